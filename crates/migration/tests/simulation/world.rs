// SPDX-License-Identifier: MIT OR Apache-2.0
//! Two hosts with a program on one of them, and all that can happen to both. After each step the rules are checked.

pub(crate) mod rules;

use std::ops::Range;

use rewake_migration::blocks::{
    BLOCK, BLOCK_PAGES, BlockAnswer, BlockDigest, BlockPlace, DestinationBlocks, PageMask, SourceBlocks,
};
use rewake_migration::destination::{
    DestinationInput, DestinationOutcome, DestinationOutput, MigrationDestination,
};
use rewake_migration::message::{FromDestination, FromSource};
use rewake_migration::record::{DestinationRecord, SourceRecord};
use rewake_migration::source::{MigrationSource, SourceInput, SourceOutcome, SourceOutput};
use rewake_testkit::Random;

use super::link::{Link, ToDestination, ToSource};

/// Blocks of the program's memory.
const BLOCKS: usize = 8;
/// Each has two halves, which are read and requested one by one.
const HALF: u64 = BLOCK_PAGES / 2;

/// The bytes of a program: a number for each half of a block.
type Memory = [[u64; 2]; BLOCKS];

/// A tree on one host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TreeState {
    None,
    /// Its tasks exist, and none runs.
    Held,
    Running,
}

/// What a driver does in its own time. A crash may come before it, or after.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pending {
    Freeze,
    WriteGrant,
    KillSource,
    Compare,
    Restore,
    WriteRelease,
    Release,
}

#[derive(Debug)]
struct SourceHost {
    agent: Option<MigrationSource>,
    record: Option<SourceRecord>,
    tree: TreeState,
    memory: Memory,
    blocks: SourceBlocks,
    /// A block whose first half was read: the program may write before the second is.
    half_read: Option<(usize, u64)>,
    /// The round whose report ends pre-copy.
    last_round: Option<u32>,
    /// Metadata was sent: pages may be read.
    serves: bool,
    pre_copies: usize,
    /// The last round that the destination has stored.
    stored_round: u32,
    outcome: Option<SourceOutcome>,
    is_lost: bool,
}

#[derive(Debug)]
struct DestinationHost {
    agent: Option<MigrationDestination>,
    record: Option<DestinationRecord>,
    tree: TreeState,
    memory: Memory,
    blocks: DestinationBlocks,
    /// The restore has begun: pages may be requested.
    requests: bool,
    outcome: Option<DestinationOutcome>,
}

/// Which events a run has.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct FaultMix {
    pub(super) cuts: bool,
    pub(super) timeouts: bool,
    pub(super) aborts: bool,
    pub(super) agent_crashes: bool,
    pub(super) host_crashes: bool,
    /// Writes, dumps and restores that fail, and wrong bytes.
    pub(super) failures: bool,
    /// A destination that sends what it likes.
    pub(super) lies: bool,
    /// All memory is at the destination before GRANT.
    pub(super) all_first: bool,
}

#[derive(Debug)]
pub(super) struct World {
    random: Random,
    mix: FaultMix,
    link: Link,
    source: SourceHost,
    destination: DestinationHost,
    /// The memory when it was frozen.
    frozen: Option<Memory>,
    pending: Vec<Pending>,
    /// Something happened that may lose the program: a crash or a timeout after GRANT.
    may_be_lost: bool,
    history: Vec<String>,
}

fn digest(halves: [u64; 2]) -> BlockDigest {
    let mut digest = BlockDigest::default();
    digest[..16].copy_from_slice(&halves.map(u64::to_le_bytes).concat());
    digest
}

/// The pages of some halves.
fn pages(halves: &Range<usize>) -> Range<u64> {
    halves.start as u64 * HALF..halves.end as u64 * HALF
}

fn place(block: usize) -> BlockPlace {
    BlockPlace { task: 1, vaddr: block as u64 * BLOCK }
}

impl DestinationHost {
    fn is_resident(&self, block: usize, halves: Range<usize>) -> bool {
        self.blocks.resident(place(block), pages(&halves)).is_some()
    }

    fn missing(&self) -> usize {
        (0..BLOCKS).filter(|block| !self.is_resident(*block, 0..2)).count()
    }
}

impl World {
    pub(super) fn new(seed: u64, mix: FaultMix) -> Self {
        let mut random = Random::new(seed);
        let memory = std::array::from_fn(|_| [random.number(), random.number()]);
        Self {
            mix,
            link: Link::default(),
            source: SourceHost {
                agent: Some(MigrationSource::new("offer".to_owned())),
                record: Some(SourceRecord::Started),
                tree: TreeState::Running,
                memory,
                blocks: SourceBlocks::default(),
                half_read: None,
                last_round: None,
                serves: false,
                pre_copies: 0,
                stored_round: 0,
                outcome: None,
                is_lost: false,
            },
            destination: DestinationHost {
                agent: Some(MigrationDestination::new()),
                record: None,
                tree: TreeState::None,
                memory: Memory::default(),
                blocks: DestinationBlocks::default(),
                requests: false,
                outcome: None,
            },
            frozen: None,
            pending: Vec::new(),
            may_be_lost: false,
            history: Vec::new(),
            random,
        }
    }

    /// One random step of the world, then the rules.
    pub(super) fn step(&mut self, has_faults: bool) {
        match self.random.below(if has_faults { 24 } else { 20 }) {
            0..=4 => self.deliver_to_destination(),
            5..=9 => self.deliver_to_source(),
            10..=11 => self.complete_pending(),
            12 => self.source_program(),
            13 => self.destination_program(),
            14..=16 => self.source_traffic(),
            17 => self.learn_of_cut(),
            18 => self.connect(),
            19 => self.restart(),
            _ => self.fault(),
        }
        self.check();
    }

    fn deliver_to_destination(&mut self) {
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

    fn report_residency(&mut self) {
        if self.destination.missing() == 0 {
            self.step_destination(DestinationInput::AllArrived);
            self.step_destination(DestinationInput::Resident);
        }
    }

    fn deliver_to_source(&mut self) {
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
    fn stored(&mut self, round: u32) {
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
    fn answer(&mut self, block: usize, halves: Range<usize>, wants_bytes: bool) {
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

    fn complete_pending(&mut self) {
        if self.pending.is_empty() {
            return;
        }
        let index = self.random.below(self.pending.len());
        let pending = self.pending.swap_remove(index);
        let fails = self.mix.failures && self.random.below(8) == 0;
        let why = || "it failed".to_owned();
        match pending {
            Pending::Freeze if fails => self.step_source(SourceInput::FreezeFailed(why())),
            Pending::Freeze => {
                self.source.tree = TreeState::Held;
                self.frozen = Some(self.source.memory);
                self.step_source(SourceInput::Frozen);
            }
            Pending::WriteGrant if fails => self.step_source(SourceInput::WriteFailed(why())),
            Pending::WriteGrant => {
                self.source.record = Some(SourceRecord::Granted);
                self.step_source(SourceInput::GrantWritten);
            }
            Pending::KillSource => {
                self.source.tree = TreeState::None;
                self.step_source(SourceInput::Killed);
            }
            Pending::Compare => {
                let result = if fails { Err(why()) } else { Ok(()) };
                self.step_destination(DestinationInput::Compared(result));
            }
            Pending::Restore if fails => self.step_destination(DestinationInput::RestoreFailed(why())),
            Pending::Restore => {
                self.destination.tree = TreeState::Held;
                self.step_destination(DestinationInput::RestoreWaits);
            }
            Pending::WriteRelease if fails => {
                self.may_be_lost = true;
                self.step_destination(DestinationInput::WriteFailed(why()));
            }
            Pending::WriteRelease => {
                self.destination.record = Some(DestinationRecord::Released);
                self.step_destination(DestinationInput::ReleaseWritten);
            }
            Pending::Release => {
                self.destination.tree = TreeState::Running;
                self.step_destination(DestinationInput::Running);
            }
        }
    }

    /// The program writes its memory.
    fn source_program(&mut self) {
        if self.source.tree == TreeState::Running {
            self.source.memory[self.random.below(BLOCKS)][self.random.below(2)] = self.random.number();
        }
    }

    /// The program, the restore or the background load requests memory.
    fn destination_program(&mut self) {
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
    fn source_traffic(&mut self) {
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

    fn learn_of_cut(&mut self) {
        if self.link.is_connected() {
            return;
        }
        if self.random.below(2) == 0 {
            if std::mem::take(&mut self.link.source_believes) {
                self.step_source(SourceInput::Disconnected);
            }
        } else if std::mem::take(&mut self.link.destination_believes) {
            self.step_destination(DestinationInput::Disconnected);
        }
    }

    /// The source connects again once it knows of the cut; the destination may learn of the new connection first.
    fn connect(&mut self) {
        let exist = self.source.agent.is_some() && self.destination.agent.is_some();
        if exist && !self.link.is_connected() && !self.link.source_believes {
            self.link.connect();
            // The destination relies on its own comparison: half of the sources forget nothing.
            if self.random.below(2) == 0 {
                self.source.blocks.lost_after(self.source.stored_round);
            }
            if self.source.last_round.take().is_some() {
                // The round is sent again.
                self.source.pre_copies = BLOCKS;
            }
            self.step_destination(DestinationInput::Connected);
            self.step_source(SourceInput::Connected);
        }
    }

    fn restart(&mut self) {
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

    fn fault(&mut self) {
        let mix = self.mix;
        match self.random.below(9) {
            0 | 1 if mix.cuts => self.link.cut(),
            2 if mix.timeouts => self.time_out(),
            3 if mix.aborts && self.rarely() => self.step_source(SourceInput::Abort),
            4 if mix.aborts && self.rarely() => self.step_destination(DestinationInput::Abort),
            5 if mix.agent_crashes && self.rarely() => self.crash_source_agent(),
            6 if mix.agent_crashes && self.rarely() => self.crash_destination_agent(),
            7 if mix.host_crashes && self.rarely() => self.crash_host(),
            8 if mix.failures && self.rarely() => {
                self.may_be_lost = true;
                self.step_destination(DestinationInput::MemoryLost("wrong bytes".to_owned()));
            }
            8 if mix.lies => self.lie(),
            _ => {}
        }
    }

    fn rarely(&mut self) -> bool {
        self.random.below(16) == 0
    }

    fn time_out(&mut self) {
        let reason = "the limit has passed".to_owned();
        if self.random.below(3) > 0 {
            return;
        }
        if self.link.is_connected() {
            // Limits of the source: of a comparison, of a round, and of the frozen time.
            if self.source.record == Some(SourceRecord::Started) && self.rarely() {
                self.step_source(SourceInput::TimedOut(reason));
            }
            return;
        }
        self.may_be_lost |= self.source.record == Some(SourceRecord::Granted);
        if self.random.below(2) == 0 {
            self.step_source(SourceInput::TimedOut(reason));
        } else {
            self.may_be_lost |= self.pending.contains(&Pending::WriteGrant);
            self.step_destination(DestinationInput::TimedOut(reason));
        }
    }

    fn lie(&mut self) {
        let messages = [
            FromDestination::Ready,
            FromDestination::Accept,
            FromDestination::Running,
            FromDestination::Commit,
            FromDestination::Abort("a lie".to_owned()),
        ];
        let message = messages[self.random.below(messages.len())].clone();
        self.link.send_to_source(ToSource::Message(message));
    }

    /// A pending write has happened, or not. CRIU's action script then does what the record says.
    fn crash_source_agent(&mut self) {
        if self.source.agent.take().is_none() {
            return;
        }
        self.note("source agent crashes".to_owned());
        if self.take_pending(Pending::WriteGrant) && self.random.below(2) == 0 {
            self.source.record = Some(SourceRecord::Granted);
        }
        for dropped in [Pending::Freeze, Pending::KillSource] {
            self.take_pending(dropped);
        }
        self.link.cut();
        self.link.source_believes = false;
        if self.source.record == Some(SourceRecord::Started) && self.source.tree == TreeState::Held {
            self.source.tree = TreeState::Running;
        }
    }

    fn crash_destination_agent(&mut self) {
        if self.destination.agent.take().is_none() {
            return;
        }
        self.note("destination agent crashes".to_owned());
        if self.take_pending(Pending::WriteRelease) && self.random.below(2) == 0 {
            self.destination.record = Some(DestinationRecord::Released);
        }
        let is_granted =
            self.source.record == Some(SourceRecord::Granted) || self.pending.contains(&Pending::WriteGrant);
        self.may_be_lost |= is_granted && self.destination.record != Some(DestinationRecord::Released);
        for dropped in [Pending::Compare, Pending::Restore, Pending::Release] {
            self.take_pending(dropped);
        }
        self.link.cut();
        self.link.destination_believes = false;
        if self.destination.tree == TreeState::Held {
            let is_released = self.destination.record == Some(DestinationRecord::Released);
            self.destination.tree = if is_released { TreeState::Running } else { TreeState::None };
        }
    }

    fn crash_host(&mut self) {
        self.may_be_lost = true;
        self.link.cut();
        if self.random.below(2) == 0 {
            self.note("source host crashes".to_owned());
            self.crash_source_agent();
            self.source.tree = TreeState::None;
            (self.source.record, self.source.is_lost) = (None, true);
        } else {
            self.note("destination host crashes".to_owned());
            self.crash_destination_agent();
            self.destination.tree = TreeState::None;
            (self.destination.record, self.destination.requests) = (None, false);
            self.destination.blocks = DestinationBlocks::default();
        }
    }

    fn take_pending(&mut self, wanted: Pending) -> bool {
        let before = self.pending.len();
        self.pending.retain(|pending| *pending != wanted);
        self.pending.len() < before
    }

    fn step_source(&mut self, input: SourceInput) {
        let Some(source) = &mut self.source.agent else { return };
        let given = format!("{input:?}");
        let outputs = source.step(input);
        self.note(format!("source: {given} -> {outputs:?}"));
        self.act_for_source(outputs);
    }

    fn act_for_source(&mut self, outputs: Vec<SourceOutput>) {
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

    fn step_destination(&mut self, input: DestinationInput) {
        let Some(destination) = &mut self.destination.agent else { return };
        let given = format!("{input:?}");
        let outputs = destination.step(input);
        self.note(format!("destination: {given} -> {outputs:?}"));
        self.act_for_destination(outputs);
    }

    fn act_for_destination(&mut self, outputs: Vec<DestinationOutput>) {
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

    fn note(&mut self, line: String) {
        self.history.push(line);
    }
}
