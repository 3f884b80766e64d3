// SPDX-License-Identifier: MIT OR Apache-2.0
//! Whether a tracee has stopped.

use std::io;

use super::{Tid, check};

/// Set in a stop's signal by PTRACE_O_TRACESYSGOOD when it is at a system call.
const AT_CALL: i32 = 0x80;
/// `PTRACE_EVENT_STOP` (`include/uapi/linux/ptrace.h`).
const EVENT_STOP: i32 = 128;

/// Why a tracee stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stop {
    /// PTRACE_INTERRUPT, or the whole process is stopped (SIGSTOP): between two pieces of the thread's own code.
    Asked,
    /// A system call begins or ends.
    AtCall,
    /// A signal is about to be delivered.
    Signal(i32),
    /// Another event: none is asked for.
    Event(i32),
}

/// What a look at a tracee shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Waited {
    /// It runs, or it has ended and its end is for its parent to see.
    Nothing,
    /// It has stopped since the last look.
    Stopped(Stop),
    /// There is no such tracee.
    Gone,
}

/// Looks at a tracee without waiting. Never takes the news of its end away from its parent.
pub(crate) fn look(tid: Tid) -> io::Result<Waited> {
    let id = tid.try_into().map_err(io::Error::other)?;
    // SAFETY: zeros are a valid siginfo_t.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let options = libc::WSTOPPED | libc::__WALL | libc::WNOHANG;
    // SAFETY: the kernel writes one siginfo_t, which is live.
    let result = check(unsafe { libc::waitid(libc::P_PID, id, &raw mut info, options) }.into());
    match result {
        Err(error) if error.raw_os_error() == Some(libc::ECHILD) => return Ok(Waited::Gone),
        Err(error) => return Err(error),
        Ok(_) => {}
    }
    // SAFETY: waitid fills the fields of SIGCHLD, or leaves all zero.
    let (pid, status) = unsafe { (info.si_pid(), info.si_status()) };
    if pid == 0 {
        return Ok(Waited::Nothing);
    }
    let (signal, event) = (status & 0xff, status >> 8);
    Ok(Waited::Stopped(match event {
        EVENT_STOP => Stop::Asked,
        0 if signal == libc::SIGTRAP | AT_CALL => Stop::AtCall,
        0 => Stop::Signal(signal),
        other => Stop::Event(other),
    }))
}

/// Takes note of the end of a traced thread that is not its process's first: until then an exec in another thread waits.
/// Any thread of this process may; a stop is left to the tracer.
pub(crate) fn bury(tid: Tid) {
    // A ptrace stop is told whatever is asked for (`kernel/exit.c: wait_task_stopped`), so look before taking.
    let ends = [libc::CLD_EXITED, libc::CLD_KILLED, libc::CLD_DUMPED];
    if ends.contains(&end(tid, libc::WNOWAIT)) {
        end(tid, 0);
    }
}

/// The code of the SIGCHLD for a tracee's end or stop, 0 when there is none.
fn end(tid: Tid, option: libc::c_int) -> libc::c_int {
    let Ok(id) = tid.try_into() else { return 0 };
    // SAFETY: zeros are a valid siginfo_t.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let options = libc::WEXITED | libc::__WALL | libc::WNOHANG | option;
    // SAFETY: the kernel writes one siginfo_t, which is live. That there is no such tracee is no error here.
    unsafe { libc::waitid(libc::P_PID, id, &raw mut info, options) };
    info.si_code
}
