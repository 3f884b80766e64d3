// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory for the tests of this folder.

use std::ptr::NonNull;
use std::sync::Arc;

use super::Memory;

/// Pages of this process.
#[derive(Debug)]
pub(crate) struct Pages(memmap2::MmapRaw);

// SAFETY: the pages are mapped until the value is dropped, and never borrowed.
unsafe impl Memory for Arc<Pages> {
    fn start(&self) -> NonNull<u8> {
        NonNull::new(self.0.as_mut_ptr()).unwrap()
    }

    fn bytes(&self) -> usize {
        self.0.len()
    }
}

impl Pages {
    pub(crate) fn new(bytes: usize) -> Arc<Self> {
        Arc::new(Self(memmap2::MmapOptions::new().len(bytes).map_anon().unwrap().into()))
    }

    pub(crate) fn put(&self, at: usize, bytes: &[u8]) {
        // SAFETY: the range lies in the mapping, and no other thread runs.
        unsafe { self.0.as_mut_ptr().add(at).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }

    pub(crate) fn get(&self, at: usize, bytes: usize) -> Vec<u8> {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().add(at), bytes) }.to_vec()
    }
}
