// SPDX-License-Identifier: MIT OR Apache-2.0
//! Capabilities of this thread (capabilities(7)).

use std::io;

use crate::check;

/// `CAP_SYS_PTRACE` of linux/capability.h.
pub const SYS_PTRACE: u32 = 19;

/// `_LINUX_CAPABILITY_VERSION_3`.
const VERSION: u32 = 0x2008_0522;
/// The version, and the thread: this one.
const HEADER: [u32; 2] = [VERSION, 0];
/// The effective, permitted and inheritable capabilities: the first 32 of each, then the others.
type Sets = [u32; 6];

/// Returns whether this thread has a capability, one of the first 32, in effect.
///
/// # Errors
/// The kernel does not know this version of the call.
pub fn has(number: u32) -> io::Result<bool> {
    let mut sets: Sets = [0; 6];
    // SAFETY: capget reads a header of two words, and writes two sets of three words each.
    check(unsafe { libc::syscall(libc::SYS_capget, HEADER.as_ptr(), sets.as_mut_ptr()) })?;
    Ok(sets[0] & 1 << number != 0)
}

/// Gives up all capabilities.
///
/// # Errors
/// The kernel does not know this version of the call.
pub fn drop_all() -> io::Result<()> {
    let none: Sets = [0; 6];
    // SAFETY: capset reads a header of two words, and two sets of three words each.
    check(unsafe { libc::syscall(libc::SYS_capset, HEADER.as_ptr(), none.as_ptr()) }).map(drop)
}
