// SPDX-License-Identifier: MIT OR Apache-2.0
//! Allocates GPU addresses. The engine has the whole address space of its own render node.

use std::collections::BTreeMap;

/// The alignment of all ranges and their sizes.
const ALIGNMENT: u64 = 64 << 10;
/// The alignment of ranges of this size or more, so that one page directory entry maps them.
const LARGE_ALIGNMENT: u64 = 2 << 20;

/// Free ranges by their first address. Adjacent ranges are joined.
#[derive(Debug)]
pub(crate) struct Addresses {
    free: BTreeMap<u64, u64>,
}

impl Addresses {
    /// Creates an allocator of the addresses from `first` up to `end`.
    pub(crate) fn new(first: u64, end: u64) -> Self {
        let first = first.next_multiple_of(ALIGNMENT).max(ALIGNMENT);
        let size = end.saturating_sub(first) / ALIGNMENT * ALIGNMENT;
        Self { free: (size > 0).then_some((first, size)).into_iter().collect() }
    }

    /// Takes the first free range that is large enough.
    pub(crate) fn take(&mut self, bytes: u64) -> Option<u64> {
        let bytes = rounded(bytes)?;
        let align = if bytes >= LARGE_ALIGNMENT { LARGE_ALIGNMENT } else { ALIGNMENT };
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

    /// Frees a range that was taken with that size.
    pub(crate) fn release(&mut self, address: u64, bytes: u64) {
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
    bytes.max(1).checked_next_multiple_of(ALIGNMENT)
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn ranges_are_aligned_apart_and_never_at_the_bottom() {
        let mut addresses = Addresses::new(0, 1 << 30);
        assert_eq!(addresses.take(1), Some(ALIGNMENT), "the kernel keeps the first 64 KiB");
        assert_eq!(addresses.take(ALIGNMENT + 1), Some(2 * ALIGNMENT));
        assert_eq!(addresses.take(LARGE_ALIGNMENT), Some(LARGE_ALIGNMENT));
        assert_eq!(addresses.take(5), Some(4 * ALIGNMENT), "the gap before a large range is used");
        assert_eq!(addresses.take(LARGE_ALIGNMENT + 1), Some(2 * LARGE_ALIGNMENT));
    }

    #[test]
    fn freed_ranges_are_joined() {
        let mut addresses = Addresses::new(LARGE_ALIGNMENT, 5 * LARGE_ALIGNMENT);
        let taken: Vec<u64> = (0..4).map(|_| addresses.take(LARGE_ALIGNMENT).unwrap()).collect();
        assert_eq!(addresses.take(1), None);
        for index in [1, 3, 0, 2] {
            addresses.release(taken[index], LARGE_ALIGNMENT);
        }
        assert_eq!(addresses.free, BTreeMap::from([(LARGE_ALIGNMENT, 4 * LARGE_ALIGNMENT)]));
        assert_eq!(addresses.take(4 * LARGE_ALIGNMENT), Some(LARGE_ALIGNMENT));
    }

    proptest! {
        #[test]
        fn ranges_never_overlap_and_nothing_is_lost(
            steps in vec((any::<bool>(), 1..5 * LARGE_ALIGNMENT), 1..200),
        ) {
            let whole = BTreeMap::from([(LARGE_ALIGNMENT, 16 * LARGE_ALIGNMENT)]);
            let mut addresses = Addresses::new(LARGE_ALIGNMENT, 17 * LARGE_ALIGNMENT);
            let mut taken: BTreeMap<u64, u64> = BTreeMap::new();
            for (take, bytes) in steps {
                if !take {
                    let index = usize::try_from(bytes).unwrap() % taken.len().max(1);
                    if let Some(start) = taken.keys().nth(index).copied() {
                        addresses.release(start, taken.remove(&start).unwrap());
                    }
                } else if let Some(start) = addresses.take(bytes) {
                    prop_assert_eq!(start % ALIGNMENT, 0);
                    prop_assert!(bytes < LARGE_ALIGNMENT || start % LARGE_ALIGNMENT == 0);
                    let before = taken.range(..=start).next_back();
                    prop_assert!(before.is_none_or(|(first, size)| first + size <= start));
                    let after = taken.range(start..).next();
                    prop_assert!(after.is_none_or(|(first, _)| start + bytes <= *first));
                    prop_assert!(start >= LARGE_ALIGNMENT && start + bytes <= 17 * LARGE_ALIGNMENT);
                    taken.insert(start, bytes);
                }
            }
            for (start, bytes) in taken {
                addresses.release(start, bytes);
            }
            prop_assert_eq!(addresses.free, whole);
        }
    }

    #[test]
    fn the_largest_size_is_refused() {
        let mut addresses = Addresses::new(0, 1 << 47);
        for bytes in [1 << 47, u64::MAX, u64::MAX - ALIGNMENT] {
            assert_eq!(addresses.take(bytes), None);
        }
        assert_eq!(Addresses::new(1 << 40, 1 << 20).take(1), None);
        assert_eq!(addresses.take(1 << 46), Some(LARGE_ALIGNMENT));
    }
}
