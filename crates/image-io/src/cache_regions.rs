// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which stretches of a file are worth asking the page cache for.
//!
//! Where the page cache has only islands, reading them through it makes the kernel read ahead of each, and pages
//! on their way count as cached: a reader of "cached" bytes then waits for the disk, behind reads that nobody
//! asked for. So a stretch that is mostly on the disk is read past the page cache, islands and all.

use std::sync::atomic::{AtomicU8, Ordering};

/// Bytes of a stretch: some milliseconds of a disk's time, thousands of looks saved in a large file.
const WINDOW: u64 = 8 * 1024 * 1024;

/// Stretches that are noted: the first 16 TiB, as much as one process can have. A sparse file may claim exabytes.
const MAX_WINDOWS: u64 = 1 << 21;

const UNKNOWN: u8 = 0;
const COLD: u8 = 1;
const WARM: u8 = 2;

/// What was found for each stretch when it was first asked for; one byte each.
#[derive(Debug)]
pub(crate) struct CacheRegions {
    states: Box<[AtomicU8]>,
}

impl CacheRegions {
    pub(crate) fn new(file_len: u64) -> Self {
        let count = usize::try_from(file_len.div_ceil(WINDOW).min(MAX_WINDOWS)).unwrap_or(0);
        Self { states: (0..count).map(|_| AtomicU8::new(UNKNOWN)).collect() }
    }

    /// Whether the bytes at `offset` lie in a stretch that is not the page cache's. `look` tells of a range
    /// whether it is, once for each stretch.
    pub(crate) fn is_cold(&self, offset: u64, look: impl FnOnce(u64, u64) -> bool) -> bool {
        let window = offset / WINDOW;
        let Some(state) = usize::try_from(window).ok().and_then(|window| self.states.get(window)) else {
            return false;
        };
        match state.load(Ordering::Relaxed) {
            UNKNOWN => {
                let warm = look(window * WINDOW, WINDOW);
                state.store(if warm { WARM } else { COLD }, Ordering::Relaxed);
                !warm
            }
            known => known == COLD,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_stretch_is_looked_at_once_and_remembered() {
        let windows = CacheRegions::new(3 * WINDOW - 1);
        let mut looks = Vec::new();
        for offset in [0, 1, 2 * WINDOW, 2 * WINDOW + 5, WINDOW - 1] {
            let cold = windows.is_cold(offset, |start, len| {
                looks.push((start, len));
                start == 0
            });
            assert_eq!(cold, offset >= WINDOW);
        }
        assert_eq!(looks, [(0, WINDOW), (2 * WINDOW, WINDOW)]);
    }

    #[test]
    fn a_sparse_file_of_exabytes_costs_two_megabytes() {
        let windows = CacheRegions::new(u64::MAX);
        assert_eq!(windows.states.len() as u64, MAX_WINDOWS);
        assert!(windows.is_cold((MAX_WINDOWS - 1) * WINDOW, |_, _| false));
        assert!(!windows.is_cold(MAX_WINDOWS * WINDOW, |_, _| panic!("it is not noted")));
    }

    #[test]
    fn beyond_the_end_nothing_is_cold() {
        assert!(!CacheRegions::new(WINDOW).is_cold(WINDOW, |_, _| panic!("there is nothing to look at")));
        assert!(!CacheRegions::new(0).is_cold(0, |_, _| panic!("there is nothing to look at")));
    }
}
