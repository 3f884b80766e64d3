// SPDX-License-Identifier: MIT OR Apache-2.0
//! Descriptors that the kernel has just made for this process.

use std::io;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd, RawFd};

/// Takes over descriptors that were just received in a message.
pub(crate) fn adopt(received: Vec<RawFd>) -> impl Iterator<Item = OwnedFd> {
    // SAFETY: the kernel has installed them for this process in the call that gave their numbers, and nothing
    // else uses them.
    received.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Takes over the descriptor of accept4.
pub(crate) fn accepted(number: RawFd) -> OwnedFd {
    // SAFETY: the kernel has installed it for this process in that call, and nothing else uses it.
    unsafe { OwnedFd::from_raw_fd(number) }
}

/// Opens a descriptor of a process (pidfd_open(2)).
pub(crate) fn process(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: integers only.
    made(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) })
}

/// Duplicates descriptor `number` of another process (pidfd_getfd(2)).
pub(crate) fn descriptor_of(process: &OwnedFd, number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: integers only.
    made(unsafe { libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), number, 0) })
}

/// Takes over the descriptor that a system call has just made.
fn made(result: libc::c_long) -> io::Result<OwnedFd> {
    match RawFd::try_from(result) {
        // SAFETY: the kernel has installed it for this process in the call that gave its number.
        Ok(number) if number >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(number) }),
        _ => Err(io::Error::last_os_error()),
    }
}
