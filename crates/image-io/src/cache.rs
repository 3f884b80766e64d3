// SPDX-License-Identifier: MIT OR Apache-2.0
//! Blocks of pages files in bounded memory, each read once however many sessions want it.

use std::fmt;
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::buffer::{BufferSlice, Place, Pool};
use crate::error::StoreError;
use crate::file::PagesFile;
use crate::metrics::Metrics;
use crate::notifier::Notifier;
use crate::slots::{Found, Key, Slots};
use crate::{BLOCK, PAGE};

/// Default budget in bytes: 511 blocks and the demand buffers. Enough to keep one engine's queue full
/// ([`crate::engine::DEPTH_BLOCKS`]) while as many blocks again are being copied out and some stay for a
/// second session.
pub const DEFAULT_BUDGET: usize = 32 * 1024 * 1024;

/// Number of one-page buffers for demand reads; together they take one block of the budget.
///
/// Most faults load their block; these serve faults in blocks that are claimed but not being read yet, and those
/// before the background may begin.
pub const DEMAND_BUFFERS: u32 = 16;

const _: () = assert!(DEMAND_BUFFERS as usize * PAGE == BLOCK);

/// A bounded cache of blocks, shared by all threads.
pub struct BlockCache {
    pool: Pool,
    /// Held for table look-ups only, never over a system call.
    slots: Mutex<Slots>,
    metrics: Arc<Metrics>,
    blocks: u32,
}

/// What [`BlockCache::acquire`] found.
#[derive(Debug)]
pub enum Acquire {
    /// The bytes are here.
    Hit(BlockRef),
    /// The caller, and nobody else, is to load the block.
    Load(LoadGuard),
    /// Another caller is loading it. The waker is signalled when it is published or failed: acquire again.
    Pending,
    /// Every buffer is in use. The waker is signalled when one is free: acquire again.
    Full,
}

impl BlockCache {
    /// A cache that never takes more than `budget` bytes (rounded down to whole blocks) for its buffers.
    /// Memory is taken from the system as buffers are first used, or at once by an engine that registers it.
    ///
    /// # Errors
    /// [`StoreError::Budget`] for less than two blocks; [`StoreError::Setup`] when memory is refused.
    pub fn new(budget: usize) -> Result<Arc<Self>, StoreError> {
        let least = 2 * BLOCK;
        if budget < least {
            return Err(StoreError::Budget { budget, least });
        }
        // More than u32::MAX blocks is a pebibyte: such a budget is as good as that many.
        let blocks = u32::try_from(budget / BLOCK - 1).unwrap_or(u32::MAX - 1);
        let pool = Pool::new(blocks)
            .map_err(|error| StoreError::Setup { act: "mapping the block cache's memory", error })?;
        let metrics = Arc::new(Metrics::default());
        Ok(Arc::new(Self { pool, slots: Mutex::new(Slots::new(blocks)), metrics, blocks }))
    }

    /// Looks a block of a file up, or makes the caller its loader. `block` counts [`BLOCK`]s from the start
    /// of the file. A block beyond the end may be acquired; loading it gives [`crate::ReadError::Short`].
    pub fn acquire(self: &Arc<Self>, file: &Arc<PagesFile>, block: u64, waker: &Notifier) -> Acquire {
        let len = file.block_len(block);
        let found = self.lock().acquire(Key { file: file.key(), block }, len, waker);
        match found {
            Found::Hit(index, len) => {
                Metrics::add(&self.metrics.hits, 1);
                Acquire::Hit(self.block_ref(index, len))
            }
            Found::Load(index) => {
                Metrics::add(&self.metrics.loads, 1);
                let slice = BufferSlice::new(Arc::clone(self), Place::Block(index), len);
                let home = Arc::clone(self);
                Acquire::Load(LoadGuard { home, index, len, block, slice: Some(slice), standing: true })
            }
            Found::Pending => {
                Metrics::add(&self.metrics.pending, 1);
                Acquire::Pending
            }
            Found::Full => {
                Metrics::add(&self.metrics.full, 1);
                Acquire::Full
            }
        }
    }

    /// A one-page buffer for a page fault that waits, or None when all [`DEMAND_BUFFERS`] are in use.
    pub fn demand_buffer(self: &Arc<Self>) -> Option<BufferSlice> {
        let index = self.lock().take_demand()?;
        Some(BufferSlice::new(Arc::clone(self), Place::Demand(index), PAGE))
    }

    /// Number of block buffers.
    pub fn capacity(&self) -> usize {
        self.blocks as usize
    }

    /// The counters of this cache and of the engines made for it.
    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.metrics
    }

    pub(crate) fn pool(&self) -> &Pool {
        &self.pool
    }

    /// A buffer slice was dropped.
    pub(crate) fn take_back(&self, place: Place) {
        match place {
            Place::Block(index) => {
                let wake = self.lock().return_block(index);
                wake_all(&wake);
            }
            Place::Demand(index) => self.lock().return_demand(index),
            Place::Gone => {}
        }
    }

    fn block_ref(self: &Arc<Self>, index: u32, len: usize) -> BlockRef {
        let start = self.pool.at(Place::Block(index));
        BlockRef { home: Arc::clone(self), index, start, len, discard: false }
    }

    fn lock(&self) -> MutexGuard<'_, Slots> {
        // A panic under the lock can only come from an index out of range, before anything is changed.
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// After the lock is released: a wake is a system call.
fn wake_all(wakers: &[Notifier]) {
    for waker in wakers {
        waker.wake();
    }
}

impl fmt::Debug for BlockCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockCache").field("blocks", &self.blocks).field("metrics", &self.metrics).finish()
    }
}

/// The duty to load one block. Dropping it unpublished fails the load: those who wait are woken, and the next
/// to acquire the block becomes its loader. A read that is still under way keeps its buffer until it is done.
#[derive(Debug)]
pub struct LoadGuard {
    home: Arc<BlockCache>,
    index: u32,
    len: usize,
    block: u64,
    slice: Option<BufferSlice>,
    standing: bool,
}

impl LoadGuard {
    /// The buffer to read the block into, as long as the block's valid bytes; once, then None.
    pub fn take_slice(&mut self) -> Option<BufferSlice> {
        self.slice.take()
    }

    /// Byte offset in the file where the block starts.
    pub fn offset(&self) -> u64 {
        self.block.saturating_mul(BLOCK as u64)
    }

    /// Makes the block available. `filled` is the buffer from [`take_slice`](Self::take_slice), back from a
    /// read whose result was `Ok`: to hold it is the proof that no read is still writing to it.
    ///
    /// # Panics
    /// When `filled` is another block's buffer: its bytes would be served as this block's.
    pub fn publish(mut self, filled: BufferSlice) -> BlockRef {
        let own = filled.place() == Place::Block(self.index) && Arc::ptr_eq(filled.home(), &self.home);
        assert!(own, "published {filled:?} for the block that is loaded into buffer {}", self.index);
        filled.hand_over();
        self.standing = false;
        let wake = self.home.lock().publish(self.index);
        wake_all(&wake);
        self.home.block_ref(self.index, self.len)
    }

    /// Gives up, as dropping does. The error stays with the caller: whoever waits will try for itself.
    pub fn fail(self) {
        drop(self);
    }
}

impl Drop for LoadGuard {
    fn drop(&mut self) {
        if self.standing {
            // The buffer first, so that abandoning the block frees it in the same step.
            drop(self.slice.take());
            let wake = self.home.lock().abandon(self.index);
            wake_all(&wake);
        }
    }
}

/// A loaded block: derefs to its valid bytes (fewer than [`BLOCK`] at the end of a file). Its buffer is not
/// reused while a reference lives; afterwards the block stays until the buffer is needed, least recently
/// used first.
pub struct BlockRef {
    home: Arc<BlockCache>,
    index: u32,
    start: NonNull<u8>,
    len: usize,
    discard: bool,
}

// SAFETY: a BlockRef gives only shared access to bytes that nobody writes while any reference lives (the
// cache hands a buffer out again only when its count of references is zero), and holds the memory's owner.
unsafe impl Send for BlockRef {}
// SAFETY: as above; there is no interior mutability.
unsafe impl Sync for BlockRef {}

impl BlockRef {
    /// Drops the reference and, when it is the last and nobody else asked for the block while it was being
    /// loaded, frees the buffer at once instead of keeping the block. For bytes that will not be wanted again.
    pub fn discard(mut self) {
        self.discard = true;
    }
}

impl Deref for BlockRef {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: start is a buffer of BLOCK bytes in home's mapping, len <= BLOCK of them were filled before
        // the block was published, and nobody writes to it while this reference is counted.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl Clone for BlockRef {
    fn clone(&self) -> Self {
        self.home.lock().add_ref(self.index);
        self.home.block_ref(self.index, self.len)
    }
}

impl Drop for BlockRef {
    fn drop(&mut self) {
        let wake = self.home.lock().drop_ref(self.index, self.discard);
        wake_all(&wake);
    }
}

impl fmt::Debug for BlockRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockRef").field("index", &self.index).field("len", &self.len).finish()
    }
}
