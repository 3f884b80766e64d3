// SPDX-License-Identifier: MIT OR Apache-2.0
//! The first process of a restored tree: when it ends, the program has ended.

use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;
use std::time::Duration;

use nix::sys::signal::Signal;
use rewake_process::{pidfd, proc};

/// Time for a process whose memory is gone to end, and for its parent to collect it. The parent may do that
/// later: then its status is read before.
const EXIT_LIMIT: Duration = Duration::from_secs(10);

/// The first process of a restored tree.
#[derive(Debug)]
pub struct RootProcess {
    pid: i32,
    pidfd: OwnedFd,
}

/// What has become of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProgramState {
    /// It runs.
    Runs,
    /// It has ended with exit code 0.
    Finished,
    /// It was killed, or has ended with another exit code. None: how is not known.
    Ended(Option<ExitStatus>),
}

impl ProgramState {
    /// How it ended, for users.
    #[must_use]
    pub fn how(self) -> String {
        let Self::Ended(status) = self else { return String::new() };
        let signal = status.and_then(|status| status.signal());
        match (signal, status.and_then(|status| status.code())) {
            (Some(number), _) => match Signal::try_from(number) {
                Ok(signal) => format!(" (killed by {signal})"),
                Err(_) => format!(" (killed by signal {number})"),
            },
            (None, Some(code)) => format!(" (exit code {code})"),
            (None, None) => String::new(),
        }
    }
}

impl RootProcess {
    /// Finds the process whose parent is not one of them. None: no pid is known, or it has ended.
    pub(crate) fn of(pids: &[i32]) -> Option<Self> {
        let is_child = |pid: i32| proc::status(pid).is_none_or(|status| pids.contains(&status.parent));
        let pid = pids.iter().copied().find(|pid| *pid > 0 && !is_child(*pid))?;
        Some(Self { pid, pidfd: pidfd::pidfd_open(pid).ok()? })
    }

    /// Returns what has become of it. It blocks while the process is ending.
    pub(crate) fn state(&self) -> ProgramState {
        let number = self.pidfd.as_raw_fd();
        if !pidfd::has_ended(number) && !proc::is_ending(self.pid) {
            return ProgramState::Runs;
        }
        if !pidfd::ends_within(number, EXIT_LIMIT) {
            return ProgramState::Ended(None);
        }
        // In this order: its parent may collect it in between.
        let status = proc::exit_status(self.pid).or_else(|| pidfd::exit_status(self.pidfd.as_fd()));
        match status {
            Some(status) if status.success() => ProgramState::Finished,
            status => ProgramState::Ended(status),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use super::*;

    fn child(script: &str) -> (Child, RootProcess) {
        let child = Command::new("sh").args(["-c", script]).spawn().unwrap();
        let root = RootProcess::of(&[0, child.id().cast_signed()]).unwrap();
        (child, root)
    }

    #[test]
    fn the_root_is_the_process_whose_parent_is_no_task() {
        let (mut child, root) = child("sleep 1000 & wait");
        let pid = child.id().cast_signed();
        let grandchild = loop {
            if let [grandchild] = proc::children(pid)[..] {
                break grandchild;
            }
        };
        assert_eq!(RootProcess::of(&[grandchild, pid]).unwrap().pid, pid);
        assert_eq!(root.state(), ProgramState::Runs);
        child.kill().unwrap();
        // A busy machine lets it run until the signal reaches it.
        assert!(pidfd::ends_within(root.pidfd.as_raw_fd(), Duration::from_secs(60)));
        // Its parent, this process, has not collected it.
        assert_eq!(root.state().how(), " (killed by SIGKILL)");
        child.wait().unwrap();
        pidfd::pidfd_kill(pidfd::pidfd_open(grandchild).unwrap().as_raw_fd()).unwrap();
        assert!(RootProcess::of(&[0, i32::MAX]).is_none());
    }

    #[test]
    fn a_program_that_finished_its_work_is_no_failure() {
        for (script, ended) in
            [("read x; exit 0", ProgramState::Finished), ("read x; exit 3", ProgramState::Ended(None))]
        {
            let mut child =
                Command::new("sh").args(["-c", script]).stdin(std::process::Stdio::piped()).spawn().unwrap();
            let root = RootProcess::of(&[child.id().cast_signed()]).unwrap();
            drop(child.stdin.take());
            assert!(pidfd::ends_within(root.pidfd.as_raw_fd(), Duration::from_secs(60)));
            match (root.state(), ended) {
                (ProgramState::Ended(status), ProgramState::Ended(_)) => {
                    assert_eq!(status.unwrap().code(), Some(3));
                }
                (state, ended) => assert_eq!(state, ended),
            }
            child.wait().unwrap();
        }
    }
}
