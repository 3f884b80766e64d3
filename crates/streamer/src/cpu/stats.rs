// SPDX-License-Identifier: MIT OR Apache-2.0
//! Counters of one session and of its tasks: reactors write them, and progress displays read them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Buckets of the histogram of fault latencies: four to each power of two of nanoseconds, so within 25 %.
const BUCKETS: usize = 160;

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
    /// Page faults served.
    pub faults: AtomicU64,
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
    latencies: [AtomicU64; BUCKETS],
}

impl Default for Stats {
    fn default() -> Self {
        Self {
            pages_total: AtomicU64::new(0),
            pages_copied: AtomicU64::new(0),
            pages_zero: AtomicU64::new(0),
            pages_dropped: AtomicU64::new(0),
            faults: AtomicU64::new(0),
            waiting: AtomicU64::new(0),
            put_off: AtomicU64::new(0),
            starved: AtomicU64::new(0),
            events: AtomicU64::new(0),
            first_fault: AtomicU64::new(0),
            last_fault: AtomicU64::new(0),
            start: Instant::now(),
            latencies: [const { AtomicU64::new(0) }; BUCKETS],
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
    /// Pages that need no load any more, those of a process that ended included.
    pub pages_dropped: AtomicU64,
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
        if let Some(bucket) = self.latencies.get(bucket(latency)) {
            add(bucket, 1);
        }
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

    /// Returns the latency that `share` (0..=1) of the page faults did not exceed. None before the first one.
    #[must_use]
    pub fn fault_quantile(&self, share: f64) -> Option<Duration> {
        let counts: Vec<u64> = self.latencies.iter().map(|count| count.load(Ordering::Relaxed)).collect();
        let total: u64 = counts.iter().sum();
        if total == 0 {
            return None;
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "a rank: far below 2^52 and not negative"
        )]
        let rank = ((total as f64 * share).ceil() as u64).clamp(1, total);
        let mut seen = 0;
        let index = counts.iter().position(|count| {
            seen += count;
            seen >= rank
        })?;
        Some(upper(index))
    }
}

fn bucket(latency: Duration) -> usize {
    let nanos = u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX).max(4);
    let power = 63 - nanos.leading_zeros() as usize;
    let quarter = (nanos >> (power - 2) & 3) as usize;
    ((power - 2) * 4 + quarter).min(BUCKETS - 1)
}

fn upper(bucket: usize) -> Duration {
    let (power, quarter) = (bucket / 4 + 2, bucket as u64 % 4);
    Duration::from_nanos((5 + quarter) << (power - 2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantile_is_within_a_quarter_of_the_truth() {
        let stats = Stats::default();
        for micros in 1..=1000 {
            stats.fault(Duration::from_micros(micros));
        }
        for (share, truth) in [(0.5, 500.0), (0.99, 990.0), (1.0, 1000.0)] {
            let found = stats.fault_quantile(share).unwrap().as_secs_f64() * 1e6;
            assert!(found >= truth && found <= truth * 1.26, "{share}: {found} for {truth}");
        }
    }

    #[test]
    fn no_faults_no_quantile() {
        assert_eq!(Stats::default().fault_quantile(0.99), None);
    }

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

    #[test]
    fn extreme_latencies_are_counted() {
        let stats = Stats::default();
        stats.fault(Duration::ZERO);
        stats.fault(Duration::MAX);
        assert_eq!(stats.faults.load(Ordering::Relaxed), 2);
        assert!(stats.fault_quantile(1.0).unwrap() > Duration::from_secs(60));
    }
}
