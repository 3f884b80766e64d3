// SPDX-License-Identifier: MIT OR Apache-2.0
//! Addresses of a GPU's address space: which are free. The engine has the whole space of its own render node.

use std::collections::BTreeMap;

/// What every range is a multiple of, and aligned to.
const GRAIN: u64 = 64 << 10;
/// What ranges of at least that size are aligned to: one entry of a page directory then maps it.
const LARGE: u64 = 2 << 20;

/// Free ranges by their first address; neighbours are one range.
#[derive(Debug)]
pub(crate) struct Addresses {
    free: BTreeMap<u64, u64>,
}

impl Addresses {
    /// All addresses from `first` to before `end`.
    pub(crate) fn new(first: u64, end: u64) -> Self {
        let first = first.next_multiple_of(GRAIN).max(GRAIN);
        let size = end.saturating_sub(first) / GRAIN * GRAIN;
        Self { free: (size > 0).then_some((first, size)).into_iter().collect() }
    }

    /// Takes the first range that is free and large enough.
    pub(crate) fn take(&mut self, bytes: u64) -> Option<u64> {
        let bytes = rounded(bytes)?;
        let align = if bytes >= LARGE { LARGE } else { GRAIN };
        let (start, size, address) = self.free.iter().find_map(|(start, size)| {
            let address = start.checked_next_multiple_of(align)?;
            let end = address.checked_add(bytes)?;
            (end <= start + size).then_some((*start, *size, address))
        })?;
        self.free.remove(&start);
        if address > start {
            self.free.insert(start, address - start);
        }
        if start + size > address + bytes {
            self.free.insert(address + bytes, start + size - address - bytes);
        }
        Some(address)
    }

    /// Gives a range back that was taken with that size.
    pub(crate) fn give(&mut self, address: u64, bytes: u64) {
        let (mut start, mut size) = (address, rounded(bytes).unwrap_or(0));
        if let Some((before, length)) =
            self.free.range(..start).next_back().map(|(start, size)| (*start, *size))
            && before + length == start
        {
            self.free.remove(&before);
            (start, size) = (before, length + size);
        }
        if let Some(length) = self.free.remove(&(start + size)) {
            size += length;
        }
        self.free.insert(start, size);
    }
}

fn rounded(bytes: u64) -> Option<u64> {
    bytes.max(1).checked_next_multiple_of(GRAIN)
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn ranges_are_aligned_apart_and_never_at_the_bottom() {
        let mut addresses = Addresses::new(0, 1 << 30);
        assert_eq!(addresses.take(1), Some(GRAIN), "the kernel keeps the first 64 KiB");
        assert_eq!(addresses.take(GRAIN + 1), Some(2 * GRAIN));
        assert_eq!(addresses.take(LARGE), Some(LARGE));
        assert_eq!(addresses.take(5), Some(4 * GRAIN), "the gap before a large range is used");
        assert_eq!(addresses.take(LARGE + 1), Some(2 * LARGE));
    }

    #[test]
    fn what_is_given_back_is_one_range_again() {
        let mut addresses = Addresses::new(LARGE, 5 * LARGE);
        let taken: Vec<u64> = (0..4).map(|_| addresses.take(LARGE).unwrap()).collect();
        assert_eq!(addresses.take(1), None);
        for index in [1, 3, 0, 2] {
            addresses.give(taken[index], LARGE);
        }
        assert_eq!(addresses.free, BTreeMap::from([(LARGE, 4 * LARGE)]));
        assert_eq!(addresses.take(4 * LARGE), Some(LARGE));
    }

    proptest! {
        #[test]
        fn ranges_never_overlap_and_nothing_is_lost(steps in vec((any::<bool>(), 1..5 * LARGE), 1..200)) {
            let whole = BTreeMap::from([(LARGE, 16 * LARGE)]);
            let mut addresses = Addresses::new(LARGE, 17 * LARGE);
            let mut taken: BTreeMap<u64, u64> = BTreeMap::new();
            for (take, bytes) in steps {
                if !take {
                    let index = usize::try_from(bytes).unwrap() % taken.len().max(1);
                    if let Some(start) = taken.keys().nth(index).copied() {
                        addresses.give(start, taken.remove(&start).unwrap());
                    }
                } else if let Some(start) = addresses.take(bytes) {
                    prop_assert!(start % GRAIN == 0 && (bytes < LARGE || start % LARGE == 0));
                    let before = taken.range(..=start).next_back();
                    prop_assert!(before.is_none_or(|(first, size)| first + size <= start));
                    let after = taken.range(start..).next();
                    prop_assert!(after.is_none_or(|(first, _)| start + bytes <= *first));
                    prop_assert!(start >= LARGE && start + bytes <= 17 * LARGE);
                    taken.insert(start, bytes);
                }
            }
            for (start, bytes) in taken {
                addresses.give(start, bytes);
            }
            prop_assert_eq!(addresses.free, whole);
        }
    }

    #[test]
    fn no_size_is_too_large_to_be_refused() {
        let mut addresses = Addresses::new(0, 1 << 47);
        for bytes in [1 << 47, u64::MAX, u64::MAX - GRAIN] {
            assert_eq!(addresses.take(bytes), None);
        }
        assert_eq!(Addresses::new(1 << 40, 1 << 20).take(1), None);
        assert_eq!(addresses.take(1 << 46), Some(LARGE));
    }
}
