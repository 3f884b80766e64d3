// SPDX-License-Identifier: MIT OR Apache-2.0
//! The rules that hold after each step, and at the end of a run.

use rewake_migration::destination::{DestinationInput, DestinationOutcome, MigrationDestination};
use rewake_migration::record::{DestinationRecord, SourceRecord};
use rewake_migration::source::{SourceInput, SourceOutcome};

use super::{Pending, TreeState, World};

/// Steps in which a run without faults must end.
const MAX_STEPS: usize = 40_000;
/// Steps without a change after which a side's time limit passes.
const PATIENCE: usize = 1000;

/// Where the program is at the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EndPlace {
    Source,
    Destination,
    Nowhere,
}

impl World {
    /// I9 and I1.
    pub(super) fn check(&self) {
        let (source, destination) = (&self.source, &self.destination);
        let both = source.tree == TreeState::Running && destination.tree == TreeState::Running;
        assert!(!both, "I9: the program runs on both sides\n{}", self.story());
        assert!(
            source.tree != TreeState::Running || source.record != Some(SourceRecord::Granted),
            "I9: the source runs after GRANT\n{}",
            self.story()
        );
        assert!(
            destination.tree != TreeState::Running || destination.record == Some(DestinationRecord::Released),
            "I9: the destination runs without RELEASE\n{}",
            self.story()
        );
        let is_granted = source.record == Some(SourceRecord::Granted) && !self.mix.lies && !self.may_be_lost;
        assert!(
            !self.mix.all_first || !is_granted || destination.missing() == 0,
            "GRANT while memory is missing at the destination\n{}",
            self.story()
        );
        let is_confirmed = destination.agent.as_ref().is_some_and(MigrationDestination::is_confirmed);
        assert!(
            !is_confirmed || source.outcome.is_some(),
            "the destination may forget what its source has not read\n{}",
            self.story()
        );
        let Some(frozen) = self.frozen else { return };
        for (block, half) in (0..frozen.len()).flat_map(|block| [(block, 0), (block, 1)]) {
            assert!(
                !destination.is_resident(block, half..half + 1)
                    || destination.memory[block][half] == frozen[block][half],
                "I1: half {half} of block {block} is wrong at the destination\n{}",
                self.story()
            );
        }
    }

    /// Lets the run end: agents restart, the link works, and limits pass only where nothing else happens.
    pub(crate) fn settle(&mut self) {
        let (mut quiet, mut before) = (0, 0);
        for _ in 0..MAX_STEPS {
            if self.has_ended() {
                return;
            }
            self.step(false);
            quiet = if self.history.len() == before { quiet + 1 } else { 0 };
            before = self.history.len();
            if quiet > PATIENCE {
                quiet = 0;
                self.pass_a_limit();
                self.check();
            }
        }
        panic!("the run does not end\n{}", self.story());
    }

    fn pass_a_limit(&mut self) {
        let reason = || "the limit has passed".to_owned();
        if self.source.agent.is_some() && self.source.outcome.is_none() && self.random.below(2) == 0 {
            self.may_be_lost |= self.source.record == Some(SourceRecord::Granted);
            self.step_source(SourceInput::TimedOut(reason()));
        } else if self.destination.outcome.is_none() {
            self.step_destination(DestinationInput::TimedOut(reason()));
        }
    }

    fn has_ended(&self) -> bool {
        let source = self.source.outcome.is_some() || self.source.is_lost;
        // A destination that has no offer is not part of the migration.
        let destination = self.destination.outcome.is_some() || self.destination.record.is_none();
        source
            && destination
            && self.is_answered()
            && self.pending.iter().all(|pending| *pending == Pending::WriteRelease)
    }

    /// Whether a source that can be answered has confirmed that the program is not at the destination.
    fn is_answered(&self) -> bool {
        let asks_later = matches!(self.source.outcome, Some(SourceOutcome::Frozen(_)));
        let is_gone = matches!(
            self.destination.outcome,
            Some(DestinationOutcome::Aborted(_) | DestinationOutcome::Lost(_))
        );
        let agent = self.destination.agent.as_ref();
        !is_gone || asks_later || self.source.is_lost || agent.is_some_and(MigrationDestination::is_confirmed)
    }

    /// Checks how a run of honest sides ended. Returns where the program is.
    pub(crate) fn conclude(&self) -> EndPlace {
        let (source, destination) = (&self.source, &self.destination);
        let story = || self.story();
        let keeps_frozen = matches!(source.outcome, Some(SourceOutcome::Frozen(_)));
        assert!(
            source.tree != TreeState::Held || keeps_frozen,
            "the source's tree waits for ever\n{}",
            story()
        );
        assert_ne!(destination.tree, TreeState::Held, "the destination's tree waits for ever\n{}", story());
        if source.tree == TreeState::Running {
            let is_said = matches!(source.outcome, Some(SourceOutcome::Aborted(_)));
            assert!(is_said, "it runs at the source, which says {:?}\n{}", source.outcome, story());
            let never_ran = matches!(destination.outcome, None | Some(DestinationOutcome::Aborted(_)));
            assert!(never_ran, "the destination says {:?}\n{}", destination.outcome, story());
            return EndPlace::Source;
        }
        if destination.tree == TreeState::Running {
            assert_eq!(destination.missing(), 0, "I1: memory is missing for ever\n{}", story());
            let is_said = matches!(destination.outcome, Some(DestinationOutcome::Restored { .. }));
            assert!(is_said, "the destination says {:?}\n{}", destination.outcome, story());
            let agrees = matches!(source.outcome, Some(SourceOutcome::Migrated | SourceOutcome::Unknown(_)));
            assert!(agrees || self.may_be_lost, "the source says {:?}\n{}", source.outcome, story());
            return EndPlace::Destination;
        }
        assert!(self.may_be_lost, "the program is lost without a reason\n{}", story());
        let source_says = !matches!(source.outcome, Some(SourceOutcome::Aborted(_)));
        assert!(
            source_says || source.is_lost,
            "it is lost, and the source says {:?}\n{}",
            source.outcome,
            story()
        );
        let destination_says = !matches!(destination.outcome, Some(DestinationOutcome::Restored { .. }));
        assert!(destination_says, "it is lost, and the destination says it runs\n{}", story());
        EndPlace::Nowhere
    }

    /// Whether both sides ended as after an undisturbed migration.
    pub(crate) fn is_migrated(&self) -> bool {
        self.source.outcome == Some(SourceOutcome::Migrated)
            && matches!(self.destination.outcome, Some(DestinationOutcome::Restored { .. }))
            && self.destination.missing() == 0
    }

    /// All that happened, and the state.
    pub(crate) fn story(&self) -> String {
        format!("{}\n{:#?}", self.history.join("\n"), (&self.source, &self.destination, &self.pending))
    }
}
