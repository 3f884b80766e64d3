// SPDX-License-Identifier: MIT OR Apache-2.0
//! The state of a session, which the control thread and the reactors share.

pub mod address;
pub(crate) mod complete;
pub mod gpu_pinned;
pub mod image;
pub mod open;
pub(crate) mod peer;
pub mod serve;
pub mod socket;

use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use tokio::sync::Notify;
use tracing::error;

use crate::cpu::stats::{Stats, TaskStats, add};
use crate::ledger::fd_store::{EntryKind, FdStore, StoreEntry};
use crate::ledger::{Ledger, NO_FD, SpaceSlot, wants_room};

/// The restore that this worker serves.
#[derive(Debug)]
pub struct Session {
    /// Its image directory.
    pub images: PathBuf,
    /// When the worker opened it or took it over.
    pub since: Instant,
    /// Its counters.
    pub stats: Stats,
    /// Its fd store; none in tests.
    store: Option<FdStore>,
    tasks: Mutex<Vec<Arc<TaskStats>>>,
    released: AtomicBool,
    running_ns: AtomicU64,
    failure: OnceLock<String>,
    open_spaces: AtomicUsize,
    changed: Notify,
}

impl Session {
    /// Returns a session without address spaces.
    #[must_use]
    pub fn new(images: PathBuf) -> Self {
        Self {
            images,
            since: Instant::now(),
            stats: Stats::default(),
            store: None,
            tasks: Mutex::default(),
            released: AtomicBool::new(false),
            running_ns: AtomicU64::new(0),
            failure: OnceLock::new(),
            open_spaces: AtomicUsize::new(0),
            changed: Notify::new(),
        }
    }

    /// Gives the session the store that keeps its descriptors.
    #[must_use]
    pub fn with_store(self, store: FdStore) -> Self {
        Self { store: Some(store), ..self }
    }

    /// Returns its fd store.
    #[must_use]
    pub fn store(&self) -> Option<&FdStore> {
        self.store.as_ref()
    }

    /// Puts an address space's userfaultfd, and its journal if it has one, into the store, where they outlive
    /// this process. Of two entries for one address space the later one counts.
    ///
    /// # Errors
    /// Fails when the store is full.
    pub fn keep(&self, slot: &SpaceSlot) -> io::Result<()> {
        let Some(store) = self.store() else { return Ok(()) };
        let mut numbers = vec![slot.uffd.load(Ordering::Acquire), slot.journal.load(Ordering::Acquire)];
        numbers.retain(|number| *number != NO_FD);
        store.put(slot.entry(), &numbers)
    }

    /// Returns whether the store has room for the userfaultfd of one more address space.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.store().is_none_or(|store| store.has_room().unwrap_or(true))
    }

    /// Removes address spaces from the store that no slot of the ledger has any more. Until then their
    /// userfaultfds are open, and no process reads their events. Returns false if it must be called again, for
    /// want of descriptors.
    pub fn forget_retired(&self, ledger: Ledger) -> bool {
        let Some(store) = self.store() else { return true };
        let is_current = |entry: StoreEntry| {
            let slot = ledger.spaces().get(entry.index as usize);
            entry.kind != EntryKind::Space
                || slot.is_some_and(|slot| !slot.is_free() && slot.entry() == entry)
        };
        match store.retain(is_current) {
            Err(error) if wants_room(&error) => false,
            Err(error) => {
                self.fail(&format!("taking userfaultfds of loaded memory out of the fd store: {error}"));
                true
            }
            Ok(()) => true,
        }
    }

    /// Notes that the restore has finished. Reactors may then load in the background and retire address
    /// spaces that are fully resident.
    pub fn release(&self) {
        if !self.released.swap(true, Ordering::AcqRel) {
            self.running_ns.store(self.stats.elapsed(), Ordering::Relaxed);
        }
    }

    /// Returns when the restore finished, in nanoseconds as [`Stats::elapsed`] counts. 0: not yet.
    #[must_use]
    pub fn running_ns(&self) -> u64 {
        self.running_ns.load(Ordering::Relaxed)
    }

    /// Returns true after [`Session::release`].
    pub fn is_released(&self) -> bool {
        self.released.load(Ordering::Acquire)
    }

    /// Fails the session, because bytes of the image cannot be read or filled. Keeps and logs only the first
    /// reason.
    pub fn fail(&self, reason: &str) {
        if self.failure.set(reason.to_owned()).is_ok() {
            error!("{reason}; ending the restored processes of {}", self.images.display());
            self.changed.notify_one();
        }
    }

    /// Returns true after [`Session::fail`].
    pub fn has_failed(&self) -> bool {
        self.failure.get().is_some()
    }

    /// Returns why it failed.
    pub fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }

    /// Adds a task with `pages` missing pages, and returns its counters.
    pub fn task_arrived(&self, pid: i32, pages: u64) -> Arc<TaskStats> {
        add(&self.stats.pages_total, pages);
        let task = Arc::new(TaskStats { pid, pages_total: pages.into(), ..TaskStats::default() });
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(&task));
        task
    }

    /// Returns the tasks that have reported, in this order. After [`Session::release`] these are all.
    pub fn tasks(&self) -> Vec<Arc<TaskStats>> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Counts one more address space to serve.
    pub fn space_opened(&self) {
        self.open_spaces.fetch_add(1, Ordering::AcqRel);
    }

    /// Counts one address space less. The last one ends the session.
    pub fn space_closed(&self) {
        if self.open_spaces.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.changed.notify_one();
        }
    }

    /// Returns whether no address space is left to serve.
    pub fn is_empty(&self) -> bool {
        self.open_spaces.load(Ordering::Acquire) == 0
    }

    /// Waits until the session fails or its last address space is closed. Only one task may wait.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;

    use nix::sys::memfd::{MFdFlags, memfd_create};

    use super::*;
    use crate::ledger::fd_store::peek_all;

    #[test]
    fn an_unpublished_address_space_stays_in_the_store() {
        let ledger = Ledger::new().unwrap();
        let (store, writer) = FdStore::create().unwrap();
        let store = FdStore::of(store.as_raw_fd(), writer.as_raw_fd()).unwrap();
        let session = Session::new(PathBuf::new()).with_store(store);
        let file = memfd_create(c"userfaultfd", MFdFlags::MFD_CLOEXEC).unwrap();
        let [forked, retired] = [(), ()].map(|()| {
            let index = ledger.take_space().unwrap();
            let slot = &ledger.spaces()[index];
            slot.uffd.store(file.as_raw_fd(), Ordering::Release);
            session.keep(slot).unwrap();
            slot
        });
        retired.publish();
        retired.retire();
        assert!(session.forget_retired(ledger));
        let held = peek_all(session.store().unwrap().descriptor()).unwrap();
        let held: Vec<StoreEntry> =
            held.into_iter().map(|(entry, _)| entry).filter(|of| of.kind == EntryKind::Space).collect();
        assert_eq!(held, [forked.entry()]);
    }
}
