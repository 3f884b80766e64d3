// SPDX-License-Identifier: MIT OR Apache-2.0
//! The side that has the program.

use crate::message::{DestinationProgress, FromDestination, FromSource, VERSION};
use crate::record::SourceRecord;

/// What happens to a source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SourceInput {
    /// A new connection to the destination exists; the one before is lost.
    Connected,
    /// The connection is lost.
    Disconnected,
    /// The destination sent a message.
    Received(FromDestination),
    /// Pre-copy has done what it can.
    PreCopied,
    /// The program cannot move as the user wants it: its memory changes too fast.
    PreCopyFailed(
        /// Why.
        String,
    ),
    /// The tree is dumped, and its cgroup is frozen.
    Frozen,
    /// The tree could not be dumped or frozen.
    FreezeFailed(
        /// Why.
        String,
    ),
    /// [`SourceOutput::WriteGrant`] is done: the record says [`SourceRecord::Granted`].
    GrantWritten,
    /// The record could not be written, and is as before.
    WriteFailed(
        /// Why.
        String,
    ),
    /// [`SourceOutput::Kill`] is done.
    Killed,
    /// A time limit has passed: of the frozen time before GRANT, or of a lost connection.
    TimedOut(
        /// Which.
        String,
    ),
    /// The user ends the migration.
    Abort,
}

/// What a driver of a source does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SourceOutput {
    /// Sends a message. Without a connection it is dropped.
    Send(FromSource),
    /// Copies memory while the tree runs, then gives [`SourceInput::PreCopied`].
    PreCopy,
    /// Dumps and freezes the tree.
    Freeze,
    /// Sends the files of the image, and then [`FromSource::Metadata`]. Pages are served from now on.
    SendMetadata,
    /// Writes [`SourceRecord::Granted`].
    WriteGrant,
    /// Ends the dump and thaws the tree, which runs on.
    Thaw,
    /// Kills the frozen tree.
    Kill,
    /// An abort was refused: the program may run at the destination.
    AbortRefused,
    /// The migration has ended.
    End(SourceOutcome),
}

/// How a migration ended, as the source knows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SourceOutcome {
    /// The program runs at the destination with all its memory. The source's tree is killed.
    Migrated,
    /// The program runs at the source.
    Aborted(
        /// Why.
        String,
    ),
    /// The destination has lost the program after GRANT. It runs nowhere.
    Lost(
        /// Why.
        String,
    ),
    /// The destination cannot be reached after GRANT. Whether the program runs there is not known; it does
    /// not run here.
    Unknown(
        /// Why.
        String,
    ),
    /// After GRANT an agent answered that is not the destination's. The tree stays frozen, and the record
    /// says GRANT: an agent that finds the destination can continue.
    Frozen(
        /// Why.
        String,
    ),
}

impl SourceOutcome {
    /// The answer to a destination that has ended: no agent of the source asks for the program again.
    fn confirmation(&self) -> Option<SourceOutput> {
        let message = match self {
            Self::Migrated | Self::Lost(_) | Self::Unknown(_) => FromSource::Discarded,
            Self::Aborted(reason) => FromSource::Abort(reason.clone()),
            // A later agent asks for it.
            Self::Frozen(_) => return None,
        };
        Some(SourceOutput::Send(message))
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum SourcePhase {
    /// Waits for the destination's answer to the offer.
    Comparing,
    /// Memory is copied while the tree runs.
    PreCopying,
    /// CRIU dumps the tree.
    Freezing,
    /// The tree is frozen, metadata is sent, and pages are served.
    WaitingForReady,
    /// The record is being written.
    Granting,
    /// The record says GRANT.
    Granted,
    /// The tree is being killed.
    Killing(SourceOutcome),
    Ended(SourceOutcome),
}

/// The source of one migration.
#[derive(Debug)]
pub struct MigrationSource {
    state: SourcePhase,
    offer: String,
    /// The destination has answered Hello on this connection. Until then its progress is not known, and only
    /// Hello is sent: what else is due is sent after the answer.
    is_greeted: bool,
}

impl MigrationSource {
    /// A new migration. The record says [`SourceRecord::Started`]. The offer is text for the destination's
    /// driver.
    #[must_use]
    pub fn new(offer: String) -> Self {
        Self { state: SourcePhase::Comparing, offer, is_greeted: false }
    }

    /// Continues a migration whose agent ended. The outputs come before all others.
    #[must_use]
    pub fn restarted(record: SourceRecord) -> (Self, Vec<SourceOutput>) {
        let (mut source, mut outputs) = (Self::new(String::new()), Vec::new());
        match record {
            SourceRecord::Granted => source.state = SourcePhase::Granted,
            SourceRecord::Started => {
                outputs = source.abort("the source's agent ended before GRANT".to_owned());
            }
        }
        (source, outputs)
    }

    /// Whether the tree must not run here, whatever happens.
    #[must_use]
    pub fn has_granted(&self) -> bool {
        match &self.state {
            SourcePhase::Granting | SourcePhase::Granted | SourcePhase::Killing(_) => true,
            SourcePhase::Ended(outcome) => !matches!(outcome, SourceOutcome::Aborted(_)),
            SourcePhase::Comparing
            | SourcePhase::PreCopying
            | SourcePhase::Freezing
            | SourcePhase::WaitingForReady => false,
        }
    }

    /// Whether the destination has not answered the offer.
    #[must_use]
    pub fn is_comparing(&self) -> bool {
        self.state == SourcePhase::Comparing
    }

    /// Takes an input.
    #[must_use]
    pub fn step(&mut self, input: SourceInput) -> Vec<SourceOutput> {
        match input {
            SourceInput::Connected => {
                self.is_greeted = false;
                vec![SourceOutput::Send(FromSource::Hello { version: VERSION })]
            }
            SourceInput::Disconnected => {
                self.is_greeted = false;
                Vec::new()
            }
            SourceInput::Received(message) => self.received(message),
            SourceInput::PreCopied if self.state == SourcePhase::PreCopying => {
                self.state = SourcePhase::Freezing;
                vec![SourceOutput::Freeze]
            }
            SourceInput::Frozen if self.state == SourcePhase::Freezing => {
                self.state = SourcePhase::WaitingForReady;
                self.once_greeted(SourceOutput::SendMetadata)
            }
            SourceInput::GrantWritten if self.state == SourcePhase::Granting => {
                self.state = SourcePhase::Granted;
                self.once_greeted(SourceOutput::Send(FromSource::Grant))
            }
            SourceInput::Killed => self.killed(),
            // An input of a state that an abort has left.
            SourceInput::PreCopied | SourceInput::Frozen | SourceInput::GrantWritten => Vec::new(),
            SourceInput::PreCopyFailed(reason) | SourceInput::FreezeFailed(reason) if !self.has_granted() => {
                self.abort(reason)
            }
            SourceInput::PreCopyFailed(_) | SourceInput::FreezeFailed(_) => Vec::new(),
            // The record is as before, and Grant was not sent.
            SourceInput::WriteFailed(reason) if self.state == SourcePhase::Granting => self.abort(reason),
            SourceInput::WriteFailed(_) => Vec::new(),
            SourceInput::TimedOut(reason) => self.timed_out(reason),
            SourceInput::Abort if self.has_granted() => vec![SourceOutput::AbortRefused],
            SourceInput::Abort => self.abort("the source's user ended the migration".to_owned()),
        }
    }

    fn received(&mut self, message: FromDestination) -> Vec<SourceOutput> {
        match message {
            FromDestination::Hello { version, .. } if version != VERSION => self.not_served(format!(
                "the destination speaks version {version} of the protocol, expected {VERSION}"
            )),
            FromDestination::Refused(refusal) => {
                self.not_served(format!("the destination refuses the connection: {refusal}"))
            }
            FromDestination::Hello { progress, .. } => {
                self.is_greeted = true;
                self.resume(progress)
            }
            FromDestination::Accept if self.state == SourcePhase::Comparing => {
                self.state = SourcePhase::PreCopying;
                vec![SourceOutput::PreCopy]
            }
            // Sent again after a new connection.
            FromDestination::Accept
                if matches!(self.state, SourcePhase::PreCopying | SourcePhase::Freezing) =>
            {
                Vec::new()
            }
            FromDestination::Ready if self.state == SourcePhase::WaitingForReady => {
                self.state = SourcePhase::Granting;
                vec![SourceOutput::WriteGrant]
            }
            // After a restart, or a message that crossed ours.
            FromDestination::Ready if self.state == SourcePhase::Granted => {
                vec![SourceOutput::Send(FromSource::Grant)]
            }
            FromDestination::Running if self.state == SourcePhase::Granted => Vec::new(),
            FromDestination::Commit if self.state == SourcePhase::Granted => {
                self.kill(SourceOutcome::Migrated)
            }
            FromDestination::Commit if self.migrated() => vec![SourceOutput::Send(FromSource::Discarded)],
            FromDestination::Withdraw if self.has_granted() => Vec::new(),
            FromDestination::Withdraw => self.abort("the destination's user ended the migration".to_owned()),
            FromDestination::Abort(reason) => self.gone(reason),
            message => self.violated(&message),
        }
    }

    /// Continues on a new connection.
    fn resume(&mut self, progress: DestinationProgress) -> Vec<SourceOutput> {
        match (&self.state, progress) {
            (_, DestinationProgress::Gone(reason)) => self.gone(reason),
            (
                SourcePhase::Ended(
                    SourceOutcome::Aborted(reason)
                    | SourceOutcome::Lost(reason)
                    | SourceOutcome::Unknown(reason),
                ),
                _,
            ) => vec![SourceOutput::Send(FromSource::Abort(reason.clone()))],
            (SourcePhase::Comparing, DestinationProgress::New) => {
                vec![SourceOutput::Send(FromSource::Offer(self.offer.clone()))]
            }
            (SourcePhase::Comparing, DestinationProgress::Accepted) => self.received(FromDestination::Accept),
            (SourcePhase::PreCopying | SourcePhase::Freezing, DestinationProgress::Accepted) => Vec::new(),
            (SourcePhase::WaitingForReady, DestinationProgress::Accepted) => vec![SourceOutput::SendMetadata],
            (SourcePhase::WaitingForReady | SourcePhase::Granted, DestinationProgress::Ready) => {
                self.received(FromDestination::Ready)
            }
            (SourcePhase::WaitingForReady, DestinationProgress::Restoring)
            | (SourcePhase::Granting, DestinationProgress::Ready)
            | (SourcePhase::Granted, DestinationProgress::Released)
            | (SourcePhase::Killing(_), DestinationProgress::Released | DestinationProgress::Resident) => {
                Vec::new()
            }
            (SourcePhase::Granted | SourcePhase::Ended(_), DestinationProgress::Resident) => {
                self.received(FromDestination::Commit)
            }
            // It has never asked for GRANT.
            (
                SourcePhase::Granted,
                progress @ (DestinationProgress::New
                | DestinationProgress::Accepted
                | DestinationProgress::Restoring),
            ) => self.keep_frozen(format!(
                "another `rewake receive` answered, which is at {progress:?}; an earlier one has the program"
            )),
            (_, progress) => self.gone(format!("the destination has lost its state: it is at {progress:?}")),
        }
    }

    fn once_greeted(&self, output: SourceOutput) -> Vec<SourceOutput> {
        if self.is_greeted { vec![output] } else { Vec::new() }
    }

    /// An agent answers that does not serve this migration, and knows nothing about its program.
    fn not_served(&mut self, reason: String) -> Vec<SourceOutput> {
        if self.state == SourcePhase::Granted { self.keep_frozen(reason) } else { self.gone(reason) }
    }

    /// The program does not run at the destination.
    fn gone(&mut self, reason: String) -> Vec<SourceOutput> {
        match &self.state {
            // The record may say GRANT already: what the destination does is known when it is written.
            SourcePhase::Granting | SourcePhase::Killing(_) => Vec::new(),
            SourcePhase::Ended(outcome) => outcome.confirmation().into_iter().collect(),
            SourcePhase::Granted => self.kill(SourceOutcome::Lost(reason)),
            _ => self.abort(reason),
        }
    }

    fn violated(&mut self, message: &FromDestination) -> Vec<SourceOutput> {
        if self.has_granted() || matches!(self.state, SourcePhase::Ended(_)) {
            return Vec::new();
        }
        self.abort(format!("the destination sent {message:?}, which violates the protocol"))
    }

    fn timed_out(&mut self, reason: String) -> Vec<SourceOutput> {
        match self.state {
            SourcePhase::Granting | SourcePhase::Killing(_) | SourcePhase::Ended(_) => Vec::new(),
            SourcePhase::Granted => self.kill(SourceOutcome::Unknown(reason)),
            _ => self.abort(reason),
        }
    }

    fn abort(&mut self, reason: String) -> Vec<SourceOutput> {
        if let SourcePhase::Ended(_) = self.state {
            return Vec::new();
        }
        let outcome = SourceOutcome::Aborted(reason.clone());
        self.state = SourcePhase::Ended(outcome.clone());
        vec![SourceOutput::Thaw, SourceOutput::Send(FromSource::Abort(reason)), SourceOutput::End(outcome)]
    }

    fn kill(&mut self, outcome: SourceOutcome) -> Vec<SourceOutput> {
        self.state = SourcePhase::Killing(outcome);
        vec![SourceOutput::Kill]
    }

    fn keep_frozen(&mut self, reason: String) -> Vec<SourceOutput> {
        let outcome = SourceOutcome::Frozen(reason);
        self.state = SourcePhase::Ended(outcome.clone());
        vec![SourceOutput::End(outcome)]
    }

    fn killed(&mut self) -> Vec<SourceOutput> {
        let SourcePhase::Killing(outcome) = &self.state else { return Vec::new() };
        let outcome = outcome.clone();
        self.state = SourcePhase::Ended(outcome.clone());
        // A destination that has not answered does not expect one.
        let is_answer = matches!(outcome, SourceOutcome::Migrated | SourceOutcome::Lost(_));
        let last = is_answer.then(|| outcome.confirmation()).flatten();
        last.into_iter().chain([SourceOutput::End(outcome)]).collect()
    }

    fn migrated(&self) -> bool {
        self.state == SourcePhase::Ended(SourceOutcome::Migrated)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::LinkRefusal;

    #[test]
    fn after_grant_another_destination_changes_nothing() {
        for (version, progress) in [
            (VERSION, DestinationProgress::New),
            (VERSION, DestinationProgress::Accepted),
            (VERSION, DestinationProgress::Restoring),
            (VERSION + 1, DestinationProgress::Ready),
        ] {
            let (mut source, outputs) = MigrationSource::restarted(SourceRecord::Granted);
            assert_eq!(outputs, []);
            let _ = source.step(SourceInput::Connected);
            let hello = FromDestination::Hello { version, progress: progress.clone(), gpu_on_demand: false };
            let outputs = source.step(SourceInput::Received(hello));
            let [SourceOutput::End(SourceOutcome::Frozen(_))] = &outputs[..] else {
                panic!("{progress:?}: {outputs:?}");
            };
            assert!(source.has_granted());
        }
    }

    #[test]
    fn a_refusal_leaves_the_program_where_it_is() {
        for refusal in [LinkRefusal::Busy, LinkRefusal::OtherCertificate] {
            let refused = || SourceInput::Received(FromDestination::Refused(refusal));
            let reason = format!("the destination refuses the connection: {refusal}");
            let mut source = MigrationSource::new(String::new());
            let _ = source.step(SourceInput::Connected);
            let end = SourceOutput::End(SourceOutcome::Aborted(reason.clone()));
            let outputs = source.step(refused());
            assert_eq!((outputs.first(), outputs.last()), (Some(&SourceOutput::Thaw), Some(&end)));

            let (mut source, _) = MigrationSource::restarted(SourceRecord::Granted);
            let _ = source.step(SourceInput::Connected);
            assert_eq!(source.step(refused()), [SourceOutput::End(SourceOutcome::Frozen(reason))]);
            assert!(source.has_granted());
        }
    }

    #[test]
    fn a_destination_s_loss_is_confirmed_when_the_tree_is_killed() {
        let (mut source, _) = MigrationSource::restarted(SourceRecord::Granted);
        let lost = || SourceInput::Received(FromDestination::Abort("lost".to_owned()));
        assert_eq!(source.step(lost()), [SourceOutput::Kill]);
        assert_eq!(source.step(lost()), []);
        let confirmation = SourceOutput::Send(FromSource::Discarded);
        let end = SourceOutput::End(SourceOutcome::Lost("lost".to_owned()));
        assert_eq!(source.step(SourceInput::Killed), [confirmation.clone(), end]);
        // The first one was lost with its connection.
        assert_eq!(source.step(lost()), [confirmation]);
    }
}
