// SPDX-License-Identifier: MIT OR Apache-2.0
//! The ledger holds what a successor must know if the worker dies at any instruction.
//!
//! It is a file that the supervisor maps before it forks the worker. Both share a descriptor table
//! (`CLONE_FILES`), so descriptors outlive the worker under the same numbers, and the ledger says what they
//! are. When both have ended, `rewake recover` reads the file ([`Folder`]) and takes the descriptors from
//! the session's [fd store](crate::ledger::fd_store).
//!
//! Some messages can be received only once: userfaultfd events and the restore's handshake. The kernel writes
//! them *into* the ledger, so no message is ever received and not noted. See
//! `docs/decisions/0003-no-orphan-faults.md`.

mod bytes;
pub mod fd_store;
mod folder;
mod gates;
mod handshake;
mod journal;
mod parked_stores;
mod session_slot;
pub mod session_store;
mod space_slot;

use std::fs::File;
use std::io;
use std::mem::offset_of;
use std::os::fd::{AsRawFd as _, BorrowedFd, IntoRawFd as _, OwnedFd};
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use nix::fcntl::{FallocateFlags, OFlag, openat};
use nix::sys::resource::{Resource, getrlimit};
use nix::sys::stat::Mode;
use nix::time::{ClockId, clock_gettime};

pub use folder::{Folder, FolderInUse, Starter, root};
pub use gates::{Gates, NotClosed};
pub use handshake::{Inbox, Received};
pub use journal::{Journal, Replay, forks, set_fork};
pub(crate) use parked_stores::{ParkedStore, ParkedStores};
pub use session_slot::{SessionOutcome, SessionSlot, SessionState};
pub use space_slot::SpaceSlot;

use crate::ledger::fd_store::FdStore;
use crate::sys;

/// Address spaces that one streamer watches at once: every task of the restore, and the children that they
/// fork. There are fewer where this user may write no file of the ledger's length.
pub const MAX_SPACES: usize = 4096;
/// Messages that one read of a userfaultfd receives.
pub const MAX_MESSAGES: usize = 32;
/// Longest path of an image or work directory, in bytes.
pub const MAX_PATH: usize = 2048;

/// First bytes of a ledger: a program maps only ledgers of its own layout.
const MAGIC: u64 = u64::from_le_bytes(*b"rewake-5");

const FREE: u32 = 0;
const LIVE: u32 = 1;
const TAKEN: u32 = 2;

/// Stands for no descriptor.
pub const NO_FD: i32 = -1;
/// Returns whether an act can be tried again when there is more room. Room means slots of the ledger,
/// descriptors, memory, or space in the session's fd store (EAGAIN, ENOBUFS, ETOOMANYREFS).
#[must_use]
pub fn wants_room(error: &io::Error) -> bool {
    let store = [libc::EAGAIN, libc::ENOBUFS, libc::ETOOMANYREFS];
    let kernel = [libc::EMFILE, libc::ENFILE, libc::ENOMEM];
    let errno = error.raw_os_error();
    error.kind() == io::ErrorKind::QuotaExceeded
        || errno.is_some_and(|errno| store.contains(&errno) || kernel.contains(&errno))
}

/// Takes the descriptor out of a place of the ledger that owns it.
fn take(place: &AtomicI32) -> Option<OwnedFd> {
    let number = place.swap(NO_FD, Ordering::AcqRel);
    // SAFETY: the place owned it, and this swap took it out.
    (number != NO_FD).then(|| unsafe { sys::take_over(number) })
}

/// The whole shared memory.
#[repr(C)]
struct Layout {
    magic: AtomicU64,
    /// Bytes of the file: less than the layout where this user may write no file of that length.
    length: AtomicU64,
    /// Every space slot in use is among this many first ones.
    used_spaces: AtomicU32,
    /// How often a worker was started; the first worker has 1.
    generation: AtomicU32,
    ready: AtomicU32,
    /// 1: all GPU memory that the plugin handed over is resident.
    gpus_loaded: AtomicU32,
    /// When a worker last noted that it serves: nanoseconds since boot (CLOCK_BOOTTIME).
    served_at: AtomicU64,
    /// Descriptors that hold calls that register memory, each as its number plus one. 0 is none.
    holds: [AtomicI32; 2],
    /// The folder that the ledger is in, as its number plus one. 0 is none.
    folder: AtomicI32,
    gates: Gates,
    session: SessionSlot,
    spaces: [SpaceSlot; MAX_SPACES],
}

/// A handle to the shared memory, which lives as long as the process.
#[derive(Clone, Copy)]
pub struct Ledger(&'static Layout);

impl std::fmt::Debug for Ledger {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ledger").field("generation", &self.0.generation).finish_non_exhaustive()
    }
}

/// The space slots of a file of this length.
fn slots_in(length: usize) -> usize {
    length.saturating_sub(offset_of!(Layout, spaces)) / size_of::<SpaceSlot>()
}

fn now() -> u64 {
    let now = clock_gettime(ClockId::CLOCK_BOOTTIME).map(Duration::from).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}

impl Ledger {
    /// Makes an empty ledger in memory, which every later fork shares: for tests.
    ///
    /// # Errors
    /// ENOMEM.
    #[cfg(test)]
    pub fn new() -> io::Result<Self> {
        Self::in_file(&rewake_process::descriptors::memory_file(c"rewake-ledger", 0)?)
    }

    /// Makes an empty ledger in a new file, with all its blocks allocated. Where this process may not write a
    /// file of that length (RLIMIT_FSIZE), the ledger has fewer slots.
    ///
    /// A page that the file system refused later would be a SIGBUS.
    ///
    /// # Errors
    /// ENOMEM, ENOSPC, or EFBIG where no slot is allowed.
    pub fn in_file(file: &File) -> io::Result<Self> {
        let (most, _) = getrlimit(Resource::RLIMIT_FSIZE)?;
        Self::in_file_of(file, most)
    }

    fn in_file_of(file: &File, most: u64) -> io::Result<Self> {
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        let length = match slots_in(most).min(MAX_SPACES) {
            0 => return Err(io::Error::from_raw_os_error(libc::EFBIG)),
            slots => offset_of!(Layout, spaces) + slots * size_of::<SpaceSlot>(),
        };
        let allocated = libc::off_t::try_from(length).map_err(io::Error::other)?;
        nix::fcntl::fallocate(file, FallocateFlags::empty(), 0, allocated)?;
        let ledger = Self::map(file, length)?;
        ledger.0.session.reset();
        ledger.0.length.store(length as u64, Ordering::Relaxed);
        ledger.0.magic.store(MAGIC, Ordering::Release);
        Ok(ledger)
    }

    /// Maps the ledger in a file, or `None` if another version of the program wrote it.
    ///
    /// # Errors
    /// ENOMEM.
    pub fn of_file(file: &File) -> io::Result<Option<Self>> {
        let length = usize::try_from(file.metadata()?.len()).unwrap_or(usize::MAX);
        if length > size_of::<Layout>() || slots_in(length) == 0 {
            return Ok(None);
        }
        let ledger = Self::map(file, length)?;
        let own = ledger.0.magic.load(Ordering::Acquire) == MAGIC
            && ledger.0.length.load(Ordering::Relaxed) == length as u64;
        Ok(own.then_some(ledger))
    }

    /// Maps a file of this length, which is at most that of the layout. The slots that the file lacks are
    /// memory of this process, and are never taken.
    fn map(file: &File, length: usize) -> io::Result<Self> {
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        let map = |at: *mut libc::c_void, length, flags, file| {
            // SAFETY: a new mapping at an address that the kernel chooses, or in the place of that one.
            match unsafe { libc::mmap(at, length, rights, flags, file, 0) } {
                libc::MAP_FAILED => Err(io::Error::last_os_error()),
                map => Ok(map),
            }
        };
        let whole =
            map(std::ptr::null_mut(), size_of::<Layout>(), libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1)?;
        let map = map(whole, length, libc::MAP_SHARED | libc::MAP_FIXED, file.as_raw_fd())?;
        // SAFETY: page aligned, any bytes are a valid Layout (atomics and arrays of bytes), never unmapped.
        // Only this user can write to the file's folder, and no program of ours truncates it.
        Ok(Self(unsafe { &*map.cast::<Layout>() }))
    }

    /// Returns how often a worker was started.
    #[must_use]
    pub fn generation(&self) -> u32 {
        self.0.generation.load(Ordering::Acquire)
    }

    /// Counts the start of a worker, and returns how many there were.
    pub fn next_generation(&self) -> u32 {
        self.0.generation.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// Returns true once a worker has reported that the daemon is ready.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.0.ready.load(Ordering::Acquire) == 1
    }

    /// Clears what depends on a descriptor table that no longer exists: the report of readiness, and the
    /// descriptors that held calls.
    pub fn forget_numbers(&self) {
        self.0.ready.store(0, Ordering::Release);
        for number in self.0.holds.iter().chain([&self.0.folder]) {
            number.store(0, Ordering::Release);
        }
    }

    /// Keeps the folder that the ledger is in: journals are made in it.
    pub(crate) fn keep_folder(&self, folder: File) {
        self.0.folder.store(folder.into_raw_fd() + 1, Ordering::Release);
    }

    /// Opens a file of the session's folder, which root alone can do.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn open_file(&self, name: &str, flags: OFlag) -> io::Result<File> {
        let number = self.0.folder.load(Ordering::Acquire) - 1;
        if number == NO_FD {
            // A test's ledger is in no folder.
            #[cfg(test)]
            return rewake_process::descriptors::memory_file(c"rewake-test", 0);
            #[cfg(not(test))]
            return Err(io::ErrorKind::NotFound.into());
        }
        // SAFETY: the ledger owns it, and no process closes it as long as the ledger is used.
        let folder = unsafe { BorrowedFd::borrow_raw(number) };
        let flags = flags | OFlag::O_CLOEXEC | OFlag::O_NOFOLLOW;
        Ok(openat(folder, name, flags, Mode::S_IRUSR | Mode::S_IWUSR)?.into())
    }

    /// Opens the file of a slot's journal, after the death of every process.
    ///
    /// # Errors
    /// There is none.
    pub(crate) fn journal_file(&self, slot: &SpaceSlot) -> io::Result<File> {
        self.open_file(&slot.journal_name(), OFlag::O_RDWR)
    }

    /// Makes the file of a slot's journal: empty, whatever an earlier life of the slot has left.
    fn new_journal_file(&self, slot: &SpaceSlot) -> io::Result<File> {
        self.open_file(&slot.journal_name(), OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_TRUNC)
    }

    /// Notes that this worker serves now. It does so once a second.
    pub fn beat(&self) {
        self.0.served_at.store(now(), Ordering::Relaxed);
    }

    /// Returns for how long no worker has served.
    #[must_use]
    pub fn silent_for(&self) -> Duration {
        Duration::from_nanos(now().saturating_sub(self.0.served_at.load(Ordering::Relaxed)))
    }

    /// Notes that the daemon has been reported as ready.
    pub fn set_ready(&self) {
        self.0.ready.store(1, Ordering::Release);
    }

    /// Keeps the descriptors that hold calls that register memory: as long as a process of this streamer
    /// lives.
    pub fn keep(&self, holds: [OwnedFd; 2]) {
        for (place, hold) in self.0.holds.iter().zip(holds) {
            place.store(hold.into_raw_fd() + 1, Ordering::Release);
        }
    }

    /// Returns the session.
    #[must_use]
    pub fn session(&self) -> &'static SessionSlot {
        &self.0.session
    }

    /// Returns all space slots that were ever taken.
    #[must_use]
    pub fn spaces(&self) -> &'static [SpaceSlot] {
        let used = self.0.used_spaces.load(Ordering::Acquire) as usize;
        &self.0.spaces[..used.min(MAX_SPACES)]
    }

    /// Returns the live address spaces, each with its slot number.
    pub fn live_spaces(&self) -> impl Iterator<Item = (usize, &'static SpaceSlot)> + use<> {
        self.spaces().iter().enumerate().filter(|(_, slot)| slot.is_live())
    }

    /// Returns true if processes that are restored, or are being restored, need a worker.
    #[must_use]
    pub fn is_depended_on(&self) -> bool {
        self.gates().any() || self.live_spaces().next().is_some() || self.session().is_connected()
    }

    /// Returns the live address spaces that the session serves, each with its slot number. The others are
    /// [abandoned](SpaceSlot::abandoned).
    pub fn served_spaces(&self) -> impl Iterator<Item = (usize, &'static SpaceSlot)> + use<> {
        self.live_spaces().filter(|(_, slot)| slot.abandoned.load(Ordering::Acquire) == 0)
    }

    /// Opens the fd store of a restored process, and makes the store if the process's task has none.
    ///
    /// The session may not have received the task's userfaultfd yet, or never receives it, as CRIU loads the
    /// memory itself.
    ///
    /// # Errors
    /// ESRCH: the process has ended. EMFILE, ENOMEM, E2BIG.
    pub(crate) fn store_of_process(&self, pid: i32) -> io::Result<FdStore> {
        // CRIU names a task by its pid in the task's own namespace.
        let task = rewake_process::proc::status(pid).and_then(|status| status.own_number);
        let task = task.ok_or_else(|| io::Error::from_raw_os_error(libc::ESRCH))?;
        Ok(self.session().stores.of_task(task)?.1)
    }

    /// Returns all space slots, also those that were never taken.
    #[must_use]
    pub fn capacity(&self) -> &'static [SpaceSlot] {
        let length = usize::try_from(self.0.length.load(Ordering::Relaxed)).unwrap_or(usize::MAX);
        &self.0.spaces[..slots_in(length).min(MAX_SPACES)]
    }

    /// Returns a lower bound of the free space slots. It is exact once half of all slots have been in use.
    ///
    /// Another thread may take them at any moment.
    #[must_use]
    pub fn room(&self) -> usize {
        let used = self.0.used_spaces.load(Ordering::Acquire) as usize;
        let all = self.capacity();
        let never_used = all.len().saturating_sub(used);
        if never_used >= all.len() / 2 {
            return never_used;
        }
        all.iter().filter(|slot| slot.live.load(Ordering::Relaxed) == FREE).count()
    }

    /// Takes a free space slot, with no descriptors. It is not live until it is published.
    #[must_use]
    pub fn take_space(&self) -> Option<usize> {
        let free = |slot: &SpaceSlot| {
            slot.live.compare_exchange(FREE, TAKEN, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        let index = self.capacity().iter().position(free)?;
        let slot = self.0.spaces.get(index)?;
        let number = u32::try_from(index).ok()?;
        self.0.used_spaces.fetch_max(number + 1, Ordering::AcqRel);
        slot.index.store(number, Ordering::Relaxed);
        slot.life.fetch_add(1, Ordering::Relaxed);
        slot.started.store(0, Ordering::Relaxed);
        slot.abandoned.store(0, Ordering::Relaxed);
        for fd in [&slot.uffd, &slot.pidfd, &slot.journal] {
            fd.store(NO_FD, Ordering::Relaxed);
        }
        slot.lossy.store(0, Ordering::Relaxed);
        slot.host_pid.store(0, Ordering::Relaxed);
        slot.store.store(parked_stores::NO_STORE, Ordering::Relaxed);
        slot.commit.store(0, Ordering::Relaxed);
        Some(index)
    }

    /// Frees the slots that a dead worker had taken and not published.
    pub fn reclaim(&self) {
        for slot in self.spaces() {
            let _ = slot.live.compare_exchange(TAKEN, FREE, Ordering::AcqRel, Ordering::Relaxed);
        }
    }

    /// Returns the descriptors that a successor needs. All others that a dead worker left open may be closed.
    pub fn descriptors(&self) -> impl Iterator<Item = i32> + use<> {
        let session = Some(self.session()).filter(|slot| slot.state() != SessionState::Free);
        let of_space = |slot: &'static SpaceSlot| {
            let own = [&slot.uffd, &slot.pidfd, &slot.journal].map(|fd| fd.load(Ordering::Acquire));
            own.into_iter().chain(journal::forked_descriptors(slot))
        };
        session
            .into_iter()
            .flat_map(SessionSlot::descriptors)
            .chain(self.live_spaces().flat_map(move |(_, slot)| of_space(slot)))
            .chain(self.0.holds.iter().chain([&self.0.folder]).map(|hold| hold.load(Ordering::Acquire) - 1))
            .filter(|&fd| fd != NO_FD)
    }

    /// Notes that all GPU memory is resident that the plugin handed over.
    pub fn set_gpus_loaded(&self) {
        self.0.gpus_loaded.store(1, Ordering::Release);
    }

    /// Returns true once all GPU memory is resident that the plugin handed over.
    #[must_use]
    pub fn has_loaded_gpus(&self) -> bool {
        self.0.gpus_loaded.load(Ordering::Acquire) == 1
    }

    /// Returns the processes whose gates are closed.
    #[must_use]
    pub fn gates(&self) -> &'static Gates {
        &self.0.gates
    }

    /// Kills every process that has missing pages or a closed gate, and returns how many.
    ///
    /// It waits until those with missing pages are dead: they read nothing then, so the descriptors may
    /// close. It makes only system calls.
    pub fn end_all(&self) -> usize {
        let gated = self.0.gates.end_all();
        let killed = gated + self.live_spaces().filter(|(_, slot)| slot.kill()).count();
        self.live_spaces().for_each(|(_, slot)| slot.wait_for_end());
        killed
    }
}

#[cfg(test)]
mod tests {
    use rewake_process::descriptors::memory_file;

    use super::*;

    #[test]
    fn a_file_that_may_not_be_longer_has_fewer_slots() {
        let file = || -> File { memory_file(c"ledger", 0).unwrap() };
        let slots = |count: usize| (offset_of!(Layout, spaces) + count * size_of::<SpaceSlot>()) as u64;
        let (short, most) = (file(), slots(3) + 100);
        let ledger = Ledger::in_file_of(&short, most).unwrap();
        assert_eq!((short.metadata().unwrap().len(), ledger.room()), (slots(3), 3));
        let taken: Vec<_> = std::iter::from_fn(|| ledger.take_space()).collect();
        assert_eq!(taken, [0, 1, 2]);
        let same = Ledger::of_file(&short).unwrap().unwrap();
        assert_eq!((same.spaces().len(), same.room(), same.take_space()), (3, 0, None));
        let refused = Ledger::in_file_of(&file(), slots(1) - 1).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EFBIG));
        assert_eq!(Ledger::in_file(&file()).unwrap().room(), MAX_SPACES);
    }
}
