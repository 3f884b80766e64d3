// SPDX-License-Identifier: MIT OR Apache-2.0
//! One watched address space, in the ledger.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

use rewake_uffd::RawMessage;

use super::{FREE, LIVE, MAX_MESSAGES, NO_FD, TAKEN};
use crate::ledger::fd_store::{Entry, Kind};
use crate::sys;

/// One watched address space.
#[repr(C)]
pub struct SpaceSlot {
    pub(super) live: AtomicU32,
    /// Its own place among all of them.
    pub(super) index: AtomicU32,
    /// How often it was taken.
    pub(super) life: AtomicU64,
    /// When the process `host_pid` started, in clock ticks since the machine did; 0 where that is not known.
    pub started: AtomicU64,
    /// Session slot it belongs to.
    pub session: AtomicU32,
    /// Pid that names the images (the pid inside the restored pid namespace).
    pub image_pid: AtomicI32,
    /// Pid on this host; 0 for a child forked after the restore, whose pid no event tells.
    pub host_pid: AtomicI32,
    /// The userfaultfd.
    pub uffd: AtomicI32,
    /// Process descriptor, or [`NO_FD`].
    pub pidfd: AtomicI32,
    /// Journal file, or [`NO_FD`].
    pub journal: AtomicI32,
    /// 1 when the journal could not hold the layout: a successor cannot serve this one, only end it.
    pub lossy: AtomicU32,
    /// See [`Journal`].
    pub(super) commit: AtomicU64,
    pub(super) messages: std::cell::UnsafeCell<[RawMessage; MAX_MESSAGES]>,
}

impl SpaceSlot {
    /// True when the slot describes an address space with missing pages.
    #[must_use]
    pub fn is_live(&self) -> bool {
        self.live.load(Ordering::Acquire) == LIVE
    }

    /// True when no address space has the slot, not even one that is not published yet.
    #[must_use]
    pub fn is_free(&self) -> bool {
        self.live.load(Ordering::Acquire) == FREE
    }

    /// Its place among all of them, and how often that was taken: what the fd store calls it.
    #[must_use]
    pub fn entry(&self) -> Entry {
        let (index, life) = (self.index.load(Ordering::Acquire), self.life.load(Ordering::Acquire));
        Entry { kind: Kind::Space, index, life }
    }

    /// Publishes the filled slot to successors.
    pub fn publish(&self) {
        self.live.store(LIVE, Ordering::Release);
    }

    /// Takes the slot out: its process is gone, or nothing is missing in it. Closes its process descriptor and
    /// journal, when no successor would look for them any more and before anybody else can have the slot. The
    /// userfaultfd is its owner's to close: a fill may be under way on another thread.
    pub fn retire(&self) {
        self.live.store(TAKEN, Ordering::Release);
        for number in [&self.pidfd, &self.journal] {
            let number = number.swap(NO_FD, Ordering::AcqRel);
            if number != NO_FD {
                // SAFETY: the slot owned it, and this swap took it out.
                drop(unsafe { sys::take_over(number) });
            }
        }
        self.live.store(FREE, Ordering::Release);
    }

    /// Forgets all descriptors, as [`SessionSlot::forget_numbers`] does; gives the userfaultfd's old number.
    pub fn forget_numbers(&self) -> i32 {
        self.pidfd.store(NO_FD, Ordering::Release);
        self.journal.store(NO_FD, Ordering::Release);
        self.uffd.swap(NO_FD, Ordering::AcqRel)
    }

    /// Asks the kernel whether the memory still exists. Only a system call.
    pub fn memory_is_gone(&self) -> bool {
        // SAFETY: the slot's userfaultfd, open while the slot is live.
        let uffd = unsafe { BorrowedFd::borrow_raw(self.uffd.load(Ordering::Acquire)) };
        rewake_uffd::address_space_ended(uffd)
    }

    /// Waits until the memory is gone, and with it every process that could read it: that of the slot, a child
    /// whose pid is not known, or one that shares it. Only system calls: without an end it goes on for ever, and
    /// with it the descriptors.
    pub fn wait_for_end(&self) {
        while !self.memory_is_gone() {
            sys::nap();
        }
    }

    /// Kills the process if its descriptor is known. Only system calls.
    pub fn kill(&self) -> bool {
        let pidfd = self.pidfd.load(Ordering::Acquire);
        pidfd != NO_FD && sys::pidfd_kill(pidfd).is_ok()
    }
}

// SAFETY: all fields are atomics but the message area, which is reached only through the slot's one `Journal`.
unsafe impl Sync for SpaceSlot {}
