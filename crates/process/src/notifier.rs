// SPDX-License-Identifier: MIT OR Apache-2.0
//! An eventfd with which one thread wakes another.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;

/// Wakes one reactor. Clones share the eventfd. It stays readable from a [`wake`](Notifier::wake) until
/// [`drain`](Notifier::drain), so a wake-up before the wait is not lost.
#[derive(Debug, Clone)]
pub struct Notifier {
    eventfd: Arc<File>,
}

impl Notifier {
    /// Makes a notifier without a pending wake-up.
    ///
    /// # Errors
    /// The kernel's, when no file descriptor is left.
    pub fn new() -> io::Result<Self> {
        // SAFETY: eventfd takes no pointers; its result is checked before use.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: fd was just returned by eventfd, is open, and has no other owner.
        let owned = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Self { eventfd: Arc::new(File::from(owned)) })
    }

    /// Makes the eventfd readable. Any thread may call it, any number of times.
    pub fn wake(&self) {
        // A non-blocking eventfd gives only EAGAIN here, at 2^64-2 undrained wakes: then it is readable.
        let _ = (&*self.eventfd).write(&1u64.to_ne_bytes());
    }

    /// Clears all wake-ups so far, and returns whether there were any. Drain first, then look for work: the
    /// other order loses wake-ups.
    pub fn drain(&self) -> bool {
        // EAGAIN: no wake-up is pending.
        (&*self.eventfd).read(&mut [0u8; 8]).is_ok()
    }

    /// Whether both wake by the same eventfd.
    #[must_use]
    pub fn same(&self, other: &Notifier) -> bool {
        Arc::ptr_eq(&self.eventfd, &other.eventfd)
    }
}

impl AsFd for Notifier {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.eventfd.as_fd()
    }
}

impl AsRawFd for Notifier {
    /// The eventfd, for epoll: level-triggered readable while a wake is not drained.
    fn as_raw_fd(&self) -> RawFd {
        self.eventfd.as_raw_fd()
    }
}
