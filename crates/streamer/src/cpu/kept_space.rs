// SPDX-License-Identifier: MIT OR Apache-2.0
//! What an address space has in its fd store.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::cpu::space::AddressSpace;
use crate::ledger::SpaceSlot;
use crate::ledger::fd_store::FdStore;

impl AddressSpace {
    /// Returns whether its fd store has room for the userfaultfd of a forked child.
    pub(super) fn has_room_for_child(&self) -> bool {
        self.store.as_ref().is_none_or(|store| store.has_room().unwrap_or(true))
    }

    /// Puts the userfaultfd of a forked child into its fd store, which the child has inherited: there the
    /// userfaultfd outlives every process of the streamer. Of two entries for one address space the later one
    /// counts.
    ///
    /// # Errors
    /// Fails when the store is full.
    pub(super) fn keep(&self, child: &SpaceSlot) -> io::Result<()> {
        child.set_store_number(self.slot.store_number());
        let put = |store: &Arc<FdStore>| store.put(child.entry(), &[child.uffd.load(Ordering::Acquire)]);
        self.store.as_ref().map_or(Ok(()), put)
    }

    /// Frees its slot. [`Session::forget_retired`] takes its userfaultfd out of the fd store.
    pub(super) fn retire(&self) {
        self.forget(self.slot);
    }

    /// Frees the slot of a forked child whose userfaultfd is in this space's fd store.
    pub(super) fn forget(&self, child: &SpaceSlot) {
        child.retire();
        self.store.iter().for_each(|store| store.note_stale());
    }
}
