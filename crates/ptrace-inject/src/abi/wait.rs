// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads stops of tracees.

use std::io;

use super::{Tid, check};

/// PTRACE_O_TRACESYSGOOD sets this bit in the signal of a stop at a system call.
const AT_CALL: i32 = 0x80;
/// `PTRACE_EVENT_STOP` (`include/uapi/linux/ptrace.h`).
const EVENT_STOP: i32 = 128;

/// The reason of a stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StopReason {
    /// PTRACE_INTERRUPT, or a stop of the whole process (SIGSTOP), between two instructions of the thread's
    /// own code.
    Interrupt,
    /// A system call begins or ends.
    AtCall,
    /// A signal is about to be delivered.
    Signal(i32),
    /// Another event: no option enables one.
    Event(i32),
}

/// The state of a tracee.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TraceeState {
    /// It runs, or it has ended and its parent can read that.
    Running,
    /// It has stopped since the last poll.
    Stopped(StopReason),
    /// The tracee does not exist.
    Gone,
}

/// Polls a tracee without waiting. Never takes the exit status away from its parent.
pub(crate) fn poll_stop(tid: Tid) -> io::Result<TraceeState> {
    let id = tid.try_into().map_err(io::Error::other)?;
    // SAFETY: zeros are a valid siginfo_t.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let options = libc::WSTOPPED | libc::__WALL | libc::WNOHANG;
    // SAFETY: the kernel writes one siginfo_t, which is live.
    let result = check(unsafe { libc::waitid(libc::P_PID, id, &raw mut info, options) }.into());
    match result {
        Err(error) if error.raw_os_error() == Some(libc::ECHILD) => return Ok(TraceeState::Gone),
        Err(error) => return Err(error),
        Ok(_) => {}
    }
    // SAFETY: waitid fills the fields of SIGCHLD, or leaves all zero.
    let (pid, status) = unsafe { (info.si_pid(), info.si_status()) };
    if pid == 0 {
        return Ok(TraceeState::Running);
    }
    let (signal, event) = (status & 0xff, status >> 8);
    Ok(TraceeState::Stopped(match event {
        EVENT_STOP => StopReason::Interrupt,
        0 if signal == libc::SIGTRAP | AT_CALL => StopReason::AtCall,
        0 => StopReason::Signal(signal),
        other => StopReason::Event(other),
    }))
}

/// Reaps an ended tracee that is not the first thread of its process. Until then, an exec in another thread
/// waits. Any thread of this process may call this; it leaves stops to the tracer.
pub(crate) fn reap_thread(tid: Tid) {
    // waitid returns ptrace stops whatever its options are (`kernel/exit.c: wait_task_stopped`), so peek
    // first.
    let ends = [libc::CLD_EXITED, libc::CLD_KILLED, libc::CLD_DUMPED];
    if ends.contains(&end(tid, libc::WNOWAIT)) {
        end(tid, 0);
    }
}

/// Returns the SIGCHLD code of a tracee's end or stop, or 0.
fn end(tid: Tid, option: libc::c_int) -> libc::c_int {
    let Ok(id) = tid.try_into() else { return 0 };
    // SAFETY: zeros are a valid siginfo_t.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let options = libc::WEXITED | libc::__WALL | libc::WNOHANG | option;
    // SAFETY: the kernel writes one siginfo_t, which is live. That there is no such tracee is no error here.
    unsafe { libc::waitid(libc::P_PID, id, &raw mut info, options) };
    info.si_code
}
