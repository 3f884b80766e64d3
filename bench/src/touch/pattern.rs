// SPDX-License-Identifier: MIT OR Apache-2.0
//! The content of memory and the order of accesses: both computed, neither stored.

use rewake_testkit::random::mix;

/// 64-bit words in a 4 KiB page.
pub(crate) const WORDS: u64 = 512;

/// The word at `index` (counted over the whole memory): random bits that no server can compress, guess or
/// take from a neighbour, and that any reader can recompute (the `SplitMix64` finaliser).
pub(crate) fn word(index: u64) -> u64 {
    mix(index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

/// Every page exactly once, in an order without locality. Needs no memory of its own, which would be lazy
/// too: a bijection of the next power of two, values past the end skipped.
#[derive(Debug)]
pub(crate) struct Permutation {
    pages: u64,
    mask: u64,
    half: u32,
    next: u64,
}

impl Permutation {
    pub(crate) fn new(pages: u64) -> Self {
        let mask = pages.next_power_of_two() - 1;
        Self { pages, mask, half: (mask.count_ones() / 2).max(1), next: 0 }
    }

    /// Each step can be undone modulo a power of two: x ^= x >> k, and x *= odd.
    fn mix(&self, mut x: u64) -> u64 {
        for factor in [0x9e37_79b9_7f4a_7c15, 0xbf58_476d_1ce4_e5b9, 0x94d0_49bb_1331_11eb] {
            x = x.wrapping_mul(factor) & self.mask;
            x ^= x >> self.half;
        }
        x
    }
}

impl Iterator for Permutation {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        while self.next <= self.mask {
            let page = self.mix(self.next);
            self.next += 1;
            if page < self.pages {
                return Some(page);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_page_is_accessed_exactly_once() {
        for pages in [1, 2, 3, 255, 256, 1000, 65_536, 100_003] {
            let mut seen: Vec<u64> = Permutation::new(pages).collect();
            seen.sort_unstable();
            assert!(seen.into_iter().eq(0..pages), "{pages} pages");
        }
    }

    #[test]
    fn the_order_has_no_locality() {
        let order: Vec<u64> = Permutation::new(1 << 16).collect();
        let near = order.windows(2).filter(|pair| pair[0].abs_diff(pair[1]) <= 16).count();
        // Expected by chance: 32 in 65536 of 65535 pairs.
        assert!(near < 100, "{near} of {} steps stay within 16 pages", order.len());
    }

    #[test]
    fn neighbouring_words_share_nothing() {
        let mut words: Vec<u64> = (0..100_000).map(word).collect();
        words.sort_unstable();
        words.dedup();
        assert_eq!(words.len(), 100_000);
        assert!(!words.contains(&0), "a zero word would look like a page served as zeros");
    }
}
