// SPDX-License-Identifier: MIT OR Apache-2.0
//! One bit for every page of a plan; several threads change them concurrently.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::index;

const WORD: u64 = 64;

/// A fixed number of bits. Bits beyond that number in the last word stay clear.
#[derive(Debug)]
pub(crate) struct Bits {
    words: Box<[AtomicU64]>,
}

impl Bits {
    pub(crate) fn new(len: u64) -> Self {
        Self { words: (0..len.div_ceil(WORD)).map(|_| AtomicU64::new(0)).collect() }
    }

    pub(crate) fn get(&self, bit: u64) -> bool {
        self.load(bit / WORD) >> (bit % WORD) & 1 == 1
    }

    /// Sets the bits of `range`. Returns how many of them were clear. When several threads set a bit, exactly
    /// one of them counts it.
    pub(crate) fn set(&self, range: Range<u64>) -> u64 {
        let set = |(word, mask)| {
            let before = self.words[index(word)].fetch_or(mask, Ordering::AcqRel);
            u64::from((mask & !before).count_ones())
        };
        masks(range).map(set).sum()
    }

    /// Clears the bits of `range`.
    pub(crate) fn clear(&self, range: Range<u64>) {
        for (word, mask) in masks(range) {
            self.words[index(word)].fetch_and(!mask, Ordering::AcqRel);
        }
    }

    /// Number of set bits.
    pub(crate) fn count(&self) -> u64 {
        self.words.iter().map(|word| u64::from(word.load(Ordering::Acquire).count_ones())).sum()
    }

    /// The first clear bit of `range`, or the range's end.
    pub(crate) fn next_clear(&self, range: Range<u64>) -> u64 {
        self.find(range, |word| !word)
    }

    /// The first set bit of `range`, or the range's end.
    pub(crate) fn next_set(&self, range: Range<u64>) -> u64 {
        self.find(range, |word| word)
    }

    fn find(&self, range: Range<u64>, wanted: impl Fn(u64) -> u64) -> u64 {
        let end = range.end;
        masks(range)
            .find_map(|(word, mask)| {
                let found = wanted(self.load(word)) & mask;
                (found != 0).then(|| word * WORD + u64::from(found.trailing_zeros()))
            })
            .unwrap_or(end)
    }

    /// Maximal ranges of clear bits in `range`, in order.
    pub(crate) fn clear_ranges(&self, range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
        let mut at = range.start;
        std::iter::from_fn(move || {
            let start = self.next_clear(at..range.end);
            if start >= range.end {
                return None;
            }
            at = self.next_set(start..range.end);
            Some(start..at)
        })
    }

    fn load(&self, word: u64) -> u64 {
        self.words[index(word)].load(Ordering::Acquire)
    }
}

impl Clone for Bits {
    fn clone(&self) -> Self {
        let copy = |word: &AtomicU64| AtomicU64::new(word.load(Ordering::Acquire));
        Self { words: self.words.iter().map(copy).collect() }
    }
}

/// The words that have bits of `range`, each with a mask of those bits.
fn masks(range: Range<u64>) -> impl Iterator<Item = (u64, u64)> {
    let (start, end) = (range.start, range.end.max(range.start));
    (start / WORD..end.div_ceil(WORD)).filter_map(move |word| {
        let first = start.saturating_sub(word * WORD);
        let last = (end - word * WORD).min(WORD);
        (last > first).then(|| (word, u64::MAX << first & u64::MAX >> (WORD - last)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn setting_counts_only_bits_that_were_clear() {
        let bits = Bits::new(200);
        assert_eq!(bits.set(60..70), 10);
        assert_eq!(bits.set(0..200), 190);
        assert_eq!(bits.set(0..200), 0);
        bits.clear(63..129);
        assert_eq!(bits.count(), 134);
        assert_eq!(bits.set(0..200), 66);
    }

    #[test]
    fn an_empty_range_changes_and_finds_nothing() {
        let bits = Bits::new(128);
        for at in [0, 5, 64, 128] {
            assert_eq!(bits.set(at..at), 0);
            assert_eq!(bits.next_clear(at..at), at);
        }
        assert_eq!(bits.next_set(0..128), 128);
    }

    #[test]
    fn searches_stop_at_the_end_of_their_range() {
        let bits = Bits::new(300);
        bits.set(100..250);
        assert_eq!(bits.next_set(0..300), 100);
        assert_eq!(bits.next_set(0..90), 90);
        assert_eq!(bits.next_clear(100..300), 250);
        assert_eq!(bits.next_clear(100..200), 200);
    }

    #[test]
    fn clear_ranges_are_maximal_and_clipped() {
        let bits = Bits::new(300);
        bits.set(10..20);
        bits.set(64..128);
        assert_eq!(bits.clear_ranges(5..200).collect::<Vec<_>>(), [5..10, 20..64, 128..200]);
        assert_eq!(bits.clear_ranges(10..20).count(), 0);
    }
}
