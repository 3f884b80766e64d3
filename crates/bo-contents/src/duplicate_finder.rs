// SPDX-License-Identifier: MIT OR Apache-2.0
//! Finds buffers of a sealed image that have the same bytes: their chunks have the same hashes in its
//! manifest. Replicas of a model on several GPUs have hundreds of them.

use std::collections::HashMap;
use std::ops::Range;

use rewake_criu_images::Digest;
use rewake_manifest::{ImageChecksums, MemoryFile};

use crate::process::{Name, ProcessBuffers};

/// The smallest buffer that has a duplicate: a smaller one is read as fast as it is copied.
pub(crate) const MIN_BYTES: u64 = 64 << 10;

/// What a buffer has: the lengths and hashes of its chunks. Adjacent chunks of zeros are one.
type Contents = Vec<(u64, Digest)>;

/// Returns sets of two buffers or more that have the same bytes, by the process's index and the image's
/// number of the buffer. Each buffer is in one set at most. Buffers of zeros are in none: they are mostly
/// holes, which are not read.
#[must_use]
pub fn find_duplicates(
    processes: &[ProcessBuffers<'_>],
    sealed: &ImageChecksums,
) -> Vec<Vec<(usize, usize)>> {
    let mut by_contents: HashMap<Contents, Vec<Name>> = HashMap::new();
    for (process, of) in processes.iter().enumerate() {
        for file in of.files {
            let memory = sealed.memory.get(file.name()).filter(|memory| memory.length == file.file.len());
            let chunks = memory.map(SealedRanges::of).unwrap_or_default();
            for stretch in file.stretches().iter().filter(|stretch| stretch.bytes >= MIN_BYTES) {
                if let Some(contents) = chunks.contents(stretch.start..stretch.start + stretch.bytes) {
                    by_contents.entry(contents).or_default().push((process, stretch.buffer));
                }
            }
        }
    }
    let mut sets: Vec<Vec<Name>> = by_contents.into_values().filter(|set| set.len() > 1).collect();
    sets.sort_unstable();
    sets
}

/// The chunks of a file, in ascending order.
#[derive(Debug, Default)]
struct SealedRanges(Vec<(Range<u64>, Option<Digest>)>);

impl SealedRanges {
    fn of(memory: &MemoryFile) -> Self {
        let mut start = 0;
        let ranges = memory.chunks.iter().map(|chunk| {
            let range = start..start + u64::from(chunk.length);
            start = range.end;
            (range, (!chunk.is_zero()).then_some(chunk.digest))
        });
        Self(ranges.collect())
    }

    /// Returns what a range has, or `None` if it is not made of whole chunks, or of zeros only.
    fn contents(&self, range: Range<u64>) -> Option<Contents> {
        let first = self.0.partition_point(|(of, _)| of.end <= range.start);
        let (mut all, mut zeros): (Contents, u64) = (Vec::new(), 0);
        for (of, digest) in self.0[first..].iter().take_while(|(of, _)| of.start < range.end) {
            let Some(digest) = digest else {
                // A segment of zeros is one chunk, whatever buffers it has.
                zeros += of.end.min(range.end) - of.start.max(range.start);
                continue;
            };
            if of.start < range.start || of.end > range.end {
                return None;
            }
            if zeros > 0 {
                all.push((std::mem::take(&mut zeros), Digest::default()));
            }
            all.push((of.end - of.start, *digest));
        }
        let is_zero = all.is_empty();
        if zeros > 0 {
            all.push((zeros, Digest::default()));
        }
        (!is_zero).then_some(all)
    }
}

#[cfg(test)]
mod tests {
    use rewake_manifest::SealedChunk;

    use super::*;

    /// A file with chunks of these lengths, each with its number as its hash; 0 is a chunk of zeros.
    fn ranges(chunks: &[(u32, u8)]) -> SealedRanges {
        let chunk = |&(length, number)| SealedChunk { length, digest: Digest([number; 32]) };
        SealedRanges::of(&MemoryFile { chunks: chunks.iter().map(chunk).collect(), ..MemoryFile::default() })
    }

    #[test]
    fn contents_are_those_of_whole_chunks() {
        let file = ranges(&[(8, 1), (100, 2), (50, 3), (100, 2), (50, 3)]);
        let contents = Some(vec![(100, Digest([2; 32])), (50, Digest([3; 32]))]);
        assert_eq!(file.contents(8..158), contents);
        assert_eq!(file.contents(158..308), contents);
        for range in [8..157, 9..158, 0..158, 8..9] {
            assert_ne!(file.contents(range), contents);
        }
        assert_eq!(file.contents(8..100), None, "a part of a chunk");
        assert_eq!(SealedRanges::default().contents(0..10), None);
    }

    #[test]
    fn zeros_are_the_same_however_they_are_cut() {
        let one = ranges(&[(100, 1), (300, 0), (100, 2), (50, 0)]);
        let other = ranges(&[(70, 0), (100, 1), (100, 0), (200, 0), (100, 2), (90, 0)]);
        assert_eq!(one.contents(0..550), other.contents(70..620));
        assert_ne!(one.contents(0..550), other.contents(70..610));
        assert_eq!(one.contents(100..400), None, "zeros only");
    }
}
