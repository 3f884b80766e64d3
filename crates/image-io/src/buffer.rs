// SPDX-License-Identifier: MIT OR Apache-2.0
//! The memory that reads fill: one mapping, divided into buffers with one owner each.

use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use memmap2::{Advice, MmapMut, MmapRaw};

use crate::cache::BlockCache;
use crate::memory::Memory;
use crate::units::{BLOCK, PAGE};

/// The mapping of a cache: block buffers, then demand buffers of one block in all.
#[derive(Debug)]
pub(crate) struct BufferPool {
    map: MmapRaw,
    blocks: u32,
}

/// The place of a slice's buffer in the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PoolPlace {
    Block(u32),
    Demand(u32),
    /// The cache owns the buffer: a drop returns nothing.
    Cache,
}

impl BufferPool {
    pub(crate) fn new(blocks: u32) -> io::Result<Self> {
        let map = MmapMut::map_anon((blocks as usize + 1) * BLOCK)?;
        // A child must not share pages that the kernel may be reading into.
        map.advise(Advice::DontFork)?;
        // A core dump of this process must not have memory of other processes.
        map.advise(Advice::DontDump)?;
        Ok(Self { map: MmapRaw::from(map), blocks })
    }

    pub(crate) fn at(&self, place: PoolPlace) -> NonNull<u8> {
        let offset = match place {
            PoolPlace::Block(index) if index < self.blocks => index as usize * BLOCK,
            PoolPlace::Demand(index) if (index as usize) < BLOCK / PAGE => {
                self.blocks as usize * BLOCK + index as usize * PAGE
            }
            other => unreachable!("no buffer {other:?} in a pool of {} blocks", self.blocks),
        };
        // SAFETY: offset is inside the mapping: the index was checked against its number of buffers above.
        unsafe { NonNull::new_unchecked(self.map.as_mut_ptr().add(offset)) }
    }
}

/// An owned buffer of the pool: only its owner can access its memory. It moves into a
/// [`Request`](crate::Request), and a [`Completion`](crate::Completion) returns it. A drop returns it to the
/// pool.
///
/// It is page-aligned. Before it is filled it has arbitrary old bytes (never uninitialised ones).
pub struct BufferSlice {
    home: Arc<BlockCache>,
    place: PoolPlace,
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a BufferSlice is the only owner of its bytes (the cache gives out each buffer once until it is
// returned). The bytes live as long as `home`, which the slice holds. Like a Box<[u8]>.
unsafe impl Send for BufferSlice {}
// SAFETY: a shared reference allows only reads of the bytes.
unsafe impl Sync for BufferSlice {}

impl BufferSlice {
    /// Makes a slice. `place` must be a buffer that the cache just took from its free list for this slice.
    pub(crate) fn new(home: Arc<BlockCache>, place: PoolPlace, len: usize) -> Self {
        let start = home.pool().at(place);
        Self { home, place, start, len }
    }

    /// Makes the slice shorter; its memory stays whole. A `len` that is not less has no effect.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Bytes of memory of the slice, a multiple of [`PAGE`] and at least `len()`.
    fn capacity(&self) -> usize {
        if matches!(self.place, PoolPlace::Demand(_)) { PAGE } else { BLOCK }
    }

    pub(crate) fn home(&self) -> &Arc<BlockCache> {
        &self.home
    }

    pub(crate) fn place(&self) -> PoolPlace {
        self.place
    }

    /// Returns the buffer to the cache, but not to the free list.
    pub(crate) fn hand_over(mut self) {
        self.place = PoolPlace::Cache;
    }
}

// SAFETY: the buffer is a part of `home`'s mapping, which the slice keeps. All references to its bytes borrow
// the slice. It is ordinary memory.
unsafe impl Memory for BufferSlice {
    fn start(&self) -> NonNull<u8> {
        self.start
    }

    fn bytes(&self) -> usize {
        self.capacity()
    }
}

impl Deref for BufferSlice {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the buffer has capacity() initialised bytes (the mapping starts zeroed), and len is never
        // above that. This slice alone owns them and is borrowed for as long as the result.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for BufferSlice {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Drop for BufferSlice {
    fn drop(&mut self) {
        self.home.take_back(self.place);
    }
}

impl fmt::Debug for BufferSlice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BufferSlice").field("place", &self.place).field("len", &self.len).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the flags of this process's mapping at an address, as `VmFlags` of `/proc/self/smaps` shows
    /// them.
    fn flags_at(address: usize) -> String {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut inside = false;
        for line in maps.lines() {
            let range = line.split_once(' ').and_then(|(range, _)| range.split_once('-'));
            let number = |digits| usize::from_str_radix(digits, 16).ok();
            if let Some((start, end)) = range.and_then(|(start, end)| Some((number(start)?, number(end)?))) {
                inside = (start..end).contains(&address);
            } else if let Some(flags) = line.strip_prefix("VmFlags: ").filter(|_| inside) {
                return flags.to_owned();
            }
        }
        panic!("no mapping at {address:#x}")
    }

    #[test]
    fn bytes_of_other_processes_are_in_no_core_dump_and_in_no_child() {
        let pool = BufferPool::new(4).unwrap();
        let flags = flags_at(pool.at(PoolPlace::Block(0)).addr().get());
        let has = |flag| flags.split(' ').any(|other| other == flag);
        assert!(has("dd") && has("dc"), "{flags}");
    }
}
