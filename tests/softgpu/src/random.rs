// SPDX-License-Identifier: MIT OR Apache-2.0
//! Numbers that look like chance, the same for the same seed.

/// Marsaglia's xorshift; not 0.
#[derive(Debug)]
pub struct Random(pub u64);

impl Random {
    /// The next one.
    pub fn number(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// One below `end`, which is not 0.
    pub fn below(&mut self, end: u64) -> u64 {
        self.number() % end
    }

    /// One of a list that is not empty.
    ///
    /// # Panics
    /// It is empty.
    pub fn of<T: Copy>(&mut self, list: &[T]) -> T {
        list[usize::try_from(self.below(list.len() as u64)).unwrap()]
    }
}
