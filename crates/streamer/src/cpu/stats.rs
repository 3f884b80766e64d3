// SPDX-License-Identifier: MIT OR Apache-2.0
//! Counters of one session and of its tasks: reactors write them, and progress displays read them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::fault_latencies::LatencyHistogram;

/// Why pages were filled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadCause {
    /// A thread waited for one of them.
    Fault,
    /// They are of the working set, which is loaded before the rest.
    WorkingSet,
    /// All memory is loaded.
    Background,
}

/// The counters of a session. All counts start with the worker.
#[derive(Debug)]
pub struct Stats {
    /// Pages with bytes in the image that the session must load, in all address spaces.
    pub pages_total: AtomicU64,
    /// Pages that reactors filled with bytes.
    pub pages_copied: AtomicU64,
    /// Pages that reactors filled with the zero page.
    pub pages_zero: AtomicU64,
    /// Pages that need no load any more: the program unmapped, dropped or replaced them.
    pub pages_dropped: AtomicU64,
    /// Pages that reactors filled, by [`LoadCause`].
    pages_loaded: [AtomicU64; 3],
    /// Page faults served.
    pub faults: AtomicU64,
    /// How long they waited.
    pub latencies: LatencyHistogram,
    /// Page faults that were read and are not served.
    pub waiting: AtomicU64,
    /// Fills that the kernel refused because the program was changing its layout (EAGAIN).
    pub put_off: AtomicU64,
    /// Fills that the kernel refused for want of memory (ENOMEM), and that are tried again.
    pub starved: AtomicU64,
    /// Events of userfaultfd: forks, remaps, removes and unmaps.
    pub events: AtomicU64,
    /// Nanoseconds from `start` to the first and the last page fault served. 0: none.
    first_fault: AtomicU64,
    last_fault: AtomicU64,
    start: Instant,
}

impl Default for Stats {
    fn default() -> Self {
        Self {
            pages_total: AtomicU64::new(0),
            pages_copied: AtomicU64::new(0),
            pages_zero: AtomicU64::new(0),
            pages_dropped: AtomicU64::new(0),
            pages_loaded: [const { AtomicU64::new(0) }; 3],
            faults: AtomicU64::new(0),
            latencies: LatencyHistogram::default(),
            waiting: AtomicU64::new(0),
            put_off: AtomicU64::new(0),
            starved: AtomicU64::new(0),
            events: AtomicU64::new(0),
            first_fault: AtomicU64::new(0),
            last_fault: AtomicU64::new(0),
            start: Instant::now(),
        }
    }
}

/// The counters of one task and of the children that it has forked since. They count as in [`Stats`].
#[derive(Debug, Default)]
pub struct TaskStats {
    /// Its pid on this host; 0 when the kernel did not report it.
    pub pid: i32,
    /// Pages with bytes in the image that the session must load.
    pub pages_total: AtomicU64,
    /// Pages that reactors filled, with bytes or with the zero page.
    pub pages_back: AtomicU64,
    /// Pages that need no load any more: the program unmapped, dropped or replaced them.
    pub pages_dropped: AtomicU64,
    /// Pages that were missing when the process ended.
    pub pages_ended: AtomicU64,
    /// Page faults served.
    pub faults: AtomicU64,
    /// The sum of their latencies, in microseconds.
    pub fault_wait_us: AtomicU64,
    /// The longest of their latencies, in microseconds.
    pub longest_fault_us: AtomicU64,
}

impl TaskStats {
    /// Counts a page fault that was served `latency` after its message was read.
    pub fn fault(&self, latency: Duration) {
        let micros = u64::try_from(latency.as_micros()).unwrap_or(u64::MAX);
        add(&self.faults, 1);
        add(&self.fault_wait_us, micros);
        self.longest_fault_us.fetch_max(micros, Ordering::Relaxed);
    }
}

/// Adds to a counter without ordering: it only informs users.
pub(crate) fn add(counter: &AtomicU64, amount: u64) {
    counter.fetch_add(amount, Ordering::Relaxed);
}

impl Stats {
    /// Counts a page fault that was served `latency` after its message was read.
    pub fn fault(&self, latency: Duration) {
        add(&self.faults, 1);
        let now = self.elapsed();
        self.last_fault.fetch_max(now, Ordering::Relaxed);
        if self.first_fault.load(Ordering::Relaxed) == 0 {
            // On failure another reactor was faster: its fault was the first.
            let _ = self.first_fault.compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed);
        }
        self.latencies.add(latency);
    }

    /// Counts pages that a reactor has filled, with bytes or with the zero page.
    pub(crate) fn loaded(&self, cause: LoadCause, pages: u64) {
        add(&self.pages_loaded[cause as usize], pages);
    }

    /// Returns the pages that reactors filled for a cause.
    #[must_use]
    pub fn pages_loaded(&self, cause: LoadCause) -> u64 {
        self.pages_loaded[cause as usize].load(Ordering::Relaxed)
    }

    /// Returns the nanoseconds since the counts started, 1 at least.
    #[must_use]
    pub fn elapsed(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX).max(1)
    }

    /// Returns when the first and the last page fault were served, in nanoseconds as [`Stats::elapsed`]
    /// counts. 0: no fault yet.
    #[must_use]
    pub fn fault_times(&self) -> (u64, u64) {
        (self.first_fault.load(Ordering::Relaxed), self.last_fault.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_times_of_the_first_and_the_last_fault_are_recorded() {
        let stats = Stats::default();
        assert_eq!(stats.fault_times(), (0, 0));
        stats.fault(Duration::ZERO);
        let (first, last) = stats.fault_times();
        assert!(first > 0 && first == last);
        std::thread::sleep(Duration::from_millis(1));
        stats.fault(Duration::ZERO);
        assert_eq!(stats.fault_times().0, first);
        assert!(stats.fault_times().1 >= first + 1_000_000 && stats.fault_times().1 <= stats.elapsed());
    }
}
