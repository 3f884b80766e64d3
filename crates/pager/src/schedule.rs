// SPDX-License-Identifier: MIT OR Apache-2.0
//! Decides which block is read next, with two bits per block. Several threads may call each method.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::BlockIx;
use crate::bits::Bits;

/// Promoted blocks that may wait to be claimed: 16 MiB, about 10 ms of a fast disk. Page faults that are
/// older say little about the next ones.
pub const PROMOTED_BLOCKS: usize = 64;

/// How far claims in order may be ahead of a sweep: 16 MiB.
const AHEAD: usize = 256;
/// How far they are ahead of a sweep that fills its own windows: 2 MiB. Otherwise both would fill the same
/// pages.
const LEAD: usize = 32;

/// The outcome of work on a claimed block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// It has no missing page.
    Done,
    /// It must be claimed again.
    Retry,
}

/// State of a block. The order matters: a block below `Loading` can be claimed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BlockState {
    Missing = 0,
    Queued = 1,
    Loading = 2,
    Done = 3,
}

/// Blocks of a priority range that are searched together: each claim searches from the start of its piece.
const PRIORITY_PIECE: usize = 1024;
const PER_WORD: usize = 32;
/// The upper bit of every state.
const UPPER: u64 = 0xaaaa_aaaa_aaaa_aaaa;

/// The states of all blocks, the promoted blocks, and the position of the rest.
#[derive(Debug)]
pub(crate) struct Schedule {
    states: Box<[AtomicU64]>,
    blocks: usize,
    /// Blocks that can be claimed. It may be too high for a moment, but never too low: zero means none.
    unclaimed: AtomicUsize,
    /// Where a search begins: most likely no block below can be claimed.
    cursor: AtomicUsize,
    promoted: PromotedRing,
    overflows: AtomicU64,
    /// Blocks to claim after promoted ones and before the others; `next_priority` is the current piece.
    priority: Vec<PriorityPiece>,
    /// The blocks of these pieces, without blocks of rank 0, for which restores wait. `None` without pieces.
    prefetched: Option<Bits>,
    next_priority: AtomicUsize,
    /// Pieces before this one have no missing page.
    resident_pieces: AtomicUsize,
}

/// Blocks that are claimed before others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PriorityPiece {
    pub(crate) blocks: Range<usize>,
    /// Their place among the pieces of all address spaces.
    pub(crate) rank: u32,
}

impl PriorityPiece {
    /// Whether a piece begins in this one or right after it, and has its rank.
    fn is_continued_by(&self, next: &Self) -> bool {
        self.rank == next.rank && (self.blocks.start..=self.blocks.end).contains(&next.blocks.start)
    }
}

impl Schedule {
    pub(crate) fn new(blocks: usize) -> Self {
        Self {
            states: (0..blocks.div_ceil(PER_WORD)).map(|_| AtomicU64::new(0)).collect(),
            blocks,
            unclaimed: AtomicUsize::new(blocks),
            cursor: AtomicUsize::new(0),
            promoted: PromotedRing::default(),
            overflows: AtomicU64::new(0),
            priority: Vec::new(),
            prefetched: None,
            next_priority: AtomicUsize::new(0),
            resident_pieces: AtomicUsize::new(0),
        }
    }

    /// Sets the blocks to claim before the others, in this order.
    pub(crate) fn set_priority(&mut self, pieces: impl IntoIterator<Item = PriorityPiece>) {
        let mut joined: Vec<PriorityPiece> = Vec::new();
        for piece in pieces {
            match joined.last_mut() {
                Some(last) if last.is_continued_by(&piece) => {
                    last.blocks.end = last.blocks.end.max(piece.blocks.end);
                }
                _ => joined.push(piece),
            }
        }
        let split = |PriorityPiece { blocks, rank }| {
            let starts = blocks.clone().step_by(PRIORITY_PIECE);
            starts.map(move |start| PriorityPiece {
                blocks: start..blocks.end.min(start + PRIORITY_PIECE),
                rank,
            })
        };
        self.priority = joined.into_iter().flat_map(split).collect();
        self.prefetched = (!self.priority.is_empty()).then(|| Bits::new(self.blocks as u64));
        for piece in self.priority.iter().filter(|piece| piece.rank > 0) {
            let PriorityPiece { blocks, .. } = piece;
            self.prefetched.iter().for_each(|bits| {
                bits.set(blocks.start as u64..blocks.end as u64);
            });
        }
        self.next_priority = AtomicUsize::new(0);
        self.resident_pieces = AtomicUsize::new(0);
    }

    /// Whether a block has priority, and no restore waits for it.
    pub(crate) fn is_prefetched(&self, block: BlockIx) -> bool {
        self.prefetched.as_ref().is_some_and(|bits| bits.get(block.0 as u64))
    }

    /// The rank of the next blocks with priority, or `None` if none are left.
    pub(crate) fn next_rank(&self) -> Option<u32> {
        self.priority.get(self.next_priority.load(Ordering::Relaxed)).map(|piece| piece.rank)
    }

    /// Whether no block with priority has a missing page, as `missing` says.
    pub(crate) fn is_priority_resident(&self, missing: impl Fn(BlockIx) -> bool) -> bool {
        let known = self.resident_pieces.load(Ordering::Relaxed);
        let is_resident = |piece: &&PriorityPiece| !piece.blocks.clone().any(|block| missing(BlockIx(block)));
        let more = self.priority[known..].iter().take_while(is_resident).count();
        // A page never becomes missing again.
        self.resident_pieces.fetch_max(known + more, Ordering::Relaxed);
        known + more == self.priority.len()
    }

    /// Claims a block: the oldest promoted one, else one with priority, else the lowest.
    pub(crate) fn claim(&self) -> Option<BlockIx> {
        let promoted = std::iter::from_fn(|| self.promoted.pop())
            .find(|block| self.claim_in(*block, BlockState::Queued));
        self.claimed(promoted.or_else(|| self.claim_priority(u32::MAX)).or_else(|| self.claim_lowest()))
    }

    /// Claims a block with priority only, of this rank at most.
    pub(crate) fn claim_first(&self, most_rank: u32) -> Option<BlockIx> {
        self.claimed(self.claim_priority(most_rank))
    }

    fn claimed(&self, block: Option<usize>) -> Option<BlockIx> {
        if block.is_some() {
            self.unclaimed.fetch_sub(1, Ordering::AcqRel);
        }
        block.map(BlockIx)
    }

    /// Claims a block with priority. A block that is released after its piece was searched is claimed with
    /// the lowest.
    fn claim_priority(&self, most_rank: u32) -> Option<usize> {
        loop {
            let next = self.next_priority.load(Ordering::Acquire);
            let piece = self.priority.get(next).filter(|piece| piece.rank <= most_rank)?;
            if let Some(claimed) = self.search(piece.blocks.clone()) {
                return Some(claimed);
            }
            // It fails when another thread did it.
            let _ = self.next_priority.compare_exchange(next, next + 1, Ordering::AcqRel, Ordering::Relaxed);
        }
    }

    fn claim_lowest(&self) -> Option<usize> {
        if self.unclaimed.load(Ordering::Acquire) == 0 {
            return None;
        }
        let from = self.cursor.load(Ordering::Acquire);
        // The second search finds a block that was released below a moving cursor.
        let claimed = self.search(from..self.blocks).or_else(|| self.search(0..from))?;
        // It fails when another thread moved the cursor, perhaps back.
        let _ = self.cursor.compare_exchange(from, claimed + 1, Ordering::AcqRel, Ordering::Relaxed);
        Some(claimed)
    }

    fn search(&self, range: Range<usize>) -> Option<usize> {
        let mut at = range.start;
        while at < range.end {
            let word = self.states[at / PER_WORD].load(Ordering::Acquire);
            let claimable = !word & UPPER & u64::MAX << (2 * (at % PER_WORD));
            if claimable == 0 {
                at = (at / PER_WORD + 1) * PER_WORD;
                continue;
            }
            at = at / PER_WORD * PER_WORD + claimable.trailing_zeros() as usize / 2;
            if at < range.end
                && (self.claim_in(at, BlockState::Missing) || self.claim_in(at, BlockState::Queued))
            {
                return Some(at);
            }
        }
        None
    }

    fn claim_in(&self, block: usize, from: BlockState) -> bool {
        self.change(block, from, BlockState::Loading)
    }

    /// Promotes `block` and the next one, unless they are claimed or done.
    pub(crate) fn promote(&self, block: BlockIx) {
        for block in block.0..self.blocks.min(block.0 + 2) {
            if !self.change(block, BlockState::Missing, BlockState::Queued) {
                continue;
            }
            if let Some(overwritten) = self.promoted.push(block)
                && self.change(overwritten, BlockState::Queued, BlockState::Missing)
            {
                self.overflows.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Returns false when every block is claimed or done.
    pub(crate) fn has_claimable(&self) -> bool {
        self.unclaimed.load(Ordering::Acquire) > 0
    }

    pub(crate) fn position(&self) -> Option<BlockIx> {
        let at = self.cursor.load(Ordering::Acquire);
        (0 < at && at < self.blocks).then_some(BlockIx(at))
    }

    pub(crate) fn begin_at(&self, block: BlockIx) {
        self.cursor.store(block.0, Ordering::Release);
    }

    /// Continues claims in order shortly ahead of `block`, where a thread sweeps, unless they have that
    /// position. With `windows` the sweep fills the next blocks itself. The blocks before follow after the
    /// last one.
    pub(crate) fn follow(&self, block: BlockIx, windows: bool) {
        let start = if windows { block.0.saturating_add(LEAD) } else { block.0 };
        let at = self.cursor.load(Ordering::Acquire);
        if start < self.blocks && !(start..block.0.saturating_add(AHEAD)).contains(&at) {
            self.cursor.store(start, Ordering::Release);
        }
    }

    /// Claims this block. Returns false when it is claimed or done.
    pub(crate) fn claim_block(&self, block: BlockIx) -> bool {
        let claimed =
            self.claim_in(block.0, BlockState::Missing) || self.claim_in(block.0, BlockState::Queued);
        if claimed {
            self.unclaimed.fetch_sub(1, Ordering::AcqRel);
        }
        claimed
    }

    pub(crate) fn release(&self, block: BlockIx, finish: Finish) {
        match finish {
            Finish::Done => {
                let held = self.change(block.0, BlockState::Loading, BlockState::Done);
                debug_assert!(held, "{block:?} was released without being claimed");
            }
            Finish::Retry => {
                self.unclaimed.fetch_add(1, Ordering::AcqRel);
                if self.change(block.0, BlockState::Loading, BlockState::Missing) {
                    self.cursor.fetch_min(block.0, Ordering::AcqRel);
                } else {
                    self.unclaimed.fetch_sub(1, Ordering::AcqRel);
                    debug_assert!(false, "{block:?} was released without being claimed");
                }
            }
        }
    }

    /// Number of promotions that later ones overwrote. Such blocks keep their place in the plain order.
    pub(crate) fn overflows(&self) -> u64 {
        self.overflows.load(Ordering::Relaxed)
    }

    /// Checks that the states are consistent. `missing` returns whether a block has missing pages.
    pub(crate) fn check(&self, missing: impl Fn(BlockIx) -> bool) -> Result<(), String> {
        let mut claimable = 0;
        for block in 0..self.blocks {
            let state = self.states[block / PER_WORD].load(Ordering::Acquire) >> (2 * (block % PER_WORD)) & 3;
            claimable += usize::from(state < BlockState::Loading as u64);
            if state == BlockState::Done as u64 && missing(BlockIx(block)) {
                return Err(format!("block {block} is done and has missing pages"));
            }
        }
        let unclaimed = self.unclaimed.load(Ordering::Acquire);
        if unclaimed == claimable {
            Ok(())
        } else {
            Err(format!("{claimable} blocks are claimable, {unclaimed} are counted"))
        }
    }

    fn change(&self, block: usize, from: BlockState, to: BlockState) -> bool {
        let shift = 2 * (block % PER_WORD);
        let change = |word: u64| {
            let held = word >> shift & 3 == from as u64;
            held.then(|| word & !(3 << shift) | (to as u64) << shift)
        };
        self.states[block / PER_WORD].fetch_update(Ordering::AcqRel, Ordering::Acquire, change).is_ok()
    }
}

/// A ring of promoted blocks. Entries are only hints; the states decide. An entry that two threads lose, or
/// that is found a turn later, only loses its place in the order.
#[derive(Debug)]
struct PromotedRing {
    /// Block number plus one; zero is an empty place.
    places: [AtomicUsize; PROMOTED_BLOCKS],
    /// Number of entries ever taken, and ever put.
    head: AtomicUsize,
    tail: AtomicUsize,
}

impl Default for PromotedRing {
    fn default() -> Self {
        let places = std::array::from_fn(|_| AtomicUsize::new(0));
        Self { places, head: AtomicUsize::new(0), tail: AtomicUsize::new(0) }
    }
}

impl PromotedRing {
    /// Puts `block` last. Returns the block that it overwrote when the ring was full.
    fn push(&self, block: usize) -> Option<usize> {
        let at = self.tail.fetch_add(1, Ordering::AcqRel);
        self.places[at % PROMOTED_BLOCKS].swap(block + 1, Ordering::AcqRel).checked_sub(1)
    }

    /// Takes the first block.
    fn pop(&self) -> Option<usize> {
        loop {
            let head = self.head.load(Ordering::Acquire);
            let tail = self.tail.load(Ordering::Acquire);
            if head >= tail {
                return None;
            }
            // Entries further back than one turn were overwritten.
            let at = head.max(tail.saturating_sub(PROMOTED_BLOCKS));
            if self.head.compare_exchange(head, at + 1, Ordering::AcqRel, Ordering::Relaxed).is_err() {
                continue;
            }
            let taken = self.places[at % PROMOTED_BLOCKS].swap(0, Ordering::AcqRel);
            if let Some(block) = taken.checked_sub(1) {
                return Some(block);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claims(schedule: &Schedule) -> Vec<usize> {
        std::iter::from_fn(|| schedule.claim()).map(|block| block.0).collect()
    }

    fn piece(blocks: Range<usize>, rank: u32) -> PriorityPiece {
        PriorityPiece { blocks, rank }
    }

    #[test]
    fn without_faults_blocks_are_claimed_in_order() {
        let schedule = Schedule::new(100);
        assert_eq!(claims(&schedule), (0..100).collect::<Vec<_>>());
        schedule.check(|_| true).unwrap();
    }

    #[test]
    fn promoted_blocks_precede_priority_blocks_and_these_the_rest() {
        let mut schedule = Schedule::new(5000);
        schedule.set_priority([piece(4000..4003, 3), piece(100..2500, 8)]);
        assert_eq!(schedule.next_rank(), Some(3));
        assert_eq!(schedule.claim(), Some(BlockIx(4000)));
        schedule.promote(BlockIx(7));
        let wanted = [7, 8].into_iter().chain(4001..4003).chain(100..2500);
        let wanted = wanted.chain(0..7).chain(9..100).chain(2500..4000).chain(4003..5000);
        assert_eq!(claims(&schedule), wanted.collect::<Vec<_>>());
        assert_eq!(schedule.next_rank(), None);
        schedule.check(|_| true).unwrap();
    }

    #[test]
    fn blocks_with_priority_can_be_claimed_alone() {
        let mut schedule = Schedule::new(100);
        schedule.set_priority([piece(50..51, 0), piece(7..8, 1)]);
        schedule.promote(BlockIx(20));
        let first = |most_rank| -> Vec<usize> {
            std::iter::from_fn(|| schedule.claim_first(most_rank)).map(|block| block.0).collect()
        };
        assert_eq!(first(0), [50]);
        assert_eq!(schedule.next_rank(), Some(1));
        assert_eq!(first(1), [7]);
        assert_eq!(schedule.claim(), Some(BlockIx(20)));
        schedule.check(|_| true).unwrap();
    }

    #[test]
    fn priority_is_resident_when_no_block_of_it_is_missing() {
        let mut schedule = Schedule::new(100);
        assert!(schedule.is_priority_resident(|_| true), "there is none");
        schedule.set_priority([piece(50..52, 0), piece(7..8, 1)]);
        assert!(!schedule.is_priority_resident(|block| block.0 == 51));
        assert!(!schedule.is_priority_resident(|block| block.0 == 7));
        assert!(schedule.is_priority_resident(|block| ![7, 50, 51].contains(&block.0)));
    }

    #[test]
    fn adjacent_pieces_of_one_rank_are_joined() {
        let mut schedule = Schedule::new(100);
        let pieces = [piece(4..6, 0), piece(5..9, 0), piece(9..10, 0), piece(10..11, 1), piece(8..10, 1)];
        schedule.set_priority(pieces);
        assert_eq!(schedule.priority, [piece(4..10, 0), piece(10..11, 1), piece(8..10, 1)]);
        let prefetched = (0..100).filter(|block| schedule.is_prefetched(BlockIx(*block)));
        assert_eq!(prefetched.collect::<Vec<_>>(), [8, 9, 10], "restores wait for blocks of rank 0");
    }

    #[test]
    fn a_released_block_is_claimed_again() {
        let mut schedule = Schedule::new(100);
        schedule.set_priority([piece(50..52, 0)]);
        assert_eq!(schedule.claim(), Some(BlockIx(50)));
        assert_eq!(schedule.claim(), Some(BlockIx(51)));
        assert_eq!(schedule.claim(), Some(BlockIx(0)));
        schedule.release(BlockIx(50), Finish::Retry);
        assert_eq!(claims(&schedule), (1..51).chain(52..100).collect::<Vec<_>>());
    }

    #[test]
    fn claims_that_begin_in_the_middle_end_with_the_start() {
        let schedule = Schedule::new(100);
        assert_eq!(schedule.position(), None);
        schedule.begin_at(BlockIx(70));
        assert_eq!(schedule.claim(), Some(BlockIx(70)));
        assert_eq!(schedule.position(), Some(BlockIx(71)));
        assert_eq!(claims(&schedule), (71..100).chain(0..70).collect::<Vec<_>>());
        schedule.check(|_| true).unwrap();
    }

    #[test]
    fn a_promoted_block_and_its_successor_are_claimed_first_once() {
        let schedule = Schedule::new(100);
        schedule.promote(BlockIx(50));
        schedule.promote(BlockIx(50));
        schedule.promote(BlockIx(99));
        let order = claims(&schedule);
        assert_eq!(order[..5], [50, 51, 99, 0, 1]);
        assert_eq!(order.len(), 100);
    }

    #[test]
    fn a_released_block_is_claimed_again_before_higher_ones() {
        let schedule = Schedule::new(100);
        for _ in 0..70 {
            schedule.claim();
        }
        schedule.release(BlockIx(3), Finish::Retry);
        schedule.release(BlockIx(4), Finish::Done);
        assert_eq!(schedule.claim(), Some(BlockIx(3)));
        assert_eq!(schedule.claim(), Some(BlockIx(70)));
        schedule.check(|block| block.0 != 4).unwrap();
        assert!(schedule.check(|block| block.0 == 4).is_err());
    }

    #[test]
    fn too_many_promotions_overwrite_the_oldest_and_are_counted() {
        let schedule = Schedule::new(10 * PROMOTED_BLOCKS);
        for block in 0..PROMOTED_BLOCKS {
            schedule.promote(BlockIx(4 * block + 10));
        }
        assert_eq!(schedule.overflows(), PROMOTED_BLOCKS as u64);
        // 64 calls put 128 blocks; the first 64 are overwritten.
        assert_eq!(schedule.claim(), Some(BlockIx(4 * PROMOTED_BLOCKS / 2 + 10)));
        assert_eq!(claims(&schedule).len(), 10 * PROMOTED_BLOCKS - 1);
    }

    #[test]
    fn a_promotion_of_a_claimed_or_done_block_changes_nothing() {
        let schedule = Schedule::new(4);
        assert_eq!(schedule.claim(), Some(BlockIx(0)));
        assert_eq!(schedule.claim(), Some(BlockIx(1)));
        schedule.release(BlockIx(0), Finish::Done);
        schedule.promote(BlockIx(0));
        assert_eq!(claims(&schedule), [2, 3]);
    }

    #[test]
    fn threads_never_share_a_claim_and_lose_no_block() {
        const BLOCKS: usize = 3000;
        let schedule = Schedule::new(BLOCKS);
        let owners: Vec<AtomicUsize> = (0..BLOCKS).map(|_| AtomicUsize::new(0)).collect();
        let done = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for seed in 0..4_usize {
                let (schedule, owners, done) = (&schedule, &owners, &done);
                scope.spawn(move || {
                    let mut turn = seed;
                    while done.load(Ordering::Acquire) < BLOCKS {
                        turn = turn.wrapping_mul(25_214_903_917).wrapping_add(11);
                        schedule.promote(BlockIx((turn >> 20) % BLOCKS));
                        let Some(block) = schedule.claim() else { continue };
                        assert_eq!(owners[block.0].swap(1, Ordering::AcqRel), 0, "claimed twice");
                        owners[block.0].store(0, Ordering::Release);
                        if turn >> 16 & 3 == 0 {
                            schedule.release(block, Finish::Retry);
                        } else {
                            schedule.release(block, Finish::Done);
                            done.fetch_add(1, Ordering::AcqRel);
                        }
                    }
                });
            }
        });
        assert_eq!(schedule.claim(), None);
        schedule.check(|_| false).unwrap();
    }
}
