// SPDX-License-Identifier: MIT OR Apache-2.0
//! Blocks of chunks that are being read, or were read last, in their stored form. Concurrent readers of a
//! block share one request, because page faults need blocks that the background load has requested, and
//! neighbours in a file share a block of a chunk.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use futures::FutureExt as _;
use futures::future::{BoxFuture, Shared};
use rewake_criu_images::Digest;

use crate::blocks;
use crate::error::ImageStoreError;
use crate::format::ChunkLocation;

/// Bytes that a read takes in addition to the stored ones.
const READ_COST: usize = 512;

/// The stored bytes of a read; the error is one for all who wait.
pub(crate) type ReadResult = Result<Bytes, Arc<ImageStoreError>>;

/// Blocks of a chunk that are being read, or were read.
#[derive(Debug, Clone)]
pub(crate) struct SharedRead {
    pub(crate) blocks: Range<usize>,
    number: u64,
    /// Bytes of memory: the stored ones, and what it takes itself.
    length: usize,
    result: Shared<BoxFuture<'static, ReadResult>>,
}

/// The last reads.
#[derive(Debug)]
pub(crate) struct SharedReads {
    recent: Mutex<RecentReads>,
    /// Bytes of memory that they have together.
    limit: usize,
}

#[derive(Debug, Default)]
struct RecentReads {
    of_chunks: HashMap<Digest, Vec<SharedRead>>,
    /// The chunk and the number of each read, the latest at the end.
    order: VecDeque<(Digest, u64)>,
    /// Bytes of memory that they have together.
    kept: usize,
    /// Reads so far.
    count: u64,
}

impl SharedRead {
    /// Waits for the stored bytes of the read.
    ///
    /// # Errors
    /// The read has failed.
    pub(crate) async fn wait(self) -> anyhow::Result<Bytes> {
        self.result.await.map_err(|error| anyhow::anyhow!("{error:#}"))
    }
}

impl SharedReads {
    /// Keeps up to `limit` bytes, but always the latest read.
    pub(crate) fn new(limit: usize) -> Self {
        Self { recent: Mutex::default(), limit }
    }

    /// Forgets all reads: what is damaged is read again.
    pub(crate) fn forget(&self) {
        *self.recent.lock().unwrap_or_else(PoisonError::into_inner) = RecentReads::default();
    }

    /// Returns the reads that have these blocks of a chunk, in their order, and which ones each has. `read`
    /// begins one where there is none: the last one with up to `more` blocks after these.
    pub(crate) fn begin<F>(
        &self,
        chunk: Digest,
        at: &ChunkLocation,
        blocks: Range<usize>,
        more: usize,
        read: impl Fn(Range<usize>) -> F,
    ) -> Vec<(SharedRead, Range<usize>)>
    where
        F: Future<Output = Result<Bytes, ImageStoreError>> + Send + 'static,
    {
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        recent.forget_failed(chunk);
        let (mut start, mut parts) = (blocks.start, Vec::new());
        while start < blocks.end {
            let found = recent.find(chunk, start).unwrap_or_else(|| {
                let longest = start..blocks.end + more;
                let end = longest.clone().find(|block| recent.find(chunk, *block).is_some());
                let blocks = start..end.unwrap_or(longest.end);
                let bytes = read(blocks.clone());
                let result = async move { bytes.await.map_err(Arc::new) };
                recent.add(chunk, at, blocks, result)
            });
            let end = found.blocks.end.min(blocks.end);
            parts.push((found, start..end));
            start = end;
        }
        recent.keep(self.limit);
        parts
    }

    /// Returns whether a read has a block.
    pub(crate) fn has(&self, chunk: Digest, block: usize) -> bool {
        self.recent.lock().unwrap_or_else(PoisonError::into_inner).find(chunk, block).is_some()
    }

    /// Adds a read of blocks that no other has.
    pub(crate) fn add(
        &self,
        chunk: Digest,
        at: &ChunkLocation,
        blocks: Range<usize>,
        result: impl Future<Output = ReadResult> + Send + 'static,
    ) -> SharedRead {
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        let read = recent.add(chunk, at, blocks, result);
        recent.keep(self.limit);
        read
    }
}

impl RecentReads {
    /// The latest read of a block.
    fn find(&self, chunk: Digest, block: usize) -> Option<SharedRead> {
        self.of_chunks.get(&chunk)?.iter().rev().find(|read| read.blocks.contains(&block)).cloned()
    }

    fn add(
        &mut self,
        chunk: Digest,
        at: &ChunkLocation,
        blocks: Range<usize>,
        result: impl Future<Output = ReadResult> + Send + 'static,
    ) -> SharedRead {
        let length = blocks::stored(at, blocks.clone()) + READ_COST;
        self.count += 1;
        let read = SharedRead { blocks, number: self.count, length, result: result.boxed().shared() };
        self.kept += length;
        self.of_chunks.entry(chunk).or_default().push(read.clone());
        self.order.push_back((chunk, self.count));
        read
    }

    /// Forgets reads of a chunk that have failed: the store may have the bytes by now.
    fn forget_failed(&mut self, chunk: Digest) {
        let Some(reads) = self.of_chunks.get_mut(&chunk) else { return };
        let is_failed = |read: &mut SharedRead| read.result.peek().is_some_and(Result::is_err);
        for failed in reads.extract_if(.., is_failed) {
            self.kept -= failed.length;
            self.order.retain(|(_, number)| *number != failed.number);
        }
        if reads.is_empty() {
            self.of_chunks.remove(&chunk);
        }
    }

    /// Forgets the first reads, until the others have no more bytes than the limit.
    fn keep(&mut self, limit: usize) {
        while self.kept > limit && self.order.len() > 1 {
            let Some((chunk, number)) = self.order.pop_front() else { return };
            let Entry::Occupied(mut reads) = self.of_chunks.entry(chunk) else { continue };
            for read in reads.get_mut().extract_if(.., |read| read.number == number) {
                self.kept -= read.length;
            }
            if reads.get().is_empty() {
                reads.remove();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    const CHUNK: Digest = Digest([7; 32]);
    /// Stored bytes of each block of a chunk, but of the last one.
    const STORED: usize = 1000;
    const SHORT: usize = 5;

    struct Scene {
        runtime: tokio::runtime::Runtime,
        reads: SharedReads,
        at: ChunkLocation,
        begun: RefCell<Vec<Range<usize>>>,
    }

    impl Scene {
        fn new() -> Self {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            let blocks = [vec![STORED - 1; 31], vec![SHORT - 1]].concat();
            let blocks = blocks.into_iter().map(|length| u16::try_from(length).unwrap()).collect();
            let at = ChunkLocation { pack: "p".into(), offset: 0, length: 2 << 20, blocks };
            Self { runtime, reads: SharedReads::new(8 * (STORED + READ_COST)), at, begun: RefCell::default() }
        }

        /// Reads blocks of a chunk of 32, each of which has its number in every stored byte. Returns the
        /// numbers.
        fn read(&self, chunk: Digest, blocks: Range<usize>, fails: bool) -> anyhow::Result<Vec<u8>> {
            let read = |blocks: Range<usize>| {
                self.begun.borrow_mut().push(blocks.clone());
                let length = |block| if block == 31 { SHORT } else { STORED };
                let bytes = blocks.flat_map(|block| vec![block.to_le_bytes()[0]; length(block)]);
                let bytes: Vec<u8> = bytes.collect();
                async move {
                    let what = || ImageStoreError::Damaged { object: "p".into(), what: "it fails".into() };
                    if fails { Err(what()) } else { Ok(bytes.into()) }
                }
            };
            let mut numbers = Vec::new();
            for (read, wanted) in self.reads.begin(chunk, &self.at, blocks, 0, read) {
                let first = read.blocks.start;
                let stored = self.runtime.block_on(read.wait())?;
                numbers.extend(wanted.map(|block| stored[(block - first) * STORED]));
            }
            Ok(numbers)
        }
    }

    #[test]
    fn only_blocks_that_were_not_read_lately_are_read() {
        let scene = Scene::new();
        let read = |blocks: Range<usize>| scene.read(CHUNK, blocks, false).unwrap();
        assert_eq!(read(2..4), [2, 3]);
        assert_eq!(read(0..6), [0, 1, 2, 3, 4, 5]);
        assert_eq!(read(3..5), [3, 4]);
        assert_eq!(scene.read(Digest([8; 32]), 3..4, false).unwrap(), [3]);
        assert_eq!(scene.begun.take(), [2..4, 0..2, 4..6, 3..4]);
        read(20..27);
        assert_eq!((read(2..3), scene.begun.take()), (vec![2], vec![20..27, 2..3]), "it was too long ago");
    }

    #[test]
    fn what_is_kept_is_counted_in_stored_bytes() {
        let scene = Scene::new();
        let read = |blocks: Range<usize>| scene.read(CHUNK, blocks, false).unwrap();
        for blocks in [31..32, 0..7, 31..32] {
            read(blocks);
        }
        assert_eq!(scene.begun.take(), [31..32, 0..7]);
        for block in 8..32 {
            read(block..block + 1);
        }
        let recent = scene.reads.recent.lock().unwrap();
        assert_eq!((recent.kept, recent.order.len()), (7 * STORED + SHORT + 8 * READ_COST, 8));
        assert_eq!(recent.of_chunks[&CHUNK].len(), 8);
    }

    #[test]
    fn a_read_that_failed_is_read_again() {
        let scene = Scene::new();
        assert!(scene.read(CHUNK, 0..1, true).unwrap_err().to_string().contains("it fails"));
        assert_eq!(scene.read(CHUNK, 0..1, false).unwrap(), [0]);
        let recent = scene.reads.recent.lock().unwrap();
        assert_eq!((recent.kept, recent.order.len()), (STORED + READ_COST, 1));
    }

    #[test]
    fn a_new_read_takes_blocks_after_the_wanted_ones() {
        let scene = Scene::new();
        let begin = |blocks: Range<usize>| {
            let read = |blocks: Range<usize>| {
                scene.begun.borrow_mut().push(blocks);
                async { Ok(Bytes::new()) }
            };
            let found = scene.reads.begin(CHUNK, &scene.at, blocks, 3, read);
            found.into_iter().map(|(_, blocks)| blocks).collect::<Vec<_>>()
        };
        // Up to the blocks of another read; no block if another read has the last one.
        for (blocks, expected) in [(4..5, 4..5), (1..2, 1..2), (5..6, 5..6), (0..2, 0..1)] {
            assert_eq!(begin(blocks)[0], expected);
        }
        assert_eq!(scene.begun.take(), [4..8, 1..4, 0..1]);
        assert!(scene.reads.has(CHUNK, 7) && !scene.reads.has(CHUNK, 8));
    }
}
