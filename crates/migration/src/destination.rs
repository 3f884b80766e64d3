// SPDX-License-Identifier: MIT OR Apache-2.0
//! The side that restores the program.

use crate::message::{DestinationProgress, FromDestination, FromSource, VERSION};
use crate::record::DestinationRecord;

/// What happens to a destination.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DestinationInput {
    /// A new connection from the source exists; the one before is lost.
    Connected,
    /// The connection is lost.
    Disconnected,
    /// The source sent a message.
    Received(FromSource),
    /// This host can take the program, or why it cannot.
    Compared(Result<(), String>),
    /// The restore waits at its last step: all tasks exist, and none runs.
    RestoreWaits,
    /// [`DestinationOutput::FetchAll`] is done: all memory is on this host.
    AllArrived,
    /// The restore failed, and has left no task.
    RestoreFailed(
        /// Why.
        String,
    ),
    /// [`DestinationOutput::WriteRelease`] is done: the record says [`DestinationRecord::Released`].
    ReleaseWritten,
    /// The record could not be written, and is as before.
    WriteFailed(
        /// Why.
        String,
    ),
    /// The program runs.
    Running,
    /// All memory is resident.
    Resident,
    /// Missing memory cannot be loaded: the source lost its bytes, or sent wrong ones.
    MemoryLost(
        /// Why.
        String,
    ),
    /// The restored tasks have ended by themselves, or were killed here.
    TreeEnded,
    /// A time limit of a lost connection has passed.
    TimedOut(
        /// Which.
        String,
    ),
    /// The user ends the migration.
    Abort,
}

/// What a driver of a destination does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DestinationOutput {
    /// Sends a message. Without a connection it is dropped.
    Send(FromDestination),
    /// Compares this host with an offer, then gives [`DestinationInput::Compared`].
    Compare(
        /// Text of the source's driver.
        String,
    ),
    /// Starts the restore: the files of the image are complete.
    Restore,
    /// Brings all memory to this host while the restore runs, then gives [`DestinationInput::AllArrived`].
    FetchAll,
    /// Writes [`DestinationRecord::Released`].
    WriteRelease,
    /// Lets the restore do its last step: the program runs.
    Release,
    /// Kills the restored tasks, running or not, and the restore.
    Kill,
    /// An abort was refused: the program runs here only.
    AbortRefused,
    /// The migration has ended.
    End(DestinationOutcome),
}

/// How a migration ended, as the destination knows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DestinationOutcome {
    /// The program runs here with all its memory.
    Restored {
        /// The source has reported that its tree is killed.
        is_discarded: bool,
    },
    /// The program does not run here, and never did.
    Aborted(
        /// Why.
        String,
    ),
    /// The program ran here, and was ended: its missing memory cannot be loaded.
    Lost(
        /// Why.
        String,
    ),
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum DestinationPhase {
    /// Waits for an offer.
    New,
    /// The driver compares.
    Comparing,
    /// Waits for metadata.
    Accepted,
    /// The restore runs, up to its last step.
    Restoring,
    /// The restore waits. GRANT is asked for.
    Ready,
    /// The record is being written.
    Releasing,
    /// The record says RELEASE.
    Released,
    /// All memory is resident. The source is to discard its tree.
    Resident,
    Ended(DestinationOutcome),
}

/// The destination of one migration.
#[derive(Debug)]
pub struct MigrationDestination {
    state: DestinationPhase,
    /// The restore waits at its last step.
    is_waiting: bool,
    /// Memory is to arrive before GRANT is asked for.
    lacks_memory: bool,
    /// The program runs, or did.
    is_running: bool,
    /// All memory is resident, maybe before the program runs.
    is_resident: bool,
    /// The user ended the migration when GRANT was asked for.
    withdraws: bool,
    /// GPU memory may arrive here while the program runs.
    gpu_on_demand: bool,
    /// The source has said that the migration has ended there too.
    is_confirmed: bool,
}

impl Default for MigrationDestination {
    fn default() -> Self {
        Self::new()
    }
}

impl MigrationDestination {
    /// A new migration. The record says [`DestinationRecord::Started`].
    #[must_use]
    pub fn new() -> Self {
        Self {
            state: DestinationPhase::New,
            is_waiting: false,
            lacks_memory: false,
            is_running: false,
            is_resident: false,
            withdraws: false,
            gpu_on_demand: false,
            is_confirmed: false,
        }
    }

    /// Reports whether GPU memory may arrive here while the program runs.
    #[must_use]
    pub fn with_gpu_on_demand(self, gpu_on_demand: bool) -> Self {
        Self { gpu_on_demand, ..self }
    }

    /// Continues a migration whose agent ended. `has_tree` says whether the released tree still exists. The
    /// outputs come before all others.
    #[must_use]
    pub fn restarted(record: DestinationRecord, has_tree: bool) -> (Self, Vec<DestinationOutput>) {
        let mut destination = Self::new();
        let outputs = match record {
            DestinationRecord::Released => {
                (destination.state, destination.is_running) = (DestinationPhase::Released, true);
                if has_tree { Vec::new() } else { destination.end("the restored processes have ended") }
            }
            DestinationRecord::Started => destination.end("the destination's agent ended before RELEASE"),
        };
        (destination, outputs)
    }

    /// Takes an input.
    #[must_use]
    pub fn step(&mut self, input: DestinationInput) -> Vec<DestinationOutput> {
        match input {
            DestinationInput::Connected | DestinationInput::Disconnected => Vec::new(),
            DestinationInput::Received(message) => self.received(message),
            DestinationInput::Compared(Ok(())) if self.state == DestinationPhase::Comparing => {
                self.state = DestinationPhase::Accepted;
                vec![DestinationOutput::Send(FromDestination::Accept)]
            }
            DestinationInput::RestoreWaits => {
                self.is_waiting = true;
                self.ask_for_grant()
            }
            DestinationInput::AllArrived => {
                self.lacks_memory = false;
                self.ask_for_grant()
            }
            DestinationInput::ReleaseWritten if self.state == DestinationPhase::Releasing => {
                self.state = DestinationPhase::Released;
                vec![DestinationOutput::Release]
            }
            DestinationInput::Compared(Ok(())) | DestinationInput::ReleaseWritten => Vec::new(),
            // Reported twice: by CRIU's script, and by CRIU's end.
            DestinationInput::Running if self.is_running => Vec::new(),
            DestinationInput::Running => {
                self.is_running = true;
                let report = [DestinationOutput::Send(FromDestination::Running)];
                report.into_iter().chain(self.commit()).collect()
            }
            DestinationInput::Resident => {
                self.is_resident = true;
                self.commit()
            }
            DestinationInput::Compared(Err(reason))
            | DestinationInput::RestoreFailed(reason)
            | DestinationInput::WriteFailed(reason)
            | DestinationInput::MemoryLost(reason) => self.end(&reason),
            DestinationInput::TreeEnded if self.state == DestinationPhase::Resident => Vec::new(),
            DestinationInput::TreeEnded => self.end("the restored processes have ended"),
            DestinationInput::TimedOut(reason) => self.timed_out(&reason),
            DestinationInput::Abort if self.may_run() => vec![DestinationOutput::AbortRefused],
            DestinationInput::Abort if self.state == DestinationPhase::Ready => {
                self.withdraws = true;
                vec![DestinationOutput::Send(FromDestination::Withdraw)]
            }
            DestinationInput::Abort => self.end("the destination's user ended the migration"),
        }
    }

    /// Whether the source knows that the program does not run here: it asks no agent for it again.
    #[must_use]
    pub fn is_confirmed(&self) -> bool {
        self.is_confirmed
    }

    /// Whether the program runs, or may be released by a record that is being written.
    fn may_run(&self) -> bool {
        matches!(
            self.state,
            DestinationPhase::Releasing | DestinationPhase::Released | DestinationPhase::Resident
        )
    }

    fn received(&mut self, message: FromSource) -> Vec<DestinationOutput> {
        match (&self.state, message) {
            (_, FromSource::Hello { version }) => self.greet(version),
            (DestinationPhase::Ended(_), FromSource::Abort(_) | FromSource::Discarded) => {
                self.is_confirmed = true;
                Vec::new()
            }
            (DestinationPhase::Ended(outcome), _) => outcome.answer().into_iter().collect(),
            (DestinationPhase::New, FromSource::Offer(text)) => {
                self.state = DestinationPhase::Comparing;
                vec![DestinationOutput::Compare(text)]
            }
            (DestinationPhase::Comparing, FromSource::Offer(_)) => Vec::new(),
            // Sent again after a new connection.
            (DestinationPhase::Accepted, FromSource::Offer(_)) => {
                vec![DestinationOutput::Send(FromDestination::Accept)]
            }
            (DestinationPhase::Accepted, FromSource::Metadata { all_first }) => {
                (self.state, self.lacks_memory) = (DestinationPhase::Restoring, all_first);
                let fetch = all_first.then_some(DestinationOutput::FetchAll);
                [DestinationOutput::Restore].into_iter().chain(fetch).collect()
            }
            (DestinationPhase::Ready, FromSource::Grant) => {
                self.state = DestinationPhase::Releasing;
                vec![DestinationOutput::WriteRelease]
            }
            // Sent again after a new connection.
            (
                DestinationPhase::Releasing | DestinationPhase::Released | DestinationPhase::Resident,
                FromSource::Grant,
            ) => Vec::new(),
            (DestinationPhase::Resident, FromSource::Discarded) => self.finish(true),
            // Whatever the source says, its tree never runs again.
            (DestinationPhase::Releasing | DestinationPhase::Released | DestinationPhase::Resident, _) => {
                Vec::new()
            }
            (_, FromSource::Abort(reason)) => {
                self.is_confirmed = true;
                self.end(&reason)
            }
            (_, message) => self.end(&format!("the source sent {message:?}, which violates the protocol")),
        }
    }

    /// Answers the first message of a connection.
    fn greet(&mut self, version: u32) -> Vec<DestinationOutput> {
        let mut outputs = Vec::new();
        if version != VERSION && !self.may_run() {
            outputs =
                self.end(&format!("the source speaks version {version} of the protocol, expected {VERSION}"));
        }
        // Before the Hello, which asks for GRANT again.
        if self.withdraws && self.state == DestinationPhase::Ready {
            outputs.push(DestinationOutput::Send(FromDestination::Withdraw));
        }
        let (progress, gpu_on_demand) = (self.progress(), self.gpu_on_demand);
        let hello = FromDestination::Hello { version: VERSION, progress, gpu_on_demand };
        outputs.push(DestinationOutput::Send(hello));
        outputs
    }

    fn progress(&self) -> DestinationProgress {
        match &self.state {
            DestinationPhase::New | DestinationPhase::Comparing => DestinationProgress::New,
            DestinationPhase::Accepted => DestinationProgress::Accepted,
            DestinationPhase::Restoring => DestinationProgress::Restoring,
            // Until the record is written, a restart would forget GRANT.
            DestinationPhase::Ready | DestinationPhase::Releasing => DestinationProgress::Ready,
            DestinationPhase::Released => DestinationProgress::Released,
            DestinationPhase::Resident | DestinationPhase::Ended(DestinationOutcome::Restored { .. }) => {
                DestinationProgress::Resident
            }
            DestinationPhase::Ended(
                DestinationOutcome::Aborted(reason) | DestinationOutcome::Lost(reason),
            ) => DestinationProgress::Gone(reason.clone()),
        }
    }

    /// Asks for GRANT if the restore waits, with the memory that is to be first.
    fn ask_for_grant(&mut self) -> Vec<DestinationOutput> {
        if self.state != DestinationPhase::Restoring || !self.is_waiting || self.lacks_memory {
            return Vec::new();
        }
        self.state = DestinationPhase::Ready;
        vec![DestinationOutput::Send(FromDestination::Ready)]
    }

    /// Commits if the program runs and all of its memory is resident.
    fn commit(&mut self) -> Vec<DestinationOutput> {
        if self.state != DestinationPhase::Released || !self.is_running || !self.is_resident {
            return Vec::new();
        }
        self.state = DestinationPhase::Resident;
        vec![DestinationOutput::Send(FromDestination::Commit)]
    }

    fn timed_out(&mut self, reason: &str) -> Vec<DestinationOutput> {
        match self.state {
            DestinationPhase::Releasing => Vec::new(),
            DestinationPhase::Resident => self.finish(false),
            _ => self.end(reason),
        }
    }

    fn finish(&mut self, is_discarded: bool) -> Vec<DestinationOutput> {
        let outcome = DestinationOutcome::Restored { is_discarded };
        self.state = DestinationPhase::Ended(outcome.clone());
        vec![DestinationOutput::End(outcome)]
    }

    /// Ends the migration without the program.
    fn end(&mut self, reason: &str) -> Vec<DestinationOutput> {
        let outcome = match self.state {
            DestinationPhase::Resident | DestinationPhase::Ended(_) => return Vec::new(),
            DestinationPhase::Released => DestinationOutcome::Lost(reason.to_owned()),
            _ => DestinationOutcome::Aborted(reason.to_owned()),
        };
        self.state = DestinationPhase::Ended(outcome.clone());
        let answer = outcome.answer();
        let kill = [DestinationOutput::Kill];
        kill.into_iter().chain(answer).chain([DestinationOutput::End(outcome)]).collect()
    }
}

impl DestinationOutcome {
    /// The answer to a message after the end.
    fn answer(&self) -> Option<DestinationOutput> {
        let message = match self {
            Self::Restored { is_discarded: true } => return None,
            Self::Restored { is_discarded: false } => FromDestination::Commit,
            Self::Aborted(reason) | Self::Lost(reason) => FromDestination::Abort(reason.clone()),
        };
        Some(DestinationOutput::Send(message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn received(destination: &mut MigrationDestination, message: FromSource) -> Vec<DestinationOutput> {
        destination.step(DestinationInput::Received(message))
    }

    fn released() -> MigrationDestination {
        let mut destination = MigrationDestination::new();
        let _ = received(&mut destination, FromSource::Offer(String::new()));
        let _ = destination.step(DestinationInput::Compared(Ok(())));
        let _ = received(&mut destination, FromSource::Metadata { all_first: false });
        let _ = destination.step(DestinationInput::RestoreWaits);
        let _ = received(&mut destination, FromSource::Grant);
        assert_eq!(destination.step(DestinationInput::ReleaseWritten), [DestinationOutput::Release]);
        destination
    }

    #[test]
    fn after_release_no_message_ends_the_program() {
        let mut destination = released();
        for message in [
            FromSource::Abort(String::new()),
            FromSource::Grant,
            FromSource::Metadata { all_first: false },
            FromSource::Discarded,
            FromSource::Offer(String::new()),
        ] {
            assert_eq!(received(&mut destination, message.clone()), [], "{message:?}");
        }
        assert_eq!(destination.step(DestinationInput::Abort), [DestinationOutput::AbortRefused]);
    }

    #[test]
    fn commit_waits_until_the_program_runs_with_all_memory() {
        let mut destination = released();
        assert_eq!(destination.step(DestinationInput::Resident), []);
        let commit = DestinationOutput::Send(FromDestination::Commit);
        let running = DestinationOutput::Send(FromDestination::Running);
        assert_eq!(destination.step(DestinationInput::Running), [running, commit]);
        assert_eq!(destination.step(DestinationInput::Running), []);
    }

    #[test]
    fn grant_is_asked_for_when_all_memory_that_is_first_is_here() {
        for memory_is_last in [true, false] {
            let mut destination = MigrationDestination::new();
            let _ = received(&mut destination, FromSource::Offer(String::new()));
            let _ = destination.step(DestinationInput::Compared(Ok(())));
            let outputs = received(&mut destination, FromSource::Metadata { all_first: true });
            assert_eq!(outputs, [DestinationOutput::Restore, DestinationOutput::FetchAll]);
            let mut inputs = [DestinationInput::RestoreWaits, DestinationInput::AllArrived];
            if !memory_is_last {
                inputs.reverse();
            }
            let [first, second] = inputs;
            assert_eq!(destination.step(first), []);
            assert_eq!(destination.step(second), [DestinationOutput::Send(FromDestination::Ready)]);
        }
    }

    #[test]
    fn each_greeting_says_whether_gpu_memory_may_arrive_later() {
        for on_demand in [false, true] {
            let mut destination = MigrationDestination::new().with_gpu_on_demand(on_demand);
            let outputs = received(&mut destination, FromSource::Hello { version: VERSION });
            let [DestinationOutput::Send(FromDestination::Hello { gpu_on_demand, .. })] = outputs[..] else {
                panic!("{outputs:?}")
            };
            assert_eq!(gpu_on_demand, on_demand);
        }
    }

    #[test]
    fn another_version_is_refused_by_name() {
        let mut destination = MigrationDestination::new();
        let outputs = received(&mut destination, FromSource::Hello { version: VERSION + 1 });
        let reason = "the source speaks version 9 of the protocol, expected 8".to_owned();
        assert!(
            outputs.contains(&DestinationOutput::End(DestinationOutcome::Aborted(reason))),
            "{outputs:?}"
        );
    }

    #[test]
    fn a_lost_program_is_answered_until_the_source_confirms() {
        let mut destination = released();
        let _ = destination.step(DestinationInput::MemoryLost("lost".to_owned()));
        let answer = DestinationOutput::Send(FromDestination::Abort("lost".to_owned()));
        assert_eq!(received(&mut destination, FromSource::Grant), [answer]);
        assert!(!destination.is_confirmed());
        assert_eq!(received(&mut destination, FromSource::Discarded), []);
        assert!(destination.is_confirmed());
    }
}
