// SPDX-License-Identifier: MIT OR Apache-2.0
//! The two mappings of the touched process.

use std::num::NonZeroUsize;
use std::ptr::NonNull;

use anyhow::Context as _;
use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous};

use super::pattern::{WORDS, word};

fn map(bytes: u64, sharing: MapFlags) -> anyhow::Result<NonNull<u64>> {
    let length = usize::try_from(bytes).ok().and_then(NonZeroUsize::new).context("no memory asked for")?;
    // SAFETY: a new anonymous mapping at an address that the kernel picks touches no other memory.
    let start =
        unsafe { mmap_anonymous(None, length, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, sharing) };
    Ok(start.with_context(|| format!("mmap of {bytes} bytes"))?.cast())
}

/// Private anonymous memory full of the pattern: the memory that is restored lazily. Lives as long as the
/// process.
#[derive(Debug)]
pub(crate) struct Memory {
    start: NonNull<u64>,
    pages: u64,
}

impl Memory {
    /// Maps and fills `pages` pages of 4 KiB.
    pub(crate) fn filled(pages: u64) -> anyhow::Result<Self> {
        let start = map(pages * WORDS * 8, MapFlags::MAP_PRIVATE)?;
        let memory = Self { start, pages };
        for index in 0..pages * WORDS {
            // SAFETY: index is below the mapping's length in words, the mapping is writable and ours alone.
            unsafe { memory.at(index).write(word(index)) };
        }
        Ok(memory)
    }

    /// Where word `index` lies; callers keep `index` below `pages * WORDS`.
    fn at(&self, index: u64) -> NonNull<u64> {
        debug_assert!(index < self.pages * WORDS);
        let index = usize::try_from(index).unwrap_or(usize::MAX);
        // SAFETY: the mapping is `pages * WORDS` words long, checked by every caller.
        unsafe { self.start.add(index) }
    }

    pub(crate) fn pages(&self) -> u64 {
        self.pages
    }

    /// Reads one word, faulting its page in if it is missing. Which word of the page depends on the page.
    pub(crate) fn touch(&self, page: u64) -> u64 {
        assert!(page < self.pages, "page {page} of {}", self.pages);
        // SAFETY: inside the mapping, aligned, initialised by `filled`; volatile because the read is the point.
        unsafe { self.at(touched_word(page)).read_volatile() }
    }

    /// Number of words, over all the memory, that do not hold what they must.
    pub(crate) fn wrong_words(&self) -> u64 {
        let wrong = (0..self.pages * WORDS).filter(|&index| {
            // SAFETY: inside the mapping, aligned, initialised by `filled`.
            unsafe { self.at(index).read_volatile() != word(index) }
        });
        wrong.count() as u64
    }

    /// Overwrites one word with something wrong.
    #[cfg(test)]
    pub(crate) fn spoil(&self, index: u64) {
        assert!(index < self.pages * WORDS);
        // SAFETY: inside the writable mapping, which the test has to itself.
        unsafe { self.at(index).write(!word(index)) };
    }
}

/// Index of the word that [`Memory::touch`] reads.
pub(crate) fn touched_word(page: u64) -> u64 {
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
        let start = map(capacity * 8, MapFlags::MAP_SHARED)?;
        Ok(Self { start, capacity: usize::try_from(capacity)?, used: 0 })
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
        let memory = Memory::filled(64).unwrap();
        assert_eq!(memory.wrong_words(), 0);
        memory.spoil(63 * WORDS + 511);
        assert_eq!(memory.wrong_words(), 1);
    }

    #[test]
    fn an_access_reads_the_word_of_the_pattern() {
        let memory = Memory::filled(64).unwrap();
        assert!((0..64).all(|page| memory.touch(page) == word(touched_word(page))));
        memory.spoil(touched_word(9));
        assert_ne!(memory.touch(9), word(touched_word(9)));
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
