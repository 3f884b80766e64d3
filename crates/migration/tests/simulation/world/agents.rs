// SPDX-License-Identifier: MIT OR Apache-2.0
//! The state machines of both sides: what they are given, and what they want is done.

use rewake_migration::blocks::SourceBlocks;
use rewake_migration::destination::{DestinationInput, DestinationOutput, MigrationDestination};
use rewake_migration::message::FromSource;
use rewake_migration::record::{DestinationRecord, SourceRecord};
use rewake_migration::source::{MigrationSource, SourceInput, SourceOutput};

use super::super::link::{ToDestination, ToSource};
use super::{BLOCKS, Pending, TreeState, World};

impl World {
    pub(super) fn restart(&mut self) {
        if self.source.agent.is_none()
            && !self.source.is_lost
            && let Some(record) = self.source.record
        {
            let (source, outputs) = MigrationSource::restarted(record);
            self.note(format!("source restarts with {record:?}"));
            self.source.agent = Some(source);
            self.source.serves = record == SourceRecord::Granted;
            (self.source.blocks, self.source.stored_round) = (SourceBlocks::default(), 0);
            (self.source.half_read, self.source.last_round) = (None, None);
            self.act_for_source(outputs);
        }
        if self.destination.agent.is_none() {
            let has_tree = self.destination.tree == TreeState::Running;
            self.note(format!("destination restarts with {:?}", self.destination.record));
            let (destination, outputs) = match self.destination.record {
                Some(record) => MigrationDestination::restarted(record, has_tree),
                // It knows nothing of a migration.
                None => {
                    self.destination.outcome = None;
                    (MigrationDestination::new(), Vec::new())
                }
            };
            self.destination.agent = Some(destination);
            self.act_for_destination(outputs);
            self.report_residency();
        }
    }

    pub(super) fn step_source(&mut self, input: SourceInput) {
        let Some(source) = &mut self.source.agent else { return };
        let given = format!("{input:?}");
        let outputs = source.step(input);
        self.note(format!("source: {given} -> {outputs:?}"));
        self.act_for_source(outputs);
    }

    pub(super) fn act_for_source(&mut self, outputs: Vec<SourceOutput>) {
        for output in outputs {
            match output {
                SourceOutput::Send(message) => self.link.send_to_destination(ToDestination::Message(message)),
                SourceOutput::PreCopy => {
                    self.source.blocks.begin_round();
                    self.source.pre_copies = BLOCKS * (1 + self.random.below(3));
                }
                SourceOutput::Freeze => self.pending.push(Pending::Freeze),
                SourceOutput::SendMetadata => {
                    self.source.serves = true;
                    let metadata = FromSource::Metadata { all_first: self.mix.all_first };
                    self.link.send_to_destination(ToDestination::Message(metadata));
                }
                SourceOutput::WriteGrant => self.pending.push(Pending::WriteGrant),
                SourceOutput::Thaw => {
                    self.take_pending(Pending::Freeze);
                    if self.source.tree == TreeState::Held {
                        self.source.tree = TreeState::Running;
                    }
                }
                SourceOutput::Kill => {
                    assert_eq!(self.source.record, Some(SourceRecord::Granted), "killed before GRANT");
                    self.pending.push(Pending::KillSource);
                }
                SourceOutput::AbortRefused => {}
                SourceOutput::End(outcome) => self.source.outcome = Some(outcome),
            }
        }
    }

    pub(super) fn step_destination(&mut self, input: DestinationInput) {
        let Some(destination) = &mut self.destination.agent else { return };
        let given = format!("{input:?}");
        let outputs = destination.step(input);
        self.note(format!("destination: {given} -> {outputs:?}"));
        self.act_for_destination(outputs);
    }

    pub(super) fn act_for_destination(&mut self, outputs: Vec<DestinationOutput>) {
        for output in outputs {
            match output {
                DestinationOutput::Send(message) => self.link.send_to_source(ToSource::Message(message)),
                DestinationOutput::Compare(_) => {
                    self.destination.record = Some(DestinationRecord::Started);
                    self.pending.push(Pending::Compare);
                }
                DestinationOutput::Restore => {
                    self.destination.requests = true;
                    self.pending.push(Pending::Restore);
                }
                // Missing blocks are requested in any case.
                DestinationOutput::FetchAll => {}
                DestinationOutput::WriteRelease => self.pending.push(Pending::WriteRelease),
                DestinationOutput::Release => self.pending.push(Pending::Release),
                DestinationOutput::Kill => {
                    self.take_pending(Pending::Restore);
                    self.take_pending(Pending::Release);
                    self.destination.tree = TreeState::None;
                }
                DestinationOutput::AbortRefused => {}
                DestinationOutput::End(outcome) => self.destination.outcome = Some(outcome),
            }
        }
    }
}
