// SPDX-License-Identifier: MIT OR Apache-2.0
//! The program's memory: it is written, sent, requested and answered.

use std::ops::Range;

use rewake_migration::blocks::{BlockAnswer, PageMask};
use rewake_migration::destination::DestinationInput;
use rewake_migration::source::SourceInput;

use super::super::link::{ToDestination, ToSource};
use super::{BLOCKS, TreeState, World, digest, pages, place};

impl World {
    pub(super) fn deliver_to_destination(&mut self) {
        if self.destination.agent.is_none() {
            return;
        }
        match self.link.next_for_destination() {
            None => {}
            Some(ToDestination::Message(message)) => {
                self.step_destination(DestinationInput::Received(message));
            }
            Some(ToDestination::Candidate(block, halves))
                if self
                    .destination
                    .blocks
                    .candidate(place(block), digest(halves), PageMask::MAX)
                    .is_some() =>
            {
                self.destination.memory[block] = halves;
            }
            Some(ToDestination::Candidate(..)) => {}
            Some(ToDestination::RoundEnd(round)) => self.link.send_to_source(ToSource::RoundStored(round)),
            Some(ToDestination::Digest(block, halves, digest)) => {
                if self.destination.blocks.confirm(place(block), digest, pages(&halves)).is_none() {
                    self.link.send_to_source(ToSource::Request { block, halves, wants_bytes: true });
                }
                self.report_residency();
            }
            Some(ToDestination::Bytes(block, halves, values)) => {
                self.destination.blocks.arrived(place(block), pages(&halves));
                self.destination.memory[block][halves.clone()].copy_from_slice(&values[halves]);
                self.report_residency();
            }
        }
    }

    pub(super) fn report_residency(&mut self) {
        if self.destination.missing() == 0 {
            self.step_destination(DestinationInput::AllArrived);
            self.step_destination(DestinationInput::Resident);
        }
    }

    pub(super) fn deliver_to_source(&mut self) {
        if self.source.agent.is_none() {
            return;
        }
        match self.link.next_for_source() {
            None => {}
            Some(ToSource::Message(message)) => self.step_source(SourceInput::Received(message)),
            Some(ToSource::RoundStored(round)) => self.stored(round),
            Some(ToSource::Request { block, halves, wants_bytes }) => self.answer(block, halves, wants_bytes),
        }
    }

    /// The destination has stored a round. Pre-copy ends with the last one.
    pub(super) fn stored(&mut self, round: u32) {
        self.source.stored_round = round;
        if self.source.last_round.is_some_and(|last| last <= round) {
            self.source.last_round = None;
            let fails = self.mix.failures && self.random.below(8) == 0;
            self.step_source(match fails {
                true => SourceInput::PreCopyFailed("it changes too fast".to_owned()),
                false => SourceInput::PreCopied,
            });
        }
    }

    /// Answers a request, if pages are served.
    pub(super) fn answer(&mut self, block: usize, halves: Range<usize>, wants_bytes: bool) {
        if !self.source.serves || self.source.tree != TreeState::Held {
            return;
        }
        let values = self.source.memory[block];
        let digest = digest(values);
        self.link.send_to_destination(match self.source.blocks.answer(place(block), digest) {
            BlockAnswer::Digest if !wants_bytes => ToDestination::Digest(block, halves, digest),
            _ => ToDestination::Bytes(block, halves, values),
        });
    }

    /// The program writes its memory.
    pub(super) fn source_program(&mut self) {
        if self.source.tree == TreeState::Running {
            self.source.memory[self.random.below(BLOCKS)][self.random.below(2)] = self.random.number();
        }
    }

    /// The program, the restore or the background load requests memory.
    pub(super) fn destination_program(&mut self) {
        let first = self.random.below(BLOCKS);
        let mut all = (first..first + BLOCKS).map(|block| block % BLOCKS);
        let halves = [0..2, 0..1, 1..2][self.random.below(3)].clone();
        let missing = all.find(|block| !self.destination.is_resident(*block, halves.clone()));
        if self.destination.requests
            && let Some(block) = missing
        {
            self.link.send_to_source(ToSource::Request { block, halves, wants_bytes: false });
        }
    }

    /// Sends candidates.
    pub(super) fn source_traffic(&mut self) {
        if self.source.agent.is_none() || !self.link.is_connected() || self.source.pre_copies == 0 {
            return;
        }
        let Some((block, first)) = self.source.half_read.take() else {
            let block = self.random.below(BLOCKS);
            self.source.half_read = Some((block, self.source.memory[block][0]));
            return;
        };
        let halves = [first, self.source.memory[block][1]];
        if self.source.blocks.pre_copy(place(block), digest(halves)) {
            self.link.send_to_destination(ToDestination::Candidate(block, halves));
        }
        self.source.pre_copies -= 1;
        if self.source.pre_copies.is_multiple_of(BLOCKS) {
            let round = self.source.blocks.round();
            self.link.send_to_destination(ToDestination::RoundEnd(round));
            self.source.last_round = (self.source.pre_copies == 0).then_some(round);
            self.source.blocks.begin_round();
        }
    }
}
