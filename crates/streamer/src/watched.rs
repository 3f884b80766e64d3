// SPDX-License-Identifier: MIT OR Apache-2.0
//! Descriptors that the runtime watches.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Makes the runtime wait for what a descriptor has to read. It is not woken where there is room to write:
/// that is after each message that the peer takes.
///
/// # Errors
/// The descriptor cannot be watched.
pub fn watch(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd always gives the same descriptor and keeps it open while it lives.
    unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }.map_err(Into::into)
}

/// As [`watch`], for a descriptor that others use too.
///
/// # Errors
/// The descriptor cannot be watched.
pub fn watch_shared(fd: Arc<OwnedFd>) -> io::Result<AsyncFd<Arc<OwnedFd>>> {
    // SAFETY: the OwnedFd always gives the same descriptor, and keeps it open while this reference to it
    // lives.
    unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }.map_err(Into::into)
}
