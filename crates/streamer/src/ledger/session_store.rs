// SPDX-License-Identifier: MIT OR Apache-2.0
//! Keeps what a successor needs of a session's image: in the streamer's own [fd
//! store](crate::ledger::fd_store) for the next worker, and in the session's folder for `rewake recover`,
//! when every process of the streamer has been killed. Also makes the session's note.
//!
//! The folder has copies of the plans, and the paths of the image's open files. A successor opens these
//! again, and each must be the file that the plan describes: device, inode, length, times. Root alone can
//! open the folder, so that no restored program, whatever its user, can read it or put something else there.
//!
//! CRIU's plugins find the session by its note: one parks before a target runs, and a dump waits for missing
//! memory.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use nix::fcntl::OFlag;
use rewake_criu_images::INVENTORY_NAME;
use rewake_plugin_protocol::{FileId, Phase, SessionNote, Store, own_pid_namespace};

use crate::ledger::fd_store::{EntryKind, FdStore, MAX_DESCRIPTORS, StoreEntry, peek_all};
use crate::ledger::{Ledger, ParkedStore, SessionSlot, Starter};
use crate::session::image::remote_memory::RemoteMemory;
use crate::session::image::{Image, plan_file};

/// How long to wait for a lock of an image, and the pause between two tries.
const LOCK_LIMIT: Duration = Duration::from_secs(3);
const LOCK_INTERVAL: Duration = Duration::from_millis(20);

/// The names of the folder's files: the image's plan, the paths of its open files, the fetcher's plan.
const PLAN: &str = "plan";
const PATHS: &str = "paths";
const FETCH_PLAN: &str = "fetch-plan";

/// Makes the streamer's own fd store, and keeps an image's plan and files in it and in the folder.
///
/// # Errors
/// EMFILE, ENOMEM, ENOSPC.
pub fn of_image(ledger: Ledger, image: &Image) -> io::Result<FdStore> {
    let own = ledger.session().make_own_store()?;
    let (plan, files) = image.seal()?;
    let plan = File::from(plan);
    plan_file::copy(&plan, &ledger.open_file(PLAN, new_file())?)?;
    let mut paths = Vec::new();
    for file in &files {
        let path = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
        paths.extend_from_slice(path.as_os_str().as_bytes());
        paths.push(0);
    }
    ledger.open_file(PATHS, new_file())?.write_all(&paths)?;
    put_image(&own, plan.as_fd(), &files)?;
    Ok(own)
}

/// Keeps the plan of a fetcher that can be started again.
///
/// # Errors
/// ENOSPC.
pub(crate) fn keep_fetch_plan(ledger: Ledger, plan: &File) -> io::Result<()> {
    plan_file::copy(plan, &ledger.open_file(FETCH_PLAN, new_file())?)
}

/// Returns the plan of the fetcher, after the death of every process.
///
/// # Errors
/// The session has none.
pub(crate) fn fetch_plan(ledger: Ledger) -> io::Result<File> {
    plan_file::copy_of(&ledger.open_file(FETCH_PLAN, OFlag::O_RDONLY)?)
}

fn new_file() -> OFlag {
    OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_TRUNC
}

fn put_image(store: &FdStore, plan: BorrowedFd<'_>, files: &[BorrowedFd<'_>]) -> io::Result<()> {
    store.put(StoreEntry { kind: EntryKind::Plan, index: 0, life: 0 }, &[plan.as_raw_fd()])?;
    for (number, some) in files.chunks(MAX_DESCRIPTORS).enumerate() {
        let numbers: Vec<i32> = some.iter().map(BorrowedFd::as_raw_fd).collect();
        let index = u32::try_from(number * MAX_DESCRIPTORS).map_err(io::Error::other)?;
        store.put(StoreEntry { kind: EntryKind::Files, index, life: 0 }, &numbers)?;
    }
    Ok(())
}

/// Opens the image of a session again, by the folder of its ledger, and puts it into the streamer's own
/// store. [`image`] compares the files with the plan.
///
/// # Errors
/// A file does not exist any more, or another program writes to the image or removes it.
pub(crate) fn reopen_image(ledger: Ledger, own: &FdStore) -> anyhow::Result<()> {
    let plan = ledger.open_file(PLAN, OFlag::O_RDONLY).and_then(|plan| plan_file::copy_of(&plan));
    let plan = plan.context("the session's plan")?;
    let mut paths = Vec::new();
    let read = ledger.open_file(PATHS, OFlag::O_RDONLY).and_then(|mut file| file.read_to_end(&mut paths));
    read.context("the paths of the session's image")?;
    let paths = paths.split(|byte| *byte == 0).filter(|path| !path.is_empty());
    let files = paths.map(|path| open_again(Path::new(OsStr::from_bytes(path))));
    let files: Vec<File> = files.collect::<anyhow::Result<_>>()?;
    let files: Vec<BorrowedFd<'_>> = files.iter().map(|file| file.as_fd()).collect();
    put_image(own, plan.as_fd(), &files).context("keeping the session's image")
}

/// Opens a file of an image, locked as the planner had it: the inventory shared, a directory that an image
/// arrives in for this session alone.
fn open_again(path: &Path) -> anyhow::Result<File> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    // The kernel shows an unreachable mount so.
    ensure!(path.is_absolute(), "{}: an absolute path expected", path.display());
    let file = File::options().read(true).custom_flags(flags).open(path);
    let file = file.with_context(|| {
        format!("{}: the image must stay until all its memory is resident", path.display())
    })?;
    let end = Instant::now() + LOCK_LIMIT;
    let is_directory = file.metadata()?.is_dir();
    loop {
        let locked = if path.file_name() == Some(OsStr::new(INVENTORY_NAME)) {
            file.try_lock_shared()
        } else if is_directory {
            file.try_lock()
        } else {
            Ok(())
        };
        match locked {
            // Who looks whether an image is leased has the lock for a moment.
            Err(fs::TryLockError::WouldBlock) if Instant::now() < end => sleep(LOCK_INTERVAL),
            Err(fs::TryLockError::WouldBlock) => {
                bail!("{}: another program removes the image, or writes to it", path.display())
            }
            // A file system without locks has none for the planner either.
            _ => return Ok(file),
        }
    }
}

/// Returns the image with which a session was opened: its own plan and files, even if their paths have others
/// now.
///
/// # Errors
/// The store has no plan, or a file changed.
pub fn image(slot: &SessionSlot, own: &FdStore) -> anyhow::Result<Image> {
    let (mut plan, mut files, mut remote) = (None, BTreeMap::new(), None);
    let own = peek_all(own.descriptor()).context("reading the streamer's own fd store")?;
    for (entry, descriptors) in own {
        match entry.kind {
            EntryKind::Plan => plan = descriptors.into_iter().next(),
            EntryKind::Files => drop(files.insert(entry.index, descriptors)),
            EntryKind::Remote => remote = Some(descriptors),
            _ => {}
        }
    }
    let plan: OwnedFd = plan.context("the streamer's own fd store has no plan")?;
    Image::unseal_with(plan.as_fd(), files.into_values().flatten().collect(), |draft| {
        if draft.is_of_page_server() {
            // The store of the root, which the plan names further on.
            for store in slot.stores.present().filter_map(|(_, place)| place.descriptor()) {
                let parked = peek_all(store).context("reading a parked fd store")?;
                let of = parked.into_iter().filter(|(entry, _)| entry.kind == EntryKind::Remote);
                remote = of.map(|(_, descriptors)| descriptors).next_back().or(remote);
            }
        }
        let mut remote = remote.unwrap_or_default().into_iter().skip(1);
        match remote.next() {
            Some(presence) => RemoteMemory::inherit(presence, remote.next(), draft),
            None => RemoteMemory::arrives_again(draft),
        }
    })
}

/// Makes the note of a session for CRIU's plugins.
///
/// # Errors
/// The work directory cannot be examined.
pub fn note(slot: &SessionSlot, starter: &Starter, work: &Path, phase: Phase) -> io::Result<SessionNote> {
    let of = |(_, place): (u32, &ParkedStore)| {
        Some((place.task(), Store { number: place.descriptor()?.as_raw_fd(), inode: place.inode() }))
    };
    let stores = slot.stores.present().filter_map(of).collect();
    let (folder, starter) = (starter.folder.clone(), starter.process);
    let pid_namespace = own_pid_namespace()?;
    Ok(SessionNote { folder, starter, pid_namespace, work: FileId::of(work)?, stores, phase })
}
