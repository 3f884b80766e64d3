// SPDX-License-Identifier: MIT OR Apache-2.0
//! The content of a target's page: a function of seed, generation and page number. A zero page, another
//! place's page, a shifted page and a page from before the last write all look wrong.

use rewake_testkit::random::mix;

/// Bytes in a page.
pub const PAGE: usize = 4096;
const _: () = assert!(PAGE as u64 == rewake_uffd::PAGE_SIZE);
/// 64-bit words in a page.
pub const WORDS: usize = PAGE / 8;

/// The address of every target's main region: fixed, so that a test client can play a target's part.
pub const BASE: usize = 0x1000_0000_0000;

/// The content of one region at one time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pattern {
    /// Distinguishes regions.
    pub seed: u64,
    /// Distinguishes writes to one page; 0 is the content when the image was made.
    pub generation: u64,
}

impl Pattern {
    /// The content before any rewrite.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self { seed, generation: 0 }
    }

    /// The same region, written again.
    #[must_use]
    pub fn at(self, generation: u64) -> Self {
        Self { generation, ..self }
    }

    /// The 64-bit word number `index` of page `page`; never 0.
    #[must_use]
    #[inline(always)]
    pub fn word(self, page: usize, index: usize) -> u64 {
        let place = (page as u64) << 9 | index as u64;
        let key = mix(self.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ self.generation.rotate_left(40));
        mix(place.wrapping_add(key)) | 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_other_places_and_generations_differ() {
        let pattern = Pattern::new(7);
        let mut seen: Vec<u64> = (0..64 * WORDS).map(|i| pattern.word(i / WORDS, i % WORDS)).collect();
        seen.extend((0..WORDS).map(|i| pattern.at(1).word(0, i)));
        seen.extend((0..WORDS).map(|i| Pattern::new(8).word(0, i)));
        let all = seen.len();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), all);
    }
}
