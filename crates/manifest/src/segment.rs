// SPDX-License-Identifier: MIT OR Apache-2.0
//! Segments: up to 4 MiB of a file, with the hashes of their chunks and the checksums of their blocks.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;

use nix::errno::Errno;
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use nix::unistd::{Whence, lseek};
use rewake_criu_images::{CHUNK, Digest};
use rewake_image_io::{BLOCK, block_checksum};

/// Bytes of a block.
const BLOCK_BYTES: u64 = BLOCK as u64;
/// The most bytes of a segment.
pub(crate) const SEGMENT: u64 = 4 << 20;
/// The fewest bytes of a chunk, except the first and the last one of a file: the header of a file of GPU
/// memory is shorter, and what is left at the end may be. A reader of a manifest keeps some bytes for each
/// chunk, so tiny chunks would let a short image fill the reader's memory.
pub(crate) const MIN_CHUNK: u64 = 4 << 10;
/// The most files of an image: CRIU makes some ten for each task.
pub(crate) const MAX_FILES: u64 = 1 << 20;
/// The longest file, in bytes: the most memory that one process can have is 16 TiB here.
pub(crate) const MAX_FILE: u64 = 16 << 40;

const _: () = assert!(CHUNK <= SEGMENT && SEGMENT.is_multiple_of(BLOCK_BYTES));

/// The digest of a chunk of zeros: no chunk has this hash.
const ZEROS: Digest = Digest([0; 32]);

/// A part of a file that is stored once by a store of images.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SealedChunk {
    /// Bytes, at most 2 MiB.
    pub length: u32,
    /// Its BLAKE3 hash; zeros for a chunk of zeros.
    pub digest: Digest,
}

impl SealedChunk {
    /// A chunk of zeros, or a segment of them.
    pub(crate) fn zeros(length: u32) -> Self {
        Self { length, digest: ZEROS }
    }

    /// Returns whether all bytes are zero.
    #[must_use]
    pub fn is_zero(&self) -> bool {
        self.digest == ZEROS
    }
}

/// What a segment of a file must contain.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SealedSegment {
    /// The first byte, from the start of the file.
    pub offset: u64,
    /// The number of bytes.
    pub length: u32,
    /// Its chunks, without gaps. None: the segment and all blocks that begin in it are zeros.
    pub chunks: Vec<SealedChunk>,
    /// The checksums of the blocks that begin in it; none in a file that holds no memory.
    pub checksums: Vec<u64>,
}

impl SealedSegment {
    /// Returns where it is, in a file of this length.
    pub(crate) fn extent(&self, file_length: u64, memory: bool) -> SegmentExtent {
        let lengths = self.chunks.iter().map(|chunk| chunk.length);
        let chunks = if self.chunks.is_empty() { vec![self.length] } else { lengths.collect() };
        SegmentExtent { offset: self.offset, chunks, file_length, memory }
    }
}

/// Where a segment is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SegmentExtent {
    pub(crate) offset: u64,
    /// The lengths of its chunks.
    pub(crate) chunks: Vec<u32>,
    /// The length of the file.
    pub(crate) file_length: u64,
    /// The file holds memory: its blocks have checksums.
    pub(crate) memory: bool,
}

impl SegmentExtent {
    pub(crate) fn length(&self) -> u64 {
        self.chunks.iter().copied().map(u64::from).sum()
    }

    pub(crate) fn end(&self) -> u64 {
        self.offset + self.length()
    }

    /// The blocks that begin here.
    pub(crate) fn blocks(&self) -> Range<u64> {
        if self.memory { self.offset.div_ceil(BLOCK_BYTES)..self.end().div_ceil(BLOCK_BYTES) } else { 0..0 }
    }

    /// The place of a block that begins here.
    pub(crate) fn block(&self, block: u64) -> Range<u64> {
        block * BLOCK_BYTES..((block + 1) * BLOCK_BYTES).min(self.file_length)
    }

    /// The end of what must be read: of the chunks, and of the last block.
    pub(crate) fn read_end(&self) -> u64 {
        let blocks = self.blocks();
        if blocks.is_empty() { self.end() } else { self.end().max(self.block(blocks.end - 1).end) }
    }

    /// Has the kernel read ahead: the jobs of a batch are made before the first is read. Holes would fill the
    /// page cache with zeros.
    pub(crate) fn prefetch(&self, file: &File) {
        if is_hole(file, self.offset, self.read_end()).unwrap_or(true) {
            return;
        }
        let (offset, length) = (self.offset.cast_signed(), self.length().cast_signed());
        // A file system without readahead reads later.
        let _ = posix_fadvise(file, offset, length, PosixFadviseAdvice::POSIX_FADV_WILLNEED);
    }

    /// Reads the bytes, and computes what the manifest says of them. Holes are not read.
    pub(crate) fn measure(&self, file: &File, buffer: &mut Vec<u8>) -> io::Result<SealedSegment> {
        if is_hole(file, self.offset, self.read_end())? {
            return Ok(self.segment(Vec::new(), Vec::new()));
        }
        let bytes = self.read(file, buffer)?;
        let (chunks, checksums) = self.sums(bytes);
        let is_all_zero = chunks.iter().all(SealedChunk::is_zero) && is_zero(bytes);
        Ok(if is_all_zero { self.segment(Vec::new(), Vec::new()) } else { self.segment(chunks, checksums) })
    }

    /// Reads the bytes of the chunks and of the blocks.
    pub(crate) fn read<'a>(&self, file: &File, buffer: &'a mut Vec<u8>) -> io::Result<&'a [u8]> {
        // At most SEGMENT and a block.
        buffer.resize(usize::try_from(self.read_end() - self.offset).unwrap_or(usize::MAX), 0);
        file.read_exact_at(buffer, self.offset)?;
        Ok(buffer)
    }

    /// Computes the hashes of the chunks and the checksums of the blocks.
    pub(crate) fn sums(&self, bytes: &[u8]) -> (Vec<SealedChunk>, Vec<u64>) {
        let mut chunks = Vec::with_capacity(self.chunks.len());
        let mut rest = bytes;
        for length in &self.chunks {
            let (chunk, after) = rest.split_at(*length as usize);
            let digest = if is_zero(chunk) { ZEROS } else { Digest(*blake3::hash(chunk).as_bytes()) };
            chunks.push(SealedChunk { length: *length, digest });
            rest = after;
        }
        let inside = |offset: u64| usize::try_from(offset - self.offset).unwrap_or(usize::MAX);
        let checksums = self.blocks().map(|block| {
            let Range { start, end } = self.block(block);
            block_checksum(&bytes[inside(start)..inside(end)])
        });
        (chunks, checksums.collect())
    }

    /// What [`SegmentExtent::sums`] is for a segment of the manifest.
    pub(crate) fn sums_of(&self, segment: &SealedSegment) -> (Vec<SealedChunk>, Vec<u64>) {
        if segment.chunks.is_empty() {
            let length = usize::try_from(self.read_end() - self.offset).unwrap_or(usize::MAX);
            return self.sums(&vec![0; length]);
        }
        (segment.chunks.clone(), segment.checksums.clone())
    }

    fn segment(&self, chunks: Vec<SealedChunk>, checksums: Vec<u64>) -> SealedSegment {
        // At most SEGMENT.
        let length = u32::try_from(self.length()).unwrap_or(u32::MAX);
        SealedSegment { offset: self.offset, length, chunks, checksums }
    }
}

/// Cuts a file into segments of whole chunks.
#[derive(Debug)]
pub(crate) struct Cutter<'a> {
    at: u64,
    file_length: u64,
    memory: bool,
    /// Where chunks must begin, after `at`.
    starts: &'a [u64],
}

impl<'a> Cutter<'a> {
    pub(crate) fn new(file_length: u64, memory: bool, starts: &'a [u64]) -> Self {
        Self { at: 0, file_length, memory, starts }
    }

    /// Returns the length of the chunk at `at`. A start that would make a chunk too short is passed over, so
    /// that what begins there is in the chunk before.
    fn chunk(&mut self, at: u64) -> u64 {
        let least = if at == 0 { 1 } else { MIN_CHUNK };
        let passed = self.starts.iter().take_while(|start| **start < at + least).count();
        self.starts = &self.starts[passed..];
        let next = self.starts.first().copied().unwrap_or(u64::MAX);
        next.min(self.file_length).min(at + CHUNK) - at
    }
}

impl Iterator for Cutter<'_> {
    type Item = SegmentExtent;

    fn next(&mut self) -> Option<SegmentExtent> {
        let mut extent = SegmentExtent {
            offset: self.at,
            chunks: Vec::new(),
            file_length: self.file_length,
            memory: self.memory,
        };
        while self.at < self.file_length {
            let length = self.chunk(self.at);
            if self.at + length - extent.offset > SEGMENT {
                break;
            }
            // At most CHUNK.
            extent.chunks.push(u32::try_from(length).unwrap_or(u32::MAX));
            self.at += length;
        }
        (!extent.chunks.is_empty()).then_some(extent)
    }
}

/// Returns how many chunks, and segments without chunks, the first `bytes` of a file may have.
pub(crate) fn most_pieces(bytes: u64) -> u64 {
    bytes / MIN_CHUNK + 2
}

/// Whether the file system has no bytes of this range. A range that it cannot say that of is read.
fn is_hole(file: &File, start: u64, end: u64) -> io::Result<bool> {
    match lseek(file, start.cast_signed(), Whence::SeekData) {
        Ok(data) => Ok(data.cast_unsigned() >= end),
        // No data up to the end of the file, or the file has become shorter: a read says which.
        Err(Errno::ENXIO) => Ok(file.metadata()?.len() >= end),
        Err(_) => Ok(false),
    }
}

/// Whether all bytes are zero. A comparison of the bytes with themselves, one place on, runs at memory's
/// speed.
fn is_zero(bytes: &[u8]) -> bool {
    match bytes {
        [] => true,
        [first, rest @ ..] => *first == 0 && rest == &bytes[..rest.len()],
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Seek as _, SeekFrom, Write as _};

    use proptest::prelude::*;

    use super::*;

    /// The segments of a file, measured.
    fn measured(file: &File, starts: &[u64]) -> Vec<SealedSegment> {
        let length = file.metadata().unwrap().len();
        let mut buffer = Vec::new();
        Cutter::new(length, true, starts).map(|extent| extent.measure(file, &mut buffer).unwrap()).collect()
    }

    fn file(bytes: &[u8]) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        file
    }

    #[test]
    fn a_file_is_cut_into_chunks_at_the_given_offsets() {
        let lengths = |length, starts: &[u64]| -> Vec<Vec<u32>> {
            Cutter::new(length, true, starts).map(|extent| extent.chunks).collect()
        };
        let two = 2 << 20;
        assert_eq!(lengths(0, &[]), [[0_u32; 0]; 0]);
        assert_eq!(lengths(5 << 20, &[]), [vec![two, two], vec![1 << 20]]);
        assert_eq!(lengths(5 << 20, &[8]), [vec![8, two], vec![two, (1 << 20) - 8]]);
        assert_eq!(lengths(9000, &[0, 8, 8, 4104, 9000, 9999]), [vec![8, 4096, 4896]]);
    }

    #[test]
    fn tiny_buffers_share_a_chunk_of_the_fewest_bytes() {
        let starts: Vec<u64> = (0..9000).collect();
        let chunks: Vec<u32> = Cutter::new(9000, true, &starts).flat_map(|extent| extent.chunks).collect();
        assert_eq!(chunks, [1, 4096, 4096, 807]);
    }

    #[test]
    fn a_block_belongs_to_the_segment_in_which_it_begins() {
        let bytes: Vec<u8> = (0..BLOCK * 3 + 5).map(|at| u8::try_from(at % 251).unwrap()).collect();
        let [first, second] =
            [(0, BLOCK + 1), (BLOCK + 1, 2 * BLOCK + 4)].map(|(offset, length)| SegmentExtent {
                offset: offset as u64,
                chunks: vec![u32::try_from(length).unwrap()],
                file_length: bytes.len() as u64,
                memory: true,
            });
        let (file, mut buffer) = (file(&bytes), Vec::new());
        let sums = |blocks: &[Range<usize>]| -> Vec<u64> {
            blocks.iter().map(|block| block_checksum(&bytes[block.clone()])).collect()
        };
        let found = first.measure(&file, &mut buffer).unwrap();
        assert_eq!(found.checksums, sums(&[0..BLOCK, BLOCK..2 * BLOCK]));
        assert_eq!(found.chunks[0].digest.0, *blake3::hash(&bytes[..=BLOCK]).as_bytes());
        let found = second.measure(&file, &mut buffer).unwrap();
        assert_eq!(found.checksums, sums(&[2 * BLOCK..3 * BLOCK, 3 * BLOCK..3 * BLOCK + 5]));
    }

    #[test]
    fn zeros_and_holes_are_the_same_and_take_no_checksum() {
        let (dense, mut sparse) = (file(&vec![0; 9 << 20]), file(&[]));
        sparse.set_len(9 << 20).unwrap();
        assert_eq!(measured(&dense, &[]), measured(&sparse, &[]));
        assert!(measured(&dense, &[]).iter().all(|of| of.chunks.is_empty() && of.checksums.is_empty()));
        // One byte in the second segment.
        sparse.seek(SeekFrom::Start((4 << 20) + 7)).unwrap();
        sparse.write_all(&[1]).unwrap();
        let of = measured(&sparse, &[]);
        assert_eq!(of.iter().map(|of| of.chunks.len()).collect::<Vec<_>>(), [0, 2, 0]);
        assert!(!of[1].chunks[0].is_zero() && of[1].chunks[1].is_zero());
        assert_eq!(of[1].checksums.len(), 64);
    }

    #[test]
    fn zeros_whose_last_block_continues_into_other_bytes_keep_its_checksum() {
        let mut bytes = vec![0; 2 * BLOCK];
        bytes[BLOCK + 9] = 1;
        let extent = SegmentExtent {
            offset: 0,
            chunks: vec![u32::try_from(BLOCK + 4).unwrap()],
            file_length: bytes.len() as u64,
            memory: true,
        };
        let found = extent.measure(&file(&bytes), &mut Vec::new()).unwrap();
        assert!(found.chunks[0].is_zero());
        assert_eq!(found.checksums, [block_checksum(&bytes[..BLOCK]), block_checksum(&bytes[BLOCK..])]);
    }

    #[test]
    fn a_file_that_became_shorter_is_an_error_and_no_hole() {
        let extent = SegmentExtent { offset: 0, chunks: vec![4096], file_length: 4096, memory: true };
        let error = extent.measure(&file(&[0; 4095]), &mut Vec::new()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }

    proptest! {
        #[test]
        fn segments_tile_a_file_and_each_block_is_in_one(
            length in 0_u64..(20 << 20),
            starts in proptest::collection::btree_set(prop_oneof![0_u64..(20 << 20), 0_u64..9000], 0..40),
        ) {
            let starts: Vec<u64> = starts.into_iter().collect();
            let (mut at, mut block, mut pieces) = (0, 0, 0);
            for extent in Cutter::new(length, true, &starts) {
                prop_assert_eq!(extent.offset, at);
                prop_assert!(extent.length() <= SEGMENT);
                prop_assert!(extent.chunks.iter().all(|of| u64::from(*of) <= CHUNK));
                pieces += extent.chunks.len() as u64;
                prop_assert!(pieces <= most_pieces(extent.end()));
                prop_assert_eq!(extent.blocks().start, block);
                at = extent.end();
                block = extent.blocks().end;
            }
            prop_assert_eq!((at, block), (length, length.div_ceil(BLOCK_BYTES)));
        }
    }
}
