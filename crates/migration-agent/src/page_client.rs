// SPDX-License-Identifier: MIT OR Apache-2.0
//! The process that serves the restored program's page faults: `rewake lazy-pages`, with this agent as its page server.
//!
//! It outlives an agent that is killed, and looks for its page server again for 5 s. A later agent finds it by the record.

use std::fs;
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rewake_migration::destination::DestinationInput;
use rewake_process::proc;
use serde::{Deserialize, Serialize};

use crate::cgroup::TreeCgroup;
use crate::criu::RunningCriu;
use crate::source_begin::start_of;

const POLL: Duration = Duration::from_millis(2);
/// What the descriptor links to that is parked in a process whose memory is missing.
const PARKED: &str = "anon_inode:[userfaultfd]";

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
        let start = Instant::now();
        let mut signal = Signal::SIGTERM;
        while self.lives() {
            if start.elapsed() > limit {
                signal = Signal::SIGKILL;
            }
            // It may have ended.
            let _ = kill(Pid::from_raw(self.pid), signal);
            sleep(POLL);
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
    /// What its end says about the program; none while it runs.
    pub(crate) fn end(&mut self, tree: &TreeCgroup) -> Option<DestinationInput> {
        let failure = match self {
            Self::Started(client) => {
                let status = client.ended().ok()??;
                (!status.success()).then(|| client.failure(status))
            }
            Self::Left(client) if client.lives() => return None,
            // Its exit code is not known. It takes the parked descriptors out of the tree when all memory is resident, and
            // kills the tree when it fails.
            Self::Left(_) => lacks_memory(tree).then(|| "lazy-pages was killed".to_owned()),
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

/// Whether a process of a tree may have missing memory.
fn lacks_memory(tree: &TreeCgroup) -> bool {
    // A process that ends meanwhile has no descriptors.
    let has_parked = |pid: &i32| {
        let entries = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        let mut links = entries.filter_map(|entry| fs::read_link(entry.path()).ok());
        links.any(|link| link.as_os_str() == PARKED)
    };
    tree.processes().map_or(true, |processes| processes.iter().any(has_parked))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

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
        let (_folder, tree) = group_of(std::process::id().cast_signed());
        assert_eq!(left.end(&tree), None);
        left.stop_within(Duration::from_secs(5));
        assert!(!process.lives());
        child.wait().unwrap();
    }

    #[test]
    fn the_end_of_a_client_that_was_left_says_what_the_tree_has() {
        let mut child = Command::new("true").spawn().unwrap();
        let mut left = PageClient::Left(ClientProcess::of(child.id().cast_signed()).unwrap());
        child.wait().unwrap();
        // This process has no userfaultfd.
        let (folder, tree) = group_of(std::process::id().cast_signed());
        assert_eq!(left.end(&tree), Some(DestinationInput::Resident));
        fs::write(folder.path().join("cgroup.events"), "populated 0\n").unwrap();
        assert_eq!(left.end(&tree), Some(DestinationInput::TreeEnded));
        fs::remove_file(folder.path().join("cgroup.procs")).unwrap();
        assert!(matches!(left.end(&tree), Some(DestinationInput::MemoryLost(_))));
    }
}
