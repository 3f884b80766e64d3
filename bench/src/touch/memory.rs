// SPDX-License-Identifier: MIT OR Apache-2.0
//! The two mappings of the touched process.

use std::hint::black_box;
use std::num::NonZeroUsize;
use std::ptr::NonNull;

use anyhow::Context as _;
use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous};

use super::pattern::{WORDS, word};

/// Private anonymous memory full of the pattern: the memory that is restored lazily. The allocator maps so
/// large a vector by itself.
#[derive(Debug)]
pub(crate) struct Memory(Vec<u64>);

impl Memory {
    /// Maps and fills `pages` pages of 4 KiB.
    pub(crate) fn filled(pages: u64) -> Self {
        Self((0..pages * WORDS).map(word).collect())
    }

    pub(crate) fn pages(&self) -> u64 {
        self.0.len() as u64 / WORDS
    }

    /// Reads one word, faulting its page in if it is missing. Which word of the page depends on the page.
    pub(crate) fn touch(&self, page: u64) -> u64 {
        let word = usize::try_from(accessed_word(page)).unwrap_or(usize::MAX);
        // The read is the point, and happens here.
        black_box(self.0[word])
    }

    /// Number of words, over all the memory, that do not hold what they must.
    pub(crate) fn wrong_words(&self) -> u64 {
        let wrong = (0..).zip(black_box(&self.0)).filter(|(index, found)| **found != word(*index));
        wrong.count() as u64
    }
}

/// Index of the word that [`Memory::touch`] reads.
pub(crate) fn accessed_word(page: u64) -> u64 {
    page * WORDS + page.wrapping_mul(7) % WORDS
}

/// Buffer for latencies during the measurement: shared anonymous memory, which CRIU restores before the
/// process runs and never lazily, made resident before the first sample.
#[derive(Debug)]
pub(crate) struct Samples {
    start: NonNull<u64>,
    capacity: usize,
    used: usize,
}

impl Samples {
    /// Space for `capacity` samples, not resident yet.
    pub(crate) fn with_capacity(capacity: u64) -> anyhow::Result<Self> {
        let capacity = usize::try_from(capacity)?;
        let length = NonZeroUsize::new(capacity * size_of::<u64>()).context("no memory asked for")?;
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new anonymous mapping at an address that the kernel picks touches no other memory.
        let start = unsafe { mmap_anonymous(None, length, protection, MapFlags::MAP_SHARED) };
        Ok(Self { start: start.context("mmap")?.cast(), capacity, used: 0 })
    }

    /// Makes all of it resident, so that recording takes no fault.
    pub(crate) fn make_present(&mut self) {
        // SAFETY: the whole mapping, writable and exclusively ours.
        unsafe { self.start.write_bytes(0, self.capacity) };
    }

    /// Records one latency in nanoseconds; past the capacity it panics.
    pub(crate) fn push(&mut self, nanoseconds: u64) {
        assert!(self.used < self.capacity, "more samples than pages");
        // SAFETY: below the capacity of the mapping, which is writable and exclusively ours.
        unsafe { self.start.add(self.used).write(nanoseconds) };
        self.used += 1;
    }

    /// The recorded latencies.
    pub(crate) fn recorded(&mut self) -> &mut [u64] {
        // SAFETY: the first `used` words were written by `push`; the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.used) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filled_memory_is_right_and_one_wrong_word_is_found() {
        let mut memory = Memory::filled(64);
        assert_eq!(memory.wrong_words(), 0);
        memory.0[63 * 512 + 511] ^= 1;
        assert_eq!(memory.wrong_words(), 1);
    }

    #[test]
    fn an_access_reads_the_word_of_the_pattern() {
        let mut memory = Memory::filled(64);
        assert!((0..64).all(|page| memory.touch(page) == word(accessed_word(page))));
        memory.0[usize::try_from(accessed_word(9)).unwrap()] ^= 1;
        assert_ne!(memory.touch(9), word(accessed_word(9)));
    }

    #[test]
    fn samples_are_read_as_recorded() {
        let mut samples = Samples::with_capacity(3).unwrap();
        samples.make_present();
        samples.push(5);
        samples.push(7);
        assert_eq!(samples.recorded(), [5, 7]);
    }
}
