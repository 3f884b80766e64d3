// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ends address spaces whose bytes cannot be read: kills or poisons them, and never serves zeros instead.

use std::os::fd::AsFd as _;
use std::sync::atomic::Ordering;

use rewake_pager::{BlockIx, PageIx};
use rewake_uffd::{FillPort, PAGE_SIZE, Stop};
use tracing::error;

use super::space::AddressSpace;
use crate::ledger::NO_FD;
use crate::supervise::processes;
use crate::sys;

/// Kills the process of a failed session's address space. Where its pid is not known (a child forked after
/// the restore), every missing page is poisoned: an access raises SIGBUS.
///
/// Returns true when the userfaultfd may be closed, because no access can read zeros in place of a lost page.
/// The caller calls it again until then.
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
    // Its threads may run for a moment longer: the reactor calls again when the pidfd is ready. A process of
    // unknown pid (vfork) may still share its memory.
    sys::has_ended(pidfd) && (rewake_uffd::address_space_ended(space.uffd.as_fd()) || poison(space))
}

/// The outcome of poisoning a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Poisoned {
    /// No access to the range can read zeros in place of a lost page.
    All,
    /// The kernel refused for now: try again.
    NotYet,
    /// The address space does not exist any more.
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

/// Poisons the missing pages of a range. `in_place`: the restore has finished. Before that, CRIU may still
/// map at its final address what is not mapped now.
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
            // Like a fill, a call may not cross the border of two mappings: poison page by page.
            Some(Stop::NotMapped) if piece > PAGE_SIZE => limit = PAGE_SIZE,
            Some(Stop::NotMapped) if in_place => done += PAGE_SIZE,
            Some(Stop::Gone) => return Poisoned::Gone,
            // Changing: the reactor reads the events first, then tries again. A kernel before 6.6 cannot
            // poison: the descriptor stays open, and the child waits rather than read zeros.
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

    /// A kernel with these mappings, in pages.
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
    fn unmapped_pages_are_poisoned_only_after_the_restore() {
        let port = Port { mappings: vec![10..15, 15..20], ..Port::default() };
        assert_eq!(poison_pages(&port, 10..21, false), Poisoned::NotYet);
        assert_eq!(poison_pages(&port, 10..21, true), Poisoned::All);
    }

    #[test]
    fn a_refused_poison_is_never_reported_as_done() {
        for stop in [Stop::Changing, Stop::Failed(libc::EINVAL), Stop::Failed(libc::ENOMEM)] {
            let port = Port { mappings: vec![10..15, 15..20], stop: Some(stop), ..Port::default() };
            assert_eq!(poison_pages(&port, 10..20, true), Poisoned::NotYet);
        }
        let port = Port { stop: Some(Stop::Gone), ..Port::default() };
        assert_eq!(poison_pages(&port, 10..20, true), Poisoned::Gone);
    }
}
