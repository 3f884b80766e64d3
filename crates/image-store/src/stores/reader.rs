// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads the chunks of an image from packs, as a whole or by block.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use rewake_criu_images::Digest;
use rewake_manifest::SealedChunk;

use crate::blocks;
use crate::error::{ImageStoreError, Result};
use crate::format::ChunkLocation;
use crate::names::{DAMAGED, INDEXES, PACKS};
use crate::report::StoredImage;
use crate::store::ImageStore;

/// Times that a chunk is read which is not what it was: the store may have answered with other bytes once.
const ATTEMPTS: u32 = 3;
/// A body with fewer bytes is copied.
const SHORT_BODY: usize = 256 << 10;

/// The chunks of an image. It takes some 200 bytes for each.
#[derive(Debug)]
pub(crate) struct ChunkReader {
    store: ImageStore,
    index: String,
    chunks: HashMap<Digest, ChunkLocation>,
    /// Bytes that the store has sent.
    read: AtomicU64,
}

impl ChunkReader {
    /// Reads the index of an image.
    pub(crate) async fn open(store: &ImageStore, image: &StoredImage) -> Result<Self> {
        let object = store.object(INDEXES, &image.version);
        let damaged = |what: &str| ImageStoreError::Damaged { object: object.clone(), what: what.to_owned() };
        let index = store.index(&image.version).await?.ok_or_else(|| damaged("it is missing"))?;
        if index.image.id != image.id {
            return Err(damaged("it is of another image than the name says"));
        }
        Ok(Self {
            store: store.clone(),
            chunks: index.chunks.into_iter().collect(),
            index: object,
            read: AtomicU64::new(0),
        })
    }

    /// Reads a chunk, and compares it with its hash.
    pub(crate) async fn chunk(&self, digest: Digest, length: u32) -> Result<Vec<u8>> {
        let at = self.locate_whole(digest, length)?;
        let mut attempt = 0;
        loop {
            attempt += 1;
            let found = match self.blocks(at, 0..at.blocks.len()).await {
                Ok(bytes) if blake3::hash(&bytes).as_bytes() == &digest.0 => return Ok(bytes),
                Ok(_) => Err(self.damaged(at, &format!("not the bytes of chunk {digest:.12}"))),
                Err(error) => Err(error),
            };
            match found {
                Err(ImageStoreError::Damaged { .. }) if attempt < ATTEMPTS => {}
                found => return found,
            }
        }
    }

    /// Reads blocks of a chunk in their stored form. Nothing is compared.
    pub(crate) async fn stored(&self, chunk: SealedChunk, blocks: Range<usize>) -> Result<Bytes> {
        let at = self.locate_whole(chunk.digest, chunk.length)?;
        self.stored_run(&at.pack, blocks::range(at, blocks)).await
    }

    /// Reads a run of stored blocks. Nothing is compared.
    pub(crate) async fn stored_run(&self, pack: &str, range: Range<u64>) -> Result<Bytes> {
        let mut attempt = 0;
        loop {
            attempt += 1;
            match self.range(pack, range.clone()).await {
                Err(ImageStoreError::Damaged { .. }) if attempt < ATTEMPTS => {}
                found => return found,
            }
        }
    }

    /// Reads a block again that failed to decompress.
    pub(crate) async fn block_again(&self, chunk: SealedChunk, block: usize) -> Result<Vec<u8>> {
        let at = self.locate_whole(chunk.digest, chunk.length)?;
        // It was read once.
        let mut attempt = 1;
        loop {
            attempt += 1;
            match self.blocks(at, block..block + 1).await {
                Err(ImageStoreError::Damaged { .. }) if attempt < ATTEMPTS => {}
                found => return found,
            }
        }
    }

    /// Reads blocks of a chunk. Nothing proves them but their own checksums, which a manifest has.
    pub(crate) async fn blocks(&self, at: &ChunkLocation, blocks: Range<usize>) -> Result<Vec<u8>> {
        let stored = self.range(&at.pack, blocks::range(at, blocks.clone())).await?;
        blocks::load(&stored, at, blocks).map_err(|what| self.damaged(at, &what))
    }

    async fn range(&self, pack: &str, range: Range<u64>) -> Result<Bytes> {
        let stored = self.store.get_range(PACKS, pack, range).await?;
        self.read.fetch_add(stored.len() as u64, Ordering::Relaxed);
        // A short body may lie in a client's large buffer, all of which it would keep.
        let is_short = stored.len() < SHORT_BODY;
        Ok(if is_short { Bytes::copy_from_slice(&stored) } else { stored })
    }

    /// Returns how many bytes of memory the store has for one stored byte, at least 1.
    pub(crate) fn compression(&self) -> u64 {
        let sum =
            |of: fn(&ChunkLocation) -> u32| self.chunks.values().map(|at| u64::from(of(at))).sum::<u64>();
        (sum(|at| at.length) / sum(ChunkLocation::stored_length).max(1)).max(1)
    }

    /// Returns where a chunk of this length is.
    pub(crate) fn locate_whole(&self, digest: Digest, length: u32) -> Result<&ChunkLocation> {
        let at = self.locate(digest)?;
        if at.length != length {
            let what = format!("chunk {digest:.12} has {} bytes, expected {length}", at.length);
            return Err(ImageStoreError::Damaged { object: self.index.clone(), what });
        }
        Ok(at)
    }

    /// Returns the bytes that the store has sent.
    pub(crate) fn bytes_read(&self) -> u64 {
        self.read.load(Ordering::Relaxed)
    }

    /// Marks the pack of a chunk as damaged: no push uses it again.
    pub(crate) async fn mark_damaged(&self, digest: Digest) -> Result<()> {
        self.store.put(DAMAGED, &self.locate(digest)?.pack, Vec::new()).await
    }

    pub(crate) fn locate(&self, digest: Digest) -> Result<&ChunkLocation> {
        self.chunks.get(&digest).ok_or_else(|| ImageStoreError::Damaged {
            object: self.index.clone(),
            what: format!("it lacks chunk {digest:.12} of the manifest"),
        })
    }

    fn damaged(&self, at: &ChunkLocation, what: &str) -> ImageStoreError {
        let (from, length) = (at.offset, at.stored_length());
        let what = format!("in the {length} bytes from offset {from}: {what}");
        ImageStoreError::Damaged { object: self.store.object(PACKS, &at.pack), what }
    }
}
