// SPDX-License-Identifier: MIT OR Apache-2.0
//! The queues' start, in CRIU's main process, when every task is whole and about to run.
//!
//! RESUME once a process and never again: a second one does harm ([`criu::resume`]). CRIU ignores what this hook says, so a
//! failure ends the tasks here: none runs with a GPU that does not.

use std::os::fd::AsFd as _;

use nix::sys::ptrace::{self, Options};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rewake_amdgpu_uapi::{Error, Kfd, criu};
use rewake_criu_plugin::{Answer, Host, Refusal};

use crate::criu_watchdog::{self, CriuWatchdog};

/// What has been started.
#[derive(Debug, Default)]
pub(super) struct Resume {
    /// Children of this process that CRIU has not forked for this restore: who executed it may have left some.
    strangers: Vec<i32>,
    /// CRIU's own, opened when it is first needed.
    kfd: Option<Kfd>,
    /// Tasks that CRIU has named, in order.
    tasks: Vec<i32>,
    started: usize,
    all: bool,
    failed: bool,
    /// From when tasks are forked until all queues are started; with CRIU 4.1 from when they are whole.
    guard: Option<CriuWatchdog>,
    /// Whom it kills, with their descendants.
    roots: Vec<i32>,
    /// Whether those that CRIU traces end with it.
    tied: bool,
}

#[derive(Debug, thiserror::Error)]
#[error("killed: the queues of another task could not be started")]
struct Together;

#[derive(Debug, thiserror::Error)]
#[error("task {task} cannot go on, all restored tasks are killed")]
struct Killed {
    task: i32,
    #[source]
    why: Box<dyn std::error::Error + Send + Sync>,
}

impl Resume {
    /// Before a task is forked.
    pub(super) fn new() -> Self {
        Self { strangers: criu_watchdog::children(), ..Self::default() }
    }

    /// The first task is forked. From now on tasks that CRIU leaves to themselves are killed.
    pub(super) fn forked(&mut self, host: &Host) {
        let mut roots = criu_watchdog::children();
        roots.retain(|child| !self.strangers.contains(child));
        roots.extend(criu_watchdog::traced_siblings());
        if roots.is_empty() {
            host.warn(format_args!(
                "the task that CRIU has forked is not found: if CRIU is killed before all are whole, kill them"
            ));
            return;
        }
        self.replace_watchdog(roots, |roots| CriuWatchdog::of_trees(host, roots));
    }

    fn replace_watchdog(&mut self, roots: Vec<i32>, start: impl FnOnce(&[i32]) -> Option<CriuWatchdog>) {
        // The earlier one ends when another is there. If none can be started it still looks after those that it knows.
        if let Some(guard) = start(&roots) {
            self.guard = Some(guard);
        }
        self.roots = roots;
    }

    /// Whether no task was named yet.
    pub(super) fn begin(&mut self, host: &Host, pid: i32) -> bool {
        let first = self.tasks.is_empty();
        if !first {
            return false;
        }
        let known = self.roots.contains(&pid);
        self.roots.extend((!known).then_some(pid));
        // At once: a guard takes longer to be started.
        self.set_exitkill(host, true);
        // Or none could be started earlier.
        if !known || self.guard.is_none() {
            let roots = self.roots.clone();
            self.replace_watchdog(roots, |roots| CriuWatchdog::of_trees(host, roots));
        }
        true
    }

    /// Has tasks, which CRIU has stopped, end with it, or not any more: the kernel would let them run on at once, and the guard comes later.
    fn set_exitkill(&mut self, host: &Host, tied: bool) {
        self.tied = tied;
        // CRIU has nothing more to do with their system calls.
        let options = if tied { Options::PTRACE_O_EXITKILL } else { Options::empty() };
        for thread in criu_watchdog::traced(&self.roots) {
            if let Err(errno) = ptrace::setoptions(Pid::from_raw(thread), options) {
                let then = if tied { "may run for a moment" } else { "is killed, too" };
                host.warn(format_args!("trace {thread}: {errno}: if CRIU is killed now, it {then}"));
            }
        }
    }

    /// Starts the queues of a task, if it has some, when it is `ready`: the memory of all is loaded, or behind a gate. `made`:
    /// how many processes have some.
    pub(super) fn task(
        &mut self,
        host: &Host,
        pid: i32,
        ready: impl FnOnce() -> Answer,
        made: usize,
    ) -> Answer {
        let done = self.next(host, pid, ready);
        self.all = !self.failed && self.started == made;
        done
    }

    /// Whether the queues of all processes were started.
    pub(super) fn all_started(&self) -> bool {
        self.all
    }

    /// Once all queues were started, CRIU's end does no harm.
    pub(super) fn no_more_guard(&mut self, host: &Host) {
        if self.all {
            if self.tied {
                self.set_exitkill(host, false);
            }
            self.guard = None;
        }
    }

    fn next(&mut self, host: &Host, pid: i32, ready: impl FnOnce() -> Answer) -> Answer {
        if self.tasks.contains(&pid) {
            return Err(Refusal::NotMine);
        }
        self.tasks.push(pid);
        if self.failed {
            end(host, &[pid]);
            return Err(Together.into());
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

    /// Ends all tasks.
    pub(super) fn fail(&mut self, host: &Host, task: i32, refusal: Refusal) -> Refusal {
        let Refusal::Failed(why) = refusal else { return refusal };
        self.failed = true;
        end(host, &self.tasks);
        Killed { task, why }.into()
    }

    /// Whether there was something to start.
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

    /// Says so if processes were left standing: they would wait for their GPUs for ever.
    pub(super) fn end(self, host: &Host, result: i32, made: usize) {
        if result == 0 && !self.failed && made != self.started {
            host.error(format_args!(
                "killing the restored tasks: queues of {} processes were started, of {made} that were restored",
                self.started
            ));
            end(host, &self.tasks);
        }
    }
}

/// Kills tasks that CRIU traces and has not waited for: their numbers are their own.
fn end(host: &Host, tasks: &[i32]) {
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

    /// A process that stands for a guard.
    fn guard() -> (CriuWatchdog, Pid) {
        #[expect(clippy::zombie_processes, reason = "the guard waits for it when it is dropped")]
        let process = Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = Pid::from_raw(process.id().cast_signed());
        (CriuWatchdog::of(pid), pid)
    }

    fn is_there(pid: Pid) -> bool {
        kill(pid, None).is_ok()
    }

    #[test]
    fn a_guard_stays_until_another_is_there() {
        let mut resume = Resume::default();
        let ((first, of_first), (second, of_second)) = (guard(), guard());
        resume.replace_watchdog(vec![7], |roots| Some(first).filter(|_| roots == [7]));
        resume.replace_watchdog(vec![7, 8], |_| None);
        assert!(resume.guard.is_some() && is_there(of_first), "it still looks after the first tree");
        assert_eq!(resume.roots, [7, 8]);
        resume.replace_watchdog(vec![7, 8, 9], |_| {
            assert!(is_there(of_first), "at no moment is there none");
            Some(second)
        });
        assert_eq!((is_there(of_first), is_there(of_second)), (false, true));
        drop(resume);
        assert!(!is_there(of_second));
    }
}
