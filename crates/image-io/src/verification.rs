// SPDX-License-Identifier: MIT OR Apache-2.0
//! Checks the blocks of sealed files before their bytes are used (docs/decisions/0022-checked-at-fill.md).
//!
//! A file whose image has a manifest gets the checksums of its blocks ([`ImageFile::verify_with`]). From then
//! on an engine's reads of it are whole blocks, and each is checked in the memory that it was read into. So
//! is what [`ImageFile::read_verified`] finds in the page cache. A hole that was not sealed as zeros is no
//! hole ([`ImageFile::data`]): it is read, and found wrong.
//!
//! Memory of a page server has no manifest: its pages are compared with the bytes that arrived
//! ([`PresenceMap`](crate::PresenceMap)).

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, LazyLock};

use crate::error::TransferError;
use crate::file::ImageFile;
use crate::units::{BLOCK, PAGE};

/// Bytes of a checksum.
const CHECKSUM: usize = 8;

/// Returns the checksum of a block: CRC-64/NVME. It finds damage, and no attacker: for that there are hashes.
#[must_use]
pub fn block_checksum(bytes: &[u8]) -> u64 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, bytes)
}

/// Returns the checksum of a block of `length` zeros, which are at most [`BLOCK`].
#[must_use]
pub fn checksum_of_zeros(length: usize) -> u64 {
    static ZEROS: [u8; BLOCK] = [0; BLOCK];
    static OF_BLOCK: LazyLock<u64> = LazyLock::new(|| block_checksum(&ZEROS));
    if length >= BLOCK { *OF_BLOCK } else { block_checksum(&ZEROS[..length]) }
}

/// Memory with checksums, little-endian: of a process, or a mapping of a sealed memory file.
pub type ChecksumTable = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// The sealed checksums of the blocks of one file.
#[derive(Clone)]
pub struct BlockChecksums {
    table: ChecksumTable,
    /// Where the checksums of this file begin, in bytes.
    start: usize,
    /// The number of blocks.
    blocks: u64,
}

impl fmt::Debug for BlockChecksums {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockChecksums").field("blocks", &self.blocks).finish_non_exhaustive()
    }
}

impl BlockChecksums {
    /// Takes the checksums of a file of `length` bytes. The first one is at byte `start` of the table.
    /// Returns `None` if the table ends before the last one.
    #[must_use]
    pub fn new(table: ChecksumTable, start: usize, length: u64) -> Option<Self> {
        let blocks = length.div_ceil(BLOCK as u64);
        let bytes = usize::try_from(blocks).ok()?.checked_mul(CHECKSUM)?;
        let has_all = start.checked_add(bytes)? <= (*table).as_ref().len();
        has_all.then_some(Self { table, start, blocks })
    }

    /// Returns the checksum of a block; none beyond the last.
    fn of(&self, block: u64) -> Option<u64> {
        let block = usize::try_from(block).ok().filter(|_| block < self.blocks)?;
        let at = self.start + block * CHECKSUM;
        (*self.table).as_ref().get(at..)?.first_chunk().map(|bytes| u64::from_le_bytes(*bytes))
    }
}

/// Returns the number of blocks that a range lies in, from the first.
fn blocks_of(range: &Range<u64>) -> Range<u64> {
    range.start / BLOCK as u64..range.end.div_ceil(BLOCK as u64)
}

impl ImageFile {
    /// What a read must begin and end at: a block of a sealed file, else a page. The end of the file ends a
    /// read, too.
    #[must_use]
    pub fn read_unit(&self) -> usize {
        if self.is_sealed() { BLOCK } else { PAGE }
    }

    /// Reads bytes as [`ImageFile::read_cached`] does. Of a sealed file it reads the whole blocks that they
    /// lie in, and returns bytes of right blocks only. The read from the disk that follows finds what is
    /// wrong with the others.
    ///
    /// Returns where the first of the bytes are in `buffer`, which has room for the range and two blocks.
    ///
    /// # Errors
    /// The file has changed since it was opened.
    pub fn read_verified(
        &self,
        range: Range<u64>,
        buffer: &mut [u8],
        ahead: bool,
    ) -> Result<Range<usize>, TransferError> {
        let bytes = |length: u64| usize::try_from(length).unwrap_or(usize::MAX);
        if !self.is_sealed() {
            let into = &mut buffer[..bytes(range.end - range.start)];
            let read = self.read_cached(range.start, into, ahead)?;
            let wrong = self.source().and_then(|source| source.first_wrong(range.start, &into[..read]));
            return Ok(0..wrong.unwrap_or(read));
        }
        let blocks = blocks_of(&range);
        let start = blocks.start * BLOCK as u64;
        let end = (blocks.end * BLOCK as u64).min(self.len());
        let into = &mut buffer[..bytes(end.saturating_sub(start))];
        let read = self.read_cached(start, into, ahead)?;
        let mut right = 0;
        for block in blocks {
            let length = self.block_len(block);
            if read - right < length || self.verify_block(block, &buffer[right..right + length]).is_err() {
                break;
            }
            right += length;
        }
        let at = bytes(range.start - start);
        Ok(at.min(right)..(at + bytes(range.end - range.start)).min(right))
    }

    /// Checks bytes that were read: of a sealed file whole blocks from `offset` on, where a part of a block
    /// counts as wrong, and of a page server's memory pages.
    ///
    /// # Errors
    /// [`TransferError::Damaged`], with the first wrong block, or [`TransferError::Lost`], with the first
    /// wrong page.
    pub fn verify(&self, offset: u64, bytes: &[u8]) -> Result<(), TransferError> {
        if !self.is_sealed() {
            let wrong = self.source().and_then(|source| source.first_wrong(offset, bytes));
            let lost = |wrong: usize| TransferError::Lost {
                file: self.name().to_path_buf(),
                offset: offset + wrong as u64,
                length: PAGE.min(bytes.len() - wrong),
            };
            return wrong.map_or(Ok(()), |wrong| Err(lost(wrong)));
        }
        let first = offset / BLOCK as u64;
        if !offset.is_multiple_of(BLOCK as u64) {
            return Err(self.damaged(first));
        }
        (first..).zip(bytes.chunks(BLOCK)).try_for_each(|(block, bytes)| self.verify_block(block, bytes))
    }

    fn verify_block(&self, block: u64, bytes: &[u8]) -> Result<(), TransferError> {
        let sealed = self.checksums().and_then(|checksums| checksums.of(block));
        let is_right = bytes.len() == self.block_len(block) && sealed == Some(block_checksum(bytes));
        if is_right { Ok(()) } else { Err(self.damaged(block)) }
    }

    fn damaged(&self, block: u64) -> TransferError {
        TransferError::Damaged {
            file: self.name().to_path_buf(),
            offset: block.saturating_mul(BLOCK as u64),
            length: self.block_len(block),
        }
    }

    /// Returns the first block of a hole that was not sealed as zeros, as far as it is in the range.
    pub(crate) fn sealed_data(&self, hole: Range<u64>) -> Option<(u64, u64)> {
        let checksums = self.checksums().filter(|_| !hole.is_empty())?;
        let is_zero = |block| checksums.of(block) == Some(checksum_of_zeros(self.block_len(block)));
        let block = blocks_of(&hole).find(|block| !is_zero(*block))?;
        let start = block * BLOCK as u64;
        Some((start.max(hole.start), (start + BLOCK as u64).min(hole.end)))
    }
}
