// SPDX-License-Identifier: MIT OR Apache-2.0
//! The only source of chance in the simulation.

use std::ops::Range;

/// SplitMix64: every seed, also 0 and 1, gives an unrelated sequence.
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    /// A number of `range`, which must not be empty.
    pub(crate) fn within(&mut self, range: Range<u64>) -> u64 {
        range.start + self.next() % (range.end - range.start)
    }

    /// An index into a list of `len`.
    pub(crate) fn index(&mut self, len: usize) -> usize {
        usize::try_from(self.within(0..len as u64)).unwrap()
    }

    /// True once in `of` times.
    pub(crate) fn once_in(&mut self, of: u64) -> bool {
        self.within(0..of) == 0
    }
}
