// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ending address spaces whose bytes cannot be had: killed or poisoned, never served zeros.

use std::sync::atomic::Ordering;

use rewake_pager::{BlockIx, PageIx};
use rewake_uffd::{FillPort as _, PAGE_SIZE, Stop};
use tracing::error;

use super::space::AddressSpace;
use crate::ledger::NO_FD;
use crate::{processes, sys};

/// Kills the process, or, where its pid is not known (a child forked after the restore), makes every page
/// that is still missing raise SIGBUS. True when the userfaultfd may be closed: nothing can read a zero page
/// in place of a lost one any more. Until then it is called again.
pub(super) fn end(space: &AddressSpace) -> bool {
    let pidfd = space.slot.pidfd.load(Ordering::Acquire);
    if pidfd == NO_FD {
        return poison(space);
    }
    processes::kill_descendants(space.slot.host_pid.load(Ordering::Relaxed), pidfd);
    if let Err(error) = sys::pidfd_kill(pidfd)
        && error.raw_os_error() != Some(libc::ESRCH)
    {
        error!(%error, "killing a process whose memory is lost");
    }
    // Its threads may run on for a moment; the pidfd's readiness brings us back here.
    sys::has_ended(pidfd)
}

fn poison(space: &AddressSpace) -> bool {
    let layout = space.layout();
    let mut runs = Vec::new();
    for block in 0..layout.plan().blocks().len() {
        runs.clear();
        let mut from = Some(PageIx(0));
        while let Some(page) = from {
            from = layout.runs(BlockIx(block), page, u64::MAX, &mut runs);
        }
        for run in &runs {
            if !poison_run(space, run.target, run.pages * PAGE_SIZE) {
                return space.is_gone();
            }
        }
    }
    true
}

fn poison_run(space: &AddressSpace, target: u64, len: u64) -> bool {
    let mut done = 0;
    while done < len {
        let outcome = space.uffd.poison(target + done, len - done);
        done += outcome.bytes;
        match outcome.stop {
            None => {}
            Some(Stop::Present | Stop::NotMapped) => done += PAGE_SIZE,
            Some(Stop::Gone) => {
                space.set_gone();
                return false;
            }
            // Changing: events are read first, then this is tried again. A kernel before 6.6 has no poison:
            // the descriptor stays open, and the child waits rather than read zeros.
            Some(Stop::Changing | Stop::BadSource | Stop::Failed(_)) => return false,
        }
    }
    true
}
