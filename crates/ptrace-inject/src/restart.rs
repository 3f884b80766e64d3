// SPDX-License-Identifier: MIT OR Apache-2.0
//! Restarts calls that fail with EINTR after a stop although no signal arrived.
//!
//! A stop leaves one of the kernel's own codes (ERESTARTSYS and others) as the result of most interrupted
//! calls, and the kernel restarts them. A few calls return EINTR, as for a signal. The ones without a timeout
//! can be restarted as well. Their result becomes ERESTARTNOHAND: EINTR if a signal handler runs first, else
//! a restart (signal(7); `arch/x86/kernel/signal.c`). With a timeout, the remaining time is unknown, and
//! EINTR stays, as after any SIGSTOP.

use crate::abi::{self, Registers, Tid};

const EINTR: u64 = (-(libc::EINTR as i64)).cast_unsigned();
/// Only tracers see this code (`include/linux/errno.h`).
const ERESTARTNOHAND: u64 = (-514_i64).cast_unsigned();
/// All of the kernel's restart codes, ERESTART_RESTARTBLOCK to ERESTARTSYS, as register values.
const RESTARTS: std::ops::RangeInclusive<u64> = (-516_i64).cast_unsigned()..=(-512_i64).cast_unsigned();

/// Marks the interrupted call of a stopped thread for a restart, if it returned EINTR without need.
pub(crate) fn mark(tid: Tid) {
    let Ok(Some(mut registers)) = abi::registers(tid) else { return };
    if waits_without_end(&registers) && registers.rax == EINTR {
        registers.rax = ERESTARTNOHAND;
        // The thread is no longer stopped if it was killed.
        let _ = abi::set_registers(tid, &registers);
    }
}

/// Returns whether the kernel will restart a thread's call when the thread resumes.
pub(crate) fn will_restart(registers: &Registers) -> bool {
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
