// SPDX-License-Identifier: MIT OR Apache-2.0
//! Two hosts with a program on one of them, and all that can happen to both. After each step the rules are
//! checked.
//!
//! `agents`: the state machines. `traffic`: the program's memory. `faults`: what goes wrong. `rules`: what
//! holds.

mod agents;
mod faults;
pub(crate) mod rules;
mod traffic;

use std::ops::Range;

use rewake_migration::blocks::{
    BLOCK, BLOCK_PAGES, BlockDigest, BlockPlace, DestinationBlocks, SourceBlocks,
};
use rewake_migration::destination::{DestinationInput, DestinationOutcome, MigrationDestination};
use rewake_migration::record::{DestinationRecord, SourceRecord};
use rewake_migration::source::{MigrationSource, SourceInput, SourceOutcome};
use rewake_testkit::Random;

use super::link::Link;

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

    /// The source connects again once it knows of the cut; the destination may learn of the new connection
    /// first.
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

    fn take_pending(&mut self, wanted: Pending) -> bool {
        let before = self.pending.len();
        self.pending.retain(|pending| *pending != wanted);
        self.pending.len() < before
    }

    fn note(&mut self, line: String) {
        self.history.push(line);
    }
}
