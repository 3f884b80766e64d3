// SPDX-License-Identifier: MIT OR Apache-2.0
//! The chunks of an image in the order of its manifest, and where the bytes of each come from.

use std::collections::HashMap;
use std::ops::Range;

use rewake_criu_images::Digest;
use rewake_image_io::BLOCK;
use rewake_manifest::{ManifestReader, ManifestRecord, SealedChunk, SealedFile};

/// Where bytes are: the number of the file in the manifest, from 1, and the offset in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkPlace {
    /// The number of the file.
    pub file: u32,
    /// The first byte.
    pub offset: u64,
}

/// What is to be done next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Step {
    /// Make a file of this length, all zeros.
    File(u32, SealedFile),
    /// Bring a chunk from the server.
    Fetch(ChunkPlace, SealedChunk),
    /// Copy a chunk that an earlier step has brought.
    Copy(ChunkPlace, SealedChunk, ChunkPlace),
    /// Leave a chunk to the restore.
    Leave(ChunkPlace, SealedChunk),
    /// Make this number of bytes zeros, because an earlier copy or a restore may have written there.
    Zero(ChunkPlace, u32),
}

/// The steps of a manifest.
#[derive(Debug)]
pub(crate) struct Chunks {
    manifest: ManifestReader,
    files: u32,
    /// The chunks of the segment that was read last, and the offset of the first one that is left.
    left: std::vec::IntoIter<SealedChunk>,
    offset: u64,
    /// Where each chunk is first: 48 bytes for each 2 MiB of the image.
    first: HashMap<Digest, ChunkPlace>,
    /// The parts of the file that are needed now, in ascending order; none: all of it.
    needed: Option<Vec<Range<u64>>>,
}

impl Chunks {
    /// `manifest` is at its first file.
    pub(crate) fn new(manifest: ManifestReader) -> Self {
        let (left, first) = (Vec::new().into_iter(), HashMap::new());
        Self { manifest, files: 0, left, offset: 0, first, needed: None }
    }

    /// Says which parts of the file of the last step are needed now. Other chunks are left to the restore.
    /// The blocks of these parts are needed as a whole: a restore requests whole blocks, and would write over
    /// bytes that CRIU reads.
    pub(crate) fn need_only(&mut self, ranges: &[Range<u64>]) {
        let block = BLOCK as u64;
        let mut needed: Vec<Range<u64>> = Vec::new();
        // They are in the order of their starts, and may overlap.
        for range in ranges {
            let range =
                range.start / block * block..range.end.checked_next_multiple_of(block).unwrap_or(u64::MAX);
            match needed.last_mut() {
                Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
                _ => needed.push(range),
            }
        }
        self.needed = Some(needed);
    }

    fn is_needed(&self, start: u64, end: u64) -> bool {
        self.needed.as_ref().is_none_or(|ranges| {
            let next = ranges.partition_point(|range| range.end <= start);
            ranges.get(next).is_some_and(|range| range.start < end)
        })
    }

    /// Returns the next step; `None` after the last.
    pub(crate) fn next(&mut self) -> anyhow::Result<Option<Step>> {
        loop {
            if let Some(chunk) = self.left.next() {
                let place = ChunkPlace { file: self.files, offset: self.offset };
                self.offset += u64::from(chunk.length);
                if chunk.is_zero() {
                    return Ok(Some(Step::Zero(place, chunk.length)));
                }
                if !self.is_needed(place.offset, self.offset) {
                    return Ok(Some(Step::Leave(place, chunk)));
                }
                if let Some(first) = self.first.get(&chunk.digest) {
                    return Ok(Some(Step::Copy(place, chunk, *first)));
                }
                self.first.insert(chunk.digest, place);
                return Ok(Some(Step::Fetch(place, chunk)));
            }
            match self.manifest.next_record()? {
                None => return Ok(None),
                Some(ManifestRecord::File(file)) => {
                    self.files += 1;
                    self.needed = None;
                    return Ok(Some(Step::File(self.files, file)));
                }
                Some(ManifestRecord::Segment(segment)) => {
                    let (offset, is_zero) = (segment.offset, segment.chunks.is_empty());
                    (self.left, self.offset) = (segment.chunks.into_iter(), offset);
                    if is_zero {
                        let place = ChunkPlace { file: self.files, offset };
                        return Ok(Some(Step::Zero(place, segment.length)));
                    }
                }
                // It is the first record, and has been read.
                Some(ManifestRecord::Parent(_)) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rewake_criu_images::{Generation, ImageDir, Inventory, PAGE, PageFlags, Pagemap, write};
    use rewake_manifest::seal;

    use super::*;

    /// The offsets of the chunks of 6 MiB of memory that are fetched now. The chunks have 2 MiB less the
    /// first pages.
    fn fetched(ranges: &[[u64; 2]]) -> Vec<u64> {
        let ranges: Vec<Range<u64>> = ranges.iter().map(|[start, end]| *start..*end).collect();
        let dir = tempfile::tempdir().unwrap();
        let inventory = Inventory { version: 2, plugins: Vec::new(), run_id: None };
        write::inventory(dir.path(), &inventory).unwrap();
        // A page before a border of chunks: the second chunk begins in the first block of the file.
        let pages = (6 << 20) / PAGE;
        let map = Pagemap::new(1, Generation::Wide, [((2 << 20) - PAGE, pages, PageFlags(6))]);
        write::pagemap(dir.path(), 7, &map).unwrap();
        let bytes: Vec<u8> = (0..6u32 << 20).map(|at| (at >> 12).to_le_bytes()[0] | 1).collect();
        fs::write(dir.path().join("pages-1.img"), bytes).unwrap();
        seal(dir.path()).unwrap();
        let mut chunks = Chunks::new(ManifestReader::open(&ImageDir::open(dir.path()).unwrap()).unwrap());
        let (mut is_pages, mut found) = (false, Vec::new());
        while let Some(step) = chunks.next().unwrap() {
            match step {
                Step::File(_, file) => {
                    is_pages = file.name == "pages-1.img";
                    if is_pages {
                        chunks.need_only(&ranges);
                    }
                }
                Step::Fetch(place, _) | Step::Copy(place, ..) if is_pages => found.push(place.offset),
                _ => {}
            }
        }
        found
    }

    #[test]
    fn chunks_that_share_a_block_with_needed_bytes_are_needed() {
        let second = 2 << 20;
        assert_eq!(fetched(&[[0, PAGE]]), [0, PAGE], "the first block has the start of the second chunk");
        assert_eq!(fetched(&[[second + 0x20000, second + 0x21000]]), [second + PAGE]);
    }

    #[test]
    fn overlapping_ranges_are_needed_as_a_whole() {
        let (second, third) = (2 << 20, 4 << 20);
        let ranges = [[0, third + (1 << 20)], [PAGE, 2 * PAGE], [third + 0x20000, third + 0x21000]];
        assert_eq!(fetched(&ranges), [0, PAGE, second + PAGE, third + PAGE]);
    }
}
