// SPDX-License-Identifier: MIT OR Apache-2.0
//! When the supervisor itself is killed: a last guardian that ends the restored processes if the worker dies
//! too. It shares the worker's descriptors, so none of them closes before those processes are dead.

use std::os::fd::{AsRawFd as _, OwnedFd};

use tracing::{error, warn};

use crate::ledger::Ledger;
use crate::sys::{self, Fork};

/// Starts a guardian of this process.
pub fn start(ledger: Ledger) {
    let worker = match sys::pidfd_open(nix::unistd::getpid().as_raw()) {
        Ok(worker) => worker,
        Err(error) => return error!(%error, "no guardian: a killed worker will not be noticed"),
    };
    // SAFETY: other threads exist, so the child keeps to system calls, its stack and the ledger's atomics.
    match unsafe { sys::fork_sharing_files() } {
        Ok(Fork::Child) => watch(ledger, &worker),
        Ok(Fork::Parent(pid)) => warn!("the supervisor is gone; guardian {pid} took its place"),
        Err(error) => error!(%error, "no guardian: a killed worker will not be noticed"),
    }
    // Descriptors are shared: closing it here would close it for the guardian.
    std::mem::forget(worker);
}

/// Waits for the worker's end, then kills whatever still has missing pages. Only system calls.
fn watch(ledger: Ledger, worker: &OwnedFd) -> ! {
    let mut poll = libc::pollfd { fd: worker.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one live pollfd; EINTR is tried again, and a pidfd is readable only when its process ended.
    while unsafe { libc::poll(&raw mut poll, 1, -1) } != 1 {}
    ledger.end_all();
    // SAFETY: ends this process without running destructors of the worker's memory.
    unsafe { libc::_exit(0) }
}
