// SPDX-License-Identifier: MIT OR Apache-2.0
//! Loads pages that no thread waits for, block by block.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rewake_image_io::io_budget::PIECE;
use rewake_image_io::{
    Acquire, BLOCK, BlockRef, BufferSlice, Class, Completion, ImageFile, LoadGuard, Request, TransferError,
};
use rewake_pager::{BLOCK_PAGES, BlockIx, Finish, PageIx};

use super::Reactor;
use crate::cpu::space::{AddressSpace, Filled, REGISTERED};
use crate::failure::Failure;

/// Blocks that a reactor claims together: adjacent ones make one request to the disk.
pub(super) const BATCH: usize = PIECE / BLOCK;
/// Blocks that one reactor claims ahead, loaded or not. The I/O budget limits how many reads are in flight.
const READ_AHEAD: usize = 3 * BATCH;

/// Blocks that a reactor claims ahead and that have not arrived: the fetcher's largest window, and a batch.
const FETCH_AHEAD: usize = 32 + BATCH;

/// How long a step should take at most, because it blocks event reads of the address space and page faults of
/// this reactor. Longer steps do not fill faster.
const STEP_LIMIT: Duration = Duration::from_micros(25);

/// The outcome of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StepOutcome {
    /// There is nothing to do now.
    Idle,
    /// Pages were filled, or a block is finished.
    Worked,
    /// A program is changing its layout: no page could be filled.
    Refused,
}

/// A block claimed for one address space.
#[derive(Debug)]
pub(super) struct Claim {
    space: Arc<AddressSpace>,
    block: BlockIx,
}

/// A block whose read from the disk is in flight.
#[derive(Debug)]
pub(super) struct BlockRead {
    pub(super) space: Arc<AddressSpace>,
    pub(super) block: BlockIx,
    pub(super) guard: LoadGuard,
    /// Whether this reactor has claimed the block. Else it only serves page faults.
    pub(super) is_claimed: bool,
}

/// A claimed block whose bytes are in memory.
#[derive(Debug)]
pub(super) struct Work {
    claim: Claim,
    /// The first page that is not filled.
    next: PageIx,
    bytes: BlockBytes,
}

#[derive(Debug)]
enum BlockBytes {
    /// In the block cache.
    Cache(BlockRef),
    /// In the reactor's block buffer, with this number of bytes.
    Own(usize),
}

/// How many pages one call fills.
#[derive(Debug)]
pub(super) struct Pace(u64);

impl Default for Pace {
    fn default() -> Self {
        Self(BLOCK_PAGES)
    }
}

impl Pace {
    /// Chooses the pages of the next call by the time that the last one took. Where the kernel has to search
    /// for memory, a page takes a hundred times as long as elsewhere.
    fn note(&mut self, took: Duration) {
        if took > STEP_LIMIT {
            self.0 = (self.0 / 2).max(1);
        } else if took < STEP_LIMIT / 2 {
            self.0 = (self.0 * 2).min(BLOCK_PAGES);
        }
    }
}

/// The rank of blocks that are no prefetch blocks.
const REST: u32 = u32::MAX;

/// Returns whether only registered blocks of an address space may be claimed, which restores wait for: while
/// background reads are `held`, and while memory is loaded only when it is accessed.
fn only_registered(space: &AddressSpace, held: bool) -> bool {
    held || space.session.is_on_demand()
}

/// Returns the rank of the next blocks to claim of an address space, lower ones first, or `None` if there are
/// none now.
fn next_rank(space: &AddressSpace, held: bool) -> Option<u32> {
    if !space.wants_background() || !space.layout().has_claimable() {
        return None;
    }
    let rank = space.next_rank().unwrap_or(REST);
    (rank == REGISTERED || !only_registered(space, held)).then_some(rank)
}

fn claim_of(space: &Arc<AddressSpace>, held: bool) -> Option<Claim> {
    let layout = space.layout();
    let block = if only_registered(space, held) { layout.claim_first(REGISTERED) } else { layout.claim() }?;
    drop(layout);
    Some(Claim { space: Arc::clone(space), block })
}

impl Reactor {
    /// Does one step of background work: starts reads ahead, and fills some pages of one block.
    pub(super) fn background(&mut self) -> StepOutcome {
        self.held_back = false;
        for claim in std::mem::take(&mut self.waiting) {
            self.acquire(claim);
        }
        self.load_arrived();
        self.claim_ahead();
        self.request_blocks();
        self.engine.flush();
        let Some(work) = self.current.take().or_else(|| self.ready.pop_front()) else {
            return StepOutcome::Idle;
        };
        if !work.claim.space.wants_background() {
            return StepOutcome::Worked; // the process has ended: the block is dropped with its buffer
        }
        self.fill_piece(work)
    }

    fn fill_piece(&mut self, work: Work) -> StepOutcome {
        let Work { claim, next, bytes } = work;
        let block = match &bytes {
            BlockBytes::Cache(block) => &block[..],
            BlockBytes::Own(len) => &self.block[..*len],
        };
        let began = Instant::now();
        let (filled, next) = claim.space.fill_piece(claim.block, next, self.pace.0, block, &mut self.runs);
        self.pace.note(began.elapsed());
        match (filled, next) {
            (Filled::All, Some(next)) => self.current = Some(Work { claim, next, bytes }),
            (Filled::All, None) => {
                if let BlockBytes::Cache(block) = bytes {
                    // No other address space needs it soon, and the same buffer, which is in the CPU's cache,
                    // is used again.
                    block.discard();
                }
                claim.space.layout().release(claim.block, Finish::Done);
                self.shared.check_finished(&claim.space);
            }
            (Filled::Later(_), _) => {
                // Other address spaces must not wait: a fork may wait for them to be finished. The block
                // stays in the block cache.
                claim.space.layout().release(claim.block, Finish::Retry);
                return StepOutcome::Refused;
            }
            (Filled::Gone, _) => self.gone(&claim.space),
            (Filled::Failed(errno), _) => self.refused(&claim.space, errno),
        }
        StepOutcome::Worked
    }

    /// Claims blocks until the page cache has one, or enough are ready or in flight.
    fn claim_ahead(&mut self) {
        // Blocks that have not arrived are claimed in batches: adjacent ones make one request to the fetcher.
        if self.absent_blocks.len() + BATCH > FETCH_AHEAD {
            return;
        }
        while (self.current.is_none() || self.is_fetched) && self.wants_more() {
            // Only reads from the disk use the budget.
            let held = self.shared.budget.holds_background();
            let needs_disk = self.cold && self.spaces.iter().any(|space| next_rank(space, held).is_some());
            self.held_back = needs_disk && !self.engine.allows(PIECE);
            if self.held_back || !self.claim_batch() {
                break;
            }
        }
    }

    /// Returns whether to claim more blocks. Only reads from the disk are started ahead.
    fn wants_more(&self) -> bool {
        if self.absent_blocks.len() >= FETCH_AHEAD {
            return false;
        }
        let pending = self.loads.len() + self.waiting.len();
        if self.cold {
            pending + self.ready.len() + BATCH <= READ_AHEAD
        } else {
            self.ready.is_empty() && pending < READ_AHEAD
        }
    }

    /// Claims a block of the next address space, or a batch where the disk is read: adjacent blocks make one
    /// request to the disk. Returns false without a block to claim or a buffer for it.
    fn claim_batch(&mut self) -> bool {
        let held = self.shared.budget.holds_background();
        let count = if self.cold { BATCH } else { 1 };
        let Some(first) = self.claim_next(held) else { return false };
        let space = Arc::clone(&first.space);
        let mut first = Some(first);
        for _ in 0..count {
            let Some(claim) = first.take().or_else(|| claim_of(&space, held)) else { break };
            if !self.load(claim) {
                return false;
            }
            if self.current.is_some() {
                break;
            }
        }
        true
    }

    fn claim_next(&mut self, held: bool) -> Option<Claim> {
        loop {
            let space = self.next_space(held)?;
            let claim = claim_of(&space, held);
            // Where others have just claimed the last registered blocks, another address space may have some:
            // this one is not chosen again.
            if claim.is_some() || !only_registered(&space, held) {
                return claim;
            }
        }
    }

    /// Returns the address space whose next blocks have the lowest rank, in turn.
    fn next_space(&mut self, held: bool) -> Option<Arc<AddressSpace>> {
        let count = self.spaces.len();
        let rank = |step: usize| {
            let space = &self.spaces[(self.turn + step) % count];
            // A peer is slower than one reactor. Others would only delay it, as they use the same processors.
            let is_mine = !space.is_fetched() || space.home == self.index;
            is_mine.then(|| next_rank(space, held)).flatten()
        };
        let (_, step) = (0..count).filter_map(|step| Some((rank(step)?, step))).min()?;
        let space = Arc::clone(&self.spaces[(self.turn + step) % count]);
        self.turn = (self.turn + step + 1) % count;
        if space.begins() {
            let others = self.spaces.iter().filter(|other| !Arc::ptr_eq(other, &space));
            others.filter(|other| other.wants_background()).for_each(|other| space.join(other));
        }
        Some(space)
    }

    /// Loads the block that a page fault waits for, before all others. Returns false when it cannot be loaded
    /// now: another reactor has claimed it, no buffer is free, or the budget has no room for this class.
    pub(super) fn demand_load(&mut self, space: &Arc<AddressSpace>, block: BlockIx, class: Class) -> bool {
        if !space.loads_whole_blocks() || !space.layout().claim_block(block) {
            return false;
        }
        let claim = Claim { space: Arc::clone(space), block };
        let (file, index, next) = claim.place();
        if !has_block(&file, index) {
            space.layout().release(block, Finish::Retry);
            return false;
        }
        match self.shared.cache.acquire(&file, index, &self.waker) {
            Acquire::Hit(block) => {
                self.ready.push_front(Work { claim, next, bytes: BlockBytes::Cache(block) });
            }
            Acquire::Load(mut guard) => {
                let Some(buffer) = guard.take_slice() else { unreachable!("a fresh guard has its buffer") };
                return self.read_block(claim, &file, guard, buffer, class);
            }
            Acquire::Pending => self.waiting.push(claim),
            Acquire::Full => {
                space.layout().release(block, Finish::Retry);
                return false;
            }
        }
        true
    }

    /// Reads a claimed block if the page cache has it. Otherwise finds it in the block cache, or reads it
    /// from the disk. Returns false when no buffer is free.
    pub(super) fn load(&mut self, claim: Claim) -> bool {
        let (file, index, next) = claim.place();
        let offset = index * BLOCK as u64;
        self.is_fetched = file.source().is_some();
        // One that has arrived waits, too, while another block is filled.
        if self.is_fetched && (self.current.is_some() || !has_block(&file, index)) {
            self.await_block(claim, file, offset);
            return true;
        }
        let block = &mut self.block[..file.block_len(index)];
        let is_hole = file.data(offset, offset + block.len() as u64).is_ok_and(|data| data.is_none());
        if is_hole {
            block.fill(0);
        }
        let ahead = !self.shared.budget.is_busy();
        let range = offset..offset + block.len() as u64;
        // A read error is reported by the read that follows.
        let read = |block: &mut [u8]| {
            file.read_verified(range, block, ahead).is_ok_and(|read| read == (0..block.len()))
        };
        self.cold = !is_hole && !read(block);
        if self.cold {
            return self.acquire(claim);
        }
        let bytes = BlockBytes::Own(block.len());
        self.current = Some(Work { claim, next, bytes });
        true
    }

    /// Has the background load continue with the block of a page fault, which was read and checked for its
    /// page: its bytes are at the start of `self.window`.
    pub(super) fn continue_with(&mut self, space: &Arc<AddressSpace>, block: BlockIx) {
        if self.current.is_some() || !space.loads_whole_blocks() || !space.layout().claim_block(block) {
            return;
        }
        let claim = Claim { space: Arc::clone(space), block };
        let (file, index, next) = claim.place();
        let bytes = file.block_len(index);
        self.block[..bytes].copy_from_slice(&self.window[..bytes]);
        self.current = Some(Work { claim, next, bytes: BlockBytes::Own(bytes) });
    }

    /// Finds a claimed block in the block cache, or starts to read it from the disk. Returns false when no
    /// buffer is free.
    fn acquire(&mut self, claim: Claim) -> bool {
        let (file, index, next) = claim.place();
        match self.shared.cache.acquire(&file, index, &self.waker) {
            Acquire::Hit(block) => {
                self.ready.push_back(Work { claim, next, bytes: BlockBytes::Cache(block) });
            }
            Acquire::Load(mut guard) => {
                let Some(buffer) = guard.take_slice() else { unreachable!("a fresh guard has its buffer") };
                return self.read_block(claim, &file, guard, buffer, Class::Background);
            }
            Acquire::Pending => self.waiting.push(claim),
            Acquire::Full => {
                claim.space.layout().release(claim.block, Finish::Retry);
                return false;
            }
        }
        true
    }

    /// Starts to read a block from the disk. Returns false when the engine or the budget has no room: the
    /// block is claimed again later.
    fn read_block(
        &mut self,
        claim: Claim,
        file: &Arc<ImageFile>,
        guard: LoadGuard,
        buffer: BufferSlice,
        class: Class,
    ) -> bool {
        let entry = self.loads.vacant_entry();
        match self.engine.submit(Request::fill(entry.key() as u64, file, guard.offset(), buffer, class)) {
            Ok(_) => {
                let Claim { space, block } = claim;
                entry.insert(BlockRead { space, block, guard, is_claimed: true });
                true
            }
            Err(_no_room) => {
                claim.space.layout().release(claim.block, Finish::Retry);
                false
            }
        }
    }

    /// Handles a finished read of a block.
    pub(super) fn block_read(&mut self, done: Completion<BufferSlice>) {
        let Ok(key) = usize::try_from(done.token) else { return };
        let Some(BlockRead { space, block, guard, is_claimed }) = self.loads.try_remove(key) else { return };
        let claim = Claim { space, block };
        match done.result {
            Ok(()) if is_claimed => {
                self.enqueue(claim, guard, done.memory, done.class == Class::Demand);
                self.retry_blocked();
            }
            Ok(()) => {
                // It stays in the block cache until the page faults have been served.
                let _loaded = guard.publish(done.memory);
                self.retry_blocked();
            }
            Err(error) => {
                guard.fail();
                self.read_failed(&claim.space, claim.address(), &error);
            }
        }
    }

    /// Fails the session: bytes cannot be read. `address` is where they belong.
    pub(super) fn read_failed(&self, space: &AddressSpace, address: Option<u64>, error: &TransferError) {
        let pid = space.counts.pid;
        let place = address.map_or_else(String::new, |address| format!(", address {address:#x}"));
        let reason = format!("memory of process {pid}{place}: {error}");
        space.session.fail(Failure { cause: error.into(), reason });
        self.shared.attention_all();
    }

    fn enqueue(&mut self, claim: Claim, guard: LoadGuard, buffer: BufferSlice, on_demand: bool) {
        let (_, _, next) = claim.place();
        let work = Work { claim, next, bytes: BlockBytes::Cache(guard.publish(buffer)) };
        // The program is likely to access the neighbours of this page next.
        if on_demand { self.ready.push_front(work) } else { self.ready.push_back(work) }
    }
}

/// Whether a file has all bytes of a block.
fn has_block(file: &ImageFile, index: u64) -> bool {
    file.has(index * BLOCK as u64, file.block_len(index))
}

impl Claim {
    /// The address space of the block.
    pub(super) fn space(&self) -> &AddressSpace {
        &self.space
    }

    /// The file of the block, its number in the file, and its first page.
    fn place(&self) -> (Arc<ImageFile>, u64, PageIx) {
        let layout = self.space.layout();
        let block = layout.plan().block(self.block);
        (Arc::clone(&self.space.files[block.file as usize]), block.index, block.first)
    }

    /// The address of its first missing page.
    fn address(&self) -> Option<u64> {
        let (_, _, first) = self.place();
        let mut runs = Vec::new();
        self.space.layout().runs(self.block, first, BLOCK_PAGES, &mut runs);
        runs.first().map(|run| run.target)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_that_take_long_fill_fewer_pages() {
        let mut pace = Pace::default();
        let mut after = |micros| {
            pace.note(Duration::from_micros(micros));
            pace.0
        };
        assert_eq!([40, 40, 15, 40, 40, 5000].map(&mut after), [8, 4, 4, 2, 1, 1]);
        assert_eq!([10, 12, 13, 5, 5, 5].map(&mut after), [2, 4, 4, 8, 16, 16]);
    }
}
