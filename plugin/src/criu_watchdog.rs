// SPDX-License-Identifier: MIT OR Apache-2.0
//! Handles the death of CRIU with a process that outlives it, the CRIU watchdog. When CRIU is killed, the
//! kernel lets the tasks run that it had stopped, and the plugin's last hooks are not called.
//!
//! * Dump: the tasks would run with queues that stay evicted. The watchdog resumes the queues.
//! * Restore: the tasks would wait for CRIU without end, or run before their GPU memory is resident. The
//!   watchdog kills them. A task waits for the watchdog before it makes GPU state, for five seconds at most
//!   (`restore/watchdog_wait.rs`).
//! * Tasks that CRIU has stopped would run until the watchdog acts. The kernel kills those
//!   (`restore/resume.rs`).
//! * CRIU 4.1 does not report its forks. There the watchdog starts when the tasks are complete. Before that,
//!   tasks may run if CRIU is killed.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::{Pid, getppid};
use rewake_criu_plugin::Host;
use rewake_process::pidfd::pidfd_open;
use rewake_process::proc;

use crate::abi::{self, OnCriuDeath};

/// The watchdog's process; it is killed when this is dropped.
#[derive(Debug)]
pub(crate) struct CriuWatchdog(Pid);

impl CriuWatchdog {
    /// Starts a watchdog before the queues of the process that opened `kfd` are evicted: it is one of
    /// `tasks`. Returns none, with a warning, if that fails.
    pub(crate) fn for_queues(host: &Host, kfd: BorrowedFd<'_>, tasks: &[i32]) -> Option<Self> {
        Self::start(host, &OnCriuDeath::ResumeQueues(kfd, tasks), "queues stay evicted")
    }

    /// Starts a watchdog for restored trees before they may run. `roots`: the first task, or all tasks that
    /// CRIU forked.
    pub(crate) fn for_trees(host: &Host, roots: &[i32]) -> Option<Self> {
        let consequence = "tasks may run without their GPU memory";
        match open_living_tasks(roots, pidfd_open) {
            Ok(roots) => Self::start(host, &OnCriuDeath::KillTrees(&roots), consequence),
            Err(error) => warn_not_started(host, &error, consequence),
        }
    }

    fn start(host: &Host, action: &OnCriuDeath<'_>, consequence: &str) -> Option<Self> {
        match abi::fork_watchdog(action, host.log_file().ok()) {
            Ok(pid) => Some(Self(pid)),
            Err(error) => warn_not_started(host, &error, consequence),
        }
    }

    /// Takes a child process in the place of a watchdog.
    #[cfg(test)]
    pub(crate) fn of(pid: Pid) -> Self {
        Self(pid)
    }
}

fn warn_not_started(host: &Host, error: &io::Error, consequence: &str) -> Option<CriuWatchdog> {
    host.warn(format_args!(
        "the CRIU watchdog cannot be started: {error}; if CRIU is killed now, {consequence}"
    ));
    None
}

/// Opens pidfds of tasks. A task that has ended is left out: it needs no watchdog. Any other failure is an
/// error.
fn open_living_tasks(
    tasks: &[i32],
    open: impl Fn(i32) -> io::Result<OwnedFd>,
) -> io::Result<Vec<(i32, OwnedFd)>> {
    let mut living = Vec::new();
    for task in tasks {
        match open(*task) {
            Ok(file) => living.push((*task, file)),
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(living)
}

impl Drop for CriuWatchdog {
    fn drop(&mut self) {
        // It is a child that was not reaped, so the pid is still its own. Neither call can fail.
        let _ = kill(self.0, Signal::SIGKILL);
        let _ = waitpid(self.0, Some(WaitPidFlag::__WALL));
    }
}

/// Returns the children of this process's first thread.
pub(crate) fn children() -> Vec<i32> {
    let id = std::process::id().cast_signed();
    proc::children_of_thread(id, id)
}

/// Returns siblings of this process that it traces. With `--restore-sibling`, as runc restores, CRIU forks a
/// task as its sibling and seizes it at once.
pub(crate) fn traced_siblings() -> Vec<i32> {
    let mut siblings = proc::children(getppid().as_raw());
    siblings.retain(|sibling| is_traced(*sibling));
    siblings
}

/// Returns the threads of these trees that this process traces.
pub(crate) fn traced(roots: &[i32]) -> Vec<i32> {
    let (mut tasks, mut traced) = (roots.to_vec(), Vec::new());
    while let Some(task) = tasks.pop() {
        // A task that has ended has no threads.
        for thread in proc::threads(task) {
            tasks.extend(proc::children_of_thread(task, thread));
            traced.extend(is_traced(thread).then_some(thread));
        }
    }
    traced
}

/// Whether this process traces a thread.
fn is_traced(thread: i32) -> bool {
    proc::status(thread).is_some_and(|status| status.tracer == std::process::id().cast_signed())
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn only_tasks_that_have_ended_need_no_watchdog() {
        let open = |errno: i32| {
            move |task: i32| match task {
                8 => Err(io::Error::from_raw_os_error(errno)),
                _ => Ok(File::open("/dev/null")?.into()),
            }
        };
        let there = open_living_tasks(&[7, 8, 9], open(libc::ESRCH)).unwrap();
        assert_eq!(there.iter().map(|(task, _)| *task).collect::<Vec<_>>(), [7, 9]);
        for errno in [libc::EMFILE, libc::EINVAL, libc::ENOSYS] {
            let error = open_living_tasks(&[7, 8, 9], open(errno)).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(errno));
        }
    }

    #[test]
    fn a_task_that_was_waited_for_has_ended() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        assert!(open_living_tasks(&[child.id().cast_signed()], pidfd_open).unwrap().is_empty());
    }
}
