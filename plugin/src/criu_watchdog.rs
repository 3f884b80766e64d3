// SPDX-License-Identifier: MIT OR Apache-2.0
//! CRIU killed in the middle: what it has stopped goes on without it, and what only its plugin does is not done. A process that
//! outlives CRIU does the least that must be.
//!
//! * In a dump: the tasks go on, and their queues would stay paused for ever. The guard lets them go on.
//! * In a restore, the tasks would wait for CRIU for ever, or run before their GPUs' memory is there. The guard kills them; a
//!   task makes no GPU state before it is there, but for one that has waited five seconds for it (`restore/watchdog_wait.rs`): that goes on
//!   unguarded. Where they are stopped they would run until then: the kernel kills those (`restore/resume.rs`). CRIU 4.1 says nothing
//!   when it forks them: its tasks have a guard when they are whole only, and what CRIU's death leaves before that may run.

use std::fs;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::{Pid, getppid};
use rewake_criu_plugin::Host;

use crate::abi::{self, OnCriuDeath};

/// The guard; dropped, it is gone.
#[derive(Debug)]
pub(crate) struct CriuWatchdog(Pid);

impl CriuWatchdog {
    /// Before the queues behind `kfd` are paused; one of `tasks` is whose file that is. None, with a warning, if it cannot
    /// be started.
    pub(crate) fn of_queues(host: &Host, kfd: BorrowedFd<'_>, tasks: &[i32]) -> Option<Self> {
        Self::start(host, &OnCriuDeath::GoOn(kfd, tasks), "queues stay paused")
    }

    /// Before a restored tree may run: of its first task, or of whatever CRIU has forked.
    pub(crate) fn of_trees(host: &Host, roots: &[i32]) -> Option<Self> {
        let otherwise = "tasks run without their GPUs' memory";
        match those_there(roots, abi::task) {
            Ok(roots) => Self::start(host, &OnCriuDeath::Kill(&roots), otherwise),
            Err(error) => none(host, &error, otherwise),
        }
    }

    fn start(host: &Host, duty: &OnCriuDeath<'_>, otherwise: &str) -> Option<Self> {
        match abi::fork_guard(duty, host.log_file().ok()) {
            Ok(pid) => Some(Self(pid)),
            Err(error) => none(host, &error, otherwise),
        }
    }

    /// A child that stands for one.
    #[cfg(test)]
    pub(crate) fn of(pid: Pid) -> Self {
        Self(pid)
    }
}

fn none(host: &Host, error: &io::Error, otherwise: &str) -> Option<CriuWatchdog> {
    host.warn(format_args!(
        "start a process that outlives CRIU: {error}; if CRIU is killed now, {otherwise}"
    ));
    None
}

/// Tasks with their descriptors. One that has ended needs no guard; one that cannot be had would have none.
fn those_there(tasks: &[i32], open: impl Fn(i32) -> io::Result<OwnedFd>) -> io::Result<Vec<(i32, OwnedFd)>> {
    let mut there = Vec::new();
    for task in tasks {
        match open(*task) {
            Ok(file) => there.push((*task, file)),
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(there)
}

impl Drop for CriuWatchdog {
    fn drop(&mut self) {
        // It is this process's child until it is waited for, so that its number is nobody else's. Neither can fail then.
        let _ = kill(self.0, Signal::SIGKILL);
        let _ = waitpid(self.0, Some(WaitPidFlag::__WALL));
    }
}

/// Children of this process's first thread.
pub(crate) fn children() -> Vec<i32> {
    let id = std::process::id();
    children_of(&format!("/proc/{id}/task/{id}"))
}

/// Siblings of this process that it traces: a task that CRIU has forked for its parent (`--restore-sibling`, as runc restores) is
/// seized at once.
pub(crate) fn traced_siblings() -> Vec<i32> {
    let threads = fs::read_dir(format!("/proc/{}/task", getppid())).into_iter().flatten().flatten();
    let mut siblings: Vec<i32> =
        threads.flat_map(|thread| children_of(&thread.path().to_string_lossy())).collect();
    siblings.retain(|sibling| tracer_of(*sibling) == Some(std::process::id()));
    siblings
}

/// Threads of these trees that this process traces.
pub(crate) fn traced(roots: &[i32]) -> Vec<i32> {
    let (mut tasks, mut traced) = (roots.to_vec(), Vec::new());
    while let Some(task) = tasks.pop() {
        // Whoever ends meanwhile has none.
        for thread in fs::read_dir(format!("/proc/{task}/task")).into_iter().flatten().flatten() {
            tasks.extend(children_of(&thread.path().to_string_lossy()));
            let number = thread.file_name().to_str().and_then(|number| number.parse().ok());
            traced.extend(number.filter(|thread| tracer_of(*thread) == Some(std::process::id())));
        }
    }
    traced
}

fn children_of(thread: &str) -> Vec<i32> {
    let numbers = fs::read_to_string(format!("{thread}/children")).unwrap_or_default();
    numbers.split_whitespace().filter_map(|number| number.parse().ok()).collect()
}

fn tracer_of(task: i32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{task}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("TracerPid:"))?;
    line.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn only_tasks_that_have_ended_need_no_guard() {
        let open = |errno: i32| {
            move |task: i32| match task {
                8 => Err(io::Error::from_raw_os_error(errno)),
                _ => Ok(File::open("/dev/null")?.into()),
            }
        };
        let there = those_there(&[7, 8, 9], open(libc::ESRCH)).unwrap();
        assert_eq!(there.iter().map(|(task, _)| *task).collect::<Vec<_>>(), [7, 9]);
        for errno in [libc::EMFILE, libc::EINVAL, libc::ENOSYS] {
            let error = those_there(&[7, 8, 9], open(errno)).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(errno));
        }
    }

    #[test]
    fn a_task_that_was_waited_for_has_ended() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        assert!(those_there(&[child.id().cast_signed()], abi::task).unwrap().is_empty());
    }
}
