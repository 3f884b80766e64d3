// SPDX-License-Identifier: MIT OR Apache-2.0
//! Recognizes sweeps: threads that walk through memory, by the addresses of their page faults.
//!
//! The kernel's readahead does the same for files. CRIU does not ask userfaultfd for thread ids, so a sweep
//! is known by its addresses only: a fault continues the sweep that has filled memory next to it.

use std::ops::Range;

use crate::PAGE_SIZE;

/// Sweeps that are followed at one time: about one for each busy thread of a program.
const SWEEPS: usize = 8;
/// Pages that the second fault of a sweep fills.
const FIRST_WINDOW: u64 = 8;
/// The most pages that a fault fills. 256 KiB stay in a processor's cache between the read and the fill.
pub const MAX_WINDOW: u64 = 64;
/// The most bytes between two faults of a sweep. Pages between them may be resident already.
const MAX_GAP: u64 = MAX_WINDOW * PAGE_SIZE;

/// The sweeps of one address space.
#[derive(Debug, Default)]
pub struct Sweeps {
    sweeps: [Sweep; SWEEPS],
    /// Number of faults so far.
    faults: u64,
}

/// A sweep, or an entry without use if its range is empty.
#[derive(Debug, Clone, Default)]
struct Sweep {
    /// The addresses that its last fault filled.
    range: Range<u64>,
    direction: SweepDirection,
    /// Number of pages that its last fault filled.
    window: u64,
    /// The number of its last fault.
    last: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum SweepDirection {
    #[default]
    Up,
    Down,
}

impl Sweeps {
    /// Notes a page fault at `address` (the start of a page). Returns the addresses to fill, the page
    /// included: one page for the first fault of a sweep, then a window that doubles with each fault, up to
    /// [`MAX_WINDOW`] pages.
    pub fn fault(&mut self, address: u64) -> Range<u64> {
        self.faults += 1;
        let mut sweeps = self.sweeps.iter_mut();
        let continued = sweeps.find_map(|sweep| Some((sweep.continues_at(address)?, sweep)));
        if let Some((direction, sweep)) = continued {
            sweep.last = self.faults;
            return sweep.advance(address, direction);
        }
        let range = address..address + PAGE_SIZE;
        if let Some(oldest) = self.sweeps.iter_mut().min_by_key(|sweep| sweep.last) {
            *oldest =
                Sweep { range: range.clone(), direction: SweepDirection::Up, window: 1, last: self.faults };
        }
        range
    }
}

impl Sweep {
    /// Returns in which direction a fault at `address` continues this sweep; `None` if it does not.
    fn continues_at(&self, address: u64) -> Option<SweepDirection> {
        let Range { start, end } = self.range;
        if start == end {
            None
        } else if self.range.contains(&address) {
            // Not all of the window could be filled.
            Some(self.direction)
        } else if address >= end {
            (address - end < MAX_GAP).then_some(SweepDirection::Up)
        } else {
            (start - address <= MAX_GAP).then_some(SweepDirection::Down)
        }
    }

    fn advance(&mut self, address: u64, direction: SweepDirection) -> Range<u64> {
        if self.direction != direction {
            self.window = 0;
        }
        if !self.range.contains(&address) {
            self.window = (2 * self.window).clamp(FIRST_WINDOW, MAX_WINDOW);
        }
        let bytes = self.window * PAGE_SIZE;
        let end = address + PAGE_SIZE;
        self.direction = direction;
        self.range = match direction {
            SweepDirection::Up => address..address + bytes,
            SweepDirection::Down => end.saturating_sub(bytes)..end,
        };
        self.range.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Page numbers of the windows of faults at these pages.
    fn windows(faults: impl IntoIterator<Item = u64>) -> Vec<Range<u64>> {
        let mut sweeps = Sweeps::default();
        let window = |page| {
            let Range { start, end } = sweeps.fault(page * PAGE_SIZE);
            start / PAGE_SIZE..end / PAGE_SIZE
        };
        faults.into_iter().map(window).collect()
    }

    #[test]
    fn a_sweep_gets_windows_that_double() {
        let expected = [1000..1001, 1001..1009, 1009..1025, 1025..1057, 1057..1121, 1121..1185];
        assert_eq!(windows([1000, 1001, 1009, 1025, 1057, 1121]), expected);
    }

    #[test]
    fn a_sweep_may_go_down() {
        let expected = [1000..1001, 992..1000, 976..992, 944..976, 880..944, 816..880];
        assert_eq!(windows([1000, 999, 991, 975, 943, 879]), expected);
    }

    #[test]
    fn resident_pages_between_do_not_end_a_sweep() {
        assert_eq!(windows([1000, 1064, 1130]), [1000..1001, 1064..1072, 1130..1146]);
        assert_eq!(windows([1000, 1065]), [1000..1001, 1065..1066], "this is too far away");
    }

    #[test]
    fn random_faults_get_one_page_each() {
        let far = |number: u64| 10_000 + number * 7919 % 100 * 1000;
        assert!(windows((0..100).map(far)).iter().all(|window| window.end - window.start == 1));
    }

    #[test]
    fn sweeps_of_several_threads_are_followed_beside_each_other() {
        let mut next: Vec<u64> = (1..=SWEEPS as u64).map(|thread| thread * 100_000).collect();
        let mut sweeps = Sweeps::default();
        for fault in 0..6 {
            for next in &mut next {
                let window = sweeps.fault(*next * PAGE_SIZE);
                let pages = (window.end - window.start) / PAGE_SIZE;
                assert_eq!(pages, [1, 8, 16, 32, 64, 64][fault]);
                *next += pages;
            }
        }
    }

    #[test]
    fn another_fault_in_a_window_does_not_double_it() {
        assert_eq!(windows([1000, 1001, 1004, 1012]), [1000..1001, 1001..1009, 1004..1012, 1012..1028]);
    }

    #[test]
    fn a_sweep_that_turns_begins_with_a_small_window() {
        let expected = [1000..1001, 1001..1009, 1009..1025, 1001..1009];
        assert_eq!(windows([1000, 1001, 1009, 1008]), expected);
    }
}
