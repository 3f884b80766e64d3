// SPDX-License-Identifier: MIT OR Apache-2.0
//! For LD_PRELOAD: a program that refuses to run as root takes itself for a user (`rewake_tests::programs`).
//! A real user's processes are not dumped by a CRIU without CAP_SYS_RESOURCE.

/// The user, who owns what the program checks.
const USER: u32 = 65_534;

/// Replaces the C library's.
// SAFETY: the library's own function has this signature.
#[unsafe(no_mangle)]
pub extern "C" fn getuid() -> u32 {
    USER
}

/// Replaces the C library's.
// SAFETY: the library's own function has this signature.
#[unsafe(no_mangle)]
pub extern "C" fn geteuid() -> u32 {
    USER
}
