// SPDX-License-Identifier: MIT OR Apache-2.0
//! The state of a session, which the control thread and the reactors share.

pub(crate) mod complete;
pub mod gpu_pinned;
pub mod image;
pub mod open;
pub(crate) mod peer;
pub mod root;
pub mod serve;
pub mod socket;
pub mod summary;

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use rewake_fetcher::plan::PagePeer;
use tokio::sync::Notify;
use tracing::error;

use crate::cpu::stats::{Stats, TaskStats, add};
use crate::failure::Failure;
use crate::ledger::fd_store::{EntryKind, FdStore, StoreEntry};
use crate::ledger::{Ledger, SessionSlot, wants_room};
use crate::record::model::MemoryOrigin;
use crate::session::image::Image;
use crate::session::root::RootProcess;
use crate::working_set::LoadingOptions;
use crate::working_set::access_log::AccessLog;

/// The restore that this worker serves.
#[derive(Debug)]
pub struct Session {
    /// Its image directory.
    pub images: PathBuf,
    /// When the worker opened it or took it over.
    pub since: Instant,
    /// Its counters.
    pub stats: Stats,
    /// The fd store that only the streamer's processes have; none in tests.
    own_store: Option<FdStore>,
    /// The fd stores that targets have, by their number in the ledger; none in most tests.
    stores: Mutex<BTreeMap<u32, Arc<FdStore>>>,
    /// The store of the tree's root, if a page server has the memory: the connection is in it.
    root_store: OnceLock<Arc<FdStore>>,
    /// Where missing memory comes from, if not from the image's files.
    source: OnceLock<MemoryOrigin>,
    tasks: Mutex<Vec<Arc<TaskStats>>>,
    released: AtomicBool,
    options: LoadingOptions,
    /// Whether memory is loaded only when it is accessed.
    on_demand: AtomicBool,
    /// Notes what is accessed, if the working set is recorded.
    log: Option<AccessLog>,
    running_ns: AtomicU64,
    root: OnceLock<RootProcess>,
    /// The parts of the working set that are missing: bits of [`WorkingSetPart`].
    working_set: AtomicU8,
    /// When the last of them was resident, as [`Stats::elapsed`] counts. 0: not yet, or there was none.
    working_set_ns: AtomicU64,
    failure: OnceLock<Failure>,
    open_spaces: AtomicUsize,
    changed: Notify,
}

/// A part of the working set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WorkingSetPart {
    /// CPU memory.
    Cpus = 1,
    /// Buffers of GPUs.
    Gpus = 2,
}

impl Session {
    /// Returns a session without address spaces.
    #[must_use]
    pub fn new(images: PathBuf) -> Self {
        Self {
            images,
            since: Instant::now(),
            stats: Stats::default(),
            own_store: None,
            stores: Mutex::default(),
            root_store: OnceLock::new(),
            source: OnceLock::new(),
            tasks: Mutex::default(),
            released: AtomicBool::new(false),
            options: LoadingOptions::default(),
            on_demand: AtomicBool::new(false),
            log: None,
            running_ns: AtomicU64::new(0),
            root: OnceLock::new(),
            working_set: AtomicU8::new(0),
            working_set_ns: AtomicU64::new(0),
            failure: OnceLock::new(),
            open_spaces: AtomicUsize::new(0),
            changed: Notify::new(),
        }
    }

    /// Gives the session the stores that keep its descriptors: the streamer's own, and those that targets
    /// have by now.
    #[must_use]
    fn with_stores(self, own: FdStore, slot: &SessionSlot) -> Self {
        let stores = slot.stores.open();
        let stores = stores.map(|(number, store)| (number, Arc::new(store.sharing_spare_of(&own)))).collect();
        Self { own_store: Some(own), stores: Mutex::new(stores), ..self }
    }

    /// Returns the session of an image: the streamer's own store is `own`.
    ///
    /// # Errors
    /// EMFILE, ENOMEM.
    pub(crate) fn of(image: &Image, images: PathBuf, own: FdStore, slot: &SessionSlot) -> io::Result<Self> {
        let session = Self::new(images).with_stores(own, slot);
        if image.has_page_server() {
            session.keep_connection_with(slot, image.root())?;
        }
        Ok(session)
    }

    /// Makes the store of a restored task, unless the task has one. Returns its number; None in tests.
    ///
    /// # Errors
    /// EMFILE, ENOMEM, E2BIG.
    pub(crate) fn store_of_task(&self, slot: &SessionSlot, task: i32) -> io::Result<Option<u32>> {
        let Some(own) = &self.own_store else { return Ok(None) };
        let (number, store) = slot.stores.of_task(task)?;
        let mut stores = self.stores.lock().unwrap_or_else(PoisonError::into_inner);
        stores.entry(number).or_insert_with(|| Arc::new(store.sharing_spare_of(own)));
        Ok(Some(number))
    }

    /// Says what is wanted of the load.
    #[must_use]
    pub fn with_options(self, options: LoadingOptions) -> Self {
        let log = options.record.then(AccessLog::new);
        Self { options, on_demand: AtomicBool::new(options.begins_on_demand()), log, ..self }
    }

    /// Returns what is wanted of the load.
    pub(crate) fn options(&self) -> LoadingOptions {
        self.options
    }

    /// Returns the log of accesses, if the working set is recorded.
    pub(crate) fn log(&self) -> Option<&AccessLog> {
        self.log.as_ref()
    }

    /// Returns whether memory is loaded only when it is accessed.
    #[must_use]
    pub fn is_on_demand(&self) -> bool {
        self.on_demand.load(Ordering::Acquire)
    }

    /// Lets reactors load in the background. Returns whether they did not before.
    pub fn end_on_demand(&self) -> bool {
        self.on_demand.swap(false, Ordering::AcqRel)
    }

    /// Says that a part of the working set is loaded before the rest.
    pub(crate) fn expect_working_set(&self, part: WorkingSetPart) {
        self.working_set.fetch_or(part as u8, Ordering::AcqRel);
    }

    /// Notes that a part of the working set is resident.
    pub(crate) fn note_working_set(&self, part: WorkingSetPart) {
        // Only the last part counts, once.
        if self.working_set.fetch_and(!(part as u8), Ordering::AcqRel) == part as u8 {
            self.working_set_ns.store(self.stats.elapsed(), Ordering::Relaxed);
        }
    }

    /// Returns when the working set was resident, in nanoseconds as [`Stats::elapsed`] counts. 0: not yet, or
    /// there is none.
    #[must_use]
    pub fn working_set_ns(&self) -> u64 {
        self.working_set_ns.load(Ordering::Relaxed)
    }

    /// Says which peer missing memory comes from.
    pub(crate) fn set_peer(&self, peer: &PagePeer) {
        let is_agent = matches!(peer, PagePeer::Agent(_));
        // A session has one fetcher after another, all of one peer.
        let _ = self.source.set(if is_agent { MemoryOrigin::Cache } else { MemoryOrigin::Peer });
    }

    /// Returns where missing memory comes from.
    pub(crate) fn source(&self) -> MemoryOrigin {
        self.source.get().copied().unwrap_or_default()
    }

    /// Makes the store of the tree's root, for the connection with a page server: a worker that takes the
    /// session over finds the store.
    ///
    /// # Errors
    /// EMFILE, ENOMEM.
    fn keep_connection_with(&self, slot: &SessionSlot, root: i32) -> io::Result<()> {
        let number = self.store_of_task(slot, root)?;
        if let Some(store) = number.and_then(|number| self.store(number)) {
            let _ = self.root_store.set(store);
        }
        Ok(())
    }

    /// Returns the store that has the connection with a page server.
    pub(crate) fn root_store(&self) -> Option<&FdStore> {
        self.root_store.get().map(|store| &**store)
    }

    /// Returns a store that targets have, by its number in the ledger.
    pub(crate) fn store(&self, number: u32) -> Option<Arc<FdStore>> {
        self.stores.lock().unwrap_or_else(PoisonError::into_inner).get(&number).cloned()
    }

    /// Returns all stores that targets have.
    pub(crate) fn stores(&self) -> Vec<Arc<FdStore>> {
        self.stores.lock().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    /// Returns the fd store that only the streamer's processes have.
    pub(crate) fn own_store(&self) -> Option<&FdStore> {
        self.own_store.as_ref()
    }

    /// Removes address spaces from their stores that no slot of the ledger has any more. Until then their
    /// userfaultfds are open, and no process reads their events. Returns false if it must be called again,
    /// for want of descriptors.
    pub fn forget_retired(&self, ledger: Ledger) -> bool {
        let is_current = |entry: StoreEntry| {
            let slot = ledger.spaces().get(entry.index as usize);
            entry.kind != EntryKind::Space
                || slot.is_some_and(|slot| !slot.is_free() && slot.entry() == entry)
        };
        let mut done = true;
        for store in self.stores() {
            match store.retain_if_stale(is_current) {
                Err(error) if wants_room(&error) => done = false,
                Err(error) => {
                    self.fail(format!("taking userfaultfds of loaded memory out of an fd store: {error}"));
                }
                Ok(()) => {}
            }
        }
        done
    }

    /// Notes that the restore has finished. Reactors may then load in the background and retire address
    /// spaces that are fully resident.
    pub fn release(&self) {
        if !self.released.swap(true, Ordering::AcqRel) {
            self.running_ns.store(self.stats.elapsed(), Ordering::Relaxed);
        }
    }

    /// Finds the root of the tree, whose end is the program's: when all tasks have reported, and none has run
    /// yet, or in a successor.
    pub(crate) fn find_root(&self) {
        if let Some(root) = RootProcess::of(&self.tasks().iter().map(|task| task.pid).collect::<Vec<_>>()) {
            // It is set once.
            let _ = self.root.set(root);
        }
    }

    /// Returns the root of the tree, if its pid is known here.
    pub(crate) fn root(&self) -> Option<&RootProcess> {
        self.root.get()
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
    pub fn fail(&self, failure: impl Into<Failure>) {
        if self.failure.set(failure.into()).is_ok()
            && let Some(failure) = self.failure()
        {
            error!("{failure}; ending the restored processes of {}", self.images.display());
            self.changed.notify_one();
        }
    }

    /// Returns true after [`Session::fail`].
    pub fn has_failed(&self) -> bool {
        self.failure.get().is_some()
    }

    /// Returns why it failed.
    pub fn failure(&self) -> Option<&Failure> {
        self.failure.get()
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

    /// Returns the number of address spaces to serve.
    pub(crate) fn open_spaces(&self) -> usize {
        self.open_spaces.load(Ordering::Acquire)
    }

    /// Returns whether no address space is left to serve.
    pub fn is_empty(&self) -> bool {
        self.open_spaces() == 0
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
    fn the_working_set_is_resident_with_its_last_part() {
        let session = Session::new(PathBuf::new());
        session.note_working_set(WorkingSetPart::Cpus);
        assert_eq!(session.working_set_ns(), 0, "there is none");
        session.expect_working_set(WorkingSetPart::Cpus);
        session.expect_working_set(WorkingSetPart::Gpus);
        session.note_working_set(WorkingSetPart::Gpus);
        assert_eq!(session.working_set_ns(), 0);
        session.note_working_set(WorkingSetPart::Cpus);
        let then = session.working_set_ns();
        session.note_working_set(WorkingSetPart::Cpus);
        assert!(then > 0 && session.working_set_ns() == then);
    }

    #[test]
    fn an_unpublished_address_space_stays_in_the_store() {
        let ledger = Ledger::new().unwrap();
        let slot = ledger.session();
        let session = Session::new(PathBuf::new()).with_stores(slot.make_own_store().unwrap(), slot);
        let number = session.store_of_task(slot, 7).unwrap().unwrap();
        assert_eq!(session.store_of_task(slot, 7).unwrap(), Some(number), "a task has one store");
        let store = session.store(number).unwrap();
        let file = memfd_create(c"userfaultfd", MFdFlags::MFD_CLOEXEC).unwrap();
        let [forked, retired] = [(), ()].map(|()| {
            let index = ledger.take_space().unwrap();
            let slot = &ledger.spaces()[index];
            store.put(slot.entry(), &[file.as_raw_fd()]).unwrap();
            slot
        });
        retired.publish();
        retired.retire();
        store.note_stale();
        assert!(session.forget_retired(ledger));
        let held = peek_all(store.descriptor()).unwrap();
        let held: Vec<StoreEntry> =
            held.into_iter().map(|(entry, _)| entry).filter(|of| of.kind == EntryKind::Space).collect();
        assert_eq!(held, [forked.entry()]);
    }
}
