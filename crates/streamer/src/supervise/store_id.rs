// SPDX-License-Identifier: MIT OR Apache-2.0
//! What an fd store that processes keep is found by.

use std::fmt;
use std::os::fd::RawFd;

use crate::supervise::processes;
use crate::sys;

/// What an fd store is found by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreId {
    /// The number of the socket's inode. The kernel gives it to another socket some day.
    pub inode: u64,
    /// The number that only this socket has, as long as the machine runs (SO_COOKIE, `socket(7)`); not needed
    /// while the session lasts.
    pub cookie: Option<u64>,
}

impl StoreId {
    /// Reads what [`fmt::Display`] writes: INODE or INODE-COOKIE.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (inode, cookie) = match text.split_once('-') {
            Some((inode, cookie)) => (inode, Some(cookie.parse().ok()?)),
            None => (text, None),
        };
        Some(Self { inode: inode.parse().ok()?, cookie })
    }

    /// Its number in the table of a process. With a cookie, no other socket is taken for it that has the
    /// number of its inode by now.
    #[must_use]
    pub fn number_in(self, pid: i32) -> Option<RawFd> {
        let number = processes::number_of_socket(pid, self.inode)?;
        self.cookie.is_none_or(|cookie| cookie_of(pid, number) == Some(cookie)).then_some(number)
    }
}

impl fmt::Display for StoreId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.inode)?;
        self.cookie.map_or(Ok(()), |cookie| write!(f, "-{cookie}"))
    }
}

/// The cookie of a process's socket, or `None` if the process has ended or is not to be inspected.
pub(super) fn cookie_of(pid: i32, number: RawFd) -> Option<u64> {
    processes::descriptor_of(pid, number).and_then(|copy| sys::socket_cookie(&copy)).ok()
}
