// SPDX-License-Identifier: MIT OR Apache-2.0
//! Recovers an orphaned session: every process of its streamer has ended.
//!
//! The ledger names descriptors by the numbers of a table that no longer exists. This file takes the
//! userfaultfds from the fd stores of processes that have them, opens journals, plan and image by the
//! session's folder, and gives the ledger the numbers of this process's table. New fd stores take the places
//! of the former, whose writing ends are lost. After that a worker takes over as from a dead one. Processes
//! of a session that cannot be recovered are killed and counted: they must not run with memory that no
//! streamer serves.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, IntoRawFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use nix::sys::stat::fstat;
use rewake_plugin_protocol::{ANY_TASK, ProcessId};
use tracing::{error, warn};

use crate::ledger::fd_store::{self, EntryKind, FdStore, StoreEntry};
use crate::ledger::{
    Folder, Ledger, NO_FD, ParkedStore, SessionSlot, SessionState, SpaceSlot, forks, session_store, set_fork,
};
use crate::supervise::parking;
use crate::supervise::processes;
use crate::sys;

/// What a recovery found in a ledger.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct RecoveryReport {
    /// How many address spaces a worker can take over, or `None` if the session cannot be served any more.
    pub spaces: Option<usize>,
    /// The processes that were killed, with the reason for each kill.
    pub killed: Vec<(i32, &'static str)>,
}

/// How long to wait for the end of all killed processes. One in an uninterruptible system call (a dead mount)
/// may never end, but it executes no instruction of its program any more.
const EXIT_LIMIT: Duration = Duration::from_secs(10);

/// Reasons for kills.
const GATED: &str = "its GPUs were not resumed yet, and what was loaded for them is lost";
const NOT_PARKED: &str = "it was restored, and not parked yet";
const LOST: &str = "the userfaultfd of a forked process of its session is lost";
const UNREADABLE: &str = "its session's image or fd store cannot be read, as the log says";

/// An orphaned session, whose targets wait.
#[derive(Debug)]
pub struct Orphan {
    /// The session's image directory.
    pub images: PathBuf,
    /// The processes that have its fd store.
    pub processes: Vec<i32>,
    /// How many of their threads wait for a page, or until an event is read.
    pub waiting: usize,
    /// How long no streamer has served it, accurate to a second.
    pub silent: Duration,
}

/// Returns all orphaned sessions.
///
/// # Errors
/// The directory of the ledgers cannot be read.
pub fn orphans() -> anyhow::Result<Vec<Orphan>> {
    let mut found = Vec::new();
    for path in Folder::all()? {
        // `rewake recover` reports a ledger that cannot be read.
        let Ok(Ok((_folder, ledger))) = Folder::look(&path) else { continue };
        let slot = ledger.session();
        if slot.is_connected() {
            let processes: Vec<i32> = holders(slot).into_keys().collect();
            let waiting = processes.iter().map(|pid| processes::waiting_threads(*pid)).sum();
            let (images, silent) = (slot.paths().0, ledger.silent_for());
            found.push(Orphan { images, processes, waiting, silent });
        }
    }
    Ok(found)
}

/// Returns the processes that have fd stores of the session, each with the numbers and inodes of its stores.
fn holders(slot: &SessionSlot) -> BTreeMap<i32, Vec<(RawFd, u64)>> {
    let inodes = slot.stores.inodes().into_iter().collect();
    let stores = processes::all().map(|pid| (pid, processes::sockets_among(pid, &inodes)));
    stores.filter(|(_, stores)| !stores.is_empty()).collect()
}

/// Recovers the session of a ledger whose processes have all ended.
///
/// It takes the userfaultfds from the fd stores that targets have.
///
/// # Errors
/// The ledger's folder cannot be opened. Nothing has changed.
pub fn take_up(folder: &Folder, ledger: Ledger) -> io::Result<RecoveryReport> {
    let mut found = RecoveryReport::default();
    let directory = folder.open_directory()?;
    let gated = ledger.gates().forget();
    found.kill_all(gated.into_iter().map(|gated| (gated.pid, gated.started)), GATED);
    // From here on the ledger has no number of the old table, so none is mistaken for a descriptor of this
    // process.
    ledger.forget_numbers();
    ledger.keep_folder(directory);
    let old: Vec<RawFd> = ledger.spaces().iter().map(SpaceSlot::forget_numbers).collect();
    let slot = ledger.session();
    slot.forget_numbers();
    match slot.state() {
        SessionState::Free => {}
        SessionState::Completing => slot.free(),
        // No restore has connected, or no page is missing.
        SessionState::Listening | SessionState::Closing => {
            // The supervisor tries again at its end.
            parking::unpark_now(slot);
            slot.free();
        }
        SessionState::Handshake | SessionState::Restoring | SessionState::Running => {
            found.session(ledger, &old);
        }
    }
    Ok(found)
}

impl RecoveryReport {
    fn session(&mut self, ledger: Ledger, old: &[RawFd]) {
        let slot = ledger.session();
        let holders = holders(slot);
        let found = take_stores(slot, &holders);
        let why = if found.is_empty() {
            NOT_PARKED
        } else {
            match restore_descriptors(ledger, found, old) {
                Ok(Ok(count)) => {
                    // A target is parked only after its restore has finished.
                    slot.set_state(SessionState::Running);
                    self.spaces = Some(count);
                    return;
                }
                Ok(Err(why)) => why,
                Err(error) => {
                    error!("{error:#}");
                    UNREADABLE
                }
            }
        };
        let tasks = ledger.served_spaces().map(|(_, space)| {
            (space.host_pid.load(Ordering::Acquire), space.started.load(Ordering::Acquire))
        });
        let started = |pid| Some((pid, ProcessId::of(pid).ok()??.started));
        self.kill_all(tasks.chain(holders.into_keys().filter_map(started)), why);
        for (_, space) in ledger.served_spaces() {
            space.retire();
        }
        slot.free();
    }

    /// Kills processes, by pid and start time, and their descendants, and waits up to [`EXIT_LIMIT`] for
    /// their ends.
    ///
    /// A child that was forked before its parent was parked can be found only through its parent.
    fn kill_all(&mut self, targets: impl Iterator<Item = (i32, u64)>, why: &'static str) {
        let mut killed: BTreeMap<i32, OwnedFd> = BTreeMap::new();
        for (pid, started) in targets {
            let Some(pidfd) = open(pid, started).filter(|_| !killed.contains_key(&pid)) else { continue };
            processes::kill_descendants(pid, pidfd.as_raw_fd());
            if sys::pidfd_kill(pidfd.as_raw_fd()).is_ok() {
                self.killed.push((pid, why));
                killed.insert(pid, pidfd);
            }
        }
        let running = still_running(&killed, EXIT_LIMIT);
        if !running.is_empty() {
            warn!(pids = ?running, "processes have SIGKILL pending, and wait in the kernel");
        }
    }
}

/// Waits up to `limit` until all processes have ended. Returns the pids of those that have not.
fn still_running(processes: &BTreeMap<i32, OwnedFd>, limit: Duration) -> Vec<i32> {
    let start = Instant::now();
    let ends = |pidfd: &OwnedFd| sys::ends_within(pidfd.as_raw_fd(), limit.saturating_sub(start.elapsed()));
    processes.iter().filter(|(_, pidfd)| !ends(pidfd)).map(|(pid, _)| *pid).collect()
}

/// Opens a descriptor of the process with this pid and start time, or `None` if it has ended.
fn open(pid: i32, started: u64) -> Option<OwnedFd> {
    if pid <= 0 {
        return None;
    }
    let pidfd = sys::pidfd_open(pid).ok()?;
    // In this order: a process that has the start time now also had the pid when the descriptor was opened.
    let id = ProcessId::of(pid).ok().flatten()?;
    (id.started == started).then_some(pidfd)
}

/// Takes a copy of each store that a process has, with the store's number, and forgets the others.
fn take_stores(slot: &SessionSlot, holders: &BTreeMap<i32, Vec<(RawFd, u64)>>) -> Vec<(u32, OwnedFd)> {
    // What a recovery has left that was killed before each target had the new stores is the later part.
    let (present, former): (Vec<_>, Vec<_>) = slot.stores.all().partition(|(_, store)| !store.is_former());
    let mut found = Vec::new();
    for (number, store) in former.into_iter().chain(present) {
        match find_store(holders, store.inode()) {
            Some(copy) => found.push((number, copy)),
            None => store.forget(),
        }
    }
    found
}

/// Copies an fd store from the first process that allows it.
fn find_store(holders: &BTreeMap<i32, Vec<(RawFd, u64)>>, inode: u64) -> Option<OwnedFd> {
    holders.iter().find_map(|(pid, stores)| {
        let (number, _) = *stores.iter().find(|(_, found)| *found == inode)?;
        let store = processes::descriptor_of(*pid, number);
        let store =
            store.inspect_err(|error| warn!(%error, pid, number, "taking a session's fd store")).ok()?;
        // The process runs, so it may have closed the store, and have another file under the number.
        fstat(&store).is_ok_and(|status| status.st_ino == inode).then_some(store)
    })
}

/// Puts all descriptors of the stores into the ledger. Returns how many address spaces the session has, or
/// why a living process cannot be served.
///
/// `found` has the stores that targets have, the latest last. `old` has the userfaultfds' numbers in the old
/// descriptor table, by slot.
fn restore_descriptors(
    ledger: Ledger,
    found: Vec<(u32, OwnedFd)>,
    old: &[RawFd],
) -> anyhow::Result<Result<usize, &'static str>> {
    let session = ledger.session();
    let own = session.make_own_store().context("making another fd store")?;
    session_store::reopen_image(ledger, &own)?;
    let held: BTreeSet<i32> =
        found.iter().filter_map(|(number, _)| Some(session.stores.get(*number)?.task())).collect();
    let mut uffds = refill_stores(ledger, found)?;
    if let Err(why) = retire_ended(ledger, &held, &uffds) {
        return Ok(Err(why));
    }
    // Now, and not only in the worker: a session whose image has changed is not said to be served again.
    session_store::image(session, &own)?;
    for (number, slot) in ledger.spaces().iter().enumerate() {
        let Some(uffd) = u32::try_from(number).ok().and_then(|number| uffds.remove(&number)) else {
            continue;
        };
        slot.uffd.store(uffd.into_raw_fd(), Ordering::Release);
        if !slot.is_live() {
            continue;
        }
        let journal = ledger.journal_file(slot).context("opening a journal")?;
        slot.journal.store(journal.into_raw_fd(), Ordering::Release);
        let (pid, started) = (slot.host_pid.load(Ordering::Acquire), slot.started.load(Ordering::Acquire));
        let pidfd = open(pid, started).map_or(NO_FD, OwnedFd::into_raw_fd);
        slot.pidfd.store(pidfd, Ordering::Release);
    }
    let mut count = 0;
    for (_, slot) in ledger.served_spaces() {
        if !renumber_forks(ledger, slot, old) {
            return Ok(Err(LOST));
        }
        count += 1;
    }
    Ok(Ok(count))
}

/// Retires the address spaces whose processes have all ended, or returns why a living process cannot be
/// served. `held` are the tasks of which some process has a store, and `uffds` what is in those stores.
///
/// The store that a slot names does not decide: a recovery that was killed has moved the slot to a store that
/// a child of the task does not have yet, and the child's userfaultfd is in the former one.
fn retire_ended(
    ledger: Ledger,
    held: &BTreeSet<i32>,
    uffds: &BTreeMap<u32, OwnedFd>,
) -> Result<(), &'static str> {
    for (number, slot) in ledger.served_spaces() {
        if u32::try_from(number).is_ok_and(|number| uffds.contains_key(&number)) {
            continue;
        }
        if held.contains(&slot.image_pid.load(Ordering::Acquire)) || held.contains(&ANY_TASK) {
            return Err(LOST);
        }
        // No process has a store of its task: each process of this memory has ended, or was not parked yet.
        let (pid, started) = (slot.host_pid.load(Ordering::Acquire), slot.started.load(Ordering::Acquire));
        if open(pid, started).is_some_and(|process| !sys::has_ended(process.as_raw_fd())) {
            return Err(NOT_PARKED);
        }
        slot.retire();
    }
    Ok(())
}

/// Makes a new store for each task of which targets have one, because the writing ends of those are lost, and
/// puts what is current into the new stores. Targets get the new one later: a thread that waits in the kernel
/// for a page cannot be stopped for that before. Returns the userfaultfds by slot.
fn refill_stores(ledger: Ledger, found: Vec<(u32, OwnedFd)>) -> anyhow::Result<BTreeMap<u32, OwnedFd>> {
    let session = ledger.session();
    let mut new: BTreeMap<i32, (u32, FdStore, Vec<StoreEntry>)> = BTreeMap::new();
    let mut uffds = BTreeMap::new();
    for (number, copy) in found.into_iter().rev() {
        let stored = fd_store::peek_all(copy.as_fd()).context("reading the session's fd store")?;
        let Some(task) = session.stores.get(number).map(ParkedStore::task) else { continue };
        session.stores.replace(number, copy);
        let (number, store, kept) = match new.entry(task) {
            Entry::Occupied(made) => made.into_mut(),
            Entry::Vacant(place) => {
                let (number, store) = session.stores.make(task).context("making another fd store")?;
                place.insert((number, store, Vec::new()))
            }
        };
        // The latest first. A former store also has what is retired by now, and what another store has, too.
        for (entry, descriptors) in stored.into_iter().rev() {
            let slot = ledger.spaces().get(entry.index as usize);
            let slot = slot.filter(|slot| !slot.is_free() && slot.entry() == entry);
            let is_current = match entry.kind {
                EntryKind::Mark => false,
                EntryKind::Space => slot.is_some(),
                _ => true,
            };
            if !is_current || kept.contains(&entry) {
                continue;
            }
            let numbers: Vec<RawFd> = descriptors.iter().map(OwnedFd::as_raw_fd).collect();
            store.put(entry, &numbers).context("filling another fd store")?;
            kept.push(entry);
            if let Some(slot) = slot.filter(|_| entry.kind == EntryKind::Space) {
                slot.set_store_number(*number);
                uffds.extend(descriptors.into_iter().next().map(|uffd| (entry.index, uffd)));
            }
        }
    }
    Ok(uffds)
}

/// Gives fork messages that are received and not processed the numbers of this process's descriptor table, in
/// place of the old table's. Returns false if a child's descriptor was not in the store yet.
fn renumber_forks(ledger: Ledger, parent: &'static SpaceSlot, old: &[RawFd]) -> bool {
    forks(parent).into_iter().all(|(index, number)| {
        let is_it = |(slot, before): &(&SpaceSlot, &RawFd)| {
            **before == number && slot.uffd.load(Ordering::Acquire) != NO_FD
        };
        let found = ledger.spaces().iter().zip(old).find(is_it);
        found.is_some_and(|(slot, _)| {
            set_fork(parent, index, slot.uffd.load(Ordering::Acquire));
            true
        })
    })
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::uffd_child::{self, UffdChild};

    fn own_start(pid: i32) -> (i32, u64) {
        (pid, ProcessId::of(pid).unwrap().unwrap().started)
    }

    #[test]
    fn the_waits_for_all_killed_processes_share_one_limit() {
        let children = [0; 6].map(|_| UffdChild::start(uffd_child::sleep));
        let processes: BTreeMap<i32, OwnedFd> =
            children.iter().map(|child| (child.pid, sys::pidfd_open(child.pid).unwrap())).collect();
        let limit = Duration::from_millis(400);
        let start = Instant::now();
        assert_eq!(still_running(&processes, limit), processes.keys().copied().collect::<Vec<_>>());
        // Six limits in turn would take 2.4 s.
        assert!((limit / 2..4 * limit).contains(&start.elapsed()), "{:?}", start.elapsed());
    }

    #[test]
    fn each_process_is_killed_and_reported_once() {
        let children = [0; 2].map(|_| UffdChild::start(uffd_child::sleep));
        let [first, second] = [&children[0], &children[1]].map(|child| own_start(child.pid));
        let another = (second.0, second.1 + 1);
        let mut report = RecoveryReport::default();
        report.kill_all([first, first, another].into_iter(), LOST);
        assert_eq!(report.killed, [(first.0, LOST)]);
        assert!(!children[0].lives() && children[1].lives(), "another process has the pid of the last one");
    }

    /// They may have missing memory, and are found only while their parent lives.
    #[test]
    fn children_of_killed_processes_are_killed_too() {
        let mut task = Command::new("sh").args(["-c", "sleep 100; true"]).spawn().unwrap();
        let pid = i32::try_from(task.id()).unwrap();
        uffd_child::until(|| !processes::descendants(pid).is_empty());
        let child = sys::pidfd_open(*processes::descendants(pid).first().unwrap()).unwrap();
        RecoveryReport::default().kill_all([own_start(pid)].into_iter(), LOST);
        uffd_child::until(|| sys::has_ended(child.as_raw_fd()));
        task.wait().unwrap();
    }
}
