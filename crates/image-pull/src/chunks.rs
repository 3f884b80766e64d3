// SPDX-License-Identifier: MIT OR Apache-2.0
//! The chunks of an image in the order of its manifest, and where the bytes of each come from.

use std::collections::HashMap;
use std::ops::Range;

use rewake_criu_images::Digest;
use rewake_manifest::{ManifestReader, ManifestRecord, SealedChunk, SealedFile};

/// Where bytes are: the number of the file in the manifest, from 1, and the offset in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ChunkPlace {
    pub(crate) file: u32,
    pub(crate) offset: u64,
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
    /// Make so many bytes zeros, if an earlier copy or a restore has written there.
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
    pub(crate) fn need_only(&mut self, ranges: Vec<Range<u64>>) {
        self.needed = Some(ranges);
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
