// SPDX-License-Identifier: MIT OR Apache-2.0
//! Notes which regions of a file are worth a query of the page cache.
//!
//! Where the page cache has only islands, the kernel reads ahead of each island that is read through it.
//! Pages in flight count as cached, so a reader of "cached" bytes waits for the disk after that readahead. So
//! a region that is mostly on the disk is read past the page cache, islands included.

use std::sync::atomic::{AtomicU8, Ordering};

/// Bytes of a region: some milliseconds of a disk's time. A large file needs thousands of queries less.
const REGION: u64 = 8 * 1024 * 1024;

/// Regions that are noted: the first 16 TiB, as much as one process can have. A sparse file may claim
/// exabytes.
const MAX_REGIONS: u64 = 1 << 21;

const UNKNOWN: u8 = 0;
const COLD: u8 = 1;
const WARM: u8 = 2;

/// The state of each region at its first query; one byte each.
#[derive(Debug)]
pub(crate) struct CacheRegions {
    states: Box<[AtomicU8]>,
}

impl CacheRegions {
    pub(crate) fn new(file_len: u64) -> Self {
        let count = usize::try_from(file_len.div_ceil(REGION).min(MAX_REGIONS)).unwrap_or(0);
        Self { states: (0..count).map(|_| AtomicU8::new(UNKNOWN)).collect() }
    }

    /// Whether `offset` lies in a region that is mostly not in the page cache. `query` decides for a range,
    /// once for each region.
    pub(crate) fn is_cold(&self, offset: u64, query: impl FnOnce(u64, u64) -> bool) -> bool {
        let region = offset / REGION;
        let Some(state) = usize::try_from(region).ok().and_then(|region| self.states.get(region)) else {
            return false;
        };
        match state.load(Ordering::Relaxed) {
            UNKNOWN => {
                let warm = query(region * REGION, REGION);
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
    fn each_region_is_queried_once() {
        let regions = CacheRegions::new(3 * REGION - 1);
        let mut queries = Vec::new();
        for offset in [0, 1, 2 * REGION, 2 * REGION + 5, REGION - 1] {
            let cold = regions.is_cold(offset, |start, len| {
                queries.push((start, len));
                start == 0
            });
            assert_eq!(cold, offset >= REGION);
        }
        assert_eq!(queries, [(0, REGION), (2 * REGION, REGION)]);
    }

    #[test]
    fn a_sparse_file_of_exabytes_costs_two_megabytes() {
        let regions = CacheRegions::new(u64::MAX);
        assert_eq!(regions.states.len() as u64, MAX_REGIONS);
        assert!(regions.is_cold((MAX_REGIONS - 1) * REGION, |_, _| false));
        assert!(!regions.is_cold(MAX_REGIONS * REGION, |_, _| panic!("the region is not noted")));
    }

    #[test]
    fn beyond_the_end_nothing_is_cold() {
        assert!(!CacheRegions::new(REGION).is_cold(REGION, |_, _| panic!("the file ends before")));
        assert!(!CacheRegions::new(0).is_cold(0, |_, _| panic!("the file ends before")));
    }
}
