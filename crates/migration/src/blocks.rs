// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which blocks of the program's memory are at the destination.
//!
//! While the program runs a block travels as a candidate: its bytes may be old, or torn. After the freeze the
//! destination requests pages, and the source answers with a digest of the frozen block, if it equals the
//! digest of the candidate. The destination compares it with the bytes that it has stored. Invariant I1: a
//! candidate's bytes are used after that comparison only.

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

/// Pages of a block: a bit for each, from the first on.
pub type PageMask = u16;

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
    /// How many candidates were sent, and not lost with a connection.
    sent: u64,
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

    /// Notes a block that was read while the program runs. Returns whether it differs from the candidate that
    /// was sent last, and is to be sent.
    pub fn pre_copy(&mut self, block: BlockPlace, digest: BlockDigest) -> bool {
        match self.candidates.get(&block) {
            Some(sent) if sent.digest == digest => false,
            _ => {
                self.candidates.insert(block, SentCandidate { digest, round: self.round });
                self.sent += 1;
                true
            }
        }
    }

    /// Forgets what may have been lost with the connection: candidates of rounds after this one, the last
    /// that the destination has reported as stored.
    pub fn lost_after(&mut self, stored: u32) {
        let before = self.candidates.len();
        self.candidates.retain(|_, sent| sent.round <= stored);
        self.sent -= (before - self.candidates.len()) as u64;
    }

    /// Returns the number of candidates.
    #[must_use]
    pub fn len(&self) -> usize {
        self.candidates.len()
    }

    /// Whether it has none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.candidates.is_empty()
    }

    /// Returns how many blocks were sent in vain, if this share of all candidates has changed since.
    #[must_use]
    pub fn in_vain(&self, changed: f64) -> f64 {
        self.sent as f64 - self.len() as f64 * (1.0 - changed)
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
    /// The digest of the stored bytes, while they are one candidate's.
    candidate: Option<BlockDigest>,
    /// Pages whose bytes are known to be the frozen program's.
    resident: PageMask,
    /// Pages that have a place in the file: all others are zeros.
    written: PageMask,
}

/// Where the bytes of a block are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockSlot {
    /// Its number in the order in which blocks were stored.
    pub number: u64,
    /// Pages that have a place in the file: all others are zeros.
    pub written: PageMask,
}

/// The blocks as the destination has them.
#[derive(Debug, Default)]
pub struct DestinationBlocks {
    blocks: HashMap<BlockPlace, StoredBlock>,
    /// Pages that have a place in the file.
    pages: u64,
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

    /// The number of pages that have a place in the file.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Notes a candidate. The digest is that of the bytes, taken here; pages outside `pages` are zeros.
    /// Returns the slot as it was before, in which the bytes are to be stored, or `None` if pages of the
    /// block are resident.
    pub fn candidate(
        &mut self,
        block: BlockPlace,
        digest: BlockDigest,
        pages: PageMask,
    ) -> Option<BlockSlot> {
        let stored = self.entry(block);
        if stored.resident != 0 {
            return None;
        }
        stored.candidate = Some(digest);
        Some(self.write(block, pages))
    }

    /// Compares a candidate with a digest that was taken after the freeze. If they are equal, these pages are
    /// resident: returns the block's slot. The source has read these pages for certain, and others if its
    /// pagemap has them.
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

    /// Notes that bytes of pages arrived which were read after the freeze: pages of a block by their numbers
    /// in it. Returns the slot in which they are to be stored.
    pub fn arrived(&mut self, block: BlockPlace, pages: std::ops::Range<u64>) -> u64 {
        let (stored, pages) = (self.entry(block), mask(pages));
        // The candidate's other bytes do not match its digest any more.
        stored.candidate = None;
        stored.resident |= pages;
        self.write(block, pages).number
    }

    /// Returns the slot of a block if these pages of it are resident.
    #[must_use]
    pub fn resident(&self, block: BlockPlace, pages: std::ops::Range<u64>) -> Option<BlockSlot> {
        let mask = mask(pages);
        let stored = self.blocks.get(&block).filter(|stored| stored.resident & mask == mask)?;
        Some(BlockSlot { number: stored.slot, written: stored.written })
    }

    /// Gives pages a place in the file. Returns the slot as it was before.
    fn write(&mut self, block: BlockPlace, pages: PageMask) -> BlockSlot {
        let stored = self.entry(block);
        let before = BlockSlot { number: stored.slot, written: stored.written };
        stored.written |= pages;
        self.pages += u64::from((pages & !before.written).count_ones());
        before
    }

    fn entry(&mut self, block: BlockPlace) -> &mut StoredBlock {
        let slot = self.blocks.len() as u64;
        self.blocks.entry(block).or_insert(StoredBlock { slot, candidate: None, resident: 0, written: 0 })
    }
}

fn mask(pages: std::ops::Range<u64>) -> PageMask {
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

    /// The slot's number where pages are resident.
    fn resident(blocks: &DestinationBlocks, number: u64, pages: std::ops::Range<u64>) -> Option<u64> {
        blocks.resident(block(number), pages).map(|slot| slot.number)
    }

    #[test]
    fn a_candidate_is_resident_when_its_digest_matches() {
        let mut blocks = DestinationBlocks::default();
        let slot = |number| Some(BlockSlot { number, written: 0 });
        assert_eq!(blocks.candidate(block(0), OLD, 0xffff), slot(0));
        assert_eq!(blocks.candidate(block(1), OLD, 0xffff), slot(1));
        assert_eq!((resident(&blocks, 0, ALL), resident(&blocks, 1, ALL)), (None, None));
        assert_eq!(blocks.confirm(block(0), OLD, 2..4), Some(0));
        assert_eq!((resident(&blocks, 0, 2..4), resident(&blocks, 0, 3..5)), (Some(0), None));
        assert_eq!((blocks.confirm(block(0), OLD, ALL), blocks.confirm(block(1), NEW, ALL)), (Some(0), None));
        assert_eq!((resident(&blocks, 0, ALL), resident(&blocks, 1, ALL)), (Some(0), None));
        assert_eq!(blocks.confirm(block(2), OLD, ALL), None);
    }

    #[test]
    fn a_candidate_never_replaces_resident_bytes() {
        let mut blocks = DestinationBlocks::default();
        assert_eq!(blocks.arrived(block(0), 3..5), 0);
        assert_eq!(blocks.candidate(block(0), OLD, 0xffff), None);
        assert_eq!(blocks.confirm(block(0), OLD, ALL), None);
        let of = |pages| resident(&blocks, 0, pages);
        assert_eq!((of(3..5), of(3..4), of(3..6), of(2..4)), (Some(0), Some(0), None, None));
    }

    #[test]
    fn bytes_that_arrive_end_their_block_s_candidate() {
        let mut blocks = DestinationBlocks::default();
        blocks.candidate(block(0), OLD, 0xffff);
        blocks.arrived(block(0), 0..1);
        assert_eq!((blocks.confirm(block(0), OLD, ALL), resident(&blocks, 0, 1..2)), (None, None));
    }

    #[test]
    fn only_pages_with_bytes_have_a_place() {
        let mut blocks = DestinationBlocks::default();
        blocks.candidate(block(0), OLD, 0b1);
        assert_eq!(blocks.pages(), 1);
        // Page 0 is zeros now, and keeps its place.
        assert_eq!(blocks.candidate(block(0), NEW, 0b110), Some(BlockSlot { number: 0, written: 0b1 }));
        assert_eq!(blocks.pages(), 3);
        blocks.arrived(block(0), 2..4);
        assert_eq!((blocks.pages(), blocks.len()), (4, 1));
        assert_eq!(blocks.resident(block(0), 2..4), Some(BlockSlot { number: 0, written: 0b1111 }));
    }

    #[test]
    fn blocks_are_sent_in_vain_when_they_have_changed() {
        let mut blocks = SourceBlocks::default();
        blocks.begin_round();
        (0..4).for_each(|number| assert!(blocks.pre_copy(block(number), OLD)));
        assert_eq!((blocks.in_vain(0.0), blocks.in_vain(0.25)), (0.0, 1.0));
        let first = blocks.begin_round() - 1;
        assert!(blocks.pre_copy(block(0), NEW));
        assert_eq!((blocks.in_vain(0.0), blocks.in_vain(0.5), blocks.len()), (1.0, 3.0, 4));
        // One that is lost with its connection was not sent.
        blocks.lost_after(first);
        assert_eq!((blocks.in_vain(0.0), blocks.len()), (1.0, 3));
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
