// SPDX-License-Identifier: MIT OR Apache-2.0
//! Stops all threads of a process.

use std::marker::PhantomData;
use std::time::{Duration, Instant};

use crate::abi::{self, StopReason, Tid, TraceeState};
use crate::error::Error;
use crate::inject::CallSetup;
use crate::stuck::{Reason, StuckThread};
use crate::tracer::TraceeList;
use crate::wait::Wait;
use crate::{proc, restart, sharers, tracer};

/// Stops all threads of process `pid`, runs `act`, and resumes them. The stop leaves no trace. Interrupted
/// system calls are restarted, and signals that arrive meanwhile are delivered. A process that job control
/// had stopped stays stopped.
///
/// Threads get `timeout` to stop. `act` runs also if some do not: see [`Stopped::stuck`].
///
/// `act` runs on a thread of its own, the tracer, so that threads that never stop can be detached. No other
/// thread of this process may wait for any child (`waitpid(-1)`) meanwhile: it could take the report of a
/// stop.
///
/// # Errors
/// [`Error::Ended`], [`Error::Traced`], [`Error::NotAllowed`], [`Error::Foreign`], [`Error::SharedMemory`].
/// The process continues.
pub fn with_stopped<T: Send>(
    pid: i32,
    timeout: Duration,
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
            call_setup: None,
            owner: Owner::Rewake,
            tracer: PhantomData,
        };
        stopped.settle(timeout)?;
        sharers::refuse_children(pid)?;
        Ok(act(&mut stopped))
    })
}

/// Runs `act` on process `pid`, which the calling thread traces already. Every thread stays in its stop.
///
/// This is for CRIU's main thread in `RESUME_DEVICES_LATE`, when CRIU has seized every thread of the restored
/// task. Each is stopped at the end of a system call (`rt_sigreturn(2)`, and `munmap(2)` for the first
/// thread), with the program's registers. This function seizes, interrupts and detaches no thread, and starts
/// none. Injected calls end in a stop of the same kind, with the thread's own registers and signal mask.
///
/// The kernel does not report ptrace options. The thread that made calls has PTRACE_O_TRACESYSGOOD
/// afterwards, as CRIU sets it. If it has a filter, it also has PTRACE_O_SUSPEND_SECCOMP.
///
/// # Errors
/// [`Error::NotHeld`] for a thread that the calling thread has not stopped at the end of a system call, or
/// whose call the kernel will restart; [`Error::Ended`], [`Error::Foreign`].
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
        if !abi::is_at_syscall_exit(*tid)
            || registers.is_some_and(|registers| restart::will_restart(&registers))
        {
            return Err(Error::NotHeld { tid: *tid });
        }
    }
    let traced = TraceeList::default();
    let mut stopped = Stopped {
        pid,
        since: Instant::now(),
        traced: &traced,
        threads,
        running: Vec::new(),
        call_setup: None,
        owner: Owner::Caller,
        tracer: PhantomData,
    };
    Ok(act(&mut stopped))
}

/// A process whose threads are stopped, except those that are [`Stopped::stuck`]. A drop resumes them.
#[derive(Debug)]
pub struct Stopped<'a> {
    pub(crate) pid: Tid,
    since: Instant,
    traced: &'a TraceeList,
    /// The stopped threads.
    pub(crate) threads: Vec<Tid>,
    /// Threads that were interrupted and have not stopped.
    running: Vec<StoppingThread>,
    /// The means to inject calls, once found.
    pub(crate) call_setup: Option<CallSetup>,
    /// The owner of the stop.
    pub(crate) owner: Owner,
    /// Keeps this on its thread, because the tracer is a thread.
    tracer: PhantomData<*const ()>,
}

/// The owner of a stop, who also ends it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Owner {
    /// [`with_stopped`]: PTRACE_INTERRUPT has stopped the threads.
    Rewake,
    /// The caller of [`with_tracee`]: threads stay stopped at the end of a system call.
    Caller,
}

/// A thread that was interrupted.
#[derive(Debug)]
struct StoppingThread {
    tid: Tid,
    /// The thread's CPU time in nanoseconds at the interrupt, or at the start of the last wait.
    cpu_time: Option<u64>,
    /// The reason why it had not stopped at the end of the last wait.
    reason: Reason,
}

impl Stopped<'_> {
    /// Returns the process.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Returns the time of the first interrupt. Threads that ran then are stopped from their next entry into
    /// the kernel.
    #[must_use]
    pub fn since(&self) -> Instant {
        self.since
    }

    /// Returns the stopped threads.
    #[must_use]
    pub fn threads(&self) -> &[i32] {
        &self.threads
    }

    /// Returns the threads that had not stopped at the end of the last wait, with the reasons. They run none
    /// of their own code.
    #[must_use]
    pub fn stuck(&self) -> Vec<StuckThread> {
        let stuck = |thread: &StoppingThread| StuckThread { tid: thread.tid, reason: thread.reason };
        self.running.iter().map(stuck).collect()
    }

    /// Waits up to `timeout` for threads that had not stopped, after the caller has resolved the reasons.
    /// Does not wait for threads that spin in the kernel.
    ///
    /// # Errors
    /// [`Error::Ended`], [`Error::Traced`], [`Error::NotAllowed`].
    pub fn settle(&mut self, timeout: Duration) -> Result<(), Error> {
        if self.owner == Owner::Caller {
            return Ok(());
        }
        let mut wait = Wait::of(timeout);
        // The reason may be resolved, so count CPU time again.
        for thread in &mut self.running {
            thread.cpu_time = proc::cpu_time(thread.tid);
        }
        loop {
            self.poll_threads(wait.is_long())?;
            // New threads come from running ones, so the list is complete only when none runs.
            let known_stand = self.running.is_empty() || (wait.is_long() && self.all_spin());
            if known_stand && !self.interrupt_new(&mut wait)? {
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

    /// Updates the reasons why threads do not stop. Returns whether all of them spin in the kernel.
    fn all_spin(&mut self) -> bool {
        for thread in &mut self.running {
            thread.reason = proc::why_stuck(thread.tid, thread.cpu_time);
        }
        self.running.iter().all(|thread| thread.reason == Reason::Spins)
    }

    /// Seizes and interrupts new threads. Returns whether there were any.
    fn interrupt_new(&mut self, wait: &mut Wait) -> Result<bool, Error> {
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
                self.running.push(StoppingThread { tid, cpu_time, reason: Reason::Unknown });
            }
        }
        Ok(self.running.len() > before)
    }

    /// Removes ended threads. An exec ends all threads except one, which takes the number of the first, so
    /// that number is another thread then. The exec waits until the others are reaped.
    fn forget_ended(&mut self) {
        let pid = self.pid;
        self.threads.retain(|tid| {
            let stopped = abi::is_stopped(*tid);
            if !stopped && *tid != pid {
                abi::reap_thread(*tid);
            }
            stopped
        });
    }

    /// Collects threads that have stopped or, if `closely`, ended.
    fn poll_threads(&mut self, closely: bool) -> Result<(), Error> {
        if closely {
            self.forget_ended();
        }
        for thread in std::mem::take(&mut self.running) {
            let tid = thread.tid;
            let looked = abi::poll_stop(tid).map_err(Error::ptrace("poll", tid))?;
            let ended = || closely && proc::status(tid).is_none_or(proc::Status::has_ended);
            match looked {
                TraceeState::Stopped(StopReason::Interrupt) => {
                    restart::mark(tid);
                    self.threads.push(tid);
                    continue;
                }
                TraceeState::Stopped(other) => interrupt_again(tid, other),
                TraceeState::Gone => continue,
                TraceeState::Running if ended() => {
                    if tid != self.pid {
                        abi::reap_thread(tid);
                    }
                    continue;
                }
                TraceeState::Running => {}
            }
            self.running.push(thread);
        }
        Ok(())
    }
}

/// Resumes a thread from another stop, towards the stop of the interrupt. Errors mean that the thread is
/// being killed.
pub(crate) fn interrupt_again(tid: Tid, stop: StopReason) {
    let signal = match stop {
        StopReason::Signal(signal) => signal,
        _ => 0,
    };
    // Any stop cancels the pending interrupt.
    let _ = abi::interrupt(tid).and_then(|()| abi::cont(tid, signal));
}

impl Drop for Stopped<'_> {
    fn drop(&mut self) {
        if self.owner == Owner::Caller {
            return;
        }
        for tid in &self.threads {
            // The thread may have been killed.
            let _ = abi::detach(*tid);
        }
    }
}
