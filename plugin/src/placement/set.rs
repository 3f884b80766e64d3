// SPDX-License-Identifier: MIT OR Apache-2.0
//! Small sets of places.

/// The bound of the numbers in a set.
pub(super) const CAPACITY: usize = 256;

/// A set of numbers below [`CAPACITY`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Set([u64; CAPACITY / 64]);

impl Set {
    pub(super) fn insert(&mut self, place: usize) {
        self.0[place / 64] |= 1 << (place % 64);
    }

    pub(super) fn remove(&mut self, place: usize) {
        self.0[place / 64] &= !(1 << (place % 64));
    }

    pub(super) fn contains(&self, place: usize) -> bool {
        self.0[place / 64] & 1 << (place % 64) != 0
    }

    pub(super) fn and(&self, other: &Self) -> Self {
        Self(std::array::from_fn(|word| self.0[word] & other.0[word]))
    }

    pub(super) fn or(&self, other: &Self) -> Self {
        Self(std::array::from_fn(|word| self.0[word] | other.0[word]))
    }

    pub(super) fn len(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0 == [0; CAPACITY / 64]
    }

    /// Returns the numbers in ascending order.
    pub(super) fn iter(self) -> impl Iterator<Item = usize> {
        let word = |(index, mut word): (usize, u64)| {
            std::iter::from_fn(move || {
                let place = word.trailing_zeros() as usize;
                word &= word.wrapping_sub(1);
                (place < 64).then_some(index * 64 + place)
            })
        };
        self.0.into_iter().enumerate().flat_map(word)
    }
}

impl FromIterator<usize> for Set {
    fn from_iter<I: IntoIterator<Item = usize>>(places: I) -> Self {
        let mut set = Self::default();
        places.into_iter().for_each(|place| set.insert(place));
        set
    }
}
