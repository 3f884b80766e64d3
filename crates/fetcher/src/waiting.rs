// SPDX-License-Identifier: MIT OR Apache-2.0
//! Waits for sockets.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use anyhow::Context as _;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// Waits until one of the descriptors has something to read; which of them do.
pub(crate) fn wait(descriptors: &[BorrowedFd<'_>], limit: Option<Duration>) -> anyhow::Result<Vec<bool>> {
    let mut polled: Vec<PollFd<'_>> =
        descriptors.iter().map(|descriptor| PollFd::new(*descriptor, PollFlags::POLLIN)).collect();
    let limit =
        limit.map_or(PollTimeout::NONE, |limit| PollTimeout::try_from(limit).unwrap_or(PollTimeout::MAX));
    match poll(&mut polled, limit) {
        Ok(_) | Err(Errno::EINTR) => {}
        Err(error) => return Err(error).context("waiting"),
    }
    let ready = |polled: &PollFd<'_>| polled.revents().is_some_and(|events| !events.is_empty());
    Ok(polled.iter().map(ready).collect())
}
