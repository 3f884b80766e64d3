// SPDX-License-Identifier: MIT OR Apache-2.0
//! Blocks of chunks that are being read, or were read last. Who needs one of them takes it from there: page faults need
//! blocks that the background load has requested, and neighbours in a file share a block of a chunk.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use futures::FutureExt as _;
use futures::future::{BoxFuture, Shared};
use rewake_criu_images::Digest;
use rewake_image_io::BLOCK;

/// The bytes of a read; the error is one for all who wait.
type ReadResult = Result<Arc<[u8]>, Arc<anyhow::Error>>;

/// Blocks of a chunk that are being read, or were read.
#[derive(Debug, Clone)]
pub(crate) struct SharedRead {
    chunk: Digest,
    blocks: Range<usize>,
    result: Shared<BoxFuture<'static, ReadResult>>,
}

/// The last reads, the latest at the end.
#[derive(Debug)]
pub(crate) struct SharedReads {
    recent: Mutex<VecDeque<SharedRead>>,
    /// Blocks that they have together.
    limit: usize,
}

impl SharedRead {
    /// Waits for these bytes of the read: fewer at the end of the chunk.
    ///
    /// # Errors
    /// The read has failed.
    pub(crate) async fn wait(self, wanted: Range<usize>) -> anyhow::Result<Vec<u8>> {
        let bytes = self.result.await.map_err(|error| anyhow::anyhow!("{error:#}"))?;
        let wanted = wanted.start..wanted.end.min(bytes.len());
        Ok(bytes.get(wanted).unwrap_or_default().to_vec())
    }

    /// Returns these blocks of the read, and the bytes of it that they are.
    fn part(&self, blocks: &Range<usize>, end: usize) -> (Self, Range<usize>) {
        let start = (blocks.start - self.blocks.start) * BLOCK;
        (self.clone(), start..start + (end - blocks.start) * BLOCK)
    }
}

impl SharedReads {
    /// Keeps so many bytes, and one read at least.
    pub(crate) fn new(limit: usize) -> Self {
        Self { recent: Mutex::default(), limit: limit / BLOCK }
    }

    /// Returns the reads that have these blocks of a chunk, in their order, and where they are in each.
    /// `read` begins one where there is none.
    pub(crate) fn begin<F>(
        &self,
        chunk: Digest,
        blocks: Range<usize>,
        read: impl Fn(Range<usize>) -> F,
    ) -> Vec<(SharedRead, Range<usize>)>
    where
        F: Future<Output = anyhow::Result<Vec<u8>>> + Send + 'static,
    {
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        // The store may have the bytes by now.
        recent.retain(|read| !read.result.peek().is_some_and(Result::is_err));
        let found = |block: usize, recent: &VecDeque<SharedRead>| {
            recent.iter().rev().find(|read| read.chunk == chunk && read.blocks.contains(&block)).cloned()
        };
        let (mut left, mut parts) = (blocks, Vec::new());
        while !left.is_empty() {
            let part = if let Some(found) = found(left.start, &recent) {
                found.part(&left, found.blocks.end.min(left.end))
            } else {
                let end = left.clone().find(|block| found(*block, &recent).is_some()).unwrap_or(left.end);
                let bytes = read(left.start..end);
                let result = async move { bytes.await.map(Arc::from).map_err(Arc::new) };
                let begun = SharedRead { chunk, blocks: left.start..end, result: result.boxed().shared() };
                recent.push_back(begun.clone());
                begun.part(&left, end)
            };
            left.start += part.1.len() / BLOCK;
            parts.push(part);
        }
        let mut kept: usize = recent.iter().map(|read| read.blocks.len()).sum();
        while kept > self.limit && recent.len() > 1 {
            kept -= recent.pop_front().map_or(0, |read| read.blocks.len());
        }
        parts
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use futures::future::try_join_all;

    use super::*;

    const CHUNK: Digest = Digest([7; 32]);
    /// The last block of a chunk is short.
    const SHORT: usize = 5;

    struct Scene {
        runtime: tokio::runtime::Runtime,
        reads: SharedReads,
        begun: RefCell<Vec<Range<usize>>>,
    }

    impl Scene {
        fn new() -> Self {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            Self { runtime, reads: SharedReads::new(8 * BLOCK), begun: RefCell::default() }
        }

        /// Reads blocks of a chunk of 32, each of which has its number in every byte. Returns the numbers,
        /// and the length.
        fn read(&self, chunk: Digest, blocks: Range<usize>, fails: bool) -> anyhow::Result<(Vec<u8>, usize)> {
            let read = |blocks: Range<usize>| {
                self.begun.borrow_mut().push(blocks.clone());
                async move {
                    anyhow::ensure!(!fails, "it fails");
                    let length = |block| if block == 31 { SHORT } else { BLOCK };
                    Ok(blocks.flat_map(|block| vec![block.to_le_bytes()[0]; length(block)]).collect())
                }
            };
            let parts = self.reads.begin(chunk, blocks, read).into_iter();
            let bytes =
                self.runtime.block_on(try_join_all(parts.map(|(read, wanted)| read.wait(wanted))))?.concat();
            Ok((bytes.iter().copied().step_by(BLOCK).collect(), bytes.len()))
        }
    }

    #[test]
    fn only_blocks_that_were_not_read_lately_are_read() {
        let scene = Scene::new();
        let read = |blocks: Range<usize>| scene.read(CHUNK, blocks, false).unwrap().0;
        assert_eq!(read(2..4), [2, 3]);
        assert_eq!(read(0..6), [0, 1, 2, 3, 4, 5]);
        assert_eq!(read(3..5), [3, 4]);
        assert_eq!(scene.read(Digest([8; 32]), 3..4, false).unwrap().0, [3]);
        assert_eq!(scene.begun.take(), [2..4, 0..2, 4..6, 3..4]);
        read(20..27);
        assert_eq!((read(2..3), scene.begun.take()), (vec![2], vec![20..27, 2..3]), "it was too long ago");
    }

    #[test]
    fn the_last_block_of_a_chunk_may_be_short() {
        let scene = Scene::new();
        for blocks in [30..32, 29..32, 31..32] {
            let (numbers, length) = scene.read(CHUNK, blocks.clone(), false).unwrap();
            assert_eq!((numbers.len(), length), (blocks.len(), (blocks.len() - 1) * BLOCK + SHORT));
        }
    }

    #[test]
    fn a_read_that_failed_is_read_again() {
        let scene = Scene::new();
        assert_eq!(scene.read(CHUNK, 0..1, true).unwrap_err().to_string(), "it fails");
        assert_eq!(scene.read(CHUNK, 0..1, false).unwrap().0, [0]);
    }
}
