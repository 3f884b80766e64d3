// SPDX-License-Identifier: MIT OR Apache-2.0
//! System calls that a stopped thread makes for us.
//!
//! The thread goes to a `syscall` instruction that it has anyway, with our registers, makes the call between two stops
//! (its begin and its end), gets its own registers back before it runs another instruction, and is stopped once more
//! where it was: only there does the kernel start a call again that the first stop broke into
//! (`arch/x86/kernel/signal.c: arch_do_signal_or_restart`). All its signals are blocked meanwhile.
//!
//! From the first change of its registers until they are back the thread has PTRACE_O_EXITKILL: should this process be
//! killed in between, the kernel kills the process rather than let it run on with our registers.

use std::fs::File;
use std::io;
use std::time::Duration;

use crate::abi::{self, Registers, Stop, Tid, Waited};
use crate::error::Error;
use crate::maps::{self, Mapping};
use crate::stop::{Owner, Stopped, step_on};
use crate::wait::Wait;
use crate::{entry, proc, rseq};

/// Results from here up are negative errnos (`include/linux/err.h: MAX_ERRNO`).
const FIRST_ERRNO: u64 = (-4095_i64).cast_unsigned();
/// No system call, in `orig_rax`: nothing is to be started again.
const NO_CALL: u64 = u64::MAX;
const ALL_SIGNALS: u64 = u64::MAX;
/// How long an injected call may take, and then how long to be broken off: calls that are made do not wait, but for
/// the lock of the process's mappings and for a CPU.
const CALL: Duration = Duration::from_secs(3);

/// A thread with what it has to get back.
struct Borrowed {
    tid: Tid,
    registers: Registers,
    signal_mask: u64,
    filtered: bool,
}

/// What calls are made with.
#[derive(Debug)]
pub(crate) struct Tools {
    /// The thread that makes them.
    tid: Tid,
    memory: File,
    /// The address of a `syscall` instruction.
    entry: u64,
    /// Whether seccomp would judge them. No thread can change that while all stand still.
    filtered: bool,
}

impl Borrowed {
    /// Takes a thread and notes what is its own.
    fn take(tools: &Tools) -> Result<Self, Error> {
        let tid = tools.tid;
        let registers = abi::registers(tid).map_err(Error::ptrace("read the registers of", tid))?;
        let mut registers = registers.ok_or(Error::Ended { pid: tid })?;
        rseq::leave(tid, &tools.memory, &mut registers);
        let signal_mask = abi::signal_mask(tid).map_err(Error::ptrace("read the signal mask of", tid))?;
        let mut options = abi::MARK_CALLS | abi::KILL_WITH_US;
        if tools.filtered {
            options |= abi::WITHOUT_SECCOMP;
        }
        abi::set_options(tid, options).map_err(|source| match source.raw_os_error() {
            Some(libc::EPERM) => Error::Seccomp { tid, source },
            _ => Error::ptrace("set options of", tid)(source),
        })?;
        Ok(Self { tid, registers, signal_mask, filtered: tools.filtered })
    }
}

impl Stopped<'_> {
    /// Has one of the stopped threads make a system call (x86-64 numbers); `call` is its name, for errors. Pointers in
    /// `arguments` are addresses in the process. Choose calls that do not wait: after three seconds they are
    /// broken off with EINTR, or, if they cannot be, the process is killed ([`Error::Hung`]).
    ///
    /// # Errors
    /// [`Error::Call`] with the kernel's errno; [`Error::Unstoppable`] when no thread stands still: resolve what keeps
    /// them, and [`Stopped::settle`]; [`Error::NoEntry`], [`Error::Seccomp`]; [`Error::Ended`]; [`Error::Hung`].
    pub fn syscall(
        &mut self,
        call: &'static str,
        number: libc::c_long,
        arguments: [u64; 6],
    ) -> Result<u64, Error> {
        let tools = self.tools()?;
        let borrowed = Borrowed::take(&tools)?;
        let [rdi, rsi, rdx, r10, r8, r9] = arguments;
        let number = number.try_into().map_err(|_| self.refused(call, libc::ENOSYS))?;
        let registers = Registers {
            rip: tools.entry,
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
        self.tools = Some(tools);
        let result = self.run(call, &borrowed, &registers);
        self.give_back(call, &borrowed)?;
        match result {
            Ok(result) if result < FIRST_ERRNO => Ok(result),
            Ok(result) => Err(self.refused(call, i32::try_from(result.wrapping_neg()).unwrap_or(libc::EIO))),
            // It could be broken off.
            Err(Error::Hung { .. }) => Err(self.refused(call, libc::EINTR)),
            Err(error) => Err(error),
        }
    }

    fn refused(&self, call: &'static str, errno: i32) -> Error {
        Error::Call { pid: self.pid, call, source: io::Error::from_raw_os_error(errno) }
    }

    /// Which thread makes injected calls: its descriptors count.
    ///
    /// # Errors
    /// [`Error::Unstoppable`] when none stands still, [`Error::NoEntry`] when none of those runs 64-bit code.
    pub(crate) fn hand(&self) -> Result<Tid, Error> {
        let pid = self.pid;
        let able = |tid: &&Tid| matches!(abi::registers(**tid), Ok(Some(_)));
        // The first thread's descriptors are those that /proc/PID/fd and pidfd_getfd(2) show.
        let first = self.threads.iter().filter(|tid| **tid == pid);
        let others = self.threads.iter().filter(|tid| **tid != pid);
        if let Some(tid) = first.chain(others).find(able) {
            return Ok(*tid);
        }
        if self.threads.iter().any(|tid| abi::is_stopped(*tid)) {
            return Err(Error::NoEntry { pid, what: "thread in 64-bit code that stands still" });
        }
        match self.stuck() {
            threads if threads.is_empty() => Err(Error::Ended { pid }),
            threads => Err(Error::Unstoppable { pid, threads }),
        }
    }

    /// What a call is made with; found once for each thread.
    fn tools(&mut self) -> Result<Tools, Error> {
        let tid = self.hand()?;
        match self.tools.take().filter(|tools| tools.tid == tid) {
            Some(tools) => Ok(tools),
            None => self.tools_of(tid, &maps::read(tid)?),
        }
    }

    /// Finds what calls are made with in mappings that have been read already: they may be many.
    pub(crate) fn find_tools(&mut self, mappings: &[Mapping]) -> Result<(), Error> {
        let tid = self.hand()?;
        if self.tools.as_ref().is_none_or(|tools| tools.tid != tid) {
            self.tools = Some(self.tools_of(tid, mappings)?);
        }
        Ok(())
    }

    fn tools_of(&self, tid: Tid, mappings: &[Mapping]) -> Result<Tools, Error> {
        let pid = self.pid;
        // Not the first thread's, whose files are empty once it has ended, with others living on.
        let path = format!("/proc/{tid}/mem");
        let memory = File::open(&path).map_err(|source| match source.raw_os_error() {
            Some(libc::ESRCH | libc::ENOENT) => Error::Ended { pid },
            _ => Error::Read { path: path.into(), source },
        })?;
        let entry = entry::find(mappings, &memory);
        let entry = entry.ok_or(Error::NoEntry { pid, what: "readable `syscall` instruction" })?;
        let filtered = proc::status(tid).ok_or(Error::Ended { pid })?.filtered;
        Ok(Tools { tid, memory, entry, filtered })
    }

    /// Makes the call; its result as the kernel left it.
    fn run(&self, call: &'static str, thread: &Borrowed, registers: &Registers) -> Result<u64, Error> {
        let tid = thread.tid;
        abi::set_signal_mask(tid, ALL_SIGNALS).map_err(Error::ptrace("block the signals of", tid))?;
        abi::set_registers(tid, registers).map_err(Error::ptrace("set the registers of", tid))?;
        let mut wait = Wait::of(CALL);
        for _begin_and_end in 0..2 {
            abi::cont_to_call(tid).map_err(Error::ptrace("run", tid))?;
            self.until_call(call, tid, &mut wait)?;
        }
        let registers = abi::registers(tid).map_err(Error::ptrace("read the registers of", tid))?;
        Ok(registers.ok_or(Error::Ended { pid: self.pid })?.rax)
    }

    /// Waits for a call to begin or end. SIGSTOP, which cannot be blocked, is let through: the thread stops for us
    /// first, and with all others when it is let go.
    fn until_call(&self, call: &'static str, tid: Tid, wait: &mut Wait) -> Result<(), Error> {
        loop {
            match abi::look(tid).map_err(Error::ptrace("look at", tid))? {
                Waited::Stopped(Stop::AtCall) => return Ok(()),
                Waited::Stopped(Stop::Asked) => {
                    abi::cont_to_call(tid).map_err(Error::ptrace("run", tid))?;
                }
                Waited::Stopped(Stop::Signal(signal)) if signal == libc::SIGSTOP => {
                    abi::cont_to_call_with(tid, signal).map_err(Error::ptrace("run", tid))?;
                }
                // SIGSYS where the program has its system calls turned into signals (prctl(2)).
                Waited::Stopped(_) => return Err(self.refused(call, libc::ENOSYS)),
                Waited::Nothing => self.still_waits(call, tid, wait)?,
                Waited::Gone => return Err(Error::Ended { pid: self.pid }),
            }
        }
    }

    fn still_waits(&self, call: &'static str, tid: Tid, wait: &mut Wait) -> Result<(), Error> {
        if wait.is_long() && proc::status(tid).is_none_or(proc::Status::has_ended) {
            return Err(Error::Ended { pid: self.pid });
        }
        if wait.is_over() {
            return Err(Error::Hung { tid, call, waited_ms: CALL.as_millis() });
        }
        Ok(())
    }

    /// Gives a thread back what is its own, and has it stand where it stood.
    fn give_back(&mut self, call: &'static str, thread: &Borrowed) -> Result<(), Error> {
        let tid = thread.tid;
        let result = self.try_give_back(call, thread);
        if result.is_err() {
            // Killed meanwhile, or to be killed with this thread: not one to use or let go any more.
            self.threads.retain(|other| *other != tid);
        }
        result
    }

    /// Breaks off a call that does not end, if it can be.
    fn break_off(&self, call: &'static str, tid: Tid) -> Result<(), Error> {
        abi::interrupt(tid).map_err(Error::ptrace("interrupt", tid))?;
        let mut wait = Wait::of(CALL);
        loop {
            match abi::look(tid).map_err(Error::ptrace("look at", tid))? {
                Waited::Stopped(_) => return Ok(()),
                Waited::Nothing => self.still_waits(call, tid, &mut wait)?,
                Waited::Gone => return Err(Error::Ended { pid: self.pid }),
            }
        }
    }

    fn try_give_back(&self, call: &'static str, thread: &Borrowed) -> Result<(), Error> {
        let tid = thread.tid;
        if !abi::is_stopped(tid) {
            self.break_off(call, tid)?;
        }
        abi::set_registers(tid, &thread.registers).map_err(Error::ptrace("give registers back to", tid))?;
        if self.owner == Owner::Us {
            self.until_asked(call, tid)?;
        }
        abi::set_signal_mask(tid, thread.signal_mask).map_err(Error::ptrace("give signals back to", tid))?;
        let options = match self.owner {
            // CRIU suspends filters until it lets the thread go.
            Owner::Caller if thread.filtered => abi::MARK_CALLS | abi::WITHOUT_SECCOMP,
            _ => abi::MARK_CALLS,
        };
        abi::set_options(tid, options).map_err(Error::ptrace("set options of", tid))
    }

    /// Has a thread stand where it stood when it was asked to stop.
    fn until_asked(&self, call: &'static str, tid: Tid) -> Result<(), Error> {
        step_on(tid, Stop::AtCall);
        let mut wait = Wait::of(CALL);
        loop {
            match abi::look(tid).map_err(Error::ptrace("look at", tid))? {
                Waited::Stopped(Stop::Asked) => return Ok(()),
                Waited::Stopped(other) => step_on(tid, other),
                Waited::Nothing => self.still_waits(call, tid, &mut wait)?,
                Waited::Gone => return Err(Error::Ended { pid: self.pid }),
            }
        }
    }
}
