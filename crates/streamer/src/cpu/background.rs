// SPDX-License-Identifier: MIT OR Apache-2.0
//! Everything that nobody waits for yet, block by block, one bounded step at a time.

use std::sync::Arc;

use rewake_image_io::io_budget::{Lane, PIECE, Permit};
use rewake_image_io::{Acquire, BLOCK, BlockRef, BufferSlice, Done, LoadGuard, PagesFile, Read, read_now};
use rewake_pager::{BlockIx, Finish, PageIx};

use super::reactor::Reactor;
use super::space::{AddressSpace, Filled};

/// Blocks claimed together: adjacent ones make one request to the disk.
const BATCH: usize = PIECE / BLOCK;
/// Blocks that one reactor has claimed ahead, wherever their bytes are; how many may be on the disk at once
/// is for `pace` to say.
const READ_AHEAD: usize = 3 * BATCH;
/// How much is done between two looks at the faults.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Nobody waits: about 12 µs. Larger steps fill no faster.
    Full,
    /// Threads of the address space fault in quick succession: half of it.
    Half,
    /// They do, and this reactor's processor is left to them: a page or two, then it is offered. Better than
    /// to sleep: a processor that sleeps takes longer to wake than a page takes to copy.
    Brief,
}

impl Step {
    fn pages(self) -> u64 {
        match self {
            Self::Full => 8,
            Self::Half => 4,
            Self::Brief => 1,
        }
    }

    /// Bytes read from the page cache, several times faster than they are copied out.
    fn bytes(self) -> usize {
        match self {
            Self::Full => 64 * 1024,
            Self::Half => 16 * 1024,
            Self::Brief => 8 * 1024,
        }
    }
}

/// A block claimed for one address space.
#[derive(Debug)]
pub(super) struct Claim {
    space: Arc<AddressSpace>,
    block: BlockIx,
}

/// A block on its way from the disk.
#[derive(Debug)]
pub(super) struct Load {
    claim: Claim,
    guard: LoadGuard,
    /// None for a block that a thread waits for: the background's pace does not count it.
    begun: Option<Permit>,
}

/// A block whose bytes are here, or in the page cache.
#[derive(Debug)]
pub(super) struct Work {
    claim: Claim,
    next: PageIx,
    bytes: Bytes,
}

#[derive(Debug)]
enum Bytes {
    Here(BlockRef),
    /// In the page cache: being read into the buffer, `filled` bytes so far.
    Warm {
        guard: LoadGuard,
        buffer: BufferSlice,
        filled: usize,
    },
}

/// Whether there is something to claim.
fn wants(space: &Arc<AddressSpace>, first_only: bool) -> bool {
    space.wants_background() && space.layout().has_claimable() && (!first_only || space.has_first())
}

impl Reactor {
    /// One step. False: there is nothing to do now.
    pub(super) fn background(&mut self) -> bool {
        self.held_back = false;
        self.read_ahead();
        let Some(work) = self.ready.pop_front() else { return false };
        if !work.claim.space.wants_background() {
            return true; // dropped with its buffer: the process ended
        }
        let step = self.step(&work.claim.space);
        match work.bytes {
            Bytes::Warm { guard, buffer, filled } => {
                self.read_warm(work.claim, work.next, guard, buffer, filled, step);
            }
            Bytes::Here(block) => self.fill_piece(work.claim, work.next, block, step),
        }
        if step == Step::Brief {
            std::thread::yield_now();
        }
        true
    }

    /// Claims blocks until enough are under way.
    fn read_ahead(&mut self) {
        for claim in std::mem::take(&mut self.waiting) {
            self.acquire(claim);
        }
        while self.wants_more() {
            // What the page cache has, and what there is none of, is nothing to ask for.
            let first_only = self.shared.pace.holds_background();
            let asks = self.cold && self.spaces.iter().any(|space| wants(space, first_only));
            self.held_back = asks && !self.shared.pace.allows(Lane::Cpus, PIECE);
            if self.held_back || !self.claim_batch() {
                break;
            }
        }
        self.engine.flush();
    }

    /// A warm block is read when its turn comes, so that its bytes are still in the processor's cache when
    /// they are copied; only the disk is asked ahead.
    fn wants_more(&self) -> bool {
        let coming = self.loads.len() + self.waiting.len();
        if self.cold {
            coming + self.ready.len() + BATCH <= READ_AHEAD
        } else {
            self.ready.is_empty() && coming < READ_AHEAD
        }
    }

    /// Claims blocks of the next address space that wants some: together, because adjacent ones make one
    /// request to the disk. False when there are none, or no buffers.
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
        // Restores wait for what comes before the rest.
        let first_only = self.shared.pace.holds_background();
        let first = (0..count).find(|step| wants(at(*step), true));
        let rest = |step: &usize| !first_only && wants(at(*step), false);
        let urgent = |step: &usize| at(*step).session.is_urgent() && rest(step);
        let step = first.or_else(|| (0..count).find(urgent)).or_else(|| (0..count).find(rest))?;
        let space = Arc::clone(&self.spaces[(self.turn + step) % count]);
        self.turn = (self.turn + step + 1) % count;
        if space.begins() {
            let others = self.spaces.iter().filter(|other| !Arc::ptr_eq(other, &space));
            others.filter(|other| other.wants_background()).for_each(|other| space.join(other));
        }
        Some(space)
    }

    /// Loads the block that a thread waits for, before all others. False when it cannot be loaded now: somebody
    /// else claimed it, or there is no buffer.
    pub(super) fn load_wanted(&mut self, space: &Arc<AddressSpace>, block: BlockIx) -> bool {
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
                self.ready.push_front(Work { claim, next: first, bytes: Bytes::Here(block) });
            }
            Acquire::Load(mut guard) => {
                let Some(buffer) = guard.take_slice() else { unreachable!("a fresh guard has its buffer") };
                return self.read_block(claim, &file, guard, buffer, None);
            }
            Acquire::Pending => self.waiting.push(claim),
            Acquire::Full => {
                space.layout().release(block, Finish::Retry);
                return false;
            }
        }
        true
    }

    /// Gets the claimed block's bytes under way. False when no buffer is free.
    fn acquire(&mut self, claim: Claim) -> bool {
        let (file, index, first) = {
            let layout = claim.space.layout();
            let block = layout.plan().block(claim.block);
            (Arc::clone(&claim.space.files[block.file as usize]), block.index, block.first)
        };
        match self.shared.cache.acquire(&file, index, &self.waker) {
            Acquire::Hit(block) => {
                self.ready.push_back(Work { claim, next: first, bytes: Bytes::Here(block) });
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

    fn load(&mut self, claim: Claim, file: &Arc<PagesFile>, first: PageIx, mut guard: LoadGuard) {
        let Some(buffer) = guard.take_slice() else { unreachable!("a fresh guard has its buffer") };
        let offset = guard.offset();
        self.cold = !file.is_cached(offset, buffer.len());
        if !self.cold {
            let bytes = Bytes::Warm { guard, buffer, filled: 0 };
            self.ready.push_back(Work { claim, next: first, bytes });
            return;
        }
        let begun = self.shared.pace.begin(Lane::Cpus, buffer.len());
        self.read_block(claim, file, guard, buffer, Some(begun));
    }

    /// Reads a block from the disk. False when the engine is full: the block's turn comes again.
    fn read_block(
        &mut self,
        claim: Claim,
        file: &Arc<PagesFile>,
        guard: LoadGuard,
        dst: BufferSlice,
        begun: Option<Permit>,
    ) -> bool {
        let offset = guard.offset();
        let how = file.how(offset, dst.len());
        let entry = self.loads.vacant_entry();
        let read = Read { ticket: entry.key() as u64, file: Arc::clone(file), offset, dst, how };
        match self.engine.submit(read) {
            Ok(()) => {
                entry.insert(Load { claim, guard, begun });
                true
            }
            Err(_full) => {
                if let Some(begun) = begun {
                    self.shared.pace.end(begun);
                }
                claim.space.layout().release(claim.block, Finish::Retry);
                false
            }
        }
    }

    /// A background read is back.
    pub(super) fn block_read(&mut self, done: Done) {
        let Ok(key) = usize::try_from(done.ticket) else { return };
        let Some(Load { claim, guard, begun }) = self.loads.try_remove(key) else { return };
        let wanted = begun.is_none();
        if let Some(begun) = begun {
            self.shared.pace.end(begun);
        }
        match done.result {
            Ok(()) => {
                self.here(claim, guard, done.dst, wanted);
                self.retry_blocked();
            }
            Err(error) => {
                guard.fail();
                claim.space.session.fail(&error.to_string());
                self.shared.attention_all();
            }
        }
    }

    fn here(&mut self, claim: Claim, guard: LoadGuard, buffer: BufferSlice, wanted: bool) {
        let first = claim.space.layout().plan().block(claim.block).first;
        let work = Work { claim, next: first, bytes: Bytes::Here(guard.publish(buffer)) };
        // The neighbours of a touched page are likely to be touched next.
        if wanted { self.ready.push_front(work) } else { self.ready.push_back(work) }
    }

    fn read_warm(
        &mut self,
        claim: Claim,
        next: PageIx,
        guard: LoadGuard,
        mut buffer: BufferSlice,
        filled: usize,
        step: Step,
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
            self.here(claim, guard, buffer, false);
        } else {
            let bytes = Bytes::Warm { guard, buffer, filled: end };
            self.ready.push_front(Work { claim, next, bytes });
        }
    }

    fn fill_piece(&mut self, claim: Claim, from: PageIx, block: BlockRef, step: Step) {
        let (filled, next) = claim.space.fill_piece(claim.block, from, step.pages(), &block, &mut self.runs);
        match (filled, next) {
            (Filled::All, Some(next)) => {
                self.ready.push_front(Work { claim, next, bytes: Bytes::Here(block) });
            }
            (Filled::All, None) => self.finish(&claim, block),
            (Filled::Later(next), _) => {
                self.stalled = true;
                self.ready.push_back(Work { claim, next, bytes: Bytes::Here(block) });
            }
            (Filled::Gone, _) => self.gone(&claim.space),
            (Filled::Failed(errno), _) => self.refused(&claim.space, errno),
        }
    }

    fn finish(&mut self, claim: &Claim, block: BlockRef) {
        // Kept for a second session of the same image; alone, the same warm buffer is used again.
        if self.shared.lone_session() {
            block.discard();
        } else {
            drop(block);
        }
        claim.space.layout().release(claim.block, Finish::Done);
        self.shared.check_finished(&claim.space);
    }
}
