// SPDX-License-Identifier: MIT OR Apache-2.0
//! The memory that reads go to: one mapping, cut into buffers that have one owner each.

use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use memmap2::{Advice, MmapMut, MmapRaw};

use crate::cache::BlockCache;
use crate::{BLOCK, PAGE};

/// The mapping behind a cache: block buffers, then one block's worth of demand buffers.
#[derive(Debug)]
pub(crate) struct Pool {
    map: MmapRaw,
    blocks: u32,
}

/// Which buffer of the pool a slice is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    Block(u32),
    Demand(u32),
    /// Handed over to the cache: nothing to give back.
    Gone,
}

impl Pool {
    pub(crate) fn new(blocks: u32) -> io::Result<Self> {
        let map = MmapMut::map_anon((blocks as usize + 1) * BLOCK)?;
        // A child must not share pages that the kernel may be reading into.
        map.advise(Advice::DontFork)?;
        // A core dump of this process must not have memory of others.
        map.advise(Advice::DontDump)?;
        Ok(Self { map: MmapRaw::from(map), blocks })
    }

    pub(crate) fn base(&self) -> *mut u8 {
        self.map.as_mut_ptr()
    }

    pub(crate) fn len(&self) -> usize {
        self.map.len()
    }

    pub(crate) fn at(&self, place: Place) -> NonNull<u8> {
        let offset = match place {
            Place::Block(index) if index < self.blocks => index as usize * BLOCK,
            Place::Demand(index) if (index as usize) < BLOCK / PAGE => {
                self.blocks as usize * BLOCK + index as usize * PAGE
            }
            other => unreachable!("no buffer {other:?} in a pool of {} blocks", self.blocks),
        };
        // SAFETY: offset is inside the mapping: the index was checked against its number of buffers above.
        unsafe { NonNull::new_unchecked(self.map.as_mut_ptr().add(offset)) }
    }
}

/// A buffer of the pool, owned: whoever holds it is the only one who can reach its memory. It moves into a
/// [`Read`](crate::Read) and comes back in a [`Done`](crate::Done); dropped, it returns to the pool.
///
/// Page aligned. Before it has been filled its bytes are arbitrary old ones (never uninitialised).
pub struct BufferSlice {
    home: Arc<BlockCache>,
    place: Place,
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a BufferSlice is the only owner of its bytes (the cache hands out each buffer once until it comes
// back), and those bytes live as long as `home`, which it holds. Like a Box<[u8]>.
unsafe impl Send for BufferSlice {}
// SAFETY: through & only shared reads of the bytes are possible.
unsafe impl Sync for BufferSlice {}

impl BufferSlice {
    /// `place` must be a buffer that the cache just took from its free list for this slice.
    pub(crate) fn new(home: Arc<BlockCache>, place: Place, len: usize) -> Self {
        let start = home.pool().at(place);
        Self { home, place, start, len }
    }

    /// Makes the slice shorter; its memory stays whole. No effect when `len` is not less than now.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Whether this is one of the small buffers for single pages.
    pub fn is_demand(&self) -> bool {
        matches!(self.place, Place::Demand(_))
    }

    /// Bytes of memory behind the slice, a multiple of [`PAGE`]; at least `len()`. Direct reads, whose
    /// length must be aligned, may write up to here.
    pub(crate) fn capacity(&self) -> usize {
        if self.is_demand() { PAGE } else { BLOCK }
    }

    pub(crate) fn home(&self) -> &Arc<BlockCache> {
        &self.home
    }

    pub(crate) fn place(&self) -> Place {
        self.place
    }

    /// Marks the buffer as the cache's again, without returning it to the free list.
    pub(crate) fn hand_over(mut self) {
        self.place = Place::Gone;
    }

    /// The memory, for the kernel to write to. Valid for `capacity()` bytes while the slice lives.
    pub(crate) fn as_mut_ptr_whole(&mut self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// All of the memory, beyond `len()` too.
    pub(crate) fn whole_mut(&mut self) -> &mut [u8] {
        // SAFETY: the buffer has capacity() initialised bytes (the mapping starts zeroed), owned by this slice
        // alone, borrowed for as long as the result.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.capacity()) }
    }
}

impl Deref for BufferSlice {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: as in whole_mut; len is never above capacity.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for BufferSlice {
    fn deref_mut(&mut self) -> &mut [u8] {
        let len = self.len;
        &mut self.whole_mut()[..len]
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

    /// Flags of this process's mapping at an address, as `VmFlags` of `/proc/self/smaps` shows them.
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
        panic!("nothing is mapped at {address:#x}")
    }

    #[test]
    fn bytes_of_other_processes_are_in_no_core_dump_and_in_no_child() {
        let pool = Pool::new(4).unwrap();
        let flags = flags_at(pool.base().addr());
        let has = |flag| flags.split(' ').any(|other| other == flag);
        assert!(has("dd") && has("dc"), "{flags}");
    }
}
