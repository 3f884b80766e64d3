// SPDX-License-Identifier: MIT OR Apache-2.0
//! ptrace(2), request by request. All but [`seize`] and [`interrupt`] want a stopped tracee and say ESRCH otherwise;
//! all want the calling thread to be the tracer.

use std::io;

use super::{Tid, check};

/// General registers: `user_regs_struct` (`arch/x86/include/asm/user_64.h`).
pub(crate) type Registers = libc::user_regs_struct;
/// Where a thread has its restartable sequences: `struct ptrace_rseq_configuration`.
pub(crate) type Rseq = libc::ptrace_rseq_configuration;

const _: () = {
    assert!(size_of::<Registers>() == 27 * 8);
    assert!(size_of::<Rseq>() == 24);
};

/// `NT_PRSTATUS` (`include/uapi/linux/elf.h`): the general registers.
const NT_PRSTATUS: usize = 1;
/// `PTRACE_EVENTMSG_SYSCALL_EXIT` (`include/uapi/linux/ptrace.h`, Linux 5.3): of stops for other reasons the message is 0,
/// or the one of the event, none of which is asked for here.
const END_OF_CALL: libc::c_ulong = 2;
/// Bytes in the kernel's signal mask.
const MASK_BYTES: usize = 8;

/// A request whose address and data are plain integers.
fn request(request: libc::c_uint, tid: Tid, address: usize, data: usize) -> io::Result<()> {
    // SAFETY: of the requests that this file makes this way, none has the kernel write to our memory.
    check(unsafe { libc::ptrace(request, tid, address, data) }).map(drop)
}

/// Becomes the tracer of a thread, which goes on running.
pub(crate) fn seize(tid: Tid, options: u64) -> io::Result<()> {
    request(libc::PTRACE_SEIZE, tid, 0, options.try_into().map_err(io::Error::other)?)
}

/// Asks a thread to stop before it next runs its own code.
pub(crate) fn interrupt(tid: Tid) -> io::Result<()> {
    request(libc::PTRACE_INTERRUPT, tid, 0, 0)
}

/// Lets a stopped thread run, with `signal` delivered unless 0.
pub(crate) fn cont(tid: Tid, signal: i32) -> io::Result<()> {
    request(libc::PTRACE_CONT, tid, 0, signal.try_into().map_err(io::Error::other)?)
}

/// Lets a stopped thread run to where its next system call begins, or the present one ends.
pub(crate) fn cont_to_call(tid: Tid) -> io::Result<()> {
    cont_to_call_with(tid, 0)
}

/// As [`cont_to_call`], with `signal` delivered first.
pub(crate) fn cont_to_call_with(tid: Tid, signal: i32) -> io::Result<()> {
    request(libc::PTRACE_SYSCALL, tid, 0, signal.try_into().map_err(io::Error::other)?)
}

/// Lets a stopped thread go for good.
pub(crate) fn detach(tid: Tid) -> io::Result<()> {
    request(libc::PTRACE_DETACH, tid, 0, 0)
}

/// Replaces a stopped thread's options.
pub(crate) fn set_options(tid: Tid, options: u64) -> io::Result<()> {
    request(libc::PTRACE_SETOPTIONS, tid, 0, options.try_into().map_err(io::Error::other)?)
}

/// Whether the thread is a tracee of this thread and stands still.
pub(crate) fn is_stopped(tid: Tid) -> bool {
    message(tid).is_ok()
}

/// Whether the thread is a tracee of this thread and is stopped where a system call ends.
pub(crate) fn is_at_end_of_call(tid: Tid) -> bool {
    message(tid).is_ok_and(|message| message == END_OF_CALL)
}

/// What the kernel says of a thread's stop.
fn message(tid: Tid) -> io::Result<libc::c_ulong> {
    let mut message: libc::c_ulong = 0;
    // SAFETY: the kernel writes one unsigned long, which is live.
    check(unsafe { libc::ptrace(libc::PTRACE_GETEVENTMSG, tid, 0_usize, &raw mut message) })?;
    Ok(message)
}

/// A stopped thread's registers; none when it is not in 64-bit code (i386, or a kernel's worker that has no code).
pub(crate) fn registers(tid: Tid) -> io::Result<Option<Registers>> {
    // SAFETY: integers only, for which zeros are fine.
    let mut registers: Registers = unsafe { std::mem::zeroed() };
    let mut buffer = libc::iovec { iov_base: (&raw mut registers).cast(), iov_len: size_of::<Registers>() };
    // SAFETY: the kernel writes at most `iov_len` bytes to the live registers, and the length to the live iovec.
    check(unsafe { libc::ptrace(libc::PTRACE_GETREGSET, tid, NT_PRSTATUS, &raw mut buffer) })?;
    Ok((buffer.iov_len == size_of::<Registers>()).then_some(registers))
}

/// Replaces a stopped thread's registers.
pub(crate) fn set_registers(tid: Tid, registers: &Registers) -> io::Result<()> {
    let mut registers = *registers;
    let mut buffer = libc::iovec { iov_base: (&raw mut registers).cast(), iov_len: size_of::<Registers>() };
    // SAFETY: the kernel reads `iov_len` bytes of the live registers.
    check(unsafe { libc::ptrace(libc::PTRACE_SETREGSET, tid, NT_PRSTATUS, &raw mut buffer) }).map(drop)
}

/// The signals that a stopped thread has blocked. In a call with a mask of its own (ppoll): those of before it.
pub(crate) fn signal_mask(tid: Tid) -> io::Result<u64> {
    let mut mask = 0_u64;
    // SAFETY: the kernel writes MASK_BYTES bytes, the size of the live mask.
    check(unsafe { libc::ptrace(libc::PTRACE_GETSIGMASK, tid, MASK_BYTES, &raw mut mask) })?;
    Ok(mask)
}

/// Replaces the signals that a stopped thread has blocked.
pub(crate) fn set_signal_mask(tid: Tid, mask: u64) -> io::Result<()> {
    let mut mask = mask;
    // SAFETY: the kernel reads MASK_BYTES bytes, the size of the live mask.
    check(unsafe { libc::ptrace(libc::PTRACE_SETSIGMASK, tid, MASK_BYTES, &raw mut mask) }).map(drop)
}

/// Where a stopped thread has its restartable sequences (Linux 5.13); a null pointer where it has none.
pub(crate) fn rseq(tid: Tid) -> io::Result<Rseq> {
    // SAFETY: integers only, for which zeros are fine.
    let mut rseq: Rseq = unsafe { std::mem::zeroed() };
    let request = libc::PTRACE_GET_RSEQ_CONFIGURATION;
    // SAFETY: the kernel writes at most the size given to the live struct.
    check(unsafe { libc::ptrace(request, tid, size_of::<Rseq>(), &raw mut rseq) })?;
    Ok(rseq)
}
