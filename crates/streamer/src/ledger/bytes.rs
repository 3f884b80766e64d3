// SPDX-License-Identifier: MIT OR Apache-2.0
//! Keeps a string of bytes in shared memory.

use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};

/// Up to `N` bytes. One worker writes them before any process relies on them, and its successors read them.
///
/// All-zero memory is an empty cell.
#[repr(C)]
pub(super) struct ByteCell<const N: usize> {
    len: AtomicU32,
    bytes: [AtomicU8; N],
}

impl<const N: usize> ByteCell<N> {
    /// Stores the bytes. Returns false and changes nothing if they are too many.
    pub(super) fn set(&self, bytes: &[u8]) -> bool {
        let Some(len) = u32::try_from(bytes.len()).ok().filter(|&len| len as usize <= N) else {
            return false;
        };
        for (cell, byte) in self.bytes.iter().zip(bytes) {
            cell.store(*byte, Ordering::Relaxed);
        }
        self.len.store(len, Ordering::Release);
        true
    }

    /// Returns the bytes.
    pub(super) fn get(&self) -> Vec<u8> {
        let len = (self.len.load(Ordering::Acquire) as usize).min(N);
        self.bytes.iter().take(len).map(|cell| cell.load(Ordering::Relaxed)).collect()
    }
}
