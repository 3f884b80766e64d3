// SPDX-License-Identifier: MIT OR Apache-2.0
//! Processes of this machine.
//!
//! * [`capabilities`]: of this thread.
//! * [`core_dump`], [`oom_score`]: what a crash leaves, and when the kernel kills this process.
//! * [`pidfd`]: descriptors of processes, and copies of their descriptors.
//! * [`beneath`]: directories that no name and no link leads out of.
//! * [`criu`]: the command line of CRIU, and errors in its log.
//! * [`descriptors`]: the descriptor table of this process.
//! * [`file_lock`]: locks that end with their process.
//! * [`kcmp`]: whether threads have an open file or an address space in common.
//! * [`local_time`]: times that people write.
//! * [`maps`]: lines of `/proc/PID/maps`. [`names`]: names of programs and of files, which are bytes.
//! * [`pagemap`]: which pages of a process are its own.
//! * [`private_socket`]: unix sockets that only their user can connect to.
//! * [`proc`]: what `/proc` shows of processes and threads.
//! * [`ready`]: what a server does when it is ready.
//! * [`service_manager`]: a socket that systemd gives, and the report to it.
//! * [`sandbox`]: what keeps a process that reads what others wrote.
//! * [`time_slice`]: threads and programs on which others wait.
//! * [`Notifier`]: an eventfd. [`wake_socket`]: a socket by which another process wakes a thread.
//!
//! [`pidfd`], but for `pidfd_pid`, and [`kcmp`] only make system calls: they allocate nothing, and a forked
//! child may call them.
#![cfg_attr(not(test), deny(clippy::unwrap_used))]
#![deny(unsafe_code)]

pub mod beneath;
#[allow(unsafe_code, reason = "the system calls have no other form")]
pub mod capabilities;
pub mod core_dump;
pub mod criu;
#[allow(unsafe_code, reason = "the system call has no other form")]
pub mod descriptors;
#[allow(unsafe_code, reason = "the system call has no other form")]
pub mod file_lock;
#[allow(unsafe_code, reason = "the system call has no other form")]
pub mod kcmp;
#[allow(unsafe_code, reason = "the calls of libc have no other form")]
pub mod local_time;
pub mod maps;
pub mod names;
#[allow(unsafe_code, reason = "the system call has no other form")]
mod notifier;
pub mod oom_score;
#[allow(unsafe_code, reason = "the system call has no other form")]
pub mod pagemap;
#[allow(unsafe_code, reason = "the system calls have no other form")]
pub mod pidfd;
pub mod private_socket;
pub mod proc;
#[allow(unsafe_code, reason = "the system call has no other form")]
pub mod ready;
pub mod sandbox;
#[allow(unsafe_code, reason = "the descriptor has no other form")]
pub mod service_manager;
#[allow(unsafe_code, reason = "the system call has no other form")]
pub mod time_slice;
#[allow(unsafe_code, reason = "the system call has no other form")]
pub mod wake_socket;

pub use notifier::Notifier;

use std::io;

fn check(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
