// SPDX-License-Identifier: MIT OR Apache-2.0
//! Processes of this machine.
//!
//! * [`pidfd`]: descriptors of processes, and copies of their descriptors.
//! * [`descriptors`]: the descriptor table of this process.
//! * [`file_lock`]: locks that end with their process.
//! * [`kcmp`]: whether threads have an open file or an address space in common.
//! * [`maps`]: lines of `/proc/PID/maps`. [`names`]: names of programs and of files, which are bytes.
//! * [`pagemap`]: which pages of a process are its own.
//! * [`proc`]: what `/proc` shows of processes and threads.
//! * [`ready`]: what a server does when it is ready.
//! * [`Notifier`]: an eventfd.
//!
//! [`pidfd`], but for `pidfd_pid`, and [`kcmp`] only make system calls: they allocate nothing, and a forked
//! child may call them.
#![cfg_attr(not(test), deny(clippy::unwrap_used))]
#![deny(unsafe_code)]

#[allow(unsafe_code, reason = "the system call has no other form")]
pub mod descriptors;
#[allow(unsafe_code, reason = "the system call has no other form")]
pub mod file_lock;
#[allow(unsafe_code, reason = "the system call has no other form")]
pub mod kcmp;
pub mod maps;
pub mod names;
#[allow(unsafe_code, reason = "the system call has no other form")]
mod notifier;
#[allow(unsafe_code, reason = "the system call has no other form")]
pub mod pagemap;
#[allow(unsafe_code, reason = "the system calls have no other form")]
pub mod pidfd;
pub mod proc;
#[allow(unsafe_code, reason = "the system call has no other form")]
pub mod ready;

pub use notifier::Notifier;

use std::io;

fn check(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
