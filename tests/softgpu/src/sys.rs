// SPDX-License-Identifier: MIT OR Apache-2.0
//! System calls that no crate at hand has.

use std::io;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};

/// A copy of descriptor `number` of process `pid`: the same open file.
///
/// # Errors
/// The kernel's errno.
pub fn descriptor_of(pid: u32, number: i32) -> io::Result<OwnedFd> {
    // SAFETY: integers only.
    let pidfd = check(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) })?;
    // SAFETY: just made, and nobody else has it.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    // SAFETY: integers only.
    let fd = check(unsafe { libc::syscall(libc::SYS_pidfd_getfd, pidfd.as_raw_fd(), number, 0) })?;
    // SAFETY: just made, and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Begins to trace a process, from this thread, without stopping it.
///
/// # Errors
/// The kernel's errno.
pub fn seize(pid: u32) -> io::Result<()> {
    trace(libc::PTRACE_SEIZE, pid)
}

fn trace(request: libc::c_uint, pid: u32) -> io::Result<()> {
    let none = std::ptr::null_mut::<libc::c_void>();
    // SAFETY: neither address nor data is used by this request.
    let result = unsafe { libc::ptrace(request, pid.cast_signed(), none, none) };
    check(result).map(drop)
}

fn check(result: i64) -> io::Result<i32> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(i32::try_from(result).unwrap_or(i32::MAX)) }
}
