// SPDX-License-Identifier: MIT OR Apache-2.0
//! Counts how sessions ended: a worker's successor must not serve one again.

use std::sync::atomic::{AtomicU64, Ordering};

/// The counts. Only the control thread writes them.
#[derive(Debug)]
#[repr(C)]
pub struct Outcomes {
    last: AtomicU64,
    served: AtomicU64,
    failed: AtomicU64,
}

impl Outcomes {
    /// Returns a number that no session had before.
    pub(super) fn next_number(&self) -> u64 {
        self.last.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// Notes how a session ended.
    pub fn note(&self, ok: bool) {
        if ok { &self.served } else { &self.failed }.fetch_add(1, Ordering::AcqRel);
    }

    /// Returns how many sessions ended well, and how many failed.
    #[must_use]
    pub fn counts(&self) -> (u64, u64) {
        (self.served.load(Ordering::Acquire), self.failed.load(Ordering::Acquire))
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Ledger, SessionState};

    #[test]
    fn sessions_that_ended_are_counted() {
        let outcomes = Ledger::new().unwrap().outcomes();
        [true, false, true].into_iter().for_each(|ok| outcomes.note(ok));
        assert_eq!(outcomes.counts(), (2, 1));
    }

    #[test]
    fn no_number_is_given_twice() {
        let ledger = Ledger::new().unwrap();
        let number = || {
            let index = ledger.take_session().unwrap();
            let slot = &ledger.sessions()[index];
            slot.set_state(SessionState::Free);
            slot.number()
        };
        assert_eq!([number(), number()], [1, 2]);
    }
}
