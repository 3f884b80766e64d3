// SPDX-License-Identifier: MIT OR Apache-2.0
//! The requests of ptrace(2). The calling thread must be the tracer. All except [`seize`] and [`interrupt`]
//! need a stopped tracee, and fail with ESRCH otherwise.

use std::io;

use super::{Tid, check};

/// The general registers: `user_regs_struct` (`arch/x86/include/asm/user_64.h`).
pub(crate) type Registers = libc::user_regs_struct;
/// The place of a thread's restartable sequences: `struct ptrace_rseq_configuration`.
pub(crate) type Rseq = libc::ptrace_rseq_configuration;

const _: () = {
    assert!(size_of::<Registers>() == 27 * 8);
    assert!(size_of::<Rseq>() == 24);
};

/// `NT_PRSTATUS` (`include/uapi/linux/elf.h`): the general registers.
const NT_PRSTATUS: usize = 1;
/// `PTRACE_EVENTMSG_SYSCALL_EXIT` (`include/uapi/linux/ptrace.h`, Linux 5.3). At other stops the message is
/// 0, or that of an event, and no option here enables events.
const SYSCALL_EXIT: libc::c_ulong = 2;
/// Bytes in the kernel's signal mask.
const MASK_BYTES: usize = 8;

/// Makes a request whose address and data are plain integers.
fn request(request: libc::c_uint, tid: Tid, address: usize, data: usize) -> io::Result<()> {
    // SAFETY: of the requests that this file makes this way, none has the kernel write to our memory.
    check(unsafe { libc::ptrace(request, tid, address, data) }).map(drop)
}

/// Becomes the tracer of a thread, which continues.
pub(crate) fn seize(tid: Tid, options: u64) -> io::Result<()> {
    request(libc::PTRACE_SEIZE, tid, 0, options.try_into().map_err(io::Error::other)?)
}

/// Makes a thread stop before it next runs its own code.
pub(crate) fn interrupt(tid: Tid) -> io::Result<()> {
    request(libc::PTRACE_INTERRUPT, tid, 0, 0)
}

/// Resumes a stopped thread, and delivers `signal` unless it is 0.
pub(crate) fn cont(tid: Tid, signal: i32) -> io::Result<()> {
    request(libc::PTRACE_CONT, tid, 0, signal.try_into().map_err(io::Error::other)?)
}

/// Resumes a stopped thread until its next system call begins, or the current one ends.
pub(crate) fn cont_to_syscall(tid: Tid) -> io::Result<()> {
    cont_to_syscall_with(tid, 0)
}

/// As [`cont_to_syscall`], but delivers `signal` first.
pub(crate) fn cont_to_syscall_with(tid: Tid, signal: i32) -> io::Result<()> {
    request(libc::PTRACE_SYSCALL, tid, 0, signal.try_into().map_err(io::Error::other)?)
}

/// Ends the trace of a stopped thread, which continues.
pub(crate) fn detach(tid: Tid) -> io::Result<()> {
    request(libc::PTRACE_DETACH, tid, 0, 0)
}

/// Sets a stopped thread's options.
pub(crate) fn set_options(tid: Tid, options: u64) -> io::Result<()> {
    request(libc::PTRACE_SETOPTIONS, tid, 0, options.try_into().map_err(io::Error::other)?)
}

/// Returns whether the thread is a stopped tracee of this thread.
pub(crate) fn is_stopped(tid: Tid) -> bool {
    message(tid).is_ok()
}

/// Returns whether the thread is a tracee of this thread, stopped at the end of a system call.
pub(crate) fn is_at_syscall_exit(tid: Tid) -> bool {
    message(tid).is_ok_and(|message| message == SYSCALL_EXIT)
}

/// Returns the kernel's message about a thread's stop.
fn message(tid: Tid) -> io::Result<libc::c_ulong> {
    let mut message: libc::c_ulong = 0;
    // SAFETY: the kernel writes one unsigned long, which is live.
    check(unsafe { libc::ptrace(libc::PTRACE_GETEVENTMSG, tid, 0_usize, &raw mut message) })?;
    Ok(message)
}

/// Returns a stopped thread's registers. Returns `None` if it is not in 64-bit code: i386, or a kernel worker
/// without code.
pub(crate) fn registers(tid: Tid) -> io::Result<Option<Registers>> {
    // SAFETY: integers only, for which zeros are fine.
    let mut registers: Registers = unsafe { std::mem::zeroed() };
    let mut buffer = libc::iovec { iov_base: (&raw mut registers).cast(), iov_len: size_of::<Registers>() };
    // SAFETY: the kernel writes at most `iov_len` bytes to the live registers, and the length to the live
    // iovec.
    check(unsafe { libc::ptrace(libc::PTRACE_GETREGSET, tid, NT_PRSTATUS, &raw mut buffer) })?;
    Ok((buffer.iov_len == size_of::<Registers>()).then_some(registers))
}

/// Sets a stopped thread's registers.
pub(crate) fn set_registers(tid: Tid, registers: &Registers) -> io::Result<()> {
    let mut registers = *registers;
    let mut buffer = libc::iovec { iov_base: (&raw mut registers).cast(), iov_len: size_of::<Registers>() };
    // SAFETY: the kernel reads `iov_len` bytes of the live registers.
    check(unsafe { libc::ptrace(libc::PTRACE_SETREGSET, tid, NT_PRSTATUS, &raw mut buffer) }).map(drop)
}

/// Returns a stopped thread's signal mask. In a call with a mask of its own (ppoll), this is the mask before
/// the call.
pub(crate) fn signal_mask(tid: Tid) -> io::Result<u64> {
    let mut mask = 0_u64;
    // SAFETY: the kernel writes MASK_BYTES bytes, the size of the live mask.
    check(unsafe { libc::ptrace(libc::PTRACE_GETSIGMASK, tid, MASK_BYTES, &raw mut mask) })?;
    Ok(mask)
}

/// Sets a stopped thread's signal mask.
pub(crate) fn set_signal_mask(tid: Tid, mask: u64) -> io::Result<()> {
    let mut mask = mask;
    // SAFETY: the kernel reads MASK_BYTES bytes, the size of the live mask.
    check(unsafe { libc::ptrace(libc::PTRACE_SETSIGMASK, tid, MASK_BYTES, &raw mut mask) }).map(drop)
}

/// Returns the place of a stopped thread's restartable sequences (Linux 5.13), or a null pointer if it has
/// none.
pub(crate) fn rseq(tid: Tid) -> io::Result<Rseq> {
    // SAFETY: integers only, for which zeros are fine.
    let mut rseq: Rseq = unsafe { std::mem::zeroed() };
    let request = libc::PTRACE_GET_RSEQ_CONFIGURATION;
    // SAFETY: the kernel writes at most the size given to the live struct.
    check(unsafe { libc::ptrace(request, tid, size_of::<Rseq>(), &raw mut rseq) })?;
    Ok(rseq)
}
