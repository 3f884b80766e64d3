// SPDX-License-Identifier: MIT OR Apache-2.0
//! A guardian ends the restored processes if the worker dies and the supervisor is not there any more: it was killed, or is in the same
//! moment. It shares the worker's descriptors, so none of them closes before those processes are dead.

use std::os::fd::{AsRawFd as _, OwnedFd};

use nix::sys::signal::{SigSet, SigmaskHow};
use tracing::error;

use crate::ledger::Ledger;
use crate::sys::{self, Fork};

/// Whom it ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Whom {
    /// All that have missing pages or stand before gates.
    All,
    /// Those before gates, and the others, too, if there is nobody who would start a successor for them: the supervisor of this number has
    /// ended.
    Gated {
        /// Its number.
        supervisor: i32,
    },
}

/// Looks for the supervisor's end when the worker has ended, a millisecond apart: a second, if both were killed.
const LOOKS: u32 = 1000;

/// Starts a guardian of this process; its number. No signal but SIGKILL ends it. None, with an error in the log, if it cannot be
/// started.
pub fn start(ledger: Ledger, whom: Whom) -> Option<i32> {
    let started = fork(ledger, whom);
    if let Err(error) = &started {
        error!(%error, "no guardian: a killed worker may not be noticed");
    }
    started.ok()
}

fn fork(ledger: Ledger, whom: Whom) -> std::io::Result<i32> {
    let worker = sys::pidfd_open(nix::unistd::getpid().as_raw())?;
    let supervisor = match whom {
        Whom::All => None,
        Whom::Gated { supervisor } => Some(sys::pidfd_open(supervisor)?),
    };
    // What stops a whole group of processes is for the worker to judge.
    let before = SigSet::all().thread_swap_mask(SigmaskHow::SIG_SETMASK)?;
    // SAFETY: other threads may exist, so the child keeps to system calls, its stack and the ledger's atomics.
    let forked = unsafe { sys::fork_sharing_files() };
    if let Ok(Fork::Child) = forked {
        watch(ledger, &worker, supervisor.as_ref());
    }
    before.thread_set_mask()?;
    match forked? {
        Fork::Parent(pid) => {
            // Descriptors are shared: closing it here would close it for the guardian.
            std::mem::forget((worker, supervisor));
            Ok(pid)
        }
        Fork::Child => unreachable!("it never returns"),
    }
}

/// Waits for the worker's end, then ends them. Only system calls.
fn watch(ledger: Ledger, worker: &OwnedFd, supervisor: Option<&OwnedFd>) -> ! {
    sys::wait_for_end(worker.as_raw_fd());
    match supervisor {
        None => {
            ledger.end_all();
        }
        Some(supervisor) => {
            ledger.gates().end_all();
            end_without(ledger, supervisor);
        }
    }
    // SAFETY: ends this process without running destructors of the worker's memory.
    unsafe { libc::_exit(0) }
}

/// Ends all others if the supervisor has ended, too; a successor takes them over otherwise.
fn end_without(ledger: Ledger, supervisor: &OwnedFd) {
    let generation = ledger.generation();
    for _ in 0..LOOKS {
        if sys::has_ended(supervisor.as_raw_fd()) {
            ledger.end_all();
            return;
        }
        if ledger.generation() != generation {
            return;
        }
        sys::nap();
    }
}
