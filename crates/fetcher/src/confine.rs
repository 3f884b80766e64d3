// SPDX-License-Identifier: MIT OR Apache-2.0
//! Confines the fetcher when its connections are made, and before it reads the first byte of the peer.
//!
//! * It has a user of its own, no capabilities, and gets no new privileges.
//! * Landlock, where the kernel has it: it may reach nothing by a name.
//! * seccomp: it may use memory, the sockets that it has, and the files that the streamer sent. It can make
//!   no socket and connect none, so it speaks with its peer and its streamers alone.
//! * Limits: the length of the files; no core dump. Descriptors are not limited further: a streamer that
//!   shares a fetcher sends a socket for each of its readers.

use std::io;

use nix::sys::prctl::set_dumpable;
use nix::sys::resource::Resource;
use rewake_process::sandbox::{SystemCalls, allow_reading, is, is_null, leave_user, limit};

/// System calls that a fetcher may make with any arguments, in addition to the calls that every confined
/// process needs.
const ALLOWED: &[libc::c_long] = &[
    // The peer and the streamer.
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_shutdown,
    libc::SYS_ppoll,
    // The files.
    libc::SYS_pwrite64,
    // A wait that a freezer, SIGSTOP or a tracer has interrupted continues by this one.
    libc::SYS_restart_syscall,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_poll,
];

/// Has this process leave no core dump, because it has keys. Another user, too, needs that anew.
///
/// # Errors
/// The kernel refuses a limit.
pub(crate) fn without_core() -> io::Result<()> {
    limit(Resource::RLIMIT_CORE, 0)?;
    Ok(set_dumpable(false)?)
}

/// Confines this process, for good. `len` is the length of the longest file that it writes.
///
/// # Errors
/// The kernel refuses a limit or has no seccomp filters: then no byte of the peer is read.
pub(crate) fn confine(len: u64) -> io::Result<()> {
    limit(Resource::RLIMIT_FSIZE, len)?;
    limit(Resource::RLIMIT_NOFILE, u64::MAX)?;
    second_wall()?;
    system_calls()?.confine()
}

/// What holds if the system calls had a gap. A host may have less of it (docs/threat-model.md).
fn second_wall() -> io::Result<()> {
    leave_user()?;
    allow_reading([])?;
    without_core()
}

fn system_calls() -> io::Result<SystemCalls> {
    let mut calls = SystemCalls::new(ALLOWED)?;
    // A message to the peer of a socket, and not to another address.
    let flags = [libc::MSG_NOSIGNAL, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT];
    let sends = flags.map(|flags| [is(3, flags), is_null(4)]);
    calls.permit(libc::SYS_sendto, &sends.each_ref().map(|send| send.as_slice()))?;
    // What kind of socket a reader is.
    let kinds = [libc::SO_DOMAIN, libc::SO_TYPE].map(|name| [is(1, libc::SOL_SOCKET), is(2, name)]);
    calls.permit(libc::SYS_getsockopt, &kinds.each_ref().map(|kind| kind.as_slice()))?;
    // The standard library may ask whether what it closes is open. No process is signalled (`F_SETOWN`).
    calls.permit(libc::SYS_fcntl, &[&[is(1, libc::F_GETFD)]])?;
    // The time for a handshake or an end, and how a connection ends.
    let options = [libc::SO_RCVTIMEO, libc::SO_LINGER].map(|name| [is(1, libc::SOL_SOCKET), is(2, name)]);
    calls.permit(libc::SYS_setsockopt, &options.each_ref().map(|option| option.as_slice()))?;
    Ok(calls)
}

#[cfg(test)]
mod tests;
