// SPDX-License-Identifier: MIT OR Apache-2.0
//! The slot of one address space in the ledger.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

use nix::unistd::ftruncate;
use rewake_uffd::RawMessage;

use super::{FREE, LIVE, MAX_MESSAGES, NO_FD, TAKEN, take};
use crate::ledger::fd_store::{EntryKind, StoreEntry};
use crate::sys;

/// One address space that a session serves.
#[repr(C)]
pub struct SpaceSlot {
    pub(super) live: AtomicU32,
    /// The slot's own index.
    pub(super) index: AtomicU32,
    /// How often the slot was taken.
    pub(super) life: AtomicU64,
    /// When the process `host_pid` started, in clock ticks since boot; 0 if that is not known.
    pub started: AtomicU64,
    /// 1 if the session cannot serve the address space and its memory still exists: the streamer only keeps
    /// the userfaultfd open.
    pub abandoned: AtomicU32,
    /// The pid that names the images: the one inside the restored pid namespace.
    pub image_pid: AtomicI32,
    /// The pid on this host; 0 for a child forked after the restore, whose pid is in no event.
    pub host_pid: AtomicI32,
    /// The number of the store that has its userfaultfd: a forked child's is in its parent's.
    pub(super) store: AtomicU32,
    /// The userfaultfd.
    pub uffd: AtomicI32,
    /// The process descriptor, or [`NO_FD`].
    pub pidfd: AtomicI32,
    /// The journal file, or [`NO_FD`].
    pub journal: AtomicI32,
    /// 1 if the journal could not hold the layout: a successor can only kill the process.
    pub lossy: AtomicU32,
    /// The state of the [`Journal`](super::Journal).
    pub(super) commit: AtomicU64,
    pub(super) messages: std::cell::UnsafeCell<[RawMessage; MAX_MESSAGES]>,
}

impl SpaceSlot {
    /// Returns true if the slot describes an address space with missing pages.
    #[must_use]
    pub fn is_live(&self) -> bool {
        self.live.load(Ordering::Acquire) == LIVE
    }

    /// Returns true if no address space has the slot, not even one that is not published yet.
    #[must_use]
    pub fn is_free(&self) -> bool {
        self.live.load(Ordering::Acquire) == FREE
    }

    /// Returns the address space's entry in the fd store: the slot's index, and how often the slot was taken.
    #[must_use]
    pub fn entry(&self) -> StoreEntry {
        let (index, life) = (self.index.load(Ordering::Acquire), self.life.load(Ordering::Acquire));
        StoreEntry { kind: EntryKind::Space, index, life }
    }

    /// Returns the number of the store that has its userfaultfd.
    #[must_use]
    pub(crate) fn store_number(&self) -> u32 {
        self.store.load(Ordering::Acquire)
    }

    /// Notes the number of the store that has its userfaultfd.
    pub(crate) fn set_store_number(&self, number: u32) {
        self.store.store(number, Ordering::Release);
    }

    /// Returns the name of the journal's file in the session's folder.
    #[must_use]
    pub(crate) fn journal_name(&self) -> String {
        format!("journal-{}", self.index.load(Ordering::Acquire))
    }

    /// Makes the complete slot visible to successors.
    pub fn publish(&self) {
        self.live.store(LIVE, Ordering::Release);
    }

    /// Frees the slot: its process has ended, or no page of it is missing.
    ///
    /// It closes the process descriptor and the journal: after a successor would need them, and before
    /// another address space can have the slot. The owner closes the userfaultfd, as another thread may be
    /// filling pages.
    pub fn retire(&self) {
        self.live.store(TAKEN, Ordering::Release);
        if let Some(journal) = take(&self.journal) {
            // Its memory is free now, and not only when the session ends.
            let _ = ftruncate(&journal, 0);
        }
        drop(take(&self.pidfd));
        self.live.store(FREE, Ordering::Release);
    }

    /// Clears all descriptors: their table no longer exists. Returns the userfaultfd's old number.
    pub fn forget_numbers(&self) -> i32 {
        self.pidfd.store(NO_FD, Ordering::Release);
        self.journal.store(NO_FD, Ordering::Release);
        self.uffd.swap(NO_FD, Ordering::AcqRel)
    }

    /// Returns true if the memory no longer exists. It makes only a system call.
    pub fn memory_is_gone(&self) -> bool {
        // SAFETY: the slot's userfaultfd, open while the slot is live.
        let uffd = unsafe { BorrowedFd::borrow_raw(self.uffd.load(Ordering::Acquire)) };
        rewake_uffd::address_space_ended(uffd)
    }

    /// Waits until the memory no longer exists: then no process can read it, not even a child with an unknown
    /// pid.
    ///
    /// It makes only system calls, and has no time limit: the descriptors stay open as long as the memory
    /// exists.
    pub fn wait_for_end(&self) {
        while !self.memory_is_gone() {
            sys::nap();
        }
    }

    /// Kills the process if its descriptor is known. It makes only system calls.
    pub fn kill(&self) -> bool {
        let pidfd = self.pidfd.load(Ordering::Acquire);
        pidfd != NO_FD && sys::pidfd_kill(pidfd).is_ok()
    }
}

// SAFETY: all fields are atomics but the message area, which only the slot's one `Journal` accesses.
unsafe impl Sync for SpaceSlot {}
