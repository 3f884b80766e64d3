// SPDX-License-Identifier: MIT OR Apache-2.0
//! Limits how long fills that the kernel refuses for want of memory (ENOMEM) are tried again.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// How long fills of one address space are tried again while the kernel refuses all of them. A control group
/// at its limit has memory again when the OOM killer has ended a process, or when a user raises the limit.
/// Meanwhile threads that access a missing page sleep.
pub(super) const ENOMEM_LIMIT: Duration = Duration::from_secs(2);

/// The refusals since the last fill that succeeded.
#[derive(Debug, Default)]
pub(super) struct EnomemRetry {
    /// The time of the first of them, in microseconds of the caller's clock, plus one. 0: there is no
    /// shortage.
    since: AtomicU64,
    refusals: AtomicU64,
}

/// What a refused fill does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refused {
    /// The first refusal: try again.
    First,
    /// Try again.
    Again,
    /// [`ENOMEM_LIMIT`] has passed: give up.
    TooLong,
}

impl EnomemRetry {
    /// Counts a refusal at `micros` and returns what to do.
    pub(super) fn refused(&self, micros: u64) -> Refused {
        self.refusals.fetch_add(1, Ordering::Relaxed);
        let now = micros.saturating_add(1);
        match self.since.compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => Refused::First,
            Err(since) if u128::from(now.saturating_sub(since)) < ENOMEM_LIMIT.as_micros() => Refused::Again,
            Err(_) => Refused::TooLong,
        }
    }

    /// Notes a fill that succeeded. Returns the number of refusals before it, if there were any.
    pub(super) fn succeeded(&self) -> Option<u64> {
        if self.since.load(Ordering::Relaxed) == 0 || self.since.swap(0, Ordering::Relaxed) == 0 {
            return None;
        }
        Some(self.refusals.swap(0, Ordering::Relaxed))
    }

    /// Returns the number of refusals since the last fill that succeeded.
    pub(super) fn refusals(&self) -> u64 {
        self.refusals.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_fills_are_retried_until_the_limit() {
        let shortage = EnomemRetry::default();
        let limit = u64::try_from(ENOMEM_LIMIT.as_micros()).unwrap();
        assert_eq!(shortage.refused(0), Refused::First);
        assert_eq!(shortage.refused(limit - 1), Refused::Again);
        assert_eq!(shortage.refused(limit), Refused::TooLong);
        assert_eq!(shortage.refusals(), 3);
    }

    #[test]
    fn a_fill_that_succeeds_starts_the_limit_again() {
        let shortage = EnomemRetry::default();
        let limit = u64::try_from(ENOMEM_LIMIT.as_micros()).unwrap();
        assert_eq!(shortage.succeeded(), None);
        shortage.refused(0);
        shortage.refused(limit - 1);
        assert_eq!(shortage.succeeded(), Some(2));
        assert_eq!(shortage.succeeded(), None);
        assert_eq!(shortage.refused(2 * limit), Refused::First);
    }
}
