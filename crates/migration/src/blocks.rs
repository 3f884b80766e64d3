// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which blocks of the program's memory are at the destination.
//!
//! While the program runs a block travels as a candidate: its bytes may be old, or torn. After the freeze the destination
//! requests pages, and the source answers with a digest of the block as it is then, if that is the digest of the
//! candidate. The destination compares it with the bytes that it has stored. Invariant I1: a candidate's bytes are used
//! after that comparison only.

use std::collections::HashMap;

/// Bytes of a block.
pub const BLOCK_LEN: usize = 64 << 10;
/// The same, for addresses.
pub const BLOCK: u64 = BLOCK_LEN as u64;
/// Pages of a block.
pub const BLOCK_PAGES: u64 = BLOCK / PAGE;
const PAGE: u64 = 4096;

/// A digest of a block's bytes: BLAKE3. Pages that do not exist count as zeros.
pub type BlockDigest = [u8; 32];

/// The place of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockPlace {
    /// The task, as the image numbers it.
    pub task: u32,
    /// The address: a multiple of [`BLOCK`].
    pub vaddr: u64,
}

/// What the source sends for a block that is requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockAnswer {
    /// The digest: the destination has the bytes.
    Digest,
    /// The bytes: the destination has none, or others.
    Bytes,
}

/// The blocks as the source knows them.
#[derive(Debug, Default)]
pub struct SourceBlocks {
    candidates: HashMap<BlockPlace, SentCandidate>,
    /// The round of candidates that is being sent, from 1 on.
    round: u32,
}

#[derive(Debug, Clone, Copy)]
struct SentCandidate {
    digest: BlockDigest,
    round: u32,
}

impl SourceBlocks {
    /// Begins another round over all blocks. Returns its number.
    pub fn begin_round(&mut self) -> u32 {
        self.round += 1;
        self.round
    }

    /// The number of the round that is being sent.
    #[must_use]
    pub fn round(&self) -> u32 {
        self.round
    }

    /// Notes a block that was read while the program runs. Returns whether it differs from the candidate that was sent
    /// last, and is to be sent.
    pub fn pre_copy(&mut self, block: BlockPlace, digest: BlockDigest) -> bool {
        match self.candidates.get(&block) {
            Some(sent) if sent.digest == digest => false,
            _ => {
                self.candidates.insert(block, SentCandidate { digest, round: self.round });
                true
            }
        }
    }

    /// Forgets what may have been lost with the connection: candidates of rounds after this one, the last that the
    /// destination has reported as stored.
    pub fn lost_after(&mut self, stored: u32) {
        self.candidates.retain(|_, sent| sent.round <= stored);
    }

    /// Returns whether the destination may have a candidate of a block.
    #[must_use]
    pub fn has_candidate(&self, block: BlockPlace) -> bool {
        self.candidates.contains_key(&block)
    }

    /// Chooses the answer for a block, given its digest after the freeze.
    #[must_use]
    pub fn answer(&self, block: BlockPlace, digest: BlockDigest) -> BlockAnswer {
        match self.candidates.get(&block) {
            Some(sent) if sent.digest == digest => BlockAnswer::Digest,
            _ => BlockAnswer::Bytes,
        }
    }
}

/// What the destination has of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct StoredBlock {
    /// Its number in the order in which blocks were stored: its place in a file.
    slot: u64,
    /// The digest of the stored bytes, while they are those of one candidate.
    candidate: Option<BlockDigest>,
    /// A bit for each page whose bytes are those of the frozen program.
    resident: u16,
}

/// The blocks as the destination has them.
#[derive(Debug, Default)]
pub struct DestinationBlocks {
    blocks: HashMap<BlockPlace, StoredBlock>,
}

impl DestinationBlocks {
    /// The number of blocks.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.blocks.len() as u64
    }

    /// Whether it has none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Notes a candidate. The digest is that of the bytes, taken here. Returns the slot in which the bytes are to be
    /// stored; none if pages of the block are resident.
    pub fn candidate(&mut self, block: BlockPlace, digest: BlockDigest) -> Option<u64> {
        let stored = self.entry(block);
        if stored.resident != 0 {
            return None;
        }
        stored.candidate = Some(digest);
        Some(stored.slot)
    }

    /// Compares a candidate with a digest that was taken after the freeze. If they are equal, these pages are resident:
    /// returns the block's slot. The source has read these pages for certain, and others if its pagemap has them.
    pub fn confirm(
        &mut self,
        block: BlockPlace,
        digest: BlockDigest,
        pages: std::ops::Range<u64>,
    ) -> Option<u64> {
        let stored = self.blocks.get_mut(&block)?;
        if stored.candidate != Some(digest) {
            return None;
        }
        stored.resident |= mask(pages);
        Some(stored.slot)
    }

    /// Notes that bytes of pages arrived which were read after the freeze: pages of a block by their numbers in it.
    /// Returns the slot in which they are to be stored.
    pub fn arrived(&mut self, block: BlockPlace, pages: std::ops::Range<u64>) -> u64 {
        let stored = self.entry(block);
        // The candidate's other bytes are not those of its digest any more.
        stored.candidate = None;
        stored.resident |= mask(pages);
        stored.slot
    }

    /// Returns the slot of a block if these pages of it are resident.
    #[must_use]
    pub fn resident(&self, block: BlockPlace, pages: std::ops::Range<u64>) -> Option<u64> {
        let mask = mask(pages);
        self.blocks.get(&block).filter(|stored| stored.resident & mask == mask).map(|stored| stored.slot)
    }

    fn entry(&mut self, block: BlockPlace) -> &mut StoredBlock {
        let slot = self.blocks.len() as u64;
        self.blocks.entry(block).or_insert(StoredBlock { slot, candidate: None, resident: 0 })
    }
}

fn mask(pages: std::ops::Range<u64>) -> u16 {
    pages.filter(|page| *page < BLOCK_PAGES).fold(0, |mask, page| mask | 1 << page)
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: BlockDigest = [1; 32];
    const NEW: BlockDigest = [2; 32];
    const ALL: std::ops::Range<u64> = 0..BLOCK_PAGES;

    fn block(number: u64) -> BlockPlace {
        BlockPlace { task: 7, vaddr: number * BLOCK }
    }

    #[test]
    fn a_candidate_is_resident_when_its_digest_matches() {
        let mut blocks = DestinationBlocks::default();
        assert_eq!((blocks.candidate(block(0), OLD), blocks.candidate(block(1), OLD)), (Some(0), Some(1)));
        assert_eq!((blocks.resident(block(0), ALL), blocks.resident(block(1), ALL)), (None, None));
        assert_eq!(blocks.confirm(block(0), OLD, 2..4), Some(0));
        assert_eq!((blocks.resident(block(0), 2..4), blocks.resident(block(0), 3..5)), (Some(0), None));
        assert_eq!((blocks.confirm(block(0), OLD, ALL), blocks.confirm(block(1), NEW, ALL)), (Some(0), None));
        assert_eq!((blocks.resident(block(0), ALL), blocks.resident(block(1), ALL)), (Some(0), None));
        assert_eq!(blocks.confirm(block(2), OLD, ALL), None);
    }

    #[test]
    fn a_candidate_never_replaces_resident_bytes() {
        let mut blocks = DestinationBlocks::default();
        assert_eq!(blocks.arrived(block(0), 3..5), 0);
        assert_eq!(blocks.candidate(block(0), OLD), None);
        assert_eq!(blocks.confirm(block(0), OLD, ALL), None);
        let of = |pages| blocks.resident(block(0), pages);
        assert_eq!((of(3..5), of(3..4), of(3..6), of(2..4)), (Some(0), Some(0), None, None));
    }

    #[test]
    fn bytes_that_arrive_end_their_block_s_candidate() {
        let mut blocks = DestinationBlocks::default();
        blocks.candidate(block(0), OLD);
        blocks.arrived(block(0), 0..1);
        assert_eq!((blocks.confirm(block(0), OLD, ALL), blocks.resident(block(0), 1..2)), (None, None));
    }

    #[test]
    fn a_changed_block_is_sent_again_and_answered_with_bytes() {
        let mut blocks = SourceBlocks::default();
        blocks.begin_round();
        assert!(blocks.pre_copy(block(0), OLD) && !blocks.pre_copy(block(0), OLD));
        assert_eq!(blocks.answer(block(0), OLD), BlockAnswer::Digest);
        assert_eq!(blocks.answer(block(0), NEW), BlockAnswer::Bytes);
        assert_eq!(blocks.answer(block(1), OLD), BlockAnswer::Bytes);
        assert!(blocks.pre_copy(block(0), NEW));
        assert_eq!(blocks.answer(block(0), OLD), BlockAnswer::Bytes);
    }

    #[test]
    fn candidates_that_may_be_lost_are_sent_again() {
        let mut blocks = SourceBlocks::default();
        let first = blocks.begin_round();
        blocks.pre_copy(block(0), OLD);
        blocks.begin_round();
        blocks.pre_copy(block(1), OLD);
        blocks.lost_after(first);
        assert_eq!(blocks.answer(block(0), OLD), BlockAnswer::Digest);
        assert_eq!(blocks.answer(block(1), OLD), BlockAnswer::Bytes);
        assert!(blocks.pre_copy(block(1), OLD) && !blocks.pre_copy(block(0), OLD));
    }
}
