// SPDX-License-Identifier: MIT OR Apache-2.0
//! Loads pages that no thread waits for: block by block, one bounded step at a time.

use std::sync::Arc;

use rewake_image_io::io_budget::PIECE;
use rewake_image_io::{
    Acquire, BLOCK, BlockRef, BufferSlice, Class, Completion, ImageFile, LoadGuard, Request, read_now,
};
use rewake_pager::{BlockIx, Finish, PageIx};

use super::Reactor;
use crate::cpu::space::{AddressSpace, Filled};

/// Blocks that a reactor claims together: adjacent ones make one request to the disk.
const BATCH: usize = PIECE / BLOCK;
/// Blocks that one reactor claims ahead, loaded or not. The I/O budget limits how many reads are in flight.
const READ_AHEAD: usize = 3 * BATCH;
/// How much a reactor loads before it serves page faults again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StepSize {
    /// No thread of the address space faults: about 12 µs. Larger steps fill no faster.
    Full,
    /// Threads of the address space fault in quick succession: half of [`StepSize::Full`].
    Half,
    /// They do, and this reactor leaves its processor to them: it fills a page or two, then yields. It does
    /// not sleep: an idle processor takes longer to wake than a page takes to copy.
    Brief,
}

impl StepSize {
    fn pages(self) -> u64 {
        match self {
            Self::Full => 8,
            Self::Half => 4,
            Self::Brief => 1,
        }
    }

    /// Bytes to read from the page cache, which is several times faster than to copy them to the target.
    fn bytes(self) -> usize {
        match self {
            Self::Full => 64 * 1024,
            Self::Half => 16 * 1024,
            Self::Brief => 8 * 1024,
        }
    }
}

/// The outcome of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StepOutcome {
    /// There is nothing to do now.
    Idle,
    /// Pages were read or filled, or a block is finished.
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
    claim: Claim,
    guard: LoadGuard,
}

/// A block whose bytes are in a buffer or in the page cache.
#[derive(Debug)]
pub(super) struct Work {
    claim: Claim,
    next: PageIx,
    bytes: BlockBytes,
}

#[derive(Debug)]
enum BlockBytes {
    Loaded(BlockRef),
    /// In the page cache. The reactor has read `filled` bytes of it into the buffer so far.
    Warm {
        guard: LoadGuard,
        buffer: BufferSlice,
        filled: usize,
    },
}

/// Returns whether the address space has blocks to claim, or, with `first_only`, prefetch blocks.
fn has_work(space: &Arc<AddressSpace>, first_only: bool) -> bool {
    space.wants_background() && space.layout().has_claimable() && (!first_only || space.has_first())
}

impl Reactor {
    /// Does one step of background work.
    pub(super) fn background(&mut self) -> StepOutcome {
        self.held_back = false;
        self.read_ahead();
        let Some(work) = self.ready.pop_front() else { return StepOutcome::Idle };
        if !work.claim.space.wants_background() {
            return StepOutcome::Worked; // the process has ended: the block is dropped with its buffer
        }
        let step = self.step(&work.claim.space);
        let outcome = match work.bytes {
            BlockBytes::Warm { guard, buffer, filled } => {
                self.read_warm(work.claim, work.next, guard, buffer, filled, step);
                StepOutcome::Worked
            }
            BlockBytes::Loaded(block) => self.fill_piece(work.claim, work.next, block, step),
        };
        if step == StepSize::Brief {
            std::thread::yield_now();
        }
        outcome
    }

    /// Claims blocks until enough are ready or in flight.
    fn read_ahead(&mut self) {
        for claim in std::mem::take(&mut self.waiting) {
            self.acquire(claim);
        }
        while self.wants_more() {
            // Only reads from the disk use the budget.
            let first_only = self.shared.budget.holds_background();
            let needs_disk = self.cold && self.spaces.iter().any(|space| has_work(space, first_only));
            self.held_back = needs_disk && !self.engine.allows(PIECE);
            if self.held_back || !self.claim_batch() {
                break;
            }
        }
        self.engine.flush();
    }

    /// Returns whether to claim more blocks. Only reads from the disk are started ahead: a block of the page
    /// cache is read just before its fill, so that its bytes are in the processor's cache when they are
    /// copied.
    fn wants_more(&self) -> bool {
        let pending = self.loads.len() + self.waiting.len();
        if self.cold {
            pending + self.ready.len() + BATCH <= READ_AHEAD
        } else {
            self.ready.is_empty() && pending < READ_AHEAD
        }
    }

    /// Claims a batch of blocks of the next address space: adjacent ones make one request to the disk.
    /// Returns false without a block to claim or a buffer for it.
    fn claim_batch(&mut self) -> bool {
        let Some(space) = self.next_space() else { return false };
        for n in 0..if self.cold { BATCH } else { 1 } {
            let Some(block) = space.layout().claim() else { return n > 0 };
            if !self.acquire(Claim { space: Arc::clone(&space), block }) {
                return false;
            }
        }
        true
    }

    fn next_space(&mut self) -> Option<Arc<AddressSpace>> {
        let count = self.spaces.len();
        let at = |step: usize| &self.spaces[(self.turn + step) % count];
        // Prefetch blocks have priority: restores wait for them.
        let first_only = self.shared.budget.holds_background();
        let first = (0..count).find(|step| has_work(at(*step), true));
        let rest = |step: &usize| !first_only && has_work(at(*step), false);
        let step = first.or_else(|| (0..count).find(rest))?;
        let space = Arc::clone(&self.spaces[(self.turn + step) % count]);
        self.turn = (self.turn + step + 1) % count;
        if space.begins() {
            let others = self.spaces.iter().filter(|other| !Arc::ptr_eq(other, &space));
            others.filter(|other| other.wants_background()).for_each(|other| space.join(other));
        }
        Some(space)
    }

    /// Loads the block that a page fault waits for, before all others. Returns false when it cannot be loaded
    /// now: another reactor has claimed it, or no buffer is free.
    pub(super) fn demand_load(&mut self, space: &Arc<AddressSpace>, block: BlockIx) -> bool {
        if !space.wants_background() {
            return false;
        }
        let (file, index, first) = {
            let layout = space.layout();
            if !layout.claim_block(block) {
                return false;
            }
            let block = layout.plan().block(block);
            (Arc::clone(&space.files[block.file as usize]), block.index, block.first)
        };
        let claim = Claim { space: Arc::clone(space), block };
        match self.shared.cache.acquire(&file, index, &self.waker) {
            Acquire::Hit(block) => {
                self.ready.push_front(Work { claim, next: first, bytes: BlockBytes::Loaded(block) });
            }
            Acquire::Load(mut guard) => {
                let Some(buffer) = guard.take_slice() else { unreachable!("a fresh guard has its buffer") };
                return self.read_block(claim, &file, guard, buffer, Class::Demand);
            }
            Acquire::Pending => self.waiting.push(claim),
            Acquire::Full => {
                space.layout().release(block, Finish::Retry);
                return false;
            }
        }
        true
    }

    /// Finds the claimed block in the cache, or starts to read it. Returns false when no buffer is free.
    fn acquire(&mut self, claim: Claim) -> bool {
        let (file, index, first) = {
            let layout = claim.space.layout();
            let block = layout.plan().block(claim.block);
            (Arc::clone(&claim.space.files[block.file as usize]), block.index, block.first)
        };
        match self.shared.cache.acquire(&file, index, &self.waker) {
            Acquire::Hit(block) => {
                self.ready.push_back(Work { claim, next: first, bytes: BlockBytes::Loaded(block) });
            }
            Acquire::Load(guard) => self.load(claim, &file, first, guard),
            Acquire::Pending => self.waiting.push(claim),
            Acquire::Full => {
                claim.space.layout().release(claim.block, Finish::Retry);
                return false;
            }
        }
        true
    }

    fn load(&mut self, claim: Claim, file: &Arc<ImageFile>, first: PageIx, mut guard: LoadGuard) {
        let Some(buffer) = guard.take_slice() else { unreachable!("a fresh guard has its buffer") };
        let offset = guard.offset();
        self.cold = !file.is_cached(offset, buffer.len());
        if !self.cold {
            let bytes = BlockBytes::Warm { guard, buffer, filled: 0 };
            self.ready.push_back(Work { claim, next: first, bytes });
            return;
        }
        self.read_block(claim, file, guard, buffer, Class::Background);
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
                entry.insert(BlockRead { claim, guard });
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
        let Some(BlockRead { claim, guard }) = self.loads.try_remove(key) else { return };
        match done.result {
            Ok(()) => {
                self.enqueue(claim, guard, done.memory, done.class == Class::Demand);
                self.retry_blocked();
            }
            Err(error) => {
                guard.fail();
                claim.space.session.fail(&error.to_string());
                self.shared.attention_all();
            }
        }
    }

    fn enqueue(&mut self, claim: Claim, guard: LoadGuard, buffer: BufferSlice, on_demand: bool) {
        let first = claim.space.layout().plan().block(claim.block).first;
        let work = Work { claim, next: first, bytes: BlockBytes::Loaded(guard.publish(buffer)) };
        // The program is likely to access the neighbours of this page next.
        if on_demand { self.ready.push_front(work) } else { self.ready.push_back(work) }
    }

    fn read_warm(
        &mut self,
        claim: Claim,
        next: PageIx,
        guard: LoadGuard,
        mut buffer: BufferSlice,
        filled: usize,
        step: StepSize,
    ) {
        let end = buffer.len().min(filled + step.bytes());
        let file = {
            let layout = claim.space.layout();
            Arc::clone(&claim.space.files[layout.plan().block(claim.block).file as usize])
        };
        if let Err(error) = read_now(&file, guard.offset() + filled as u64, &mut buffer[filled..end]) {
            guard.fail();
            claim.space.session.fail(&error.to_string());
            self.shared.attention_all();
            return;
        }
        if end == buffer.len() {
            self.enqueue(claim, guard, buffer, false);
        } else {
            let bytes = BlockBytes::Warm { guard, buffer, filled: end };
            self.ready.push_front(Work { claim, next, bytes });
        }
    }

    fn fill_piece(&mut self, claim: Claim, from: PageIx, block: BlockRef, step: StepSize) -> StepOutcome {
        let (filled, next) = claim.space.fill_piece(claim.block, from, step.pages(), &block, &mut self.runs);
        match (filled, next) {
            (Filled::All, Some(next)) => {
                self.ready.push_front(Work { claim, next, bytes: BlockBytes::Loaded(block) });
            }
            (Filled::All, None) => self.finish(&claim, block),
            (Filled::Later(_), _) => {
                // Other address spaces must not wait: a fork may wait for them to be finished. The block stays in
                // the cache.
                claim.space.layout().release(claim.block, Finish::Retry);
                return StepOutcome::Refused;
            }
            (Filled::Gone, _) => self.gone(&claim.space),
            (Filled::Failed(errno), _) => self.refused(&claim.space, errno),
        }
        StepOutcome::Worked
    }

    fn finish(&mut self, claim: &Claim, block: BlockRef) {
        // No other address space needs it soon, and the same warm buffer is used again.
        block.discard();
        claim.space.layout().release(claim.block, Finish::Done);
        self.shared.check_finished(&claim.space);
    }
}
