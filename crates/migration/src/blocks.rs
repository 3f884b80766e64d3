// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which blocks of the program's memory are at the destination.
//!
//! Before the freeze a block travels as a candidate: its bytes may be old. After the freeze the source sends a digest
//! of the block as it is then. The candidate becomes resident if its digest is equal; otherwise the bytes are sent
//! again. Invariant I1: no other way makes a block resident.

use std::collections::VecDeque;

/// The number of a block of the program's memory.
pub type BlockNumber = usize;

/// A digest of a block's bytes: BLAKE3.
pub type BlockDigest = [u8; 32];

/// What the source sends for a block after the freeze.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockAnswer {
    /// The digest: the destination may have the bytes.
    Digest,
    /// The bytes: the destination has none, or old ones.
    Bytes,
}

/// The blocks as the source knows them.
#[derive(Debug)]
pub struct SourceBlocks {
    blocks: Vec<SentBlock>,
    /// Blocks that a page fault waits for, each once.
    demanded: VecDeque<BlockNumber>,
    /// No block before this one is to be sent.
    next: BlockNumber,
}

#[derive(Debug, Clone, Default)]
struct SentBlock {
    /// The candidate that was sent last, and that the destination may have.
    candidate: Option<BlockDigest>,
    /// The final bytes or digest were sent on this connection, or have arrived.
    is_sent: bool,
    is_demanded: bool,
}

impl SourceBlocks {
    /// Blocks of which none was sent.
    #[must_use]
    pub fn new(count: usize) -> Self {
        Self { blocks: vec![SentBlock::default(); count], demanded: VecDeque::new(), next: 0 }
    }

    /// Notes a candidate that is read while the program runs. Returns whether it differs from the last one, and is to
    /// be sent.
    pub fn pre_copy(&mut self, block: BlockNumber, digest: BlockDigest) -> bool {
        self.blocks[block].candidate.replace(digest) != Some(digest)
    }

    /// Puts a block before the others. `is_stale`: the destination has compared its candidate with the digest.
    pub fn demand(&mut self, block: BlockNumber, is_stale: bool) {
        let Some(entry) = self.blocks.get_mut(block) else { return };
        if is_stale {
            (entry.candidate, entry.is_sent) = (None, false);
        }
        if !entry.is_sent && !entry.is_demanded {
            entry.is_demanded = true;
            self.demanded.push_back(block);
        }
    }

    /// Takes the next block to send after the freeze: demanded ones first.
    pub fn take_next(&mut self) -> Option<(BlockNumber, BlockAnswer)> {
        let block = self.demanded.pop_front().or_else(|| {
            let rest = self.blocks.iter().enumerate().skip(self.next);
            let found = rest.filter(|(_, entry)| !entry.is_sent).map(|(block, _)| block).next()?;
            self.next = found + 1;
            Some(found)
        })?;
        let entry = &mut self.blocks[block];
        (entry.is_sent, entry.is_demanded) = (true, false);
        Some((block, if entry.candidate.is_some() { BlockAnswer::Digest } else { BlockAnswer::Bytes }))
    }

    /// Continues on a new connection, with the blocks that the destination has.
    pub fn resume(&mut self, presence: impl Fn(BlockNumber) -> BlockPresence) {
        (self.demanded, self.next) = (VecDeque::new(), 0);
        for (block, entry) in self.blocks.iter_mut().enumerate() {
            let presence = presence(block);
            entry.is_sent = presence == BlockPresence::Resident;
            entry.is_demanded = false;
            match presence {
                // The candidate was lost with the connection, or this is a new agent.
                BlockPresence::Missing => entry.candidate = None,
                // Its digest is not known after a restart of the agent, and is not needed to confirm it.
                BlockPresence::Candidate => _ = entry.candidate.get_or_insert_default(),
                BlockPresence::Resident => {}
            }
        }
    }
}

/// What the destination has of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockPresence {
    /// Nothing.
    Missing,
    /// Bytes that may be old.
    Candidate,
    /// The bytes.
    Resident,
}

/// The blocks as the destination has them.
#[derive(Debug)]
pub struct DestinationBlocks {
    blocks: Vec<BlockPresence>,
    /// The digests of candidates.
    digests: Vec<BlockDigest>,
    missing: usize,
}

impl DestinationBlocks {
    /// Blocks of which none has arrived.
    #[must_use]
    pub fn new(count: usize) -> Self {
        Self {
            blocks: vec![BlockPresence::Missing; count],
            digests: vec![BlockDigest::default(); count],
            missing: count,
        }
    }

    /// Notes a candidate whose bytes are stored. The digest is that of the stored bytes. Returns whether the block
    /// exists and is not resident.
    pub fn candidate(&mut self, block: BlockNumber, digest: BlockDigest) -> bool {
        match self.blocks.get_mut(block) {
            None | Some(BlockPresence::Resident) => false,
            Some(presence) => {
                *presence = BlockPresence::Candidate;
                self.digests[block] = digest;
                true
            }
        }
    }

    /// Compares a candidate with the digest after the freeze. Returns whether the block is resident now; if not, its
    /// bytes are to be demanded.
    pub fn confirm(&mut self, block: BlockNumber, digest: BlockDigest) -> bool {
        match self.presence(block) {
            BlockPresence::Resident => true,
            BlockPresence::Candidate if self.digests[block] == digest => self.arrived(block),
            BlockPresence::Candidate | BlockPresence::Missing => false,
        }
    }

    /// Notes bytes that were read after the freeze, and are stored. Returns whether the block exists.
    pub fn arrived(&mut self, block: BlockNumber) -> bool {
        let Some(presence) = self.blocks.get_mut(block) else { return false };
        self.missing -= usize::from(*presence != BlockPresence::Resident);
        *presence = BlockPresence::Resident;
        true
    }

    /// Returns what exists of a block; nothing of one that does not exist.
    #[must_use]
    pub fn presence(&self, block: BlockNumber) -> BlockPresence {
        self.blocks.get(block).copied().unwrap_or(BlockPresence::Missing)
    }

    /// Returns the number of blocks that are not resident.
    #[must_use]
    pub fn missing(&self) -> usize {
        self.missing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: BlockDigest = [1; 32];
    const NEW: BlockDigest = [2; 32];

    #[test]
    fn a_candidate_is_resident_when_its_digest_matches() {
        let mut blocks = DestinationBlocks::new(2);
        assert!(blocks.candidate(0, OLD) && blocks.candidate(1, OLD));
        assert_eq!((blocks.confirm(0, OLD), blocks.confirm(1, NEW), blocks.missing()), (true, false, 1));
        assert!(blocks.arrived(1));
        assert_eq!(blocks.missing(), 0);
    }

    #[test]
    fn a_candidate_never_replaces_resident_bytes() {
        let mut blocks = DestinationBlocks::new(1);
        blocks.arrived(0);
        assert!(!blocks.candidate(0, OLD));
        assert_eq!((blocks.presence(0), blocks.missing()), (BlockPresence::Resident, 0));
    }

    #[test]
    fn blocks_that_do_not_exist_are_refused() {
        let mut blocks = DestinationBlocks::new(1);
        assert!(!blocks.candidate(1, OLD) && !blocks.confirm(1, OLD) && !blocks.arrived(1));
        let mut sent = SourceBlocks::new(1);
        sent.demand(1, true);
        assert_eq!([sent.take_next(), sent.take_next()], [Some((0, BlockAnswer::Bytes)), None]);
    }

    #[test]
    fn demanded_blocks_are_sent_first_and_once() {
        let mut blocks = SourceBlocks::new(3);
        assert!(blocks.pre_copy(0, OLD) && !blocks.pre_copy(0, OLD) && blocks.pre_copy(0, NEW));
        blocks.demand(2, false);
        blocks.demand(2, false);
        let sent = [blocks.take_next(), blocks.take_next(), blocks.take_next(), blocks.take_next()];
        let expected = [(2, BlockAnswer::Bytes), (0, BlockAnswer::Digest), (1, BlockAnswer::Bytes)];
        assert_eq!(sent, [Some(expected[0]), Some(expected[1]), Some(expected[2]), None]);
        blocks.demand(0, true);
        assert_eq!(blocks.take_next(), Some((0, BlockAnswer::Bytes)));
    }
}
