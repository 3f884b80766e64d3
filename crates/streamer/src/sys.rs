// SPDX-License-Identifier: MIT OR Apache-2.0
//! Wraps the few system calls that nix does not, each in one function without policy.

use std::ffi::OsStr;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;
use nix::sys::signal::{SigSet, SigmaskHow};

pub(crate) use rewake_process::pidfd::{
    ends_within, has_ended, pidfd_getfd, pidfd_kill, pidfd_open, pidfd_open_thread, pidfd_pid, pidfd_signal,
    wait_for_end,
};

fn check(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn to_fd(number: libc::c_long) -> io::Result<OwnedFd> {
    let fd = RawFd::try_from(number).map_err(io::Error::other)?;
    // SAFETY: callers pass a descriptor that a system call has just made: it is open, and nothing owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Opens a descriptor of the process that made a unix connection.
///
/// Before Linux 6.5 it is a descriptor of the process that has that process's pid now.
///
/// # Errors
/// ESRCH: the process has ended, or is in another pid namespace.
pub(crate) fn peer_process(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    /// `include/uapi/asm-generic/socket.h`
    const SO_PEERPIDFD: libc::c_int = 77;
    let mut number: libc::c_int = -1;
    #[expect(clippy::cast_possible_truncation, reason = "4")]
    let mut len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the option's value is an int, and `number` a live one of the length given.
    let result = check(libc::c_long::from(unsafe {
        let value = (&raw mut number).cast();
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, SO_PEERPIDFD, value, &raw mut len)
    }));
    match result {
        Ok(_) => to_fd(number.into()),
        Err(error) if error.raw_os_error() == Some(libc::ENOPROTOOPT) => {
            let peer = nix::sys::socket::getsockopt(&socket, nix::sys::socket::sockopt::PeerCredentials)?;
            pidfd_open(peer.pid())
        }
        Err(error) => Err(error),
    }
}

/// Which of the two processes [`fork_sharing_files`] has returned in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fork {
    /// The parent, with the child's pid.
    Parent(i32),
    /// The child.
    Child,
}

/// Forks a process that shares this one's descriptor table (`clone(CLONE_FILES)`).
///
/// A descriptor that either opens is open in both, until both have ended. Memory is copied as by `fork`.
///
/// # Safety
/// As for `fork`: if other threads exist, the child may only make system calls, and access memory that no
/// other thread could have locked or left half-changed.
///
/// # Errors
/// EAGAIN, ENOMEM.
pub(crate) unsafe fn fork_sharing_files() -> io::Result<Fork> {
    let flags = libc::CLONE_FILES | libc::SIGCHLD;
    // SAFETY: no new stack, no thread-local changes: a fork with one more flag. The caller keeps fork's rule.
    let pid = check(unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) })?;
    let pid = i32::try_from(pid).map_err(io::Error::other)?;
    Ok(if pid == 0 { Fork::Child } else { Fork::Parent(pid) })
}

/// Returns the owner of a descriptor that the ledger or the kernel gave as a number.
///
/// # Safety
/// `fd` must be open, and nothing in this process may own it.
#[must_use]
pub(crate) unsafe fn take_over(fd: RawFd) -> OwnedFd {
    // SAFETY: the caller's promise.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// Returns true if descriptor `number` of this process is a userfaultfd.
#[must_use]
pub(crate) fn is_userfaultfd(number: RawFd) -> bool {
    let link = std::fs::read_link(format!("/proc/self/fd/{number}"));
    link.is_ok_and(|link| link.as_os_str() == "anon_inode:[userfaultfd]")
}

/// Sets the byte of a unix socket's queue at which `MSG_PEEK` reads (`SO_PEEK_OFF`). Each peek advances it.
///
/// With none, each peek reads the first message.
///
/// # Errors
/// The kernel's errno.
pub(crate) fn set_peek_offset(socket: BorrowedFd<'_>, offset: Option<i32>) -> io::Result<()> {
    let offset: libc::c_int = offset.unwrap_or(-1);
    set_socket_option(socket, libc::SO_PEEK_OFF, offset)
}

/// Returns the bytes that were sent through a unix socket and not received, as the kernel counts them
/// (`SIOCOUTQ`).
///
/// # Errors
/// The descriptor is no socket.
pub(crate) fn unread_bytes(socket: BorrowedFd<'_>) -> io::Result<usize> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the kernel writes one integer.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) }.into())?;
    usize::try_from(bytes).map_err(io::Error::other)
}

/// The number that the kernel gives to this socket alone, as long as the machine runs.
///
/// # Errors
/// It is no socket.
pub(crate) fn socket_cookie(socket: impl AsFd) -> io::Result<u64> {
    let mut cookie = 0_u64;
    let mut length: libc::socklen_t = 8;
    // SAFETY: both pointers are to locals of the lengths that the call is given, which live through it.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_COOKIE,
            (&raw mut cookie).cast(),
            &raw mut length,
        )
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(cookie) }
}

/// Waits for a millisecond. It makes only a system call.
pub(crate) fn nap() {
    // SAFETY: a plain wait: no descriptors.
    unsafe { libc::poll(std::ptr::null_mut(), 0, 1) };
}

/// Returns true if the peer socket is closed in all processes.
#[must_use]
pub(crate) fn has_hung_up(socket: RawFd) -> bool {
    let mut poll = libc::pollfd { fd: socket, events: 0, revents: 0 };
    // SAFETY: one live pollfd; no wait.
    unsafe { libc::poll(&raw mut poll, 1, 0) == 1 && poll.revents & libc::POLLHUP != 0 }
}

/// Makes huge pages of a range of another process's memory (`MADV_COLLAPSE`, Linux 6.1).
///
/// # Errors
/// The kernel's errno: not all of the range has huge pages.
pub(crate) fn collapse(process: BorrowedFd<'_>, range: &Range<u64>) -> nix::Result<()> {
    // An address of the other process, which this one does not access.
    let length = usize::try_from(range.end - range.start).map_err(|_| nix::Error::EINVAL)?;
    let part = libc::iovec { iov_base: range.start as *mut libc::c_void, iov_len: length };
    let advice = libc::MADV_COLLAPSE;
    // SAFETY: one live iovec. The advice changes no bytes of the process.
    let done = unsafe {
        libc::syscall(libc::SYS_process_madvise, process.as_raw_fd(), &raw const part, 1, advice, 0)
    };
    nix::Error::result(done).map(drop)
}

/// Runs `work` in a thread of its own, which gets no signals: the threads that decide on the process's end
/// get them.
///
/// # Errors
/// The kernel cannot start a thread.
pub(crate) fn thread_without_signals(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let before = SigSet::all().thread_swap_mask(SigmaskHow::SIG_SETMASK)?;
    let thread = std::thread::Builder::new().name(name.to_owned()).spawn(work);
    before.thread_set_mask()?;
    thread.map(drop)
}

/// Makes a command's program inherit no descriptors but the standard ones.
pub(crate) fn leave_descriptors(command: &mut Command) {
    let close = || {
        // SAFETY: integers only. The child has its own table by then, and exec closes the marked descriptors.
        let marked =
            unsafe { libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC) };
        check(marked).map(drop)
    };
    // SAFETY: the closure only makes a system call.
    unsafe { command.pre_exec(close) };
}

/// Makes a command's program inherit these descriptors under their numbers, after [`leave_descriptors`].
pub(crate) fn pass_descriptors(command: &mut Command, numbers: Vec<RawFd>) {
    let unmark = move || {
        // SAFETY: integers only. The child has its own table by then.
        let unmarked = |number: &RawFd| check(unsafe { libc::fcntl(*number, libc::F_SETFD, 0) }.into());
        numbers.iter().try_for_each(|number| unmarked(number).map(drop))
    };
    // SAFETY: the closure only makes system calls.
    unsafe { command.pre_exec(unmark) };
}

/// Makes a command's program start with all signals blocked: only SIGKILL and SIGSTOP have an effect then.
pub(crate) fn block_signals(command: &mut Command) {
    let block = || Ok(SigSet::all().thread_block()?);
    // SAFETY: the closure only makes a system call, and std has set the child's mask by then.
    unsafe { command.pre_exec(block) };
}

/// Makes a stream socket attach its peer's pid to every message (`SO_PASSCRED`).
///
/// # Errors
/// The kernel's errno.
pub(crate) fn pass_credentials(socket: BorrowedFd<'_>) -> io::Result<()> {
    set_socket_option(socket, libc::SO_PASSCRED, 1)
}

fn set_socket_option(socket: BorrowedFd<'_>, option: libc::c_int, value: libc::c_int) -> io::Result<()> {
    #[expect(clippy::cast_possible_truncation, reason = "4")]
    let len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the option's value is a live int of the length given.
    let result = unsafe {
        libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, option, (&raw const value).cast(), len)
    };
    check(result.into()).map(drop)
}

/// Returns the path of this program. After an upgrade it is the path of the new program in the old one's
/// place.
///
/// # Errors
/// The path cannot be found.
pub(crate) fn program() -> anyhow::Result<PathBuf> {
    let program = std::env::current_exe().context("finding this program")?;
    // The kernel appends this to the path of a removed file (`d_path` of fs/d_path.c).
    let replaced = program.as_os_str().as_bytes().strip_suffix(b" (deleted)");
    let replaced = replaced.map(|path| PathBuf::from(OsStr::from_bytes(path)));
    Ok(replaced.filter(|path| path.is_file()).unwrap_or(program))
}
