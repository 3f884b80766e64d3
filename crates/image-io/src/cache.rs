// SPDX-License-Identifier: MIT OR Apache-2.0
//! Keeps blocks of pages files in bounded memory. Of threads that need a block which is being read, one reads
//! it, and all others wait for that read.

use std::fmt;
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::buffer::{BufferPool, BufferSlice, PoolPlace};
use crate::error::StoreError;
use crate::file::ImageFile;
use crate::slots::{Acquisition, Key, Slots};
use crate::units::{BLOCK, PAGE};
use rewake_process::Notifier;

/// Default budget in bytes: 511 blocks and the demand buffers. It keeps one engine's queue full
/// ([`crate::DEPTH`]) while as many blocks are being copied.
pub const DEFAULT_BUDGET: usize = 32 * 1024 * 1024;

/// A bounded cache of blocks, shared by all threads.
pub struct BlockCache {
    pool: BufferPool,
    /// Locked for table look-ups only, never during a system call.
    slots: Mutex<Slots>,
    blocks: u32,
}

/// What [`BlockCache::acquire`] found.
#[derive(Debug)]
pub enum Acquire {
    /// The block is loaded.
    Hit(BlockRef),
    /// The caller alone must load the block.
    Load(LoadGuard),
    /// Another caller loads it. The notifier is woken when the block is published or failed: acquire again.
    Pending,
    /// Every buffer is in use. The notifier is woken when one is free: acquire again.
    Full,
}

impl BlockCache {
    /// Makes a cache whose buffers never take more than `budget` bytes, rounded down to whole blocks. The
    /// system gives memory as buffers are first used.
    ///
    /// # Errors
    /// [`StoreError::Budget`] for less than two blocks; [`StoreError::Setup`] when memory is refused.
    pub fn new(budget: usize) -> Result<Arc<Self>, StoreError> {
        let least = 2 * BLOCK;
        if budget < least {
            return Err(StoreError::Budget { budget, least });
        }
        // More than `u32::MAX` blocks would be a pebibyte: such a budget is limited to that many.
        let blocks = u32::try_from(budget / BLOCK - 1).unwrap_or(u32::MAX - 1);
        let pool = BufferPool::new(blocks)
            .map_err(|error| StoreError::Setup { act: "mapping the block cache's memory", error })?;
        Ok(Arc::new(Self { pool, slots: Mutex::new(Slots::new(blocks)), blocks }))
    }

    /// Finds a block of a file, or makes the caller its loader. `block` counts [`BLOCK`]s from the start of
    /// the file. A block beyond the end may be acquired; loading it gives [`crate::TransferError::Short`].
    pub fn acquire(self: &Arc<Self>, file: &Arc<ImageFile>, block: u64, notifier: &Notifier) -> Acquire {
        let len = file.block_len(block);
        let found = self.lock().acquire(Key { file: file.key(), block }, len, notifier);
        match found {
            Acquisition::Hit(index, len) => Acquire::Hit(self.block_ref(index, len)),
            Acquisition::Load(index) => {
                let slice = BufferSlice::new(Arc::clone(self), PoolPlace::Block(index), len);
                let home = Arc::clone(self);
                Acquire::Load(LoadGuard { home, index, len, block, slice: Some(slice), is_pending: true })
            }
            Acquisition::Pending => Acquire::Pending,
            Acquisition::Full => Acquire::Full,
        }
    }

    /// Returns a one-page buffer for a demand read, or None when all [`DEMAND_BUFFERS`] are in use.
    pub fn demand_buffer(self: &Arc<Self>) -> Option<BufferSlice> {
        let index = self.lock().take_demand()?;
        Some(BufferSlice::new(Arc::clone(self), PoolPlace::Demand(index), PAGE))
    }

    /// Number of block buffers.
    pub fn capacity(&self) -> usize {
        self.blocks as usize
    }

    pub(crate) fn pool(&self) -> &BufferPool {
        &self.pool
    }

    /// Takes back the buffer of a dropped slice.
    pub(crate) fn take_back(&self, place: PoolPlace) {
        match place {
            PoolPlace::Block(index) => {
                let wake = self.lock().return_block(index);
                wake_all(&wake);
            }
            PoolPlace::Demand(index) => self.lock().return_demand(index),
            PoolPlace::Cache => {}
        }
    }

    fn block_ref(self: &Arc<Self>, index: u32, len: usize) -> BlockRef {
        let start = self.pool.at(PoolPlace::Block(index));
        BlockRef { home: Arc::clone(self), index, start, len, discard: false }
    }

    fn lock(&self) -> MutexGuard<'_, Slots> {
        // A panic under the lock can only be an index out of range, before anything is changed.
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Wakes waiting callers, after the lock is released: a wake is a system call.
fn wake_all(notifiers: &[Notifier]) {
    for notifier in notifiers {
        notifier.wake();
    }
}

impl fmt::Debug for BlockCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockCache").field("blocks", &self.blocks).finish_non_exhaustive()
    }
}

/// The duty to load one block. If it is dropped without a publish, the load fails: waiting callers are woken,
/// and the next caller that acquires the block loads it. A read in flight keeps its buffer until it is done.
#[derive(Debug)]
pub struct LoadGuard {
    home: Arc<BlockCache>,
    index: u32,
    len: usize,
    block: u64,
    slice: Option<BufferSlice>,
    is_pending: bool,
}

impl LoadGuard {
    /// Takes the buffer to read the block into, as long as the block's valid bytes. It returns None from the
    /// second call on.
    pub fn take_slice(&mut self) -> Option<BufferSlice> {
        self.slice.take()
    }

    /// Byte offset in the file where the block starts.
    pub fn offset(&self) -> u64 {
        self.block.saturating_mul(BLOCK as u64)
    }

    /// Publishes the block. `filled` is the buffer from [`take_slice`](Self::take_slice), returned by a read
    /// whose result was `Ok`: its owner proves that no read is still writing to it.
    ///
    /// # Panics
    /// `filled` is another block's buffer: its bytes would be served as this block's.
    pub fn publish(mut self, filled: BufferSlice) -> BlockRef {
        let own = filled.place() == PoolPlace::Block(self.index) && Arc::ptr_eq(filled.home(), &self.home);
        assert!(own, "published {filled:?} for the block that is loaded into buffer {}", self.index);
        filled.hand_over();
        self.is_pending = false;
        let wake = self.home.lock().publish(self.index);
        wake_all(&wake);
        self.home.block_ref(self.index, self.len)
    }

    /// Fails the load, as dropping does. The caller keeps the error: waiting callers try again themselves.
    pub fn fail(self) {
        drop(self);
    }
}

impl Drop for LoadGuard {
    fn drop(&mut self) {
        if self.is_pending {
            // The buffer first, so that abandoning the block frees it in the same step.
            drop(self.slice.take());
            let wake = self.home.lock().abandon(self.index);
            wake_all(&wake);
        }
    }
}

/// A loaded block that derefs to its valid bytes: fewer than [`BLOCK`] at the end of a file. Its buffer is
/// not reused while a reference exists. Then the block stays until the buffer is needed; the least recently
/// used block is evicted first.
pub struct BlockRef {
    home: Arc<BlockCache>,
    index: u32,
    start: NonNull<u8>,
    len: usize,
    discard: bool,
}

// SAFETY: a BlockRef gives only shared access to bytes that are not written while a reference exists. The
// cache reuses a buffer only when its count of references is zero. The BlockRef holds the memory's owner.
unsafe impl Send for BlockRef {}
// SAFETY: as above; there is no interior mutability.
unsafe impl Sync for BlockRef {}

impl BlockRef {
    /// Drops the reference. If it is the last one and no other caller acquired the block while it was loaded,
    /// the buffer is freed at once. Use it for bytes that will not be needed again.
    pub fn discard(mut self) {
        self.discard = true;
    }
}

impl Deref for BlockRef {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: start is a buffer of BLOCK bytes in home's mapping. len <= BLOCK of them were filled before
        // the block was published, and nothing writes to it while this reference is counted.
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
