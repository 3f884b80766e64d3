// SPDX-License-Identifier: MIT OR Apache-2.0
//! A chunk of a file of a stored image, and which of its blocks were requested.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

use rewake_criu_images::CHUNK;
use rewake_image_io::BLOCK;
use rewake_manifest::SealedChunk;

use crate::blocks;
use crate::format::ChunkLocation;

/// Stored bytes of a request for fewer, if the next blocks of the chunk have them: they take 0.5 ms of a link
/// of 1 Gbit/s.
const LEAST_REQUEST: usize = 64 << 10;

/// A chunk of a file: some 56 bytes.
#[derive(Debug)]
pub(crate) struct StoredChunk {
    /// Where it begins in the file.
    pub(crate) offset: u64,
    pub(crate) chunk: SealedChunk,
    /// A bit for each block that was requested. None of them is read ahead: clients have it, or had it read
    /// ahead.
    requested: AtomicU32,
}

const _: () = assert!(CHUNK <= u32::BITS as u64 * BLOCK as u64);

impl StoredChunk {
    /// Makes one of which nothing was requested.
    pub(crate) fn new(offset: u64, chunk: SealedChunk) -> Self {
        Self { offset, chunk, requested: AtomicU32::new(0) }
    }

    /// Returns where it ends in the file.
    pub(crate) fn end(&self) -> u64 {
        self.offset + u64::from(self.chunk.length)
    }

    /// Notes that blocks are requested.
    pub(crate) fn request(&self, blocks: &Range<usize>) {
        self.requested.fetch_or(bits(blocks), Ordering::Relaxed);
    }

    /// Notes that they are not.
    pub(crate) fn forget(&self, blocks: &Range<usize>) {
        self.requested.fetch_and(!bits(blocks), Ordering::Relaxed);
    }

    /// Notes that nothing was requested.
    pub(crate) fn forget_all(&self) {
        self.requested.store(0, Ordering::Relaxed);
    }

    /// Returns how many blocks after these are read with them: a store sends a few stored KiB as fast as a
    /// few bytes. Those that were requested before end the request.
    pub(crate) fn neighbours(&self, at: &ChunkLocation, blocks: &Range<usize>) -> usize {
        let mut length = blocks::stored(at, blocks.clone());
        let requested = self.requested.load(Ordering::Relaxed);
        let is_read = |block: &usize| {
            length += at.stored(*block) as usize;
            length <= LEAST_REQUEST && requested & 1 << block == 0
        };
        (blocks.end..at.blocks.len()).take_while(is_read).count()
    }

    /// Returns the blocks of this range that were not requested yet.
    pub(crate) fn new_blocks(&self, blocks: Range<usize>) -> impl Iterator<Item = usize> + use<> {
        let requested = self.requested.load(Ordering::Relaxed);
        blocks.filter(move |block| requested & 1 << block == 0)
    }
}

/// A bit for each block.
fn bits(blocks: &Range<usize>) -> u32 {
    blocks.clone().fold(0, |bits, block| bits | 1 << block)
}
