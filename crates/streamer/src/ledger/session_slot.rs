// SPDX-License-Identifier: MIT OR Apache-2.0
//! The session in the ledger.

use std::io;
use std::os::fd::IntoRawFd as _;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

use super::{Inbox, MAX_PATH, NO_FD, ParkedStores, bytes, take};
use crate::ledger::fd_store::FdStore;

/// The state of a session slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum SessionState {
    /// The session is not opened yet, or has ended.
    Free = 0,
    /// The socket waits for `criu restore`.
    Listening = 1,
    /// Tasks are sending their descriptors.
    Handshake = 2,
    /// All tasks are known, and the notice "restore finished" is to follow.
    Restoring = 3,
    /// The restored processes run.
    Running = 4,
    /// All its memory is resident, or its processes have ended. Some may still have its fd store.
    Closing = 5,
    /// No process depends on it or has its fd store: its image is a copy whose last bytes arrive.
    Completing = 6,
}

impl SessionState {
    fn from_number(number: u32) -> Self {
        match number {
            1 => Self::Listening,
            2 => Self::Handshake,
            3 => Self::Restoring,
            4 => Self::Running,
            5 => Self::Closing,
            6 => Self::Completing,
            _ => Self::Free,
        }
    }
}

/// How a session ended: a worker's successor must not serve it again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum SessionOutcome {
    /// It has not ended.
    Open = 0,
    /// All its memory is resident, or its processes have ended.
    Served = 1,
    /// It has failed, and the reason is logged.
    Failed = 2,
}

/// The session.
#[repr(C)]
pub struct SessionSlot {
    state: AtomicU32,
    outcome: AtomicU32,
    /// 1 when all memory of an address space has become resident.
    resident: AtomicU32,
    /// How many tasks have reported, zombies included.
    pub tasks: AtomicU32,
    /// The listening socket, or [`NO_FD`].
    pub listener: AtomicI32,
    /// The connection with the restore, or [`NO_FD`].
    pub connection: AtomicI32,
    /// The streamer's own [fd store](crate::ledger::fd_store), then the end that puts entries in, or
    /// [`NO_FD`].
    own: [AtomicI32; 2],
    /// The stores that targets have.
    pub(crate) stores: ParkedStores,
    /// The handshake message that is being received.
    pub inbox: Inbox,
    images: PathCell,
    work: PathCell,
}

impl SessionSlot {
    /// Returns the state.
    #[must_use]
    pub fn state(&self) -> SessionState {
        SessionState::from_number(self.state.load(Ordering::Acquire))
    }

    /// Returns whether a restore has connected, and its memory is not all resident yet.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        matches!(self.state(), SessionState::Handshake | SessionState::Restoring | SessionState::Running)
    }

    /// Returns whether a restore has connected, and the session is not closed yet: its processes may still
    /// have the fd store.
    #[must_use]
    pub fn is_under_way(&self) -> bool {
        self.is_connected() || self.state() == SessionState::Closing
    }

    /// Returns how the session ended.
    #[must_use]
    pub fn outcome(&self) -> SessionOutcome {
        match self.outcome.load(Ordering::Acquire) {
            1 => SessionOutcome::Served,
            2 => SessionOutcome::Failed,
            _ => SessionOutcome::Open,
        }
    }

    /// Notes that all memory of an address space has become resident.
    pub fn note_resident(&self) {
        self.resident.store(1, Ordering::Release);
    }

    /// Returns whether all memory of an address space has become resident, under this worker or one before
    /// it.
    #[must_use]
    pub fn any_resident(&self) -> bool {
        self.resident.load(Ordering::Acquire) != 0
    }

    /// Notes how the session ended.
    pub fn set_outcome(&self, outcome: SessionOutcome) {
        self.outcome.store(outcome as u32, Ordering::Release);
    }

    /// Clears everything but the paths.
    pub(super) fn reset(&self) {
        self.tasks.store(0, Ordering::Relaxed);
        self.forget_numbers();
        self.inbox.reset();
    }

    /// Returns the descriptors that a successor needs.
    pub(super) fn descriptors(&self) -> impl Iterator<Item = i32> + use<> {
        let own = self.numbers().map(|fd| fd.load(Ordering::Acquire));
        let all: Vec<i32> = own.chain(self.stores.descriptors()).collect();
        all.into_iter().chain(self.inbox.descriptor())
    }

    fn numbers(&self) -> impl Iterator<Item = &AtomicI32> {
        [&self.listener, &self.connection].into_iter().chain(&self.own)
    }

    /// Makes the streamer's own fd store.
    ///
    /// # Errors
    /// EMFILE, ENOMEM.
    pub fn make_own_store(&self) -> io::Result<FdStore> {
        let (store, writer) = FdStore::create()?;
        for (number, end) in self.own.iter().zip([store, writer]) {
            number.store(end.into_raw_fd(), Ordering::Release);
        }
        self.own_store()
    }

    /// Returns the streamer's own fd store.
    ///
    /// # Errors
    /// EBADF: the session has none.
    pub fn own_store(&self) -> io::Result<FdStore> {
        let [store, writer] = [&self.own[0], &self.own[1]].map(|number| number.load(Ordering::Acquire));
        FdStore::of(store, writer)
    }

    /// Clears all descriptors: their table no longer exists.
    pub fn forget_numbers(&self) {
        self.numbers().for_each(|number| number.store(NO_FD, Ordering::Release));
        self.stores.forget_numbers();
        self.inbox.done();
    }

    /// Closes the streamer's own fd store.
    pub(crate) fn close_own_store(&self) {
        self.own.iter().for_each(|number| drop(take(number)));
    }

    /// Ends the session, when no process has a store of it any more.
    pub fn free(&self) {
        self.end(SessionState::Free);
    }

    /// [`SessionSlot::free`], in this state.
    pub(crate) fn end(&self, state: SessionState) {
        self.close_own_store();
        self.stores.close();
        self.set_state(state);
    }

    /// Sets the state. A successor that sees it also sees everything that was written before.
    pub fn set_state(&self, state: SessionState) {
        self.state.store(state as u32, Ordering::Release);
    }

    /// Returns the image directory and the directory of the socket.
    #[must_use]
    pub fn paths(&self) -> (std::path::PathBuf, std::path::PathBuf) {
        (self.images.get(), self.work.get())
    }

    /// Stores the image directory and the directory of the socket.
    ///
    /// # Errors
    /// A path is longer than [`MAX_PATH`].
    pub fn set_paths(&self, images: &std::path::Path, work: &std::path::Path) -> io::Result<()> {
        self.images.set(images)?;
        self.work.set(work)
    }
}

/// A path in shared memory. It is written once while the slot is free, and successors read it.
#[repr(C)]
struct PathCell(bytes::ByteCell<MAX_PATH>);

impl PathCell {
    fn set(&self, path: &std::path::Path) -> io::Result<()> {
        use std::os::unix::ffi::OsStrExt as _;
        if self.0.set(path.as_os_str().as_bytes()) {
            return Ok(());
        }
        let what = format!("{}: path longer than {MAX_PATH} bytes: use a shorter one", path.display());
        Err(io::Error::new(io::ErrorKind::InvalidInput, what))
    }

    fn get(&self) -> std::path::PathBuf {
        use std::os::unix::ffi::OsStringExt as _;
        std::ffi::OsString::from_vec(self.0.get()).into()
    }
}

// SAFETY: all fields are atomics but the inbox's area, which only the control thread accesses.
unsafe impl Sync for SessionSlot {}

impl std::fmt::Debug for SessionSlot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SessionSlot").field("state", &self.state()).finish_non_exhaustive()
    }
}
