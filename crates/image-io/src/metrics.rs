// SPDX-License-Identifier: MIT OR Apache-2.0
//! Counters of one cache and of the engines that fill it.

use std::sync::atomic::{AtomicU64, Ordering};

/// Live counters that the cache and its engines share. They only grow.
#[derive(Debug, Default)]
pub struct Metrics {
    pub(crate) hits: AtomicU64,
    pub(crate) loads: AtomicU64,
    pub(crate) pending: AtomicU64,
    pub(crate) full: AtomicU64,
    pub(crate) bytes_direct: AtomicU64,
    pub(crate) bytes_buffered: AtomicU64,
    pub(crate) retries: AtomicU64,
    pub(crate) refused: AtomicU64,
}

/// The counters at one moment. Each is read by itself, so sums may be slightly off.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Counters {
    /// Blocks found in the cache.
    pub hits: u64,
    /// Blocks that a caller had to load.
    pub loads: u64,
    /// Times a caller found the block being loaded by another.
    pub pending: u64,
    /// Times that every buffer was in use: the bound on memory was reached.
    pub full: u64,
    /// Bytes that engines read past the page cache.
    pub bytes_direct: u64,
    /// Bytes that engines read through the page cache ([`crate::read_now`] is not counted).
    pub bytes_buffered: u64,
    /// Reads that were issued again: after a short read, an interruption, EIO, or a refused direct read.
    pub retries: u64,
    /// Reads that `Engine::submit` returned: the bound on reads in flight was reached.
    pub refused: u64,
}

impl Metrics {
    /// Returns the counters now.
    pub fn snapshot(&self) -> Counters {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Counters {
            hits: get(&self.hits),
            loads: get(&self.loads),
            pending: get(&self.pending),
            full: get(&self.full),
            bytes_direct: get(&self.bytes_direct),
            bytes_buffered: get(&self.bytes_buffered),
            retries: get(&self.retries),
            refused: get(&self.refused),
        }
    }

    pub(crate) fn add(counter: &AtomicU64, n: u64) {
        counter.fetch_add(n, Ordering::Relaxed);
    }
}
