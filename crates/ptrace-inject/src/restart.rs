// SPDX-License-Identifier: MIT OR Apache-2.0
//! Calls that a stop would make return EINTR though no signal came.
//!
//! Most calls that a stop breaks into leave one of the kernel's own codes (ERESTARTSYS and others) in the result's
//! register, and the kernel starts them again. A few leave EINTR, as they would for a signal. Those of them that wait
//! without end can be started again just as well: their result becomes ERESTARTNOHAND, which is EINTR if a signal's
//! handler runs first, and a restart if none does (signal(7); `arch/x86/kernel/signal.c`). With a time to wait, what is
//! left of it is not known, and EINTR stays, as for any stop by SIGSTOP.

use crate::abi::{self, Registers, Tid};

const EINTR: u64 = (-(libc::EINTR as i64)).cast_unsigned();
/// `include/linux/errno.h`: seen by tracers only.
const ERESTARTNOHAND: u64 = (-514_i64).cast_unsigned();
/// All of the kernel's codes for a call to start again: ERESTART_RESTARTBLOCK to ERESTARTSYS, as they lie in a register.
const RESTARTS: std::ops::RangeInclusive<u64> = (-516_i64).cast_unsigned()..=(-512_i64).cast_unsigned();

/// Marks the call in which a thread stopped as one to start again, if it is such a one.
pub(crate) fn mark(tid: Tid) {
    let Ok(Some(mut registers)) = abi::registers(tid) else { return };
    if waits_without_end(&registers) && registers.rax == EINTR {
        registers.rax = ERESTARTNOHAND;
        // It is not stopped any more if it was killed.
        let _ = abi::set_registers(tid, &registers);
    }
}

/// Whether the kernel is to start a thread's call again when the thread runs.
pub(crate) fn is_due(registers: &Registers) -> bool {
    registers.orig_rax.cast_signed() >= 0 && RESTARTS.contains(&registers.rax)
}

fn waits_without_end(registers: &Registers) -> bool {
    let Ok(call) = libc::c_long::try_from(registers.orig_rax) else { return false };
    let negative = |value: u64| value & 0x8000_0000 != 0;
    match call {
        libc::SYS_epoll_wait | libc::SYS_epoll_pwait => negative(registers.r10),
        libc::SYS_epoll_pwait2 | libc::SYS_semtimedop => registers.r10 == 0,
        libc::SYS_rt_sigtimedwait => registers.rdx == 0,
        libc::SYS_semop => true,
        _ => false,
    }
}
