// SPDX-License-Identifier: MIT OR Apache-2.0
//! The only source of chance in the simulation.

use std::ops::Range;

use rewake_testkit::Random;

/// Random choices that a seed repeats.
pub(crate) struct Rng(Random);

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        Self(Random::new(seed))
    }

    /// A number of `range`, which must not be empty.
    pub(crate) fn within(&mut self, range: Range<u64>) -> u64 {
        range.start + self.0.below(range.end - range.start)
    }

    /// An index into a list of `len`.
    pub(crate) fn index(&mut self, len: usize) -> usize {
        self.0.below(len)
    }

    /// True once in `of` times.
    pub(crate) fn once_in(&mut self, of: u64) -> bool {
        self.0.below(of) == 0
    }
}
