// SPDX-License-Identifier: MIT OR Apache-2.0
//! Injects system calls into a stopped thread.
//!
//! The thread moves to an existing `syscall` instruction with other registers, and makes the call between two
//! stops (begin and end). It gets its own registers back before it runs another instruction. Then it stops
//! once more at its original place. Only there does the kernel restart a call that the first stop interrupted
//! (`arch/x86/kernel/signal.c: arch_do_signal_or_restart`). All its signals are blocked meanwhile.
//!
//! While its registers are changed, the thread has PTRACE_O_EXITKILL. If this process is killed then, the
//! kernel kills the target, which would otherwise continue with wrong registers.

use std::fs::File;
use std::io;
use std::time::Duration;

use crate::abi::{self, Registers, StopReason, Tid, TraceeState};
use crate::error::Error;
use crate::maps::{self, MapsEntry};
use crate::stop::{Owner, Stopped, interrupt_again};
use crate::wait::Wait;
use crate::{entry, proc, rseq};

/// Results from here up are negative errnos (`include/linux/err.h: MAX_ERRNO`).
const FIRST_ERRNO: u64 = (-4095_i64).cast_unsigned();
/// The `orig_rax` of no system call, which the kernel does not restart.
const NO_CALL: u64 = u64::MAX;
const ALL_SIGNALS: u64 = u64::MAX;
/// The timeout of an injected call, and then of its interruption. Calls wait only for the lock of the
/// process's mappings and for a CPU.
const CALL_LIMIT: Duration = Duration::from_secs(3);

/// A thread and its own state, which it gets back.
struct SavedThread {
    tid: Tid,
    registers: Registers,
    signal_mask: u64,
    filtered: bool,
}

/// The means to inject calls.
#[derive(Debug)]
pub(crate) struct CallSetup {
    /// The thread that makes the calls.
    tid: Tid,
    memory: File,
    /// The address of a `syscall` instruction.
    entry: u64,
    /// Whether a seccomp filter would check the calls. No stopped thread can change that.
    filtered: bool,
}

impl SavedThread {
    /// Takes a thread and saves its state.
    fn take(call_setup: &CallSetup) -> Result<Self, Error> {
        let tid = call_setup.tid;
        let registers = abi::registers(tid).map_err(Error::ptrace("read the registers of", tid))?;
        let mut registers = registers.ok_or(Error::Ended { pid: tid })?;
        rseq::leave(tid, &call_setup.memory, &mut registers);
        let signal_mask = abi::signal_mask(tid).map_err(Error::ptrace("read the signal mask of", tid))?;
        let mut options = abi::TRACE_SYSGOOD | abi::EXIT_KILL;
        if call_setup.filtered {
            options |= abi::SUSPEND_SECCOMP;
        }
        abi::set_options(tid, options).map_err(|source| match source.raw_os_error() {
            Some(libc::EPERM) => Error::Seccomp { tid, source },
            _ => Error::ptrace("set options of", tid)(source),
        })?;
        Ok(Self { tid, registers, signal_mask, filtered: call_setup.filtered })
    }
}

impl Stopped<'_> {
    /// Makes one of the stopped threads call the kernel (x86-64 numbers); `call` is the name in errors.
    /// Pointers in `arguments` are addresses in the process. Choose calls that do not wait. After three
    /// seconds a call is interrupted with EINTR. If that fails, the process is killed ([`Error::Hung`]).
    ///
    /// # Errors
    /// [`Error::Call`] with the kernel's errno. [`Error::Unstoppable`] if no thread is stopped: resolve the
    /// reason, and call [`Stopped::settle`]. [`Error::NoEntry`], [`Error::Seccomp`], [`Error::Ended`],
    /// [`Error::Hung`].
    pub fn syscall(
        &mut self,
        call: &'static str,
        number: libc::c_long,
        arguments: [u64; 6],
    ) -> Result<u64, Error> {
        let call_setup = self.call_setup()?;
        let borrowed = SavedThread::take(&call_setup)?;
        let [rdi, rsi, rdx, r10, r8, r9] = arguments;
        let number = number.try_into().map_err(|_| self.refused(call, libc::ENOSYS))?;
        let registers = Registers {
            rip: call_setup.entry,
            rax: number,
            orig_rax: NO_CALL,
            rdi,
            rsi,
            rdx,
            r10,
            r8,
            r9,
            ..borrowed.registers
        };
        self.call_setup = Some(call_setup);
        let result = self.run(call, &borrowed, &registers);
        self.give_back(call, &borrowed)?;
        match result {
            Ok(result) if result < FIRST_ERRNO => Ok(result),
            Ok(result) => Err(self.refused(call, i32::try_from(result.wrapping_neg()).unwrap_or(libc::EIO))),
            // The call was interrupted.
            Err(Error::Hung { .. }) => Err(self.refused(call, libc::EINTR)),
            Err(error) => Err(error),
        }
    }

    fn refused(&self, call: &'static str, errno: i32) -> Error {
        Error::Call { pid: self.pid, call, source: io::Error::from_raw_os_error(errno) }
    }

    /// Returns the thread that makes injected calls. Descriptor numbers refer to its table.
    ///
    /// # Errors
    /// [`Error::Unstoppable`] if no thread is stopped; [`Error::NoEntry`] if none of them runs 64-bit code.
    pub(crate) fn calling_thread(&self) -> Result<Tid, Error> {
        let pid = self.pid;
        let able = |tid: &&Tid| matches!(abi::registers(**tid), Ok(Some(_)));
        // /proc/PID/fd and pidfd_getfd(2) show the first thread's descriptors.
        let first = self.threads.iter().filter(|tid| **tid == pid);
        let others = self.threads.iter().filter(|tid| **tid != pid);
        if let Some(tid) = first.chain(others).find(able) {
            return Ok(*tid);
        }
        if self.threads.iter().any(|tid| abi::is_stopped(*tid)) {
            return Err(Error::NoEntry { pid, what: "stopped thread in 64-bit code" });
        }
        match self.stuck() {
            threads if threads.is_empty() => Err(Error::Ended { pid }),
            threads => Err(Error::Unstoppable { pid, threads }),
        }
    }

    /// Returns the means to inject calls, which are found once for each thread.
    fn call_setup(&mut self) -> Result<CallSetup, Error> {
        let tid = self.calling_thread()?;
        match self.call_setup.take().filter(|call_setup| call_setup.tid == tid) {
            Some(call_setup) => Ok(call_setup),
            None => self.call_setup_of(tid, &maps::read(tid)?),
        }
    }

    /// Finds the means to inject calls in mappings that were read before: there may be many.
    pub(crate) fn find_call_setup(&mut self, mappings: &[MapsEntry]) -> Result<(), Error> {
        let tid = self.calling_thread()?;
        if self.call_setup.as_ref().is_none_or(|call_setup| call_setup.tid != tid) {
            self.call_setup = Some(self.call_setup_of(tid, mappings)?);
        }
        Ok(())
    }

    fn call_setup_of(&self, tid: Tid, mappings: &[MapsEntry]) -> Result<CallSetup, Error> {
        let pid = self.pid;
        // The first thread's file is empty if it has ended and others live.
        let path = format!("/proc/{tid}/mem");
        let memory = File::open(&path).map_err(|source| match source.raw_os_error() {
            Some(libc::ESRCH | libc::ENOENT) => Error::Ended { pid },
            _ => Error::Read { path: path.into(), source },
        })?;
        let entry = entry::find(mappings, &memory);
        let entry = entry.ok_or(Error::NoEntry { pid, what: "readable `syscall` instruction" })?;
        let filtered = proc::status(tid).ok_or(Error::Ended { pid })?.filtered;
        Ok(CallSetup { tid, memory, entry, filtered })
    }

    /// Makes the call. Returns its result as the kernel left it.
    fn run(&self, call: &'static str, thread: &SavedThread, registers: &Registers) -> Result<u64, Error> {
        let tid = thread.tid;
        abi::set_signal_mask(tid, ALL_SIGNALS).map_err(Error::ptrace("block the signals of", tid))?;
        abi::set_registers(tid, registers).map_err(Error::ptrace("set the registers of", tid))?;
        let mut wait = Wait::of(CALL_LIMIT);
        for _begin_and_end in 0..2 {
            abi::cont_to_syscall(tid).map_err(Error::ptrace("run", tid))?;
            self.until_call(call, tid, &mut wait)?;
        }
        let registers = abi::registers(tid).map_err(Error::ptrace("read the registers of", tid))?;
        Ok(registers.ok_or(Error::Ended { pid: self.pid })?.rax)
    }

    /// Waits until a call begins or ends. SIGSTOP cannot be blocked, so it is delivered: the thread stops for
    /// this tracer first. It stops with all others when it is detached.
    fn until_call(&self, call: &'static str, tid: Tid, wait: &mut Wait) -> Result<(), Error> {
        loop {
            match abi::poll_stop(tid).map_err(Error::ptrace("poll", tid))? {
                TraceeState::Stopped(StopReason::AtCall) => return Ok(()),
                TraceeState::Stopped(StopReason::Interrupt) => {
                    abi::cont_to_syscall(tid).map_err(Error::ptrace("run", tid))?;
                }
                TraceeState::Stopped(StopReason::Signal(signal)) if signal == libc::SIGSTOP => {
                    abi::cont_to_syscall_with(tid, signal).map_err(Error::ptrace("run", tid))?;
                }
                // This is SIGSYS in a program that turns its system calls into signals (prctl(2)).
                TraceeState::Stopped(_) => return Err(self.refused(call, libc::ENOSYS)),
                TraceeState::Running => self.still_waits(call, tid, wait)?,
                TraceeState::Gone => return Err(Error::Ended { pid: self.pid }),
            }
        }
    }

    fn still_waits(&self, call: &'static str, tid: Tid, wait: &mut Wait) -> Result<(), Error> {
        if wait.is_long() && proc::status(tid).is_none_or(proc::Status::has_ended) {
            return Err(Error::Ended { pid: self.pid });
        }
        if wait.is_over() {
            return Err(Error::Hung { tid, call, waited_ms: CALL_LIMIT.as_millis() });
        }
        Ok(())
    }

    /// Restores a thread's state, and stops it at its original place.
    fn give_back(&mut self, call: &'static str, thread: &SavedThread) -> Result<(), Error> {
        let tid = thread.tid;
        let result = self.try_give_back(call, thread);
        if result.is_err() {
            // The thread was killed, or will be: it must be neither used nor detached.
            self.threads.retain(|other| *other != tid);
        }
        result
    }

    /// Interrupts a call that does not end.
    fn break_off(&self, call: &'static str, tid: Tid) -> Result<(), Error> {
        abi::interrupt(tid).map_err(Error::ptrace("interrupt", tid))?;
        let mut wait = Wait::of(CALL_LIMIT);
        loop {
            match abi::poll_stop(tid).map_err(Error::ptrace("poll", tid))? {
                TraceeState::Stopped(_) => return Ok(()),
                TraceeState::Running => self.still_waits(call, tid, &mut wait)?,
                TraceeState::Gone => return Err(Error::Ended { pid: self.pid }),
            }
        }
    }

    fn try_give_back(&self, call: &'static str, thread: &SavedThread) -> Result<(), Error> {
        let tid = thread.tid;
        if !abi::is_stopped(tid) {
            self.break_off(call, tid)?;
        }
        abi::set_registers(tid, &thread.registers).map_err(Error::ptrace("give registers back to", tid))?;
        if self.owner == Owner::Rewake {
            self.until_interrupt(call, tid)?;
        }
        abi::set_signal_mask(tid, thread.signal_mask).map_err(Error::ptrace("give signals back to", tid))?;
        let options = match self.owner {
            // CRIU suspends filters until it detaches the thread.
            Owner::Caller if thread.filtered => abi::TRACE_SYSGOOD | abi::SUSPEND_SECCOMP,
            _ => abi::TRACE_SYSGOOD,
        };
        abi::set_options(tid, options).map_err(Error::ptrace("set options of", tid))
    }

    /// Waits until a thread is in the stop that the interrupt requests.
    fn until_interrupt(&self, call: &'static str, tid: Tid) -> Result<(), Error> {
        interrupt_again(tid, StopReason::AtCall);
        let mut wait = Wait::of(CALL_LIMIT);
        loop {
            match abi::poll_stop(tid).map_err(Error::ptrace("poll", tid))? {
                TraceeState::Stopped(StopReason::Interrupt) => return Ok(()),
                TraceeState::Stopped(other) => interrupt_again(tid, other),
                TraceeState::Running => self.still_waits(call, tid, &mut wait)?,
                TraceeState::Gone => return Err(Error::Ended { pid: self.pid }),
            }
        }
    }
}
