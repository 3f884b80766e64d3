// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which block is read next. Two bits a block; every method may run on several threads at once.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::BlockIx;

/// Blocks that demand faults put in front and that wait for their turn: 16 MiB, about 10 ms of a fast disk.
/// What was touched longer ago than that says little about what is touched next.
pub const PROMOTED_BLOCKS: usize = 64;

/// How work on a claimed block ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// Nothing of it is missing any more.
    Done,
    /// It must be claimed again.
    Retry,
}

/// State of a block. The order matters: below `Claimed` it can be claimed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Missing = 0,
    Queued = 1,
    Loading = 2,
    Done = 3,
}

/// Blocks that are searched together where they come before the others: each claim searches from their start.
const FIRST: usize = 1024;
const PER_WORD: usize = 32;
/// The upper bit of every state.
const UPPER: u64 = 0xaaaa_aaaa_aaaa_aaaa;

/// States of all blocks, those in front, and how far the rest has come.
#[derive(Debug)]
pub(crate) struct Schedule {
    states: Box<[AtomicU64]>,
    blocks: usize,
    /// Blocks that can be claimed; for a moment too high, never too low, so that zero means none.
    waiting: AtomicUsize,
    /// No block below can be claimed, most likely: where a search begins.
    cursor: AtomicUsize,
    front: Front,
    overflows: AtomicU64,
    /// Blocks that come before the others, if none is in front, and which of these pieces is next.
    first: Vec<Range<usize>>,
    next: AtomicUsize,
}

impl Schedule {
    pub(crate) fn new(blocks: usize) -> Self {
        Self {
            states: (0..blocks.div_ceil(PER_WORD)).map(|_| AtomicU64::new(0)).collect(),
            blocks,
            waiting: AtomicUsize::new(blocks),
            cursor: AtomicUsize::new(0),
            front: Front::default(),
            overflows: AtomicU64::new(0),
            first: Vec::new(),
            next: AtomicUsize::new(0),
        }
    }

    /// These come before the others, in this order.
    pub(crate) fn set_priority(&mut self, blocks: impl IntoIterator<Item = Range<usize>>) {
        let pieces = |range: Range<usize>| {
            let starts = range.clone().step_by(FIRST);
            starts.map(move |start| start..range.end.min(start + FIRST))
        };
        self.first = blocks.into_iter().flat_map(pieces).collect();
        self.next = AtomicUsize::new(0);
    }

    /// Whether some of those that come before the others may be left.
    pub(crate) fn has_priority(&self) -> bool {
        self.next.load(Ordering::Relaxed) < self.first.len()
    }

    /// Claims a block: those in front first, oldest first, then those that come before the others, then the lowest.
    pub(crate) fn claim(&self) -> Option<BlockIx> {
        let promoted =
            std::iter::from_fn(|| self.front.pop()).find(|block| self.enter(*block, State::Queued));
        let claimed = promoted.or_else(|| self.claim_first()).or_else(|| self.claim_lowest());
        if claimed.is_some() {
            self.waiting.fetch_sub(1, Ordering::AcqRel);
        }
        claimed.map(BlockIx)
    }

    /// One that is given back when its piece is over comes with the lowest.
    fn claim_first(&self) -> Option<usize> {
        loop {
            let next = self.next.load(Ordering::Acquire);
            if let Some(claimed) = self.search(self.first.get(next)?.clone()) {
                return Some(claimed);
            }
            // Not when another thread did.
            let _ = self.next.compare_exchange(next, next + 1, Ordering::AcqRel, Ordering::Relaxed);
        }
    }

    fn claim_lowest(&self) -> Option<usize> {
        if self.waiting.load(Ordering::Acquire) == 0 {
            return None;
        }
        let from = self.cursor.load(Ordering::Acquire);
        // The second look is needed only when a block was given back below a cursor on the move.
        let claimed = self.search(from..self.blocks).or_else(|| self.search(0..from))?;
        // Not when another thread moved the cursor: it may have been moved back.
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
            if at < range.end && (self.enter(at, State::Missing) || self.enter(at, State::Queued)) {
                return Some(at);
            }
        }
        None
    }

    fn enter(&self, block: usize, from: State) -> bool {
        self.change(block, from, State::Loading)
    }

    /// Puts `block` and the one after it in front, unless they are claimed or done.
    pub(crate) fn promote(&self, block: BlockIx) {
        for block in block.0..self.blocks.min(block.0 + 2) {
            if !self.change(block, State::Missing, State::Queued) {
                continue;
            }
            if let Some(pushed_out) = self.front.push(block)
                && self.change(pushed_out, State::Queued, State::Missing)
            {
                self.overflows.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Ends a claim.
    pub(crate) fn has_claimable(&self) -> bool {
        self.waiting.load(Ordering::Acquire) > 0
    }

    pub(crate) fn position(&self) -> Option<BlockIx> {
        let at = self.cursor.load(Ordering::Acquire);
        (0 < at && at < self.blocks).then_some(BlockIx(at))
    }

    pub(crate) fn begin_at(&self, block: BlockIx) {
        self.cursor.store(block.0, Ordering::Release);
    }

    /// Claims this very block; false when it is claimed or done.
    pub(crate) fn claim_block(&self, block: BlockIx) -> bool {
        let claimed = self.enter(block.0, State::Missing) || self.enter(block.0, State::Queued);
        if claimed {
            self.waiting.fetch_sub(1, Ordering::AcqRel);
        }
        claimed
    }

    pub(crate) fn release(&self, block: BlockIx, finish: Finish) {
        match finish {
            Finish::Done => {
                let held = self.change(block.0, State::Loading, State::Done);
                debug_assert!(held, "{block:?} was released without being claimed");
            }
            Finish::Retry => {
                self.waiting.fetch_add(1, Ordering::AcqRel);
                if self.change(block.0, State::Loading, State::Missing) {
                    self.cursor.fetch_min(block.0, Ordering::AcqRel);
                } else {
                    self.waiting.fetch_sub(1, Ordering::AcqRel);
                    debug_assert!(false, "{block:?} was released without being claimed");
                }
            }
        }
    }

    /// Promotions that were pushed out by later ones; such blocks keep their place in the plain order.
    pub(crate) fn overflows(&self) -> u64 {
        self.overflows.load(Ordering::Relaxed)
    }

    /// Why the states contradict one another. `missing` tells whether a block has missing pages.
    pub(crate) fn check(&self, missing: impl Fn(BlockIx) -> bool) -> Result<(), String> {
        let mut claimable = 0;
        for block in 0..self.blocks {
            let state = self.states[block / PER_WORD].load(Ordering::Acquire) >> (2 * (block % PER_WORD)) & 3;
            claimable += usize::from(state < State::Loading as u64);
            if state == State::Done as u64 && missing(BlockIx(block)) {
                return Err(format!("block {block} is done and has missing pages"));
            }
        }
        let waiting = self.waiting.load(Ordering::Acquire);
        if waiting == claimable {
            Ok(())
        } else {
            Err(format!("{claimable} blocks wait, {waiting} are counted"))
        }
    }

    fn change(&self, block: usize, from: State, to: State) -> bool {
        let shift = 2 * (block % PER_WORD);
        let change = |word: u64| {
            let held = word >> shift & 3 == from as u64;
            held.then(|| word & !(3 << shift) | (to as u64) << shift)
        };
        self.states[block / PER_WORD].fetch_update(Ordering::AcqRel, Ordering::Acquire, change).is_ok()
    }
}

/// A ring of promoted blocks. Entries are hints, the states decide: an entry that is lost between two
/// threads, or found again a turn later, costs its place in the order and nothing else.
#[derive(Debug)]
struct Front {
    /// Block number plus one; zero is an empty place.
    places: [AtomicUsize; PROMOTED_BLOCKS],
    /// Entries ever taken, entries ever put.
    head: AtomicUsize,
    tail: AtomicUsize,
}

impl Default for Front {
    fn default() -> Self {
        let places = std::array::from_fn(|_| AtomicUsize::new(0));
        Self { places, head: AtomicUsize::new(0), tail: AtomicUsize::new(0) }
    }
}

impl Front {
    /// Puts `block` last; gives the block whose place it took when the ring was full.
    fn push(&self, block: usize) -> Option<usize> {
        let at = self.tail.fetch_add(1, Ordering::AcqRel);
        self.places[at % PROMOTED_BLOCKS].swap(block + 1, Ordering::AcqRel).checked_sub(1)
    }

    /// Takes the first.
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

    #[test]
    fn without_faults_blocks_come_in_order() {
        let schedule = Schedule::new(100);
        assert_eq!(claims(&schedule), (0..100).collect::<Vec<_>>());
        schedule.check(|_| true).unwrap();
    }

    #[test]
    fn what_comes_before_the_others_does_and_what_was_touched_before_that() {
        let mut schedule = Schedule::new(5000);
        schedule.set_priority([4000..4003, 100..2500]);
        assert!(schedule.has_priority());
        assert_eq!(schedule.claim(), Some(BlockIx(4000)));
        schedule.promote(BlockIx(7));
        let wanted = [7, 8].into_iter().chain(4001..4003).chain(100..2500);
        let wanted = wanted.chain(0..7).chain(9..100).chain(2500..4000).chain(4003..5000);
        assert_eq!(claims(&schedule), wanted.collect::<Vec<_>>());
        assert!(!schedule.has_priority());
        schedule.check(|_| true).unwrap();
    }

    #[test]
    fn what_is_given_back_comes_again() {
        let mut schedule = Schedule::new(100);
        schedule.set_priority(std::iter::once(50..52));
        assert_eq!(schedule.claim(), Some(BlockIx(50)));
        assert_eq!(schedule.claim(), Some(BlockIx(51)));
        assert_eq!(schedule.claim(), Some(BlockIx(0)));
        schedule.release(BlockIx(50), Finish::Retry);
        assert_eq!(claims(&schedule), (1..51).chain(52..100).collect::<Vec<_>>());
    }

    #[test]
    fn claims_that_begin_in_the_middle_come_to_the_start_in_the_end() {
        let schedule = Schedule::new(100);
        assert_eq!(schedule.position(), None);
        schedule.begin_at(BlockIx(70));
        assert_eq!(schedule.claim(), Some(BlockIx(70)));
        assert_eq!(schedule.position(), Some(BlockIx(71)));
        assert_eq!(claims(&schedule), (71..100).chain(0..70).collect::<Vec<_>>());
        schedule.check(|_| true).unwrap();
    }

    #[test]
    fn a_touched_block_and_its_successor_come_first_and_once() {
        let schedule = Schedule::new(100);
        schedule.promote(BlockIx(50));
        schedule.promote(BlockIx(50));
        schedule.promote(BlockIx(99));
        let order = claims(&schedule);
        assert_eq!(order[..5], [50, 51, 99, 0, 1]);
        assert_eq!(order.len(), 100);
    }

    #[test]
    fn a_block_given_back_is_claimed_again_before_higher_ones() {
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
    fn too_many_promotions_push_out_the_oldest_and_are_counted() {
        let schedule = Schedule::new(10 * PROMOTED_BLOCKS);
        for block in 0..PROMOTED_BLOCKS {
            schedule.promote(BlockIx(4 * block + 10));
        }
        assert_eq!(schedule.overflows(), PROMOTED_BLOCKS as u64);
        // 64 calls put 128 blocks; the first 64 are pushed out.
        assert_eq!(schedule.claim(), Some(BlockIx(4 * PROMOTED_BLOCKS / 2 + 10)));
        assert_eq!(claims(&schedule).len(), 10 * PROMOTED_BLOCKS - 1);
    }

    #[test]
    fn a_promotion_of_what_is_under_way_changes_nothing() {
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
