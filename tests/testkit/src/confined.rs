// SPDX-License-Identifier: MIT OR Apache-2.0
//! Processes that confine themselves.

use nix::errno::Errno;
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, fork};

/// What a system call of a confined process did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallEnd {
    /// It was made.
    Made,
    /// It was refused.
    Refused(Errno),
    /// It ended the process.
    Killed(Signal),
}

/// The exit code of a child that cannot be confined. No errno has this number.
const NOT_CONFINED: i32 = 255;

/// Confines a child process and makes a system call there, which returns -1 and sets errno if it is refused.
///
/// # Panics
/// The child cannot be confined.
pub fn end_of(confine: impl FnOnce() -> std::io::Result<()>, call: impl Fn() -> i64) -> CallEnd {
    // SAFETY: the child makes system calls and allocates, which glibc permits after a fork.
    match unsafe { fork() }.unwrap() {
        ForkResult::Child => {
            let code = match confine() {
                Err(_) => NOT_CONFINED,
                Ok(()) if call() < 0 => Errno::last_raw(),
                Ok(()) => 0,
            };
            // SAFETY: it ends this process.
            unsafe { libc::_exit(code) }
        }
        ForkResult::Parent { child } => match waitpid(child, None).unwrap() {
            WaitStatus::Signaled(_, signal, _) => CallEnd::Killed(signal),
            WaitStatus::Exited(_, 0) => CallEnd::Made,
            WaitStatus::Exited(_, code) if code != NOT_CONFINED => CallEnd::Refused(Errno::from_raw(code)),
            other => panic!("{other:?}"),
        },
    }
}

/// Confines a child process and makes a system call there. Returns the signal that ended the child, or `None`
/// if it exited.
///
/// # Panics
/// The child cannot be confined.
pub fn signal_of(confine: impl FnOnce() -> std::io::Result<()>, call: impl Fn() -> i64) -> Option<Signal> {
    match end_of(confine, call) {
        CallEnd::Killed(signal) => Some(signal),
        CallEnd::Made | CallEnd::Refused(_) => None,
    }
}
