// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory that the kernel refuses to a fill (ENOMEM): waited for, but not for ever.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// How long fills of one address space are tried again while not one goes through. A control group at its limit
/// has memory again when the kernel's OOM killer is done, or somebody raises the limit; threads that touch a
/// missing page sleep meanwhile.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);

/// The refusals since the last fill that went through.
#[derive(Debug, Default)]
pub(super) struct EnomemRetry {
    /// When the first of them was, in microseconds of the caller's clock, plus one; 0: there is no shortage.
    since: AtomicU64,
    refusals: AtomicU64,
}

/// What to do about a refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refused {
    /// The first one: try again.
    First,
    /// Try again.
    Again,
    /// [`PATIENCE`] is at an end.
    TooLong,
}

impl EnomemRetry {
    /// A fill was refused at `micros`.
    pub(super) fn refused(&self, micros: u64) -> Refused {
        self.refusals.fetch_add(1, Ordering::Relaxed);
        let now = micros.saturating_add(1);
        match self.since.compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => Refused::First,
            Err(since) if u128::from(now.saturating_sub(since)) < PATIENCE.as_micros() => Refused::Again,
            Err(_) => Refused::TooLong,
        }
    }

    /// A fill went through: the refusals that this ends, if there were any.
    pub(super) fn over(&self) -> Option<u64> {
        if self.since.load(Ordering::Relaxed) == 0 || self.since.swap(0, Ordering::Relaxed) == 0 {
            return None;
        }
        Some(self.refusals.swap(0, Ordering::Relaxed))
    }

    /// Refusals since the last fill that went through.
    pub(super) fn refusals(&self) -> u64 {
        self.refusals.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shortage_is_borne_for_a_while_and_no_longer() {
        let shortage = EnomemRetry::default();
        let patience = u64::try_from(PATIENCE.as_micros()).unwrap();
        assert_eq!(shortage.refused(0), Refused::First);
        assert_eq!(shortage.refused(patience - 1), Refused::Again);
        assert_eq!(shortage.refused(patience), Refused::TooLong);
        assert_eq!(shortage.refusals(), 3);
    }

    #[test]
    fn a_fill_that_goes_through_gives_new_patience() {
        let shortage = EnomemRetry::default();
        let patience = u64::try_from(PATIENCE.as_micros()).unwrap();
        assert_eq!(shortage.over(), None);
        shortage.refused(0);
        shortage.refused(patience - 1);
        assert_eq!(shortage.over(), Some(2));
        assert_eq!(shortage.over(), None);
        assert_eq!(shortage.refused(2 * patience), Refused::First);
    }
}
