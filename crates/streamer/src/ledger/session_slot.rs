// SPDX-License-Identifier: MIT OR Apache-2.0
//! One restore, in the ledger.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

use super::{Inbox, MAX_PATH, NO_FD, bytes};
use crate::sys;

/// State of a session slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum SessionState {
    /// Not in use.
    Free = 0,
    /// The socket waits for `criu restore`.
    Listening = 1,
    /// Tasks are handing over their descriptors.
    Handshake = 2,
    /// All tasks are known; the notice "restore finished" is awaited.
    Restoring = 3,
    /// The restored tree runs.
    Running = 4,
    /// It has memory of GPUs: a `rewake stream-gpu` serves it, which depends on nobody here.
    Streaming = 5,
    /// All its memory is resident, or its processes have ended. Processes may still have its fd store.
    Closing = 6,
}

impl SessionState {
    fn from_number(number: u32) -> Self {
        match number {
            1 => Self::Listening,
            2 => Self::Handshake,
            3 => Self::Restoring,
            4 => Self::Running,
            5 => Self::Streaming,
            6 => Self::Closing,
            _ => Self::Free,
        }
    }
}

/// One restore.
#[repr(C)]
pub struct SessionSlot {
    pub(super) state: AtomicU32,
    pub(super) number: AtomicU64,
    /// Tasks that have reported, zombies included.
    pub tasks: AtomicU32,
    /// Listening socket, or [`NO_FD`].
    pub listener: AtomicI32,
    /// Connection with the restore, or [`NO_FD`]. With its streamer, which says there what becomes of it.
    pub connection: AtomicI32,
    /// Its streamer's group of processes; 0 before it is there.
    pub streamer: AtomicI32,
    /// What that has said: [`StatusFlags`](crate::supervise::launch::Said).
    pub said: AtomicU32,
    /// 1 when it brings memory of CPUs, too.
    pub pages: AtomicU32,
    /// The fd store, and the end that puts entries in; or [`NO_FD`]. See [`crate::ledger::fd_store`].
    pub store: AtomicI32,
    /// See [`SessionSlot::store`].
    pub writer: AtomicI32,
    /// The store's inode: what a target's copy is recognised by.
    pub inode: AtomicU64,
    /// Handshake message being received.
    pub inbox: Inbox,
    images: PathCell,
    work: PathCell,
}

impl SessionSlot {
    /// Current state.
    #[must_use]
    pub fn state(&self) -> SessionState {
        SessionState::from_number(self.state.load(Ordering::Acquire))
    }

    /// The session's number: given once in the daemon's life, unlike the slot.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.number.load(Ordering::Acquire)
    }

    /// Forgets all descriptors: they are of a table that is gone.
    pub fn forget_numbers(&self) {
        for number in [&self.listener, &self.connection, &self.store, &self.writer] {
            number.store(NO_FD, Ordering::Release);
        }
        self.inbox.done();
    }

    /// Takes the fd store and its writer out, if the session has them: they close when they are dropped. The inode
    /// stays, as processes may still have the store.
    pub fn take_store(&self) -> Option<(OwnedFd, OwnedFd)> {
        let [store, writer] = [&self.store, &self.writer].map(|number| number.swap(NO_FD, Ordering::AcqRel));
        if store == NO_FD || writer == NO_FD {
            return None;
        }
        // SAFETY: the slot owned both, and these swaps took them out.
        Some(unsafe { (sys::take_over(store), sys::take_over(writer)) })
    }

    /// No process has the session's fd store any more: another session may have the slot.
    pub fn free(&self) {
        drop(self.take_store());
        self.inode.store(0, Ordering::Release);
        self.set_state(SessionState::Free);
    }

    /// Moves to `state`; everything written before is visible to a successor that sees it.
    pub fn set_state(&self, state: SessionState) {
        self.state.store(state as u32, Ordering::Release);
    }

    /// Directories of the images and of the socket.
    #[must_use]
    pub fn paths(&self) -> (std::path::PathBuf, std::path::PathBuf) {
        (self.images.get(), self.work.get())
    }

    /// Notes the directories.
    ///
    /// # Errors
    /// A path longer than [`MAX_PATH`].
    pub fn set_paths(&self, images: &std::path::Path, work: &std::path::Path) -> io::Result<()> {
        self.images.set(images)?;
        self.work.set(work)
    }
}

/// A path in shared memory: written once while the slot is free, read by successors.
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

// SAFETY: all fields are atomics but the inbox's area, which only the control thread reaches.
unsafe impl Sync for SessionSlot {}

impl std::fmt::Debug for SessionSlot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SessionSlot").field("state", &self.state()).finish_non_exhaustive()
    }
}
