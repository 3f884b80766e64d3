// SPDX-License-Identifier: MIT OR Apache-2.0
//! What goes wrong: cuts, limits that pass, lies, and crashes of agents and hosts.

use rewake_migration::blocks::DestinationBlocks;
use rewake_migration::destination::DestinationInput;
use rewake_migration::message::FromDestination;
use rewake_migration::record::{DestinationRecord, SourceRecord};
use rewake_migration::source::SourceInput;

use super::super::link::ToSource;
use super::{Pending, TreeState, World};

impl World {
    pub(super) fn fault(&mut self) {
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

    pub(super) fn rarely(&mut self) -> bool {
        self.random.below(16) == 0
    }

    pub(super) fn time_out(&mut self) {
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

    pub(super) fn lie(&mut self) {
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
    pub(super) fn crash_source_agent(&mut self) {
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

    pub(super) fn crash_destination_agent(&mut self) {
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

    pub(super) fn crash_host(&mut self) {
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
}
