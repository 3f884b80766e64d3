// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernel interfaces: ptrace, waits for stops, messages. All unsafe code of the crate is in this module.
//!
//! Sources: `include/uapi/linux/ptrace.h`, `kernel/ptrace.c` of Linux 6.18; ptrace(2).

mod descriptors;
mod ptrace;
mod wait;

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};

pub(crate) use descriptors::{ReceiveBuffer, send};
pub(crate) use ptrace::{
    Registers, cont, cont_to_syscall, cont_to_syscall_with, detach, interrupt, is_at_syscall_exit,
    is_stopped, registers, rseq, seize, set_options, set_registers, set_signal_mask, signal_mask,
};
pub(crate) use wait::{StopReason, TraceeState, poll_stop, reap_thread};

/// The number of a thread, or of a process, which is the number of its first thread.
pub(crate) type Tid = i32;

/// `PTRACE_O_TRACESYSGOOD`: marks stops at system calls, to tell them from SIGTRAP.
pub(crate) const TRACE_SYSGOOD: u64 = 0x1;
/// `PTRACE_O_EXITKILL`: the kernel kills the process when its tracer ends.
pub(crate) const EXIT_KILL: u64 = 0x10_0000;
/// `PTRACE_O_SUSPEND_SECCOMP`: suspends filters while traced. Needs CAP_SYS_ADMIN and
/// CONFIG_CHECKPOINT_RESTORE.
pub(crate) const SUSPEND_SECCOMP: u64 = 0x20_0000;

fn check(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Returns the calling thread's number.
pub(crate) fn this_thread() -> Tid {
    // SAFETY: nothing in, an integer out; always succeeds.
    unsafe { libc::gettid() }
}

/// Returns the offset of the next data in a file (`SEEK_DATA`), or `None` if only a hole remains.
pub(crate) fn next_data(file: BorrowedFd<'_>, from: u64) -> io::Result<Option<u64>> {
    match seek(file, from, libc::SEEK_DATA) {
        Err(error) if error.raw_os_error() == Some(libc::ENXIO) => Ok(None),
        found => found.map(Some),
    }
}

/// Returns the offset of a file's next hole, or of its end (`SEEK_HOLE`).
pub(crate) fn next_hole(file: BorrowedFd<'_>, from: u64) -> io::Result<u64> {
    seek(file, from, libc::SEEK_HOLE)
}

fn seek(file: BorrowedFd<'_>, from: u64, whence: libc::c_int) -> io::Result<u64> {
    let from = from.try_into().map_err(io::Error::other)?;
    // SAFETY: integers only.
    let found = check(unsafe { libc::lseek64(file.as_raw_fd(), from, whence) })?;
    found.try_into().map_err(io::Error::other)
}

/// Creates a memfd with a hole of `length` bytes.
#[cfg(test)]
pub(crate) fn memory_file(name: &std::ffi::CStr, length: u64) -> io::Result<std::fs::File> {
    use std::os::fd::{FromRawFd as _, OwnedFd};
    // SAFETY: a live C string and an integer; the result is a new descriptor that this call owns, unless
    // negative.
    let file = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
    check(file.into())?;
    // SAFETY: as above, and it is not negative.
    let file = std::fs::File::from(unsafe { OwnedFd::from_raw_fd(file) });
    file.set_len(length)?;
    Ok(file)
}
