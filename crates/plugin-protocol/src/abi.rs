// SPDX-License-Identifier: MIT OR Apache-2.0
//! Descriptors that the kernel has just made for this process.

use std::os::fd::{FromRawFd as _, OwnedFd, RawFd};

/// Takes over descriptors that were just received in a message.
pub(crate) fn adopt(received: Vec<RawFd>) -> impl Iterator<Item = OwnedFd> {
    // SAFETY: the kernel has installed them for this process in the call that gave their numbers, and nothing
    // else uses them.
    received.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Takes over the descriptor of accept4.
pub(crate) fn accepted(number: RawFd) -> OwnedFd {
    // SAFETY: the kernel has installed it for this process in that call, and nothing else uses it.
    unsafe { OwnedFd::from_raw_fd(number) }
}
