// SPDX-License-Identifier: MIT OR Apache-2.0
//! Keeps for a while how sessions ended: a client that lost its connection with a worker asks its successor.

use std::sync::atomic::{AtomicU64, Ordering};

use super::bytes::ByteCell;

/// How many ended sessions have their records kept.
const KEPT: usize = 64;
/// Most bytes of one record: about two paths and a reason.
const MAX_RECORD: usize = 6 * 1024;

/// The latest [`KEPT`] records, and the counts of all. Only the control thread writes them.
#[repr(C)]
pub struct Outcomes {
    last: AtomicU64,
    served: AtomicU64,
    failed: AtomicU64,
    ring: [Record; KEPT],
}

#[repr(C)]
struct Record {
    /// The session's number; 0 if the slot has no record, or one that is being written.
    number: AtomicU64,
    bytes: ByteCell<MAX_RECORD>,
}

impl std::fmt::Debug for Outcomes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (served, failed) = self.counts();
        f.debug_struct("Outcomes").field("served", &served).field("failed", &failed).finish_non_exhaustive()
    }
}

impl Outcomes {
    /// Returns a number that no session had before.
    pub(super) fn next_number(&self) -> u64 {
        self.last.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// Notes how session `number` ended, with a `record` for the reader.
    ///
    /// Returns false if the record is too long to be kept. The session is counted all the same.
    pub fn note(&self, number: u64, ok: bool, record: &[u8]) -> bool {
        let (served, failed) = self.counts();
        let index = usize::try_from((served + failed) % KEPT as u64).unwrap_or(0);
        let kept = self.ring.get(index).is_some_and(|slot| {
            slot.number.store(0, Ordering::Release);
            let kept = slot.bytes.set(record);
            if kept {
                slot.number.store(number, Ordering::Release);
            }
            kept
        });
        if ok { &self.served } else { &self.failed }.fetch_add(1, Ordering::AcqRel);
        kept
    }

    /// Returns how many sessions ended well, and how many failed.
    #[must_use]
    pub fn counts(&self) -> (u64, u64) {
        (self.served.load(Ordering::Acquire), self.failed.load(Ordering::Acquire))
    }

    /// Returns the record of a session, if it is kept.
    #[must_use]
    pub fn find(&self, number: u64) -> Option<Vec<u8>> {
        self.all().find_map(|(found, bytes)| (found == number).then_some(bytes))
    }

    /// Returns the records that are kept, each with its session's number, in no order.
    pub fn all(&self) -> impl Iterator<Item = (u64, Vec<u8>)> {
        let written = self.ring.iter().filter(|slot| slot.number.load(Ordering::Acquire) != 0);
        written.map(|slot| (slot.number.load(Ordering::Acquire), slot.bytes.get()))
    }
}

#[cfg(test)]
mod tests {
    use super::super::Ledger;
    use super::*;

    #[test]
    fn the_latest_outcomes_are_kept_and_all_are_counted() {
        let outcomes = Ledger::new().unwrap().outcomes();
        let all = KEPT as u64 + 3;
        for number in 1..=all {
            assert!(outcomes.note(number, number % 2 == 0, &number.to_le_bytes()));
        }
        assert_eq!(outcomes.counts(), (all / 2, all - all / 2));
        assert_eq!(outcomes.find(3), None);
        assert_eq!(outcomes.find(4), Some(4_u64.to_le_bytes().to_vec()));
        assert_eq!(outcomes.all().count(), KEPT);
    }

    #[test]
    fn a_record_too_long_is_counted_and_not_kept() {
        let outcomes = Ledger::new().unwrap().outcomes();
        assert!(!outcomes.note(1, false, &[0; MAX_RECORD + 1]));
        assert_eq!((outcomes.counts(), outcomes.find(1)), ((0, 1), None));
    }

    #[test]
    fn no_number_is_given_twice() {
        let ledger = Ledger::new().unwrap();
        let number = || {
            let index = ledger.take_session().unwrap();
            let slot = &ledger.sessions()[index];
            slot.set_state(super::super::SessionState::Free);
            slot.number()
        };
        assert_eq!([number(), number()], [1, 2]);
    }
}
