// SPDX-License-Identifier: MIT OR Apache-2.0
//! Keeps which buffer has which block, which callers wait, and which block is evicted first. It has no locks,
//! no memory and no system calls: [`crate::cache`] adds those.

use std::collections::HashMap;

use crate::identity::FileKey;
use crate::units::{BLOCK, PAGE};
use rewake_process::Notifier;

/// Number of one-page buffers for demand reads; together they take one block of the budget.
///
/// Most page faults load their block. These buffers serve faults in blocks that are claimed but not being
/// read yet, and faults before background loads may begin.
pub const DEMAND_BUFFERS: u32 = 16;

const _: () = assert!(DEMAND_BUFFERS as usize * PAGE == BLOCK);

/// Marks the end of the list of idle blocks.
const NONE: u32 = u32::MAX;

/// One block of one content of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    pub(crate) file: FileKey,
    pub(crate) block: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SlotPhase {
    /// In the free list.
    Free,
    /// A guard exists and a reader owns the buffer.
    Loading,
    /// A guard exists, but the buffer was returned unfilled: the load can only fail.
    Returned,
    /// The guard failed while a reader still owns the buffer: a read may be writing to it.
    Detached,
    /// Published; without references it is in the list of idle blocks.
    Ready,
}

#[derive(Debug)]
struct BlockSlot {
    phase: SlotPhase,
    key: Option<Key>,
    refs: u32,
    len: usize,
    /// A caller other than the loader acquired it: discard() keeps it.
    wanted: bool,
    waiters: Vec<Notifier>,
    newer: u32,
    older: u32,
}

/// The state of a key's buffer, as [`Slots::acquire`] found or made it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Acquisition {
    /// Ready, with one more reference: index and valid bytes.
    Hit(u32, usize),
    /// The caller must load it into the buffer with this index.
    Load(u32),
    Pending,
    Full,
}

/// The states of all buffers. An index names both the slot and its buffer.
#[derive(Debug)]
pub(crate) struct Slots {
    slots: Vec<BlockSlot>,
    map: HashMap<Key, u32>,
    /// Last in, first out: the CPU's caches still have the buffer that was used last.
    free: Vec<u32>,
    demand_free: Vec<u32>,
    newest: u32,
    oldest: u32,
    full: Vec<Notifier>,
}

fn add_once(waiters: &mut Vec<Notifier>, notifier: &Notifier) {
    if !waiters.iter().any(|known| known.same(notifier)) {
        waiters.push(notifier.clone());
    }
}

impl Slots {
    pub(crate) fn new(blocks: u32) -> Self {
        let empty = || BlockSlot {
            phase: SlotPhase::Free,
            key: None,
            refs: 0,
            len: 0,
            wanted: false,
            waiters: Vec::new(),
            newer: NONE,
            older: NONE,
        };
        Self {
            slots: (0..blocks).map(|_| empty()).collect(),
            map: HashMap::with_capacity(blocks as usize),
            free: (0..blocks).rev().collect(),
            demand_free: (0..DEMAND_BUFFERS).rev().collect(),
            newest: NONE,
            oldest: NONE,
            full: Vec::new(),
        }
    }

    /// Finds a block or makes the caller its loader. `len` is the number of valid bytes.
    pub(crate) fn acquire(&mut self, key: Key, len: usize, notifier: &Notifier) -> Acquisition {
        if let Some(&index) = self.map.get(&key) {
            let slot = &mut self.slots[index as usize];
            if slot.phase != SlotPhase::Ready {
                slot.wanted = true;
                add_once(&mut slot.waiters, notifier);
                return Acquisition::Pending;
            }
            slot.refs += 1;
            let (refs, len) = (slot.refs, slot.len);
            if refs == 1 {
                self.unlink(index);
            }
            return Acquisition::Hit(index, len);
        }
        let Some(index) = self.free.pop().or_else(|| self.evict_oldest()) else {
            add_once(&mut self.full, notifier);
            return Acquisition::Full;
        };
        let slot = &mut self.slots[index as usize];
        slot.phase = SlotPhase::Loading;
        slot.key = Some(key);
        slot.len = len;
        slot.refs = 0;
        slot.wanted = false;
        self.map.insert(key, index);
        Acquisition::Load(index)
    }

    /// Makes a filled block ready, with one reference for the loader.
    pub(crate) fn publish(&mut self, index: u32) -> Vec<Notifier> {
        let slot = &mut self.slots[index as usize];
        slot.phase = SlotPhase::Ready;
        slot.refs = 1;
        std::mem::take(&mut slot.waiters)
    }

    /// Forgets a block whose loader gave up. Its buffer is free once it is returned.
    pub(crate) fn abandon(&mut self, index: u32) -> Vec<Notifier> {
        let slot = &mut self.slots[index as usize];
        let mut wake = std::mem::take(&mut slot.waiters);
        if let Some(key) = slot.key.take() {
            self.map.remove(&key);
        }
        if slot.phase == SlotPhase::Returned {
            self.set_free(index, &mut wake);
        } else {
            slot.phase = SlotPhase::Detached;
        }
        wake
    }

    /// Takes back a block buffer that was not published.
    pub(crate) fn return_block(&mut self, index: u32) -> Vec<Notifier> {
        let mut wake = Vec::new();
        let slot = &mut self.slots[index as usize];
        if slot.phase == SlotPhase::Loading {
            slot.phase = SlotPhase::Returned;
        } else {
            self.set_free(index, &mut wake);
        }
        wake
    }

    /// Adds a reference to a block that the caller already refers to.
    pub(crate) fn add_ref(&mut self, index: u32) {
        self.slots[index as usize].refs += 1;
    }

    /// Drops one reference. After the last one the block is idle. With `discard` its buffer is freed instead,
    /// unless another caller acquired the block while it was loaded.
    pub(crate) fn drop_ref(&mut self, index: u32, discard: bool) -> Vec<Notifier> {
        let slot = &mut self.slots[index as usize];
        slot.refs -= 1;
        if slot.refs > 0 {
            return Vec::new();
        }
        if discard && !slot.wanted {
            if let Some(key) = slot.key.take() {
                self.map.remove(&key);
            }
            let mut wake = Vec::new();
            self.set_free(index, &mut wake);
            return wake;
        }
        self.link_newest(index);
        std::mem::take(&mut self.full)
    }

    pub(crate) fn take_demand(&mut self) -> Option<u32> {
        self.demand_free.pop()
    }

    pub(crate) fn return_demand(&mut self, index: u32) {
        self.demand_free.push(index);
    }

    fn set_free(&mut self, index: u32, wake: &mut Vec<Notifier>) {
        self.slots[index as usize].phase = SlotPhase::Free;
        self.free.push(index);
        wake.append(&mut self.full);
    }

    /// Takes the buffer of the block that was idle for longest.
    fn evict_oldest(&mut self) -> Option<u32> {
        let index = self.oldest;
        if index == NONE {
            return None;
        }
        self.unlink(index);
        if let Some(key) = self.slots[index as usize].key.take() {
            self.map.remove(&key);
        }
        Some(index)
    }

    fn link_newest(&mut self, index: u32) {
        let before = self.newest;
        let slot = &mut self.slots[index as usize];
        slot.older = before;
        slot.newer = NONE;
        self.newest = index;
        if before == NONE {
            self.oldest = index;
        } else {
            self.slots[before as usize].newer = index;
        }
    }

    fn unlink(&mut self, index: u32) {
        let slot = &self.slots[index as usize];
        let (newer, older) = (slot.newer, slot.older);
        if newer == NONE {
            self.newest = older;
        } else {
            self.slots[newer as usize].older = older;
        }
        if older == NONE {
            self.oldest = newer;
        } else {
            self.slots[older as usize].newer = newer;
        }
    }
}
