// SPDX-License-Identifier: MIT OR Apache-2.0
//! Stored blocks that lie one after another in a pack, of one chunk or of several: a store sends them for one
//! request.

use std::ops::Range;
use std::sync::Arc;

use crate::blocks;
use crate::format::ChunkLocation;

/// A run of stored blocks. `C` is what the caller knows a chunk by.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct PackRun<C> {
    pub(crate) pack: Arc<str>,
    /// Where the stored bytes are in the pack.
    pub(crate) range: Range<u64>,
    /// The blocks, by chunk, in the order of the pack.
    pub(crate) parts: Vec<(C, Range<usize>)>,
}

impl<C> PackRun<C> {
    /// Its stored bytes.
    pub(crate) fn len(&self) -> u64 {
        self.range.end - self.range.start
    }
}

/// Adds blocks of a chunk to runs. A run has at most `most` stored bytes, or one block.
pub(crate) fn add<C: Copy + PartialEq>(
    runs: &mut Vec<PackRun<C>>,
    chunk: C,
    at: &ChunkLocation,
    blocks: Range<usize>,
    most: u64,
) {
    for block in blocks.start..blocks.end.min(at.blocks.len()) {
        let range = blocks::range(at, block..block + 1);
        let follows = |run: &&mut PackRun<C>| {
            run.pack == at.pack && run.range.end == range.start && range.end - run.range.start <= most
        };
        let Some(run) = runs.last_mut().filter(follows) else {
            runs.push(PackRun { pack: Arc::clone(&at.pack), range, parts: vec![(chunk, block..block + 1)] });
            continue;
        };
        run.range.end = range.end;
        match run.parts.last_mut() {
            Some((last, blocks)) if *last == chunk && blocks.end == block => blocks.end += 1,
            _ => run.parts.push((chunk, block..block + 1)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A chunk of blocks of 1000 stored bytes.
    fn at(pack: &str, offset: u32, blocks: usize) -> ChunkLocation {
        let length = u32::try_from(blocks << 16).unwrap();
        ChunkLocation { pack: pack.into(), offset, length, blocks: vec![999; blocks].into() }
    }

    #[test]
    fn blocks_that_follow_in_a_pack_are_one_run() {
        let mut runs = Vec::new();
        add(&mut runs, 1, &at("p", 0, 4), 2..4, 5000);
        add(&mut runs, 2, &at("p", 4000, 4), 0..4, 5000);
        // Another pack, another place in it, and a block that was left out.
        add(&mut runs, 3, &at("q", 8000, 1), 0..1, 5000);
        add(&mut runs, 4, &at("q", 10_000, 3), 0..1, 5000);
        add(&mut runs, 4, &at("q", 10_000, 3), 2..9, 5000);
        let run = |pack: &str, range, parts| PackRun { pack: pack.into(), range, parts };
        let expected = [
            run("p", 2000..7000, vec![(1, 2..4), (2, 0..3)]),
            run("p", 7000..8000, vec![(2, 3..4)]),
            run("q", 8000..9000, vec![(3, 0..1)]),
            run("q", 10_000..11_000, vec![(4, 0..1)]),
            run("q", 12_000..13_000, vec![(4, 2..3)]),
        ];
        assert_eq!(runs, expected);
    }

    #[test]
    fn a_block_that_is_longer_than_a_run_is_one() {
        let mut runs = Vec::new();
        add(&mut runs, 1, &at("p", 0, 2), 0..2, 10);
        assert_eq!(runs.iter().map(PackRun::len).collect::<Vec<_>>(), [1000, 1000]);
    }
}
