// SPDX-License-Identifier: MIT OR Apache-2.0
//! Chunks as a pack has them: block after block of 64 KiB, each compressed by itself or not at all, so that a
//! reader of a few pages reads a few blocks.

use std::io;
use std::ops::Range;

use rewake_image_io::BLOCK;
use zstd::bulk::{Compressor, Decompressor};

use crate::format::ChunkLocation;

/// The fastest of zstd's usual levels: a push shall not be slower than a link of 1 Gbit/s on one core.
const LEVEL: i32 = 1;

/// A chunk in its stored form.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct StoredBlocks {
    pub(crate) bytes: Vec<u8>,
    /// For each block the length of the stored block, less 1.
    pub(crate) lengths: Box<[u16]>,
}

/// Compresses the blocks of a chunk. A block that zstd makes shorter by less than an eighth is stored
/// uncompressed.
pub(crate) fn store(chunk: &[u8]) -> io::Result<StoredBlocks> {
    let mut compressor = Compressor::new(LEVEL)?;
    let (mut bytes, mut lengths) = (Vec::with_capacity(chunk.len()), Vec::new());
    let mut frame = vec![0; zstd::zstd_safe::compress_bound(BLOCK)];
    for block in chunk.chunks(BLOCK) {
        let length = compressor.compress_to_buffer(block, &mut frame)?;
        let stored = if length <= block.len() / 8 * 7 { &frame[..length] } else { block };
        bytes.extend(stored);
        // A block has 1 to 65536 bytes, and so has its stored form.
        lengths.push(u16::try_from(stored.len() - 1).unwrap_or(u16::MAX));
    }
    Ok(StoredBlocks { bytes, lengths: lengths.into() })
}

/// Returns the stored bytes of some blocks of a chunk.
pub(crate) fn stored(chunk: &ChunkLocation, blocks: Range<usize>) -> usize {
    blocks.map(|block| chunk.stored(block) as usize).sum()
}

/// Returns where some blocks of a chunk are in its pack.
pub(crate) fn range(chunk: &ChunkLocation, blocks: Range<usize>) -> Range<u64> {
    let start = u64::from(chunk.offset) + stored(chunk, 0..blocks.start) as u64;
    start..start + stored(chunk, blocks) as u64
}

/// Returns the bytes of some blocks of a chunk, from their stored form.
pub(crate) fn load(stored: &[u8], chunk: &ChunkLocation, blocks: Range<usize>) -> Result<Vec<u8>, String> {
    let end = (blocks.end * BLOCK).min(chunk.length as usize);
    let mut bytes = vec![0; end - blocks.start * BLOCK];
    let mut decompressor = Decompressor::new().map_err(|error| error.to_string())?;
    let mut rest = stored;
    for (block, into) in blocks.zip(bytes.chunks_mut(BLOCK)) {
        let (frame, after) = rest.split_at_checked(chunk.stored(block) as usize).ok_or("it is too short")?;
        rest = after;
        load_block(frame, &mut decompressor, into)?;
    }
    Ok(bytes)
}

/// Writes the bytes of a block, from its stored form.
pub(crate) fn load_block(
    frame: &[u8],
    decompressor: &mut Decompressor<'_>,
    into: &mut [u8],
) -> Result<(), String> {
    if frame.len() == into.len() {
        into.copy_from_slice(frame);
        return Ok(());
    }
    match decompressor.decompress_to_buffer(frame, into) {
        Ok(found) if found == into.len() => Ok(()),
        Ok(found) => Err(format!("a block has {found} bytes, expected {}", into.len())),
        Err(error) => Err(format!("a block cannot be decompressed: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn location(stored: &StoredBlocks, length: usize) -> ChunkLocation {
        let length = u32::try_from(length).unwrap();
        ChunkLocation { pack: "p".into(), offset: 7, length, blocks: stored.lengths.clone() }
    }

    /// Text, zeros, bytes that do not compress, and a last block of 5 bytes.
    fn chunk() -> Vec<u8> {
        let mut bytes: Vec<u8> = b"a page of text ".iter().copied().cycle().take(BLOCK).collect();
        bytes.extend(vec![0; BLOCK]);
        let mut hasher = blake3::Hasher::new();
        hasher.update(b"random");
        let mut random = vec![0; BLOCK + 5];
        hasher.finalize_xof().fill(&mut random);
        bytes.extend(random);
        bytes
    }

    #[test]
    fn each_block_is_compressed_where_it_pays_and_read_by_itself() {
        let chunk = chunk();
        let stored = store(&chunk).unwrap();
        let at = location(&stored, chunk.len());
        assert!(at.stored(0) < 1000 && at.stored(1) < 100, "{at:?}");
        assert_eq!([at.stored(2), at.stored(3)], [1 << 16, 5]);
        assert_eq!(stored.bytes.len(), at.stored_length() as usize);
        for first in 0..4 {
            for end in first + 1..=4 {
                let place = range(&at, first..end);
                let [from, to] = [place.start, place.end].map(|at| usize::try_from(at - 7).unwrap());
                let found = load(&stored.bytes[from..to], &at, first..end).unwrap();
                assert!(found == chunk[first * BLOCK..(end * BLOCK).min(chunk.len())], "{first}..{end}");
            }
        }
    }

    #[test]
    fn a_cut_or_altered_block_gives_no_more_than_its_bytes() {
        let chunk = chunk();
        let mut stored = store(&chunk).unwrap();
        let at = location(&stored, chunk.len());
        assert_eq!(
            load(&stored.bytes[..stored.bytes.len() - 1], &at, 0..4),
            Err("it is too short".to_owned())
        );
        for byte in 0..at.stored(0) as usize {
            stored.bytes[byte] ^= 0x55;
            // Another text, or an error; never more bytes.
            if let Ok(found) = load(&stored.bytes, &at, 0..4) {
                assert_eq!(found.len(), chunk.len());
            }
            stored.bytes[byte] ^= 0x55;
        }
    }
}
