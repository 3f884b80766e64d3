// SPDX-License-Identifier: MIT OR Apache-2.0
//! How much the background may ask of the disk while threads wait for it too.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Blocks under way on the disk for each reactor when nobody waits for it: enough that it is never idle
/// between two of them.
const CALM_DEPTH: usize = 3;
/// Reads that may lie between a demand read and the disk: about this much time of them.
const QUEUE: Duration = Duration::from_micros(300);
/// Blocks under way at most while threads wait: beyond it even a fast disk gains nothing.
const BUSY_DEPTH: usize = 8;
/// So long after the last fault that needed the disk, the next one is not expected any more.
const CALM: Duration = Duration::from_millis(5);

/// The pace of background reads, shared by all reactors.
#[derive(Debug)]
pub(super) struct Pace {
    start: Instant,
    reactors: usize,
    /// Background blocks under way on the disk.
    reading: AtomicUsize,
    /// When a fault last needed the disk: nanoseconds since `start`, 0 for never.
    disk_fault: AtomicU64,
    /// What one block takes the disk, in nanoseconds: a running mean.
    block: AtomicU64,
}

/// A background read under way.
#[derive(Debug)]
pub(super) struct Begun {
    at: Instant,
    /// Reads under way with it, itself included.
    depth: usize,
}

impl Pace {
    pub(super) fn new(reactors: usize) -> Self {
        Self {
            start: Instant::now(),
            reactors,
            reading: AtomicUsize::new(0),
            disk_fault: AtomicU64::new(0),
            block: AtomicU64::new(0),
        }
    }

    /// A thread waits for the disk.
    pub(super) fn disk_fault(&self) {
        self.disk_fault.store(nanos(self.start.elapsed()).max(1), Ordering::Relaxed);
    }

    /// Whether one more block may be read.
    pub(super) fn allows(&self) -> bool {
        let reading = self.reading.load(Ordering::Relaxed);
        reading == 0 || reading < if self.is_calm() { CALM_DEPTH * self.reactors } else { self.busy_depth() }
    }

    fn is_calm(&self) -> bool {
        let last = self.disk_fault.load(Ordering::Relaxed);
        last == 0 || nanos(self.start.elapsed()).saturating_sub(last) > nanos(CALM)
    }

    fn busy_depth(&self) -> usize {
        let block = self.block.load(Ordering::Relaxed).max(1);
        usize::try_from(nanos(QUEUE) / block).unwrap_or(BUSY_DEPTH).clamp(1, BUSY_DEPTH)
    }

    /// A background read goes to the disk.
    pub(super) fn begin(&self) -> Begun {
        Begun { at: Instant::now(), depth: self.reading.fetch_add(1, Ordering::Relaxed) + 1 }
    }

    /// It is back, or was not submitted after all.
    #[expect(clippy::needless_pass_by_value, reason = "a read ends once")]
    pub(super) fn end(&self, begun: Begun) {
        self.reading.fetch_sub(1, Ordering::Relaxed);
        // Reads queue behind one another: each one's own share of the time.
        let own = nanos(begun.at.elapsed()) / begun.depth as u64;
        let mean = self.block.load(Ordering::Relaxed);
        let mean = if mean == 0 { own } else { mean - mean / 8 + own / 8 };
        self.block.store(mean, Ordering::Relaxed);
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_faults_every_reactor_reads_ahead() {
        let pace = Pace::new(2);
        let begun: Vec<Begun> =
            std::iter::from_fn(|| pace.allows().then(|| pace.begin())).take(100).collect();
        assert_eq!(begun.len(), 2 * CALM_DEPTH);
        begun.into_iter().for_each(|begun| pace.end(begun));
        assert!(pace.allows());
    }

    #[test]
    fn while_threads_wait_for_a_slow_disk_one_block_is_under_way() {
        let pace = Pace::new(2);
        let slow = Begun { at: Instant::now().checked_sub(Duration::from_millis(1)).unwrap(), depth: 1 };
        pace.reading.store(1, Ordering::Relaxed);
        pace.end(slow);
        pace.disk_fault();
        assert!(pace.allows());
        let _begun = pace.begin();
        assert!(!pace.allows());
    }

    #[test]
    fn a_fast_disk_gets_more() {
        let pace = Pace::new(2);
        pace.block.store(50_000, Ordering::Relaxed);
        pace.disk_fault();
        let begun: Vec<Begun> =
            std::iter::from_fn(|| pace.allows().then(|| pace.begin())).take(100).collect();
        assert_eq!(begun.len(), 6);
    }
}
