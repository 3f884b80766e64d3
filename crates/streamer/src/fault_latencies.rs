// SPDX-License-Identifier: MIT OR Apache-2.0
//! Counts page faults by how long they waited. Reactors write the counts, and progress displays and metrics
//! read them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Buckets: four to each power of two of nanoseconds, so within 25 %.
const BUCKETS: usize = 160;
/// Buckets of each power of two; the first power is 2^2.
const QUARTERS: usize = 4;
const FIRST_POWER: usize = 2;
/// The powers of two of nanoseconds that bound the counts of [`LatencyCounts`]: 1 µs to 17 s.
pub const COUNTED_POWERS: std::ops::RangeInclusive<u32> = 10..=34;

/// A histogram of latencies, in fixed memory.
#[derive(Debug)]
pub struct LatencyHistogram {
    buckets: [AtomicU64; BUCKETS],
    sum_ns: AtomicU64,
}

/// What a histogram has counted, by powers of two.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LatencyCounts {
    /// Latencies below 2^10 ns, of 2^10 to less than 2^11 ns, and so on; the last are of 2^34 ns or longer.
    /// Empty: none.
    pub counts: Vec<u64>,
    /// The sum of all latencies.
    pub sum_ns: u64,
}

impl Default for LatencyHistogram {
    fn default() -> Self {
        Self { buckets: [const { AtomicU64::new(0) }; BUCKETS], sum_ns: AtomicU64::new(0) }
    }
}

impl LatencyHistogram {
    /// Counts a latency.
    pub fn add(&self, latency: Duration) {
        if let Some(bucket) = self.buckets.get(bucket(latency)) {
            bucket.fetch_add(1, Ordering::Relaxed);
        }
        let nanos = u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX);
        self.sum_ns.fetch_add(nanos, Ordering::Relaxed);
    }

    /// Returns the latency that `share` (0..=1) of those counted did not exceed. None before the first one.
    #[must_use]
    pub fn quantile(&self, share: f64) -> Option<Duration> {
        let counts: Vec<u64> = self.buckets.iter().map(|count| count.load(Ordering::Relaxed)).collect();
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

    /// Returns the counts by powers of two.
    #[must_use]
    pub fn counts(&self) -> LatencyCounts {
        let mut counts = vec![0; COUNTED_POWERS.count() + 1];
        for (index, bucket) in self.buckets.iter().enumerate() {
            let power = index / QUARTERS + FIRST_POWER;
            let place = (power + 1).saturating_sub(*COUNTED_POWERS.start() as usize).min(counts.len() - 1);
            counts[place] += bucket.load(Ordering::Relaxed);
        }
        LatencyCounts { counts, sum_ns: self.sum_ns.load(Ordering::Relaxed) }
    }
}

fn bucket(latency: Duration) -> usize {
    let nanos = u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX).max(1 << FIRST_POWER);
    let power = 63 - nanos.leading_zeros() as usize;
    let quarter = (nanos >> (power - FIRST_POWER) & 3) as usize;
    ((power - FIRST_POWER) * QUARTERS + quarter).min(BUCKETS - 1)
}

fn upper(bucket: usize) -> Duration {
    let (power, quarter) = (bucket / QUARTERS + FIRST_POWER, (bucket % QUARTERS) as u64);
    Duration::from_nanos((5 + quarter) << (power - FIRST_POWER))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantile_is_within_a_quarter_of_the_truth() {
        let histogram = LatencyHistogram::default();
        for micros in 1..=1000 {
            histogram.add(Duration::from_micros(micros));
        }
        for (share, truth) in [(0.5, 500.0), (0.99, 990.0), (1.0, 1000.0)] {
            let found = histogram.quantile(share).unwrap().as_secs_f64() * 1e6;
            assert!(found >= truth && found <= truth * 1.26, "{share}: {found} for {truth}");
        }
    }

    #[test]
    fn nothing_counted_no_quantile() {
        assert_eq!(LatencyHistogram::default().quantile(0.99), None);
    }

    #[test]
    fn extreme_latencies_are_counted() {
        let histogram = LatencyHistogram::default();
        histogram.add(Duration::ZERO);
        histogram.add(Duration::MAX);
        assert!(histogram.quantile(1.0).unwrap() > Duration::from_secs(60));
        let counts = histogram.counts().counts;
        assert_eq!((counts[0], counts[25], counts.len(), counts.iter().sum()), (1, 1, 26, 2));
    }

    #[test]
    fn counts_are_bounded_by_powers_of_two() {
        let histogram = LatencyHistogram::default();
        let nanos = [1023, 1024, 2047, 2048, (1 << 34) - 1, 1 << 34];
        nanos.iter().for_each(|nanos| histogram.add(Duration::from_nanos(*nanos)));
        let LatencyCounts { counts, sum_ns } = histogram.counts();
        assert_eq!((&counts[..3], &counts[24..], sum_ns), (&[1, 2, 1][..], &[1, 1][..], nanos.iter().sum()));
    }
}
