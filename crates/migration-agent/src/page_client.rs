// SPDX-License-Identifier: MIT OR Apache-2.0
//! The process that serves the restored program's page faults: `rewake lazy-pages`, with this agent as its
//! page server.
//!
//! It outlives an agent that is killed, and looks for its page server again for 5 s. A later agent finds it
//! by the record.

use std::os::fd::AsRawFd as _;
use std::path::Path;
use std::time::Duration;

use nix::sys::signal::Signal;
use rewake_migration::destination::DestinationInput;
use rewake_plugin_protocol::{FileId, SESSIONS, SessionNote};
use rewake_process::pidfd::{ends_within, pidfd_open, pidfd_signal, wait_for_end};
use rewake_process::proc;
use serde::{Deserialize, Serialize};

use crate::cgroup::TreeCgroup;
use crate::criu::RunningCriu;
use crate::start_time::start_of;

/// Names the process for a later agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ClientProcess {
    pid: i32,
    /// Its start time, which no other process of this number has.
    start: String,
}

impl ClientProcess {
    pub(crate) fn of(pid: i32) -> anyhow::Result<Self> {
        Ok(Self { pid, start: start_of(pid)? })
    }

    pub(crate) fn lives(&self) -> bool {
        let is_it = start_of(self.pid).is_ok_and(|start| start == self.start);
        is_it && proc::status(self.pid).is_some_and(|status| !status.has_ended())
    }

    /// Asks it to end, and kills it at the limit.
    fn stop_within(&self, limit: Duration) {
        // Opened before the start time is compared, so that no signal reaches a later process of this number.
        let Ok(process) = pidfd_open(self.pid) else { return };
        if !self.lives() {
            return;
        }
        // A signal fails only if the process has ended.
        let _ = pidfd_signal(process.as_raw_fd(), Signal::SIGTERM as i32);
        if !ends_within(process.as_raw_fd(), limit) {
            let _ = pidfd_signal(process.as_raw_fd(), Signal::SIGKILL as i32);
            wait_for_end(process.as_raw_fd());
        }
    }
}

/// The process of one restore.
#[derive(Debug)]
pub(crate) enum PageClient {
    /// Started by this agent.
    Started(RunningCriu),
    /// Started by an agent that was killed.
    Left(ClientProcess),
}

impl PageClient {
    /// What its end says about the program; none while it runs. `work` is CRIU's work directory.
    pub(crate) fn end(&mut self, tree: &TreeCgroup, work: &Path) -> Option<DestinationInput> {
        let failure = match self {
            Self::Started(client) => {
                let status = client.ended().ok()??;
                (!status.success()).then(|| client.failure(status))
            }
            Self::Left(client) if client.lives() => return None,
            // Its exit code is not known. It removes the note of its session at its end, and kills the tree
            // if it fails.
            Self::Left(_) => {
                has_session(Path::new(SESSIONS), work).then(|| "lazy-pages was killed".to_owned())
            }
        };
        Some(match failure {
            Some(reason) => DestinationInput::MemoryLost(reason),
            // It also ends well when no process needs it any more.
            None if !tree.has_processes() => DestinationInput::TreeEnded,
            None => DestinationInput::Resident,
        })
    }

    /// Asks it to end, and kills it at the limit.
    pub(crate) fn stop_within(&mut self, limit: Duration) {
        match self {
            Self::Started(client) => client.stop_within(limit),
            Self::Left(client) => client.stop_within(limit),
        }
    }
}

/// Whether there may be a session of this work directory, whose memory is missing. What cannot be read counts
/// as one.
fn has_session(sessions: &Path, work: &Path) -> bool {
    let (Ok(work), Ok(found)) = (FileId::of(work), SessionNote::all(sessions)) else { return true };
    !found.skipped.is_empty() || found.notes.iter().any(|note| note.work == work)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::process::Command;

    use rewake_plugin_protocol::{Phase, ProcessId, Store, own_pid_namespace};

    use super::*;

    fn group_of(pid: i32) -> (tempfile::TempDir, TreeCgroup) {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("cgroup.procs"), pid.to_string()).unwrap();
        fs::write(folder.path().join("cgroup.events"), "populated 1\n").unwrap();
        let group = serde_json::json!({ "path": folder.path(), "is_made": false });
        (folder, serde_json::from_value(group).unwrap())
    }

    #[test]
    fn a_client_that_was_left_is_found_and_stopped() {
        let mut child = Command::new("sleep").arg("100").spawn().unwrap();
        let process = ClientProcess::of(child.id().cast_signed()).unwrap();
        let other = ClientProcess { start: "1".to_owned(), ..process.clone() };
        assert!(process.lives() && !other.lives());
        let mut left = PageClient::Left(process.clone());
        let (folder, tree) = group_of(std::process::id().cast_signed());
        assert_eq!(left.end(&tree, folder.path()), None);
        left.stop_within(Duration::from_secs(5));
        assert!(!process.lives());
        child.wait().unwrap();
    }

    #[test]
    fn the_end_of_a_client_that_was_left_says_what_the_tree_has() {
        let mut child = Command::new("true").spawn().unwrap();
        let mut left = PageClient::Left(ClientProcess::of(child.id().cast_signed()).unwrap());
        child.wait().unwrap();
        let (folder, tree) = group_of(std::process::id().cast_signed());
        let work = folder.path();
        assert_eq!(left.end(&tree, work), Some(DestinationInput::Resident));
        fs::write(work.join("cgroup.events"), "populated 0\n").unwrap();
        assert_eq!(left.end(&tree, work), Some(DestinationInput::TreeEnded));
        let none = work.join("none");
        assert!(
            matches!(left.end(&tree, &none), Some(DestinationInput::MemoryLost(_))),
            "it cannot be known"
        );
    }

    #[test]
    fn a_note_that_is_left_says_that_memory_is_missing() {
        let [sessions, work, other] = [(); 3].map(|()| tempfile::tempdir().unwrap());
        assert!(!has_session(sessions.path(), work.path()));
        let note = SessionNote {
            folder: "4711-1".to_owned(),
            starter: ProcessId { pid: 4711, started: 1 },
            pid_namespace: own_pid_namespace().unwrap(),
            work: FileId::of(work.path()).unwrap(),
            phase: Phase::Running,
            stores: vec![(1, Store { number: 3, inode: 5 })],
        };
        note.write(sessions.path()).unwrap();
        assert!(has_session(sessions.path(), work.path()) && !has_session(sessions.path(), other.path()));
        fs::write(sessions.path().join("4711-1/session-1"), "no note").unwrap();
        assert!(has_session(sessions.path(), other.path()));
    }
}
