// SPDX-License-Identifier: MIT OR Apache-2.0
//! A whole process that stands still.

use std::marker::PhantomData;
use std::time::{Duration, Instant};

use crate::abi::{self, Stop, Tid, Waited};
use crate::error::Error;
use crate::inject::Tools;
use crate::stuck::{self, Reason, Stuck};
use crate::tracer::Traced;
use crate::wait::Wait;
use crate::{proc, restart, sharers, tracer};

/// Stops all threads of process `pid`, runs `act`, and lets them go on as if nothing had been: system calls that the
/// stop broke into are restarted, signals that came meanwhile are delivered, a process that job control had stopped
/// stays stopped.
///
/// `patience` is how long threads get to stop. Those that do not are [`Stopped::stuck`]; `act` runs all the same.
///
/// `act` runs in a thread of its own, the tracer, so that even threads that never stop can be let go. Nobody in this
/// process may wait for any child (`waitpid(-1)`) meanwhile: it could take the news of a stop.
///
/// # Errors
/// [`Error::Ended`], [`Error::Traced`], [`Error::NotAllowed`], [`Error::Foreign`], [`Error::SharedMemory`]; the
/// process runs on then.
pub fn with_stopped<T: Send>(
    pid: i32,
    patience: Duration,
    act: impl FnOnce(&mut Stopped<'_>) -> T + Send,
) -> Result<T, Error> {
    tracer::on_own_thread(|traced| {
        if let Some(what) = proc::foreign_program(pid) {
            return Err(Error::Foreign { pid, what });
        }
        sharers::refuse_any(pid)?;
        let mut stopped = Stopped {
            pid,
            since: Instant::now(),
            traced,
            threads: Vec::new(),
            running: Vec::new(),
            tools: None,
            owner: Owner::Us,
            tracer: PhantomData,
        };
        stopped.settle(patience)?;
        sharers::refuse_children(pid)?;
        Ok(act(&mut stopped))
    })
}

/// Runs `act` on process `pid`, which the calling thread traces already, and leaves every thread in the stop it was in.
///
/// This is for CRIU's main thread in `RESUME_DEVICES_LATE`: CRIU has seized every thread of the restored task. Each is
/// stopped where a system call ends (`rt_sigreturn(2)`, and `munmap(2)` for the first thread), and its registers are
/// the program's. Nothing here seizes, interrupts or detaches a thread, or starts one of ours. Injected calls end in
/// a stop of the same kind. Registers and signal mask are the thread's own again.
///
/// The kernel does not say which ptrace options a thread has. The thread that made calls has PTRACE_O_TRACESYSGOOD
/// afterwards, as CRIU sets it, and PTRACE_O_SUSPEND_SECCOMP if it has a filter.
///
/// # Errors
/// [`Error::NotHeld`] for a thread that the calling thread has not stopped where a system call ends, or whose call the
/// kernel is to start again; [`Error::Ended`], [`Error::Foreign`].
pub fn with_tracee<T>(pid: i32, act: impl FnOnce(&mut Stopped<'_>) -> T) -> Result<T, Error> {
    if let Some(what) = proc::foreign_program(pid) {
        return Err(Error::Foreign { pid, what });
    }
    let threads = proc::threads(pid);
    if threads.is_empty() {
        return Err(Error::Ended { pid });
    }
    for tid in &threads {
        let registers = abi::registers(*tid).map_err(|_| Error::NotHeld { tid: *tid })?;
        if !abi::is_at_end_of_call(*tid) || registers.is_some_and(|registers| restart::is_due(&registers)) {
            return Err(Error::NotHeld { tid: *tid });
        }
    }
    let traced = Traced::default();
    let mut stopped = Stopped {
        pid,
        since: Instant::now(),
        traced: &traced,
        threads,
        running: Vec::new(),
        tools: None,
        owner: Owner::Caller,
        tracer: PhantomData,
    };
    Ok(act(&mut stopped))
}

/// A process whose threads stand still, but for those that are [`Stopped::stuck`]. They go on when it is dropped.
#[derive(Debug)]
pub struct Stopped<'a> {
    pub(crate) pid: Tid,
    since: Instant,
    traced: &'a Traced,
    /// Those that stand still.
    pub(crate) threads: Vec<Tid>,
    /// Those that were asked to.
    running: Vec<Asked>,
    /// What calls are made with, once known.
    pub(crate) tools: Option<Tools>,
    /// Whose the stop is.
    pub(crate) owner: Owner,
    /// A tracer is a thread: this stays where it is.
    tracer: PhantomData<*const ()>,
}

/// Who has stopped a process, and so lets it run again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Owner {
    /// [`with_stopped`]: threads are in stops by PTRACE_INTERRUPT.
    Us,
    /// The caller of [`with_tracee`]: threads are where a system call ends, and stay there.
    Caller,
}

/// A thread that was asked to stop.
#[derive(Debug)]
struct Asked {
    tid: Tid,
    /// Nanoseconds on a CPU until then, or until it was waited for again.
    cpu_time: Option<u64>,
    /// Why it had not when it was last waited for.
    reason: Reason,
}

impl Stopped<'_> {
    /// The process.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// When its threads were first asked to stop. Those that run then stand still from their next entry into the kernel.
    #[must_use]
    pub fn since(&self) -> Instant {
        self.since
    }

    /// Threads that stand still.
    #[must_use]
    pub fn threads(&self) -> &[i32] {
        &self.threads
    }

    /// Threads that did not stop when they were last waited for, and why not then. They run no code of their own.
    #[must_use]
    pub fn stuck(&self) -> Vec<Stuck> {
        let stuck = |thread: &Asked| Stuck { tid: thread.tid, reason: thread.reason };
        self.running.iter().map(stuck).collect()
    }

    /// Waits for threads that did not stop before, `patience` at most: after what kept them is resolved.
    /// Threads that spin in the kernel are not waited for.
    ///
    /// # Errors
    /// [`Error::Ended`], [`Error::Traced`], [`Error::NotAllowed`].
    pub fn settle(&mut self, patience: Duration) -> Result<(), Error> {
        if self.owner == Owner::Caller {
            return Ok(());
        }
        let mut wait = Wait::of(patience);
        // What kept them may be resolved: time on a CPU counts anew.
        for thread in &mut self.running {
            thread.cpu_time = proc::cpu_time(thread.tid);
        }
        loop {
            self.look_around(wait.is_long())?;
            // Only then: threads are born of running ones, so that a look finds all when none runs.
            let known_stand = self.running.is_empty() || (wait.is_long() && self.all_spin());
            if known_stand && !self.ask_new(&mut wait)? {
                break;
            }
            if wait.is_over() {
                break;
            }
        }
        self.all_spin();
        if self.threads.is_empty() && self.running.is_empty() {
            return Err(Error::Ended { pid: self.pid });
        }
        Ok(())
    }

    /// Looks why threads do not stop; true when all do as they spin in the kernel.
    fn all_spin(&mut self) -> bool {
        for thread in &mut self.running {
            thread.reason = stuck::reason(thread.tid, thread.cpu_time);
        }
        self.running.iter().all(|thread| thread.reason == Reason::Spins)
    }

    /// Begins to trace threads that were not known, and asks them to stop; false when there are none.
    fn ask_new(&mut self, wait: &mut Wait) -> Result<bool, Error> {
        self.forget_ended();
        let known =
            |tid: &Tid| self.threads.contains(tid) || self.running.iter().any(|thread| thread.tid == *tid);
        let new: Vec<Tid> = proc::threads(self.pid).into_iter().filter(|tid| !known(tid)).collect();
        let before = self.running.len();
        for tid in new {
            match tracer::attach_thread(self.pid, tid, self.traced, wait) {
                Ok(_) => {}
                Err(Error::Ended { .. }) => continue,
                Err(error) => return Err(error),
            }
            let cpu_time = proc::cpu_time(tid);
            if abi::interrupt(tid).is_ok() {
                self.running.push(Asked { tid, cpu_time, reason: Reason::Unknown });
            }
        }
        Ok(self.running.len() > before)
    }

    /// An exec ends all threads but one, which takes the first one's number: it is not the one that stood still. And
    /// it waits until the others are buried.
    fn forget_ended(&mut self) {
        let pid = self.pid;
        self.threads.retain(|tid| {
            let stands = abi::is_stopped(*tid);
            if !stands && *tid != pid {
                abi::bury(*tid);
            }
            stands
        });
    }

    /// Looks which threads have stopped or, if `closely`, ended.
    fn look_around(&mut self, closely: bool) -> Result<(), Error> {
        if closely {
            self.forget_ended();
        }
        for thread in std::mem::take(&mut self.running) {
            let tid = thread.tid;
            let looked = abi::look(tid).map_err(Error::ptrace("look at", tid))?;
            let ended = || closely && proc::status(tid).is_none_or(proc::Status::has_ended);
            match looked {
                Waited::Stopped(Stop::Asked) => {
                    restart::mark(tid);
                    self.threads.push(tid);
                    continue;
                }
                Waited::Stopped(other) => step_on(tid, other),
                Waited::Gone => continue,
                Waited::Nothing if ended() => {
                    if tid != self.pid {
                        abi::bury(tid);
                    }
                    continue;
                }
                Waited::Nothing => {}
            }
            self.running.push(thread);
        }
        Ok(())
    }
}

/// Lets a thread go on from another stop than the one it was asked for, to that one. A thread that is being killed
/// does not hear it.
pub(crate) fn step_on(tid: Tid, stop: Stop) {
    let signal = match stop {
        Stop::Signal(signal) => signal,
        _ => 0,
    };
    // Any stop takes the place of the one that was asked for.
    let _ = abi::interrupt(tid).and_then(|()| abi::cont(tid, signal));
}

impl Drop for Stopped<'_> {
    fn drop(&mut self) {
        if self.owner == Owner::Caller {
            return;
        }
        for tid in &self.threads {
            // One that was killed meanwhile does not hear it.
            let _ = abi::detach(*tid);
        }
    }
}
