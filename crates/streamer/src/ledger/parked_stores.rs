// SPDX-License-Identifier: MIT OR Apache-2.0
//! The fd stores that targets have, in the ledger: one for each restored task.
//!
//! A restored task holds its own userfaultfds and no others, because a process that has the userfaultfd of
//! another one can write to the other one's missing memory. A child that a task forks after the restore
//! inherits the task's store, and the child's userfaultfd is put there too.

use std::io;
use std::os::fd::{BorrowedFd, IntoRawFd as _, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use rewake_plugin_protocol::ANY_TASK;

use super::{MAX_SPACES, NO_FD};
use crate::ledger::fd_store::FdStore;

/// Stands for no store, in the slot of an address space.
pub(super) const NO_STORE: u32 = u32::MAX;

/// The place of one store.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct ParkedStore {
    /// The end that targets have, then the end that puts entries in, each as its number plus one. 0 is none.
    ends: [AtomicI32; 2],
    /// The task that it was made for, by the pid that names its images.
    task: AtomicI32,
    /// 1 if `rewake recover` has made another store for the task, and targets may still have this one.
    former: AtomicU32,
    /// The inode of the first end, which identifies a target's copy of it. 0: the place is free.
    inode: AtomicU64,
}

impl ParkedStore {
    /// Returns the task that it was made for.
    pub(crate) fn task(&self) -> i32 {
        self.task.load(Ordering::Acquire)
    }

    /// Returns its inode, or 0 if the place is free.
    pub(crate) fn inode(&self) -> u64 {
        self.inode.load(Ordering::Acquire)
    }

    fn is_used(&self) -> bool {
        self.inode() != 0
    }

    /// Whether another store has taken its place.
    pub(crate) fn is_former(&self) -> bool {
        self.is_used() && self.former.load(Ordering::Acquire) == 1
    }

    /// Returns the descriptor of a store, if this streamer has one.
    pub(crate) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        let number = self.ends[0].load(Ordering::Acquire) - 1;
        // SAFETY: the place owns it, and only the control thread closes it.
        (number != NO_FD).then(|| unsafe { BorrowedFd::borrow_raw(number) })
    }

    /// Opens the store for this process. The ledger keeps both ends open until the store is
    /// [taken](Self::take).
    pub(super) fn open(&self) -> Option<FdStore> {
        let [store, writer] = [&self.ends[0], &self.ends[1]].map(|end| end.load(Ordering::Acquire) - 1);
        FdStore::of(store, writer).ok()
    }

    /// Takes both ends out of the ledger. The inode stays, because processes may still have the store.
    pub(crate) fn take(&self) -> [Option<OwnedFd>; 2] {
        [&self.ends[0], &self.ends[1]].map(|end| {
            let number = end.swap(0, Ordering::AcqRel) - 1;
            // SAFETY: the place owned it, and this swap took it out.
            (number != NO_FD).then(|| unsafe { crate::sys::take_over(number) })
        })
    }

    /// Notes that no process has the store any more.
    pub(crate) fn forget(&self) {
        self.former.store(0, Ordering::Relaxed);
        self.inode.store(0, Ordering::Release);
    }
}

/// The places of all stores.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct ParkedStores([ParkedStore; MAX_SPACES]);

impl ParkedStores {
    /// Opens the store of a task: its own, or the one for all tasks. Makes one if there is none. Returns its
    /// number.
    ///
    /// # Errors
    /// EMFILE, ENOMEM. E2BIG: every place is used.
    pub(crate) fn of_task(&self, task: i32) -> io::Result<(u32, FdStore)> {
        // A task's userfaultfd for CPU memory and the one for its placeholders come in two threads.
        static MAKING: Mutex<()> = Mutex::new(());
        let _making = MAKING.lock().unwrap_or_else(PoisonError::into_inner);
        let mut present = self.present();
        match present.find(|(_, store)| store.task() == task || store.task() == ANY_TASK) {
            Some((number, store)) => {
                let store = store.open().ok_or_else(|| io::Error::from_raw_os_error(libc::EBADF))?;
                Ok((number, store))
            }
            None => self.make(task),
        }
    }

    /// Makes an empty store for a task. Returns its number.
    ///
    /// # Errors
    /// EMFILE, ENOMEM. E2BIG: every place is used.
    pub(crate) fn make(&self, task: i32) -> io::Result<(u32, FdStore)> {
        let free = self.0.iter().enumerate().find(|(_, place)| !place.is_used());
        let (number, place) = free.ok_or_else(|| io::Error::from_raw_os_error(libc::E2BIG))?;
        let (store, writer) = FdStore::create()?;
        // A worker that was killed here has left the ends of a store that no process uses.
        drop(place.take());
        for (end, fd) in place.ends.iter().zip([store, writer]) {
            end.store(fd.into_raw_fd() + 1, Ordering::Release);
        }
        place.task.store(task, Ordering::Release);
        let store = place.open().ok_or_else(|| io::Error::from_raw_os_error(libc::EBADF))?;
        place.inode.store(store.inode(), Ordering::Release);
        Ok((u32::try_from(number).map_err(io::Error::other)?, store))
    }

    /// Returns the place of this number.
    pub(crate) fn get(&self, number: u32) -> Option<&ParkedStore> {
        self.0.get(usize::try_from(number).ok()?).filter(|place| place.is_used())
    }

    /// Returns all stores that targets may have, former ones too.
    pub(crate) fn all(&self) -> impl Iterator<Item = (u32, &ParkedStore)> {
        (0..).zip(&self.0).filter(|(_, place)| place.is_used())
    }

    /// Returns the stores that targets get, each with its number and opened for this process.
    pub(crate) fn open(&self) -> impl Iterator<Item = (u32, FdStore)> + '_ {
        self.present().filter_map(|(number, place)| Some((number, place.open()?)))
    }

    /// Returns the stores that targets get.
    pub(crate) fn present(&self) -> impl Iterator<Item = (u32, &ParkedStore)> {
        self.all().filter(|(_, place)| !place.is_former())
    }

    /// Returns the stores that another one has taken the place of.
    pub(crate) fn former(&self) -> impl Iterator<Item = &ParkedStore> {
        self.all().map(|(_, place)| place).filter(|place| place.is_former())
    }

    /// Returns the inodes of the stores that targets may have.
    pub(crate) fn inodes(&self) -> Vec<u64> {
        self.all().map(|(_, place)| place.inode()).collect()
    }

    /// Makes a store a former one, of which this process has the end that targets have.
    pub(crate) fn replace(&self, number: u32, store: OwnedFd) {
        if let Some(place) = self.get(number) {
            drop(place.take());
            place.ends[0].store(store.into_raw_fd() + 1, Ordering::Release);
            place.former.store(1, Ordering::Release);
        }
    }

    /// Clears the numbers of all descriptors: their table no longer exists.
    pub(super) fn forget_numbers(&self) {
        self.0.iter().flat_map(|place| &place.ends).for_each(|end| end.store(0, Ordering::Release));
    }

    /// Closes all stores. Their inodes stay, because processes may still have them.
    pub(super) fn close(&self) {
        self.0.iter().for_each(|place| drop(place.take()));
    }

    /// Returns the descriptors that a successor needs.
    pub(super) fn descriptors(&self) -> impl Iterator<Item = RawFd> + use<'_> {
        self.0.iter().flat_map(|place| &place.ends).map(|end| end.load(Ordering::Acquire) - 1)
    }
}
