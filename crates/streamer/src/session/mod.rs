// SPDX-License-Identifier: MIT OR Apache-2.0
//! One restore being served, as the control thread and the reactors share it.

pub mod address;
pub mod daemon;
pub mod gpu_pinned;
pub mod image;
pub mod open;
pub(crate) mod peer;
pub mod socket;

use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use tokio::sync::Notify;
use tracing::error;

use crate::cpu::stats::{Stats, TaskStats, add};
use crate::ledger::fd_store::{Entry, FdStore, Kind};
use crate::ledger::{Ledger, NO_FD, SpaceSlot};

/// One restore.
#[derive(Debug)]
pub struct Session {
    /// Its slot in the ledger.
    pub index: usize,
    /// Its number: for people, and never given again.
    pub number: u64,
    /// Image directory.
    pub images: PathBuf,
    /// When the worker took it up.
    pub since: Instant,
    /// Counters.
    pub stats: Stats,
    /// Its fd store; none in tests.
    store: Option<FdStore>,
    tasks: Mutex<Vec<Arc<TaskStats>>>,
    released: AtomicBool,
    urgent: AtomicBool,
    running_ns: AtomicU64,
    failure: OnceLock<String>,
    open_spaces: AtomicUsize,
    changed: Notify,
}

impl Session {
    /// A session with no address spaces yet.
    #[must_use]
    pub fn new(index: usize, number: u64, images: PathBuf) -> Self {
        Self {
            index,
            number,
            images,
            since: Instant::now(),
            stats: Stats::default(),
            store: None,
            tasks: Mutex::default(),
            released: AtomicBool::new(false),
            urgent: AtomicBool::new(false),
            running_ns: AtomicU64::new(0),
            failure: OnceLock::new(),
            open_spaces: AtomicUsize::new(0),
            changed: Notify::new(),
        }
    }

    /// The session with the store that keeps its descriptors.
    #[must_use]
    pub fn with_store(self, store: FdStore) -> Self {
        Self { store: Some(store), ..self }
    }

    /// Its fd store.
    #[must_use]
    pub fn store(&self) -> Option<&FdStore> {
        self.store.as_ref()
    }

    /// Puts an address space's userfaultfd, and its journal if it has one, into the store: from here on they outlive
    /// this process. Of two entries for one address space the later one counts.
    ///
    /// # Errors
    /// The store takes no more.
    pub fn keep(&self, slot: &SpaceSlot) -> io::Result<()> {
        let Some(store) = self.store() else { return Ok(()) };
        let mut numbers = vec![slot.uffd.load(Ordering::Acquire), slot.journal.load(Ordering::Acquire)];
        numbers.retain(|number| *number != NO_FD);
        store.put(slot.entry(), &numbers)
    }

    /// Whether the store takes the userfaultfd of one more address space.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.store().is_none_or(|store| store.has_room().unwrap_or(true))
    }

    /// Takes address spaces out of the store that no slot of the ledger has any more. Until then their
    /// userfaultfds are open, and no process reads their events.
    pub fn forget_retired(&self, ledger: Ledger) {
        let Some(store) = self.store() else { return };
        let is_current = |entry: Entry| {
            let slot = ledger.spaces().get(entry.index as usize);
            entry.kind != Kind::Space || slot.is_some_and(|slot| !slot.is_free() && slot.entry() == entry)
        };
        if let Err(error) = store.retain(is_current) {
            self.fail(&format!("taking userfaultfds of loaded memory out of the fd store: {error}"));
        }
    }

    /// A dump waits for it: its memory is loaded before that of other sessions.
    pub fn make_urgent(&self) {
        self.urgent.store(true, Ordering::Relaxed);
    }

    /// True after [`Session::make_urgent`].
    #[must_use]
    pub fn is_urgent(&self) -> bool {
        self.urgent.load(Ordering::Relaxed)
    }

    /// The restore finished: background filling may begin, and what is resident may be let go.
    pub fn release(&self) {
        if !self.released.swap(true, Ordering::AcqRel) {
            self.running_ns.store(self.stats.elapsed(), Ordering::Relaxed);
        }
    }

    /// When the restore finished, in nanoseconds as [`Stats::elapsed`] counts; 0: not yet.
    #[must_use]
    pub fn running_ns(&self) -> u64 {
        self.running_ns.load(Ordering::Relaxed)
    }

    /// True after [`Session::release`].
    pub fn is_released(&self) -> bool {
        self.released.load(Ordering::Acquire)
    }

    /// Ends the session: bytes of the image cannot be had. The first reason is kept and logged.
    pub fn fail(&self, reason: &str) {
        if self.failure.set(reason.to_owned()).is_ok() {
            error!(
                session = self.number,
                "{reason}; ending the restored processes of {}",
                self.images.display()
            );
            self.changed.notify_one();
        }
    }

    /// True after [`Session::fail`].
    pub fn has_failed(&self) -> bool {
        self.failure.get().is_some()
    }

    /// Why it failed.
    pub fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }

    /// One more task, with so many pages to bring back: what is done for it is counted there.
    pub fn task_arrived(&self, pid: i32, pages: u64) -> Arc<TaskStats> {
        add(&self.stats.pages_total, pages);
        let task = Arc::new(TaskStats { pid, pages_total: pages.into(), ..TaskStats::default() });
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(&task));
        task
    }

    /// The tasks that have arrived, in their order: all of them once it was released.
    pub fn tasks(&self) -> Vec<Arc<TaskStats>> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// One more address space to serve.
    pub fn space_opened(&self) {
        self.open_spaces.fetch_add(1, Ordering::AcqRel);
    }

    /// One less.
    pub fn space_closed(&self) {
        if self.open_spaces.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.changed.notify_one();
        }
    }

    /// True when no address space needs serving.
    pub fn is_empty(&self) -> bool {
        self.open_spaces.load(Ordering::Acquire) == 0
    }

    /// Waits until the session failed or its last address space was closed. One waiter.
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
    fn an_address_space_that_is_not_published_yet_stays_in_the_store() {
        let ledger = Ledger::new().unwrap();
        let (store, writer) = FdStore::create().unwrap();
        let store = FdStore::of(store.as_raw_fd(), writer.as_raw_fd()).unwrap();
        let session = Session::new(0, 1, PathBuf::new()).with_store(store);
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
        session.forget_retired(ledger);
        let held = peek_all(session.store().unwrap().descriptor()).unwrap();
        let held: Vec<Entry> =
            held.into_iter().map(|(entry, _)| entry).filter(|of| of.kind == Kind::Space).collect();
        assert_eq!(held, [forked.entry()]);
    }
}
