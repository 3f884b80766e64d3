// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernel's interfaces: ptrace, waiting for stops, kcmp. All that is unsafe here is in this module.
//!
//! Sources: `include/uapi/linux/ptrace.h`, `kernel/ptrace.c`, `kernel/kcmp.c` of Linux 6.18; ptrace(2).

mod descriptors;
mod ptrace;
mod wait;

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, RawFd};

pub(crate) use descriptors::{Receipt, send, take};
pub(crate) use ptrace::{
    Registers, cont, cont_to_call, cont_to_call_with, detach, interrupt, is_at_end_of_call, is_stopped,
    registers, rseq, seize, set_options, set_registers, set_signal_mask, signal_mask,
};
pub(crate) use wait::{Stop, Waited, bury, look};

/// The number of a thread, or of a process: that of its first thread.
pub(crate) type Tid = i32;

/// `PTRACE_O_TRACESYSGOOD`: stops at system calls differ from those for SIGTRAP.
pub(crate) const MARK_CALLS: u64 = 0x1;
/// `PTRACE_O_EXITKILL`: the process is killed when its tracer ends.
pub(crate) const KILL_WITH_US: u64 = 0x10_0000;
/// `PTRACE_O_SUSPEND_SECCOMP`: no filter is asked while traced. For CAP_SYS_ADMIN, with CONFIG_CHECKPOINT_RESTORE.
pub(crate) const WITHOUT_SECCOMP: u64 = 0x20_0000;

/// `enum kcmp_type` (`include/uapi/linux/kcmp.h`).
const KCMP_FILE: libc::c_int = 0;
const KCMP_VM: libc::c_int = 1;

fn check(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// The calling thread's number.
pub(crate) fn this_thread() -> Tid {
    // SAFETY: nothing in, an integer out; always succeeds.
    unsafe { libc::gettid() }
}

/// Whether two threads have one address space.
pub(crate) fn same_memory(a: Tid, b: Tid) -> io::Result<bool> {
    kcmp(a, b, KCMP_VM, 0, 0)
}

/// Whether descriptor `ours` of this process and descriptor `number` of thread `tid` are one open file.
pub(crate) fn same_file(ours: RawFd, tid: Tid, number: RawFd) -> io::Result<bool> {
    kcmp(this_thread(), tid, KCMP_FILE, ours, number)
}

fn kcmp(a: Tid, b: Tid, what: libc::c_int, first: RawFd, second: RawFd) -> io::Result<bool> {
    // SAFETY: integers only.
    check(unsafe { libc::syscall(libc::SYS_kcmp, a, b, what, first, second) }).map(|order| order == 0)
}

/// Where the next bytes of a file are, from `from` on (`SEEK_DATA`); none when only a hole is left.
pub(crate) fn next_data(file: BorrowedFd<'_>, from: u64) -> io::Result<Option<u64>> {
    match seek(file, from, libc::SEEK_DATA) {
        Err(error) if error.raw_os_error() == Some(libc::ENXIO) => Ok(None),
        found => found.map(Some),
    }
}

/// Where the next hole of a file is, or its end (`SEEK_HOLE`).
pub(crate) fn next_hole(file: BorrowedFd<'_>, from: u64) -> io::Result<u64> {
    seek(file, from, libc::SEEK_HOLE)
}

fn seek(file: BorrowedFd<'_>, from: u64, whence: libc::c_int) -> io::Result<u64> {
    let from = from.try_into().map_err(io::Error::other)?;
    // SAFETY: integers only.
    let found = check(unsafe { libc::lseek64(file.as_raw_fd(), from, whence) })?;
    found.try_into().map_err(io::Error::other)
}

/// A new file of memory, `length` bytes of holes.
#[cfg(test)]
pub(crate) fn memory_file(name: &std::ffi::CStr, length: u64) -> io::Result<std::fs::File> {
    use std::os::fd::{FromRawFd as _, OwnedFd};
    // SAFETY: a live C string and an integer; a new descriptor that nobody else owns comes out, unless negative.
    let file = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
    check(file.into())?;
    // SAFETY: as said, and it is not negative.
    let file = std::fs::File::from(unsafe { OwnedFd::from_raw_fd(file) });
    file.set_len(length)?;
    Ok(file)
}
