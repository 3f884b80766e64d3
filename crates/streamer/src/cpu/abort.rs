// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ending address spaces whose bytes cannot be had: killed or poisoned, never served zeros.

use std::os::fd::AsFd as _;
use std::sync::atomic::Ordering;

use rewake_pager::{BlockIx, PageIx};
use rewake_uffd::{FillPort, PAGE_SIZE, Stop};
use tracing::error;

use super::space::AddressSpace;
use crate::ledger::NO_FD;
use crate::supervise::processes;
use crate::sys;

/// Kills the process, or, where its pid is not known (a child forked after the restore), makes every page
/// that is still missing raise SIGBUS. True when the userfaultfd may be closed: nothing can read a zero page
/// in place of a lost one any more. Until then it is called again.
pub(super) fn kill_or_poison(space: &AddressSpace) -> bool {
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
    // Its threads may run on for a moment; the pidfd's readiness brings us back here. Its memory may live on in
    // a process that shares it (vfork) and that nobody knows.
    sys::has_ended(pidfd) && (rewake_uffd::address_space_ended(space.uffd.as_fd()) || poison(space))
}

/// How far poisoning came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Poisoned {
    /// Nothing in the range can be read as zeros any more.
    All,
    /// Not now: to be tried again.
    NotYet,
    /// The memory is gone.
    Gone,
}

fn poison(space: &AddressSpace) -> bool {
    let layout = space.layout();
    let mut runs = Vec::new();
    for block in 0..layout.plan().blocks() {
        runs.clear();
        let mut from = Some(PageIx(0));
        while let Some(page) = from {
            from = layout.runs(BlockIx(block), page, u64::MAX, &mut runs);
        }
        for run in &runs {
            match poison_run(&space.uffd, run.target, run.pages * PAGE_SIZE, space.session.is_released()) {
                Poisoned::All => {}
                Poisoned::NotYet => return false,
                Poisoned::Gone => {
                    space.set_gone();
                    return true;
                }
            }
        }
    }
    true
}

/// `in_place`: the restore has finished. Before, what is not mapped may be on its way to its place.
fn poison_run(port: &impl FillPort, target: u64, len: u64, in_place: bool) -> Poisoned {
    let mut done = 0;
    let mut limit = len;
    while done < len {
        let piece = limit.min(len - done);
        let outcome = port.poison(target + done, piece);
        done += outcome.bytes;
        match outcome.stop {
            None => {}
            Some(Stop::Present) => done += PAGE_SIZE,
            // As a fill, it may not cross the border of two mappings: page by page.
            Some(Stop::NotMapped) if piece > PAGE_SIZE => limit = PAGE_SIZE,
            Some(Stop::NotMapped) if in_place => done += PAGE_SIZE,
            Some(Stop::Gone) => return Poisoned::Gone,
            // Changing: events are read first, then this is tried again. A kernel before 6.6 has no poison:
            // the descriptor stays open, and the child waits rather than read zeros.
            Some(Stop::NotMapped | Stop::Changing | Stop::BadSource | Stop::Failed(_)) => {
                return Poisoned::NotYet;
            }
        }
    }
    Poisoned::All
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::BTreeSet;
    use std::io;
    use std::ops::Range;

    use rewake_uffd::Outcome;

    use super::*;

    /// Mappings as the kernel sees them, in pages.
    #[derive(Default)]
    struct Port {
        mappings: Vec<Range<u64>>,
        present: BTreeSet<u64>,
        poisoned: RefCell<BTreeSet<u64>>,
        stop: Option<Stop>,
    }

    impl FillPort for Port {
        fn copy(&self, _: u64, _: &[u8]) -> Outcome {
            unreachable!("poison copies nothing")
        }

        fn zero(&self, _: u64, _: u64) -> Outcome {
            unreachable!("a lost page is never made zero")
        }

        fn poison(&self, dst: u64, len: u64) -> Outcome {
            let pages = dst / PAGE_SIZE..(dst + len) / PAGE_SIZE;
            let stopped = |bytes, stop| Outcome { bytes, stop: Some(stop) };
            if let Some(stop) = self.stop {
                return stopped(0, stop);
            }
            if !self.mappings.iter().any(|map| map.start <= pages.start && pages.end <= map.end) {
                return stopped(0, Stop::NotMapped);
            }
            for page in pages.clone() {
                if self.present.contains(&page) || !self.poisoned.borrow_mut().insert(page) {
                    return stopped((page - pages.start) * PAGE_SIZE, Stop::Present);
                }
            }
            Outcome { bytes: len, stop: None }
        }

        fn wake(&self, _: u64, _: u64) -> io::Result<()> {
            Ok(())
        }
    }

    fn poison_pages(port: &Port, pages: Range<u64>, in_place: bool) -> Poisoned {
        poison_run(port, pages.start * PAGE_SIZE, (pages.end - pages.start) * PAGE_SIZE, in_place)
    }

    #[test]
    fn every_missing_page_is_poisoned_across_the_borders_of_mappings() {
        let present = BTreeSet::from([12, 18]);
        let port = Port { mappings: vec![10..13, 13..20, 22..30], present, ..Port::default() };
        assert_eq!(poison_pages(&port, 10..30, true), Poisoned::All);
        let missing = (10..20).chain(22..30).filter(|page| ![12, 18].contains(page));
        assert_eq!(*port.poisoned.borrow(), missing.collect());
    }

    #[test]
    fn what_is_not_mapped_before_the_restore_has_finished_may_be_mapped_yet() {
        let port = Port { mappings: vec![10..15, 15..20], ..Port::default() };
        assert_eq!(poison_pages(&port, 10..21, false), Poisoned::NotYet);
        assert_eq!(poison_pages(&port, 10..21, true), Poisoned::All);
    }

    #[test]
    fn without_poison_nothing_is_called_done() {
        for stop in [Stop::Changing, Stop::Failed(libc::EINVAL), Stop::Failed(libc::ENOMEM)] {
            let port = Port { mappings: vec![10..15, 15..20], stop: Some(stop), ..Port::default() };
            assert_eq!(poison_pages(&port, 10..20, true), Poisoned::NotYet);
        }
        let port = Port { stop: Some(Stop::Gone), ..Port::default() };
        assert_eq!(poison_pages(&port, 10..20, true), Poisoned::Gone);
    }
}
