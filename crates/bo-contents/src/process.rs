// SPDX-License-Identifier: MIT OR Apache-2.0
//! The buffers of a process, and their files.

use std::ops::Range;
use std::os::fd::OwnedFd;

use crate::pages::GpuPagesFile;

/// The buffer memory of one process or one render node. A restore skips buffers without a dma-buf.
#[derive(Debug, Clone, Copy)]
pub struct ProcessBuffers<'a> {
    /// The files with the bytes of the buffers.
    pub files: &'a [GpuPagesFile],
    /// The dma-bufs, by the image's number of the buffer.
    pub dmabufs: &'a [Option<OwnedFd>],
}

impl ProcessBuffers<'_> {
    /// Returns the bytes in one of its files of buffers that have a dma-buf.
    pub(crate) fn bytes_in(&self, file: &GpuPagesFile) -> u64 {
        let here = |buffer: usize| self.dmabufs.get(buffer).is_some_and(Option::is_some);
        let stretches = file.stretches().iter().filter(|stretch| here(stretch.buffer));
        stretches.map(|stretch| stretch.bytes).sum()
    }

    /// Returns the ranges of its files with the bytes of buffers that have a dma-buf, with the name of each
    /// file.
    pub fn ranges(&self) -> impl Iterator<Item = (&str, Vec<Range<u64>>)> {
        let is_here = |buffer: usize| self.dmabufs.get(buffer).is_some_and(Option::is_some);
        self.files.iter().map(move |file| (file.name(), file.ranges(is_here)))
    }
}

/// A buffer: its process and the image's number of it.
pub(crate) type Name = (usize, usize);
