// SPDX-License-Identifier: MIT OR Apache-2.0
//! How much the background may ask of the disk while threads wait for it too.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Blocks submitted together: adjacent ones make one request to the disk, and below 256 KiB a request costs
/// more by its number than by its length.
pub(super) const BATCH: usize = 4;
/// Batches under way on the disk for each reactor when nobody waits for it: enough that it is never idle
/// between two of them.
const CALM_BATCHES: usize = 3;
/// Reads that may lie between a demand read and the disk: about this much time of them, and one batch at least.
const QUEUE: Duration = Duration::from_micros(300);
/// Batches under way at most while threads wait: beyond it even a fast disk gains nothing.
const BUSY_BATCHES: usize = 8;
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
        self.disk_fault_at(Instant::now());
    }

    fn disk_fault_at(&self, now: Instant) {
        self.disk_fault.store(nanos(now.duration_since(self.start)).max(1), Ordering::Relaxed);
    }

    /// Whether one more batch may be read.
    pub(super) fn allows(&self) -> bool {
        self.allows_at(Instant::now())
    }

    fn allows_at(&self, now: Instant) -> bool {
        let reading = self.reading.load(Ordering::Relaxed);
        let most = if self.is_calm(now) { CALM_BATCHES * self.reactors } else { self.busy_batches() };
        reading == 0 || reading + BATCH <= most * BATCH
    }

    fn is_calm(&self, now: Instant) -> bool {
        let last = self.disk_fault.load(Ordering::Relaxed);
        last == 0 || nanos(now.duration_since(self.start)).saturating_sub(last) > nanos(CALM)
    }

    fn busy_batches(&self) -> usize {
        let batch = BATCH as u64 * self.block.load(Ordering::Relaxed).max(1);
        usize::try_from(nanos(QUEUE) / batch).unwrap_or(BUSY_BATCHES).clamp(1, BUSY_BATCHES)
    }

    /// A background read goes to the disk.
    pub(super) fn begin(&self) -> Begun {
        Begun { at: Instant::now(), depth: self.reading.fetch_add(1, Ordering::Relaxed) + 1 }
    }

    /// It is back, or was not submitted after all.
    pub(super) fn end(&self, begun: Begun) {
        self.end_at(begun, Instant::now());
    }

    #[expect(clippy::needless_pass_by_value, reason = "a read ends once")]
    fn end_at(&self, begun: Begun, now: Instant) {
        self.reading.fetch_sub(1, Ordering::Relaxed);
        // Reads queue behind one another: each one's own share of the time.
        let own = nanos(now.duration_since(begun.at)) / begun.depth as u64;
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

    /// Begins batches until no more are allowed.
    fn begin_all(pace: &Pace, now: Instant) -> Vec<Begun> {
        let mut begun = Vec::new();
        while pace.allows_at(now) {
            begun.extend((0..BATCH).map(|_| pace.begin()));
            assert!(begun.len() <= 1000, "without end");
        }
        begun
    }

    #[test]
    fn without_faults_every_reactor_reads_ahead() {
        let pace = Pace::new(2);
        let begun = begin_all(&pace, Instant::now());
        assert_eq!(begun.len(), 2 * CALM_BATCHES * BATCH);
        begun.into_iter().for_each(|begun| pace.end(begun));
        assert!(pace.allows());
    }

    #[test]
    fn while_threads_wait_for_a_slow_disk_one_batch_is_under_way() {
        let pace = Pace::new(2);
        pace.block.store(250_000, Ordering::Relaxed);
        let now = Instant::now();
        pace.disk_fault_at(now);
        assert_eq!(begin_all(&pace, now).len(), BATCH);
    }

    #[test]
    fn a_fast_disk_gets_more() {
        let pace = Pace::new(2);
        pace.block.store(12_500, Ordering::Relaxed);
        let now = Instant::now();
        pace.disk_fault_at(now);
        assert_eq!(begin_all(&pace, now).len(), 6 * BATCH);
    }

    #[test]
    fn what_a_block_takes_is_its_share_of_the_reads_it_waited_with() {
        let pace = Pace::new(1);
        let at = Instant::now();
        pace.reading.store(4, Ordering::Relaxed);
        pace.end_at(Begun { at, depth: 4 }, at + Duration::from_millis(8));
        let block = Duration::from_nanos(pace.block.load(Ordering::Relaxed));
        assert_eq!(block, Duration::from_millis(2));
    }

    #[test]
    fn some_time_after_the_last_fault_the_disk_is_the_background_s_again() {
        let pace = Pace::new(2);
        pace.block.store(1_000_000, Ordering::Relaxed);
        let now = Instant::now();
        pace.disk_fault_at(now);
        assert!(!pace.is_calm(now));
        assert!(pace.is_calm(now + 2 * CALM));
    }
}
