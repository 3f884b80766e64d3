// SPDX-License-Identifier: MIT OR Apache-2.0
//! The buffers of a process, and their files.

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
}

/// A buffer: its process and the image's number of it.
pub(crate) type Name = (usize, usize);
