// SPDX-License-Identifier: MIT OR Apache-2.0
//! Descriptors of processes (`include/uapi/linux/pidfd.h`). A pid may become another process's, and a pidfd
//! may not.

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};
use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use crate::check;
use crate::names::field;

/// `PIDFD_THREAD` (Linux 6.9): a descriptor of one thread.
const PIDFD_THREAD: libc::c_int = libc::O_EXCL;
/// `PIDFD_INFO_EXIT` (Linux 6.15): the exit status is asked for, and known.
const INFO_EXIT: u64 = 1 << 3;
/// `PIDFD_GET_INFO`: `_IOWR(0xff, 11, struct pidfd_info)`.
const GET_INFO: libc::c_ulong = 0xc040_ff0b;

/// `struct pidfd_info`, as its first version ends.
#[derive(Debug, Default)]
#[repr(C)]
struct Info {
    mask: u64,
    cgroup: u64,
    /// The numbers of the process, its group and its parent, and eight ids of users and groups.
    ids: [u32; 11],
    exit_code: i32,
}

const _: () = assert!(size_of::<Info>() == 64);

/// Opens a descriptor of process `pid` (`pidfd_open(2)`, Linux 5.3).
///
/// # Errors
/// ESRCH: no process has the pid.
pub fn pidfd_open(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: two integers in, a descriptor out.
    made(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) })
}

/// Opens a descriptor of one thread (`PIDFD_THREAD`, Linux 6.9).
///
/// # Errors
/// ESRCH: no thread has the number. EINVAL: the kernel is older than Linux 6.9.
pub fn pidfd_open_thread(thread: i32) -> io::Result<OwnedFd> {
    // SAFETY: two integers in, a descriptor out.
    made(unsafe { libc::syscall(libc::SYS_pidfd_open, thread, PIDFD_THREAD) })
}

/// Copies descriptor `number` of a pidfd's process (`pidfd_getfd(2)`, Linux 5.6). The copy is closed on exec.
///
/// # Errors
/// EPERM: this process may not trace the other. EBADF, ESRCH.
pub fn pidfd_getfd(process: BorrowedFd<'_>, number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: integers in, a descriptor out.
    made(unsafe { libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), number, 0) })
}

/// Sends SIGKILL through a pidfd: never to another process that has got the same number.
///
/// # Errors
/// ESRCH: the process has been reaped.
pub fn pidfd_kill(pidfd: RawFd) -> io::Result<()> {
    pidfd_signal(pidfd, libc::SIGKILL)
}

/// Sends a signal through a pidfd.
///
/// # Errors
/// As for [`pidfd_kill`].
pub fn pidfd_signal(pidfd: RawFd, signal: libc::c_int) -> io::Result<()> {
    // SAFETY: integers and a null siginfo; a closed descriptor gives EBADF.
    check(unsafe { libc::syscall(libc::SYS_pidfd_send_signal, pidfd, signal, 0, 0) }).map(drop)
}

/// Returns the pid of a pidfd's process in this process's namespace (`/proc/self/fdinfo`, Linux 5.3). It
/// allocates.
///
/// # Errors
/// ESRCH: the process has been reaped.
pub fn pidfd_pid(pidfd: RawFd) -> io::Result<i32> {
    let info = std::fs::read(format!("/proc/self/fdinfo/{pidfd}"))?;
    let pid = field(&info, "Pid:").and_then(|pid| pid.parse().ok());
    pid.filter(|pid| *pid > 0).ok_or_else(|| io::Error::from_raw_os_error(libc::ESRCH))
}

/// Waits until the process has ended.
pub fn wait_for_end(pidfd: RawFd) {
    let mut poll = libc::pollfd { fd: pidfd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one live pollfd; EINTR is tried again, and a pidfd is readable only when its process ended.
    while unsafe { libc::poll(&raw mut poll, 1, -1) } != 1 || poll.revents == 0 {}
}

/// Returns true if the process ends within `limit`, in whole milliseconds.
#[must_use]
pub fn ends_within(pidfd: RawFd, limit: Duration) -> bool {
    let start = Instant::now();
    let mut poll = libc::pollfd { fd: pidfd, events: libc::POLLIN, revents: 0 };
    loop {
        let left = limit.saturating_sub(start.elapsed()).as_millis();
        let left = i32::try_from(left).unwrap_or(i32::MAX);
        // SAFETY: one live pollfd. EINTR is tried again with what is left of the limit.
        match unsafe { libc::poll(&raw mut poll, 1, left) } {
            1 => return poll.revents & libc::POLLIN != 0,
            _ if left == 0 => return false,
            _ => {}
        }
    }
}

/// Returns true if the pidfd's process has ended: a pidfd is readable then.
#[must_use]
pub fn has_ended(pidfd: RawFd) -> bool {
    ends_within(pidfd, Duration::ZERO)
}

/// Returns how a process ended that its parent has collected, as for wait(2) (`PIDFD_GET_INFO`, Linux 6.15).
/// The pidfd was opened before that. None: it was not collected yet, or the kernel is older.
#[must_use]
pub fn exit_status(pidfd: BorrowedFd<'_>) -> Option<ExitStatus> {
    let mut info = Info { mask: INFO_EXIT, ..Info::default() };
    // SAFETY: the kernel writes as many bytes as the request's number encodes, which is the size of `info`.
    let result = unsafe { libc::ioctl(pidfd.as_raw_fd(), GET_INFO, &raw mut info) };
    (result == 0 && info.mask & INFO_EXIT != 0).then(|| ExitStatus::from_raw(info.exit_code))
}

/// Takes over the descriptor that a system call has just made.
fn made(result: libc::c_long) -> io::Result<OwnedFd> {
    let number = RawFd::try_from(check(result)?).map_err(io::Error::other)?;
    // SAFETY: the kernel has installed it for this process in the call that gave its number, and nothing
    // else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;
    use std::process::Command;

    use super::*;

    #[test]
    fn a_pidfd_kills_its_process_and_shows_the_end() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let pidfd = pidfd_open(child.id().cast_signed()).unwrap();
        assert!(!has_ended(pidfd.as_raw_fd()));
        pidfd_kill(pidfd.as_raw_fd()).unwrap();
        assert!(ends_within(pidfd.as_raw_fd(), Duration::from_secs(60)));
        wait_for_end(pidfd.as_raw_fd());
        assert_eq!(pidfd_pid(pidfd.as_raw_fd()).unwrap(), child.id().cast_signed());
        child.wait().unwrap();
        assert_eq!(pidfd_pid(pidfd.as_raw_fd()).unwrap_err().raw_os_error(), Some(libc::ESRCH));
        assert_eq!(pidfd_kill(pidfd.as_raw_fd()).unwrap_err().raw_os_error(), Some(libc::ESRCH));
    }

    #[test]
    fn a_descriptor_of_a_process_is_copied_by_its_number() {
        let own = pidfd_open(std::process::id().cast_signed()).unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        let copy = pidfd_getfd(own.as_fd(), file.as_raw_fd()).unwrap();
        let pid = std::process::id().cast_signed();
        assert!(crate::kcmp::same_file(copy.as_raw_fd(), pid, file.as_raw_fd()).unwrap());
        assert_eq!(pidfd_getfd(own.as_fd(), -1).unwrap_err().raw_os_error(), Some(libc::EBADF));
    }
}
