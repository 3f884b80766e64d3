// SPDX-License-Identifier: MIT OR Apache-2.0
//! Mappings of files that the bench alone reads and writes, all pages resident from the start.

use std::num::NonZeroUsize;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use anyhow::Context as _;
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};

/// A mapping.
pub(super) struct View {
    start: NonNull<u8>,
    length: usize,
    writable: bool,
}

impl View {
    /// No other process writes the file while the view lives, and it gets no shorter: the bench ensures both.
    pub(super) fn writable(file: BorrowedFd<'_>, length: usize) -> anyhow::Result<Self> {
        Self::new(file, length, true)
    }

    /// As [`View::writable`], to be read.
    pub(super) fn readable(file: BorrowedFd<'_>, length: usize) -> anyhow::Result<Self> {
        Self::new(file, length, false)
    }

    fn new(file: BorrowedFd<'_>, length: usize, writable: bool) -> anyhow::Result<Self> {
        let whole = NonZeroUsize::new(length).context("nothing to map")?;
        let read = ProtFlags::PROT_READ;
        let protection = if writable { read | ProtFlags::PROT_WRITE } else { read };
        // SAFETY: a new mapping at an address that the kernel picks.
        let start =
            unsafe { mmap(None, whole, protection, MapFlags::MAP_SHARED | MapFlags::MAP_POPULATE, file, 0) };
        Ok(Self { start: start.context("mmap")?.cast(), length, writable })
    }

    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: mapped until the view is dropped; the constructor's rule excludes writers meanwhile.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.length) }
    }

    /// # Panics
    /// The view is read-only.
    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        assert!(self.writable, "the view is read-only");
        // SAFETY: as above, and mapped writable.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.length) }
    }
}

impl Drop for View {
    fn drop(&mut self) {
        // SAFETY: the mapping is the view's, and nothing borrows from it any more.
        let _ = unsafe { munmap(self.start.cast(), self.length) };
    }
}
