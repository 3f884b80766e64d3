// SPDX-License-Identifier: MIT OR Apache-2.0
//! Starts queues in CRIU's main process, when every task is complete and about to run.
//!
//! Each process gets one RESUME only: a second one does harm ([`criu::resume`]). CRIU ignores this hook's
//! result, so a failure kills all tasks here: none runs without its GPUs.

use std::os::fd::AsFd as _;

use nix::sys::ptrace::{self, Options};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rewake_amdgpu_uapi::{Error, Kfd, criu};
use rewake_criu_plugin::{Answer, Host, Refusal};

use crate::criu_watchdog::{self, CriuWatchdog};

/// The start of all processes' queues, and the CRIU watchdog until then.
#[derive(Debug, Default)]
pub(super) struct QueueStart {
    /// Children from before the restore: the program that executed CRIU may have left some.
    earlier_children: Vec<i32>,
    /// CRIU's own `/dev/kfd`, opened at the first use.
    kfd: Option<Kfd>,
    /// Tasks that CRIU has passed to the hook, in order.
    tasks: Vec<i32>,
    started: usize,
    all_started: bool,
    failed: bool,
    /// Runs from the first fork until all queues are started; with CRIU 4.1 from when the tasks are complete.
    watchdog: Option<CriuWatchdog>,
    /// The tasks that it kills with their descendants.
    roots: Vec<i32>,
    /// Whether the tasks that CRIU traces have PTRACE_O_EXITKILL.
    exitkill: bool,
}

#[derive(Debug, thiserror::Error)]
#[error("killed: the queues of another task could not be started")]
struct OtherTaskFailed;

#[derive(Debug, thiserror::Error)]
#[error("task {task} cannot be started, all restored tasks are killed")]
struct TasksKilled {
    task: i32,
    #[source]
    why: Box<dyn std::error::Error + Send + Sync>,
}

impl QueueStart {
    /// Called before CRIU forks a task.
    pub(super) fn new() -> Self {
        Self { earlier_children: criu_watchdog::children(), ..Self::default() }
    }

    /// Starts the watchdog when CRIU has forked the first task.
    pub(super) fn post_forking(&mut self, host: &Host) {
        let mut roots = criu_watchdog::children();
        roots.retain(|child| !self.earlier_children.contains(child));
        roots.extend(criu_watchdog::traced_siblings());
        if roots.is_empty() {
            host.warn(format_args!(
                "the task that CRIU has forked is not found, so no watchdog runs: if CRIU is killed before \
                 all tasks are complete, kill them"
            ));
            return;
        }
        self.replace_watchdog(roots, |roots| CriuWatchdog::for_trees(host, roots));
    }

    fn replace_watchdog(&mut self, roots: Vec<i32>, start: impl FnOnce(&[i32]) -> Option<CriuWatchdog>) {
        // The earlier watchdog ends when the new one runs. If that cannot be started, the earlier one keeps
        // its tasks.
        if let Some(watchdog) = start(&roots) {
            self.watchdog = Some(watchdog);
        }
        self.roots = roots;
    }

    /// Returns whether this is the first task. If so, CRIU's death kills all tasks from here on.
    pub(super) fn begin(&mut self, host: &Host, pid: i32) -> bool {
        let first = self.tasks.is_empty();
        if !first {
            return false;
        }
        let known = self.roots.contains(&pid);
        self.roots.extend((!known).then_some(pid));
        // First, as a watchdog takes longer to start.
        self.set_exitkill(host, true);
        // Also if no watchdog could be started earlier.
        if !known || self.watchdog.is_none() {
            let roots = self.roots.clone();
            self.replace_watchdog(roots, |roots| CriuWatchdog::for_trees(host, roots));
        }
        true
    }

    /// Sets or clears PTRACE_O_EXITKILL of the tasks that CRIU has stopped. When CRIU dies, the kernel would
    /// let them run before the watchdog acts.
    fn set_exitkill(&mut self, host: &Host, exitkill: bool) {
        self.exitkill = exitkill;
        // CRIU no longer traces their system calls, so no other option is lost.
        let options = if exitkill { Options::PTRACE_O_EXITKILL } else { Options::empty() };
        for thread in criu_watchdog::traced(&self.roots) {
            if let Err(errno) = ptrace::setoptions(Pid::from_raw(thread), options) {
                let consequence = if exitkill { "may run for a moment" } else { "is killed, too" };
                host.warn(format_args!("trace {thread}: {errno}: if CRIU is killed now, it {consequence}"));
            }
        }
    }

    /// Starts the queues of a task, if it has some. `ready` loads their memory or closes their gate first.
    /// `made`: how many processes have GPU state.
    pub(super) fn task(
        &mut self,
        host: &Host,
        pid: i32,
        ready: impl FnOnce() -> Answer,
        made: usize,
    ) -> Answer {
        let done = self.resume_task(host, pid, ready);
        self.all_started = !self.failed && self.started == made;
        done
    }

    /// Returns whether the queues of all processes were started.
    pub(super) fn all_started(&self) -> bool {
        self.all_started
    }

    /// Stops the watchdog once all queues were started: CRIU's death then does no harm.
    pub(super) fn stop_watchdog_when_done(&mut self, host: &Host) {
        if self.all_started {
            if self.exitkill {
                self.set_exitkill(host, false);
            }
            self.watchdog = None;
        }
    }

    fn resume_task(&mut self, host: &Host, pid: i32, ready: impl FnOnce() -> Answer) -> Answer {
        if self.tasks.contains(&pid) {
            return Err(Refusal::NotMine);
        }
        self.tasks.push(pid);
        if self.failed {
            kill_all(host, &[pid]);
            return Err(OtherTaskFailed.into());
        }
        let started = ready().and_then(|()| Ok(self.start(pid)?));
        match started {
            Ok(true) => {
                self.started += 1;
                Ok(())
            }
            Ok(false) => Err(Refusal::NotMine),
            Err(refusal) => Err(self.fail(host, pid, refusal)),
        }
    }

    /// Kills all tasks.
    pub(super) fn fail(&mut self, host: &Host, task: i32, refusal: Refusal) -> Refusal {
        let Refusal::Failed(why) = refusal else { return refusal };
        self.failed = true;
        kill_all(host, &self.tasks);
        TasksKilled { task, why }.into()
    }

    /// Sends RESUME for a task; returns whether it has GPU state.
    fn start(&mut self, pid: i32) -> Result<bool, Error> {
        let kfd = match self.kfd.take() {
            Some(kfd) => kfd,
            None => Kfd::open()?,
        };
        let done = criu::resume(self.kfd.insert(kfd).as_fd(), pid.unsigned_abs());
        match done {
            Ok(()) => Ok(true),
            Err(error) if error.errno() == Some(libc::ESRCH) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Kills all tasks if the queues of some processes were not started: they would never get their GPUs.
    pub(super) fn end(self, host: &Host, result: i32, made: usize) {
        if result == 0 && !self.failed && made != self.started {
            host.error(format_args!(
                "killing the restored tasks: queues of {} processes were started, of {made} that were \
                 restored",
                self.started
            ));
            kill_all(host, &self.tasks);
        }
    }
}

/// Kills tasks. CRIU traces them and has not reaped them, so the pids are still theirs.
fn kill_all(host: &Host, tasks: &[i32]) {
    for pid in tasks {
        if let Err(errno) = kill(Pid::from_raw(*pid), Signal::SIGKILL) {
            host.warn(format_args!("kill {pid}: {errno}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// Starts a process in the place of a watchdog.
    fn watchdog() -> (CriuWatchdog, Pid) {
        #[expect(clippy::zombie_processes, reason = "the watchdog waits for it when it is dropped")]
        let process = Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = Pid::from_raw(process.id().cast_signed());
        (CriuWatchdog::of(pid), pid)
    }

    fn is_alive(pid: Pid) -> bool {
        kill(pid, None).is_ok()
    }

    #[test]
    fn a_watchdog_is_kept_until_another_runs() {
        let mut resume = QueueStart::default();
        let ((first, of_first), (second, of_second)) = (watchdog(), watchdog());
        resume.replace_watchdog(vec![7], |roots| Some(first).filter(|_| roots == [7]));
        resume.replace_watchdog(vec![7, 8], |_| None);
        assert!(resume.watchdog.is_some() && is_alive(of_first), "it still watches the first tree");
        assert_eq!(resume.roots, [7, 8]);
        resume.replace_watchdog(vec![7, 8, 9], |_| {
            assert!(is_alive(of_first), "a watchdog runs at every moment");
            Some(second)
        });
        assert_eq!((is_alive(of_first), is_alive(of_second)), (false, true));
        drop(resume);
        assert!(!is_alive(of_second));
    }
}
