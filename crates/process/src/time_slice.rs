// SPDX-License-Identifier: MIT OR Apache-2.0
//! Short time slices, for threads and programs on which others wait.

use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

/// The first version of `struct sched_attr` (`include/uapi/linux/sched/types.h`).
#[repr(C)]
struct SchedAttr {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}
const _: () = assert!(size_of::<SchedAttr>() == 48);

/// Gives the calling thread the ordinary policy with a time slice of 100 µs, the shortest possible.
///
/// The thread then runs soon after it is woken, and lets others do the same. Kernels before Linux 6.12 ignore
/// the slice.
///
/// # Errors
/// The kernel's errno.
pub fn short_time_slice() -> io::Result<()> {
    let attr = SchedAttr {
        size: 48,
        policy: 0, // SCHED_OTHER
        flags: 0,
        nice: 0,
        priority: 0,
        runtime: 100_000,
        deadline: 0,
        period: 0,
    };
    // SAFETY: pid 0 is this thread; `attr` is live and says its own size.
    let result = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attr, 0) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Gives a command's program short time slices, as [`short_time_slice`] does.
pub fn give_short_time_slices(command: &mut Command) {
    let shorten = || {
        // Without them it runs a little later.
        let _ = short_time_slice();
        Ok(())
    };
    // SAFETY: the closure only makes a system call.
    unsafe { command.pre_exec(shorten) };
}
