// SPDX-License-Identifier: MIT OR Apache-2.0
//! A range of a file as the store has it: blocks of chunks, which are decompressed when a client takes them.
//! So memory holds what the store has sent, and a byte is written once.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use anyhow::{Context as _, anyhow};
use bytes::Bytes;
use rewake_criu_images::Digest;
use rewake_image_io::BLOCK;
use rewake_image_transfer::protocol::stored_parts::{self, PART_HEADER, PartHeader};
use rewake_manifest::SealedChunk;
use tokio::runtime::Handle;
use zstd::bulk::Decompressor;

use crate::blocks::{self, load_block};
use crate::reader::ChunkReader;

const _: () = assert!(BLOCK == stored_parts::BLOCK);

/// A part of a range.
#[derive(Debug)]
pub(crate) enum RangePart {
    Zeros(usize),
    /// Bytes as they are, from here on.
    Plain(Vec<u8>, usize),
    Chunk(ChunkPart),
}

/// A part of a chunk.
#[derive(Debug)]
pub(crate) struct ChunkPart {
    pub(crate) chunk: SealedChunk,
    /// Blocks in their stored form, and the first one's number.
    pub(crate) stored: Bytes,
    pub(crate) first: usize,
    /// Bytes of the chunk. These blocks have them.
    pub(crate) bytes: Range<usize>,
}

/// The parts of a range that are not taken yet, in the order of the file.
#[derive(Debug, Default)]
pub(crate) struct StoredRange(VecDeque<RangePart>);

impl ChunkPart {
    /// The stored form of a block.
    fn stored_block(&self, reader: &ChunkReader, block: usize) -> anyhow::Result<&[u8]> {
        let at = reader.locate(self.chunk.digest)?;
        let start = blocks::stored(at, self.first..block);
        self.stored.get(start..start + at.stored(block) as usize).context("a short read")
    }
}

impl StoredRange {
    /// Appends a part.
    pub(crate) fn push(&mut self, part: RangePart) {
        self.0.push_back(part);
    }

    /// Takes the next bytes.
    ///
    /// # Errors
    /// They are more than is left of the range, or a block is damaged in the store.
    pub(crate) fn next(&mut self, mut into: &mut [u8], loader: &mut BlockLoader) -> anyhow::Result<()> {
        while !into.is_empty() {
            let part = self.0.front_mut().context("more bytes than are left of the range")?;
            let taken = match part {
                RangePart::Zeros(left) => {
                    let count = into.len().min(*left);
                    into[..count].fill(0);
                    *left -= count;
                    count
                }
                RangePart::Plain(bytes, used) => {
                    let rest = &bytes[*used..];
                    let count = into.len().min(rest.len());
                    into[..count].copy_from_slice(&rest[..count]);
                    *used += count;
                    count
                }
                RangePart::Chunk(part) => loader.take(part, into)?,
            };
            if taken == 0 {
                self.0.pop_front();
            }
            into = &mut into[taken..];
        }
        Ok(())
    }

    /// Appends the next part, `room` bytes at most, as `rewake_image_transfer::protocol::stored_parts` has
    /// it. Returns how many it has.
    ///
    /// # Errors
    /// The range has no more, or a block is damaged in the store.
    pub(crate) fn next_stored(
        &mut self,
        room: usize,
        into: &mut Vec<u8>,
        loader: &mut BlockLoader,
    ) -> anyhow::Result<usize> {
        loop {
            let part = self.0.front_mut().context("more bytes than are left of the range")?;
            let bytes = match part {
                RangePart::Zeros(left) => {
                    let bytes = room.min(*left);
                    if bytes > 0 {
                        PartHeader { stored: 0, frame: 0, first: 0, bytes }.write(into);
                    }
                    *left -= bytes;
                    bytes
                }
                RangePart::Plain(plain, used) => {
                    let rest = &plain[*used..];
                    let bytes = room.min(rest.len());
                    if bytes > 0 {
                        PartHeader { stored: bytes, frame: 0, first: 0, bytes }.write(into);
                        into.extend(&rest[..bytes]);
                    }
                    *used += bytes;
                    bytes
                }
                RangePart::Chunk(part) => loader.send(part, room, into)?,
            };
            if bytes > 0 {
                return Ok(bytes);
            }
            self.0.pop_front();
        }
    }
}

/// Gives the blocks of an image to one client.
pub(crate) struct BlockLoader {
    reader: Arc<ChunkReader>,
    runtime: Handle,
    decompressor: Decompressor<'static>,
    /// The last block of which a part was taken: the next part may follow. Blocks of a chunk and blocks of a
    /// file mostly begin at different places.
    block: Box<[u8]>,
    held: Option<(Digest, usize)>,
    /// The last block that the client has received in its stored form.
    sent: Option<(Digest, usize)>,
}

impl BlockLoader {
    /// `runtime` reads damaged blocks again. It must have threads of its own.
    ///
    /// # Errors
    /// No memory for it.
    pub(crate) fn new(reader: Arc<ChunkReader>, runtime: Handle) -> anyhow::Result<Self> {
        let decompressor = Decompressor::new().context("zstd")?;
        Ok(Self { reader, runtime, decompressor, block: vec![0; BLOCK].into(), held: None, sent: None })
    }

    /// Takes the next bytes of a part: all of a chunk, or of one block at most. Returns their number.
    fn take(&mut self, part: &mut ChunkPart, into: &mut [u8]) -> anyhow::Result<usize> {
        let length = part.chunk.length as usize;
        if part.bytes.is_empty() {
            return Ok(0);
        }
        if part.bytes == (0..length) && part.first == 0 && into.len() >= length {
            return self.take_chunk(part, &mut into[..length]);
        }
        let (block, from) = (part.bytes.start / BLOCK, part.bytes.start % BLOCK);
        let length = BLOCK.min(part.chunk.length as usize - block * BLOCK);
        let count = into.len().min(part.bytes.len()).min(length - from);
        if count == length {
            self.load(part, block, Some(into))?;
        } else {
            let place = (part.chunk.digest, block);
            if self.held != Some(place) {
                self.held = None;
                self.load(part, block, None)?;
                self.held = Some(place);
            }
            into[..count].copy_from_slice(&self.block[from..from + count]);
        }
        part.bytes.start += count;
        Ok(count)
    }

    /// Takes a chunk, and compares it with its hash. One that differs is read again.
    fn take_chunk(&mut self, part: &mut ChunkPart, into: &mut [u8]) -> anyhow::Result<usize> {
        let (SealedChunk { digest, length }, mut blocks) = (part.chunk, into.chunks_mut(BLOCK).enumerate());
        let loaded = blocks.try_for_each(|(block, into)| self.load(part, block, Some(into)));
        if loaded.is_err() || blake3::hash(into).as_bytes() != &digest.0 {
            into.copy_from_slice(&self.runtime.block_on(self.reader.chunk(digest, length))?);
        }
        part.bytes.start = part.bytes.end;
        Ok(into.len())
    }

    /// Appends the next part of a part: of one block, `room` bytes at most. Returns how many it has.
    fn send(&mut self, part: &mut ChunkPart, room: usize, into: &mut Vec<u8>) -> anyhow::Result<usize> {
        if part.bytes.is_empty() {
            return Ok(0);
        }
        let (block, first) = (part.bytes.start / BLOCK, part.bytes.start % BLOCK);
        let frame = BLOCK.min(part.chunk.length as usize - block * BLOCK);
        let bytes = room.min(part.bytes.len()).min(frame - first);
        let place = (part.chunk.digest, block);
        let stored = part.stored_block(&self.reader, block)?;
        let (stored, frame, first) = if stored.len() == frame {
            (&stored[first..first + bytes], 0, 0)
        } else if self.sent == Some(place) {
            (&[][..], frame, first)
        } else if stored.len() <= bytes {
            self.sent = Some(place);
            (stored, frame, first)
        } else {
            // Fewer bytes than the frame has.
            let start = into.len() + PART_HEADER;
            PartHeader { stored: bytes, frame: 0, first: 0, bytes }.write(into);
            into.resize(start + bytes, 0);
            return self.take(part, &mut into[start..]);
        };
        PartHeader { stored: stored.len(), frame, first, bytes }.write(into);
        into.extend(stored);
        part.bytes.start += bytes;
        Ok(bytes)
    }

    /// Decompresses a block of a part: into the place of the held one, if there is no other.
    fn load(&mut self, part: &ChunkPart, block: usize, into: Option<&mut [u8]>) -> anyhow::Result<()> {
        let Self { reader, runtime, decompressor, block: held, .. } = self;
        let length = BLOCK.min(part.chunk.length as usize - block * BLOCK);
        let into = &mut into.unwrap_or(held)[..length];
        let frame = part.stored_block(reader, block)?;
        if load_block(frame, decompressor, into).is_err() {
            let again = runtime.block_on(reader.block_again(part.chunk, block))?;
            into.copy_from_slice(again.get(..length).ok_or_else(|| anyhow!("a short block"))?);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use rewake_image_transfer::protocol::stored_parts::PartReader;

    use super::*;
    use crate::pinned::PinnedImage;
    use crate::push;
    use crate::reader::ChunkReader;
    use crate::testing::{TestImage, TestObjects};

    const CHUNK: usize = 2 << 20;

    struct Scene {
        runtime: tokio::runtime::Runtime,
        objects: Arc<TestObjects>,
        reader: Arc<ChunkReader>,
        chunk: SealedChunk,
        memory: Vec<u8>,
    }

    impl Scene {
        /// A chunk of text, whose last block is short, after another one in its pack.
        fn new() -> Self {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
            let (objects, store) = TestObjects::new();
            let memory: Vec<u8> =
                (0..CHUNK / 5).flat_map(|line| format!("{line}: a page of text").into_bytes()).collect();
            let memory = [&vec![1; CHUNK], &memory[..CHUNK - BLOCK + 5]].concat();
            let image = TestImage::new(&memory);
            runtime.block_on(push(&store, &image.path(), "web")).unwrap();
            let memory = memory[CHUNK..].to_vec();
            let pinned = runtime.block_on(PinnedImage::open(&store, "web")).unwrap();
            let digest = Digest(*blake3::hash(&memory).as_bytes());
            let chunk = SealedChunk { digest, length: u32::try_from(memory.len()).unwrap() };
            Self { runtime, objects, reader: Arc::clone(&pinned.reader), chunk, memory }
        }

        /// The bytes of the chunk in a range, from blocks that the store has sent.
        fn part(&self, bytes: Range<usize>) -> ChunkPart {
            let blocks = bytes.start / BLOCK..bytes.end.div_ceil(BLOCK);
            let first = blocks.start;
            let stored = self.runtime.block_on(self.reader.stored(self.chunk, blocks)).unwrap();
            ChunkPart { chunk: self.chunk, stored, first, bytes }
        }

        /// Takes all of a range in pieces.
        fn take(&self, mut range: StoredRange, length: usize, piece: usize) -> anyhow::Result<Vec<u8>> {
            let runtime = self.runtime.handle().clone();
            let mut loader = BlockLoader::new(Arc::clone(&self.reader), runtime)?;
            let mut bytes = vec![0xff; length];
            bytes.chunks_mut(piece).try_for_each(|piece| range.next(piece, &mut loader))?;
            assert!(range.next(&mut [0], &mut loader).is_err(), "more than the range has");
            Ok(bytes)
        }
    }

    /// Bytes as they are, parts of the chunk, and zeros. Returns the bytes of the range, too.
    fn range_of(scene: &Scene) -> (StoredRange, Vec<u8>) {
        let (first, second) = (BLOCK - 7..2 * BLOCK + 1, 3 * BLOCK..scene.memory.len());
        let mut range = StoredRange::default();
        range.push(RangePart::Plain(b"some plain".to_vec(), 5));
        range.push(RangePart::Chunk(scene.part(first.clone())));
        range.push(RangePart::Zeros(70_000));
        range.push(RangePart::Chunk(scene.part(second.clone())));
        let bytes = [b"plain", &scene.memory[first], &vec![0; 70_000], &scene.memory[second]].concat();
        (range, bytes)
    }

    #[test]
    fn pieces_of_any_length_are_the_bytes_of_the_range() {
        let scene = Scene::new();
        for piece in [1000, BLOCK, BLOCK + 1, CHUNK] {
            let (range, expected) = range_of(&scene);
            assert!(scene.take(range, expected.len(), piece).unwrap() == expected, "{piece}");
        }
    }

    #[test]
    fn stored_parts_are_the_bytes_of_the_range() {
        let scene = Scene::new();
        let (mut range, expected) = range_of(&scene);
        let runtime = scene.runtime.handle().clone();
        let mut loader = BlockLoader::new(Arc::clone(&scene.reader), runtime).unwrap();
        let mut client = PartReader::new().unwrap();
        let (mut found, mut sent) = (Vec::new(), 0);
        while found.len() < expected.len() {
            let mut block = vec![0xff; BLOCK.min(expected.len() - found.len())];
            let (mut parts, mut left) = (Vec::new(), block.len());
            while left > 0 {
                left -= range.next_stored(left, &mut parts, &mut loader).unwrap();
            }
            assert_eq!(client.block(&parts, &mut block).unwrap(), Some(parts.len()));
            sent += parts.len();
            found.extend(block);
        }
        assert!(found == expected);
        assert!(sent < expected.len() / 3, "{sent} bytes were sent for {}", found.len());
        assert!(range.next_stored(1, &mut Vec::new(), &mut loader).is_err(), "more than the range has");
    }

    #[test]
    fn a_chunk_that_is_another_one_is_read_again() {
        let scene = Scene::new();
        let length = scene.memory.len();
        scene.objects.other_reads(1);
        let mut range = StoredRange::default();
        range.push(RangePart::Chunk(scene.part(0..length)));
        assert!(scene.take(range, length, CHUNK).unwrap() == scene.memory);
    }

    #[test]
    fn a_damaged_block_is_read_again() {
        let scene = Scene::new();
        let part = || {
            let mut range = StoredRange::default();
            // Of the other chunk of the pack.
            scene.objects.other_reads(1);
            range.push(RangePart::Chunk(scene.part(BLOCK..2 * BLOCK)));
            range
        };
        assert!(scene.take(part(), BLOCK, BLOCK).unwrap() == scene.memory[BLOCK..2 * BLOCK]);
        let again = part();
        scene.objects.other_reads(2);
        let error = scene.take(again, BLOCK, BLOCK).unwrap_err().to_string();
        assert!(error.contains("packs/") && error.contains("a block "), "{error}");
    }
}
