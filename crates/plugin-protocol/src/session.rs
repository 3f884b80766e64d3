// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a session publishes for CRIU's plugins: a note in a file below [`SESSIONS`].
//! A line is `key value...`:
//!
//! ```text
//! /run/rewake/sessions/<starter's pid>-<its start time>[-<number>]/session-1
//!     version 2
//!     starter 4711 123456
//!     work 37 1234
//!     phase 3
//!     pid-namespace 4026531836
//!     store 1 1021 98765
//!     store 7 1025 98771
//! ```
//!
//! `starter` is the process that starts the session's worker again, by pid and start time in clock ticks. The
//! folder has a number too where a starter in another pid namespace has the same pid and start time.
//! `pid-namespace` is the inode of the namespace in which the starter has this pid.
//! `work` is the directory in which `criu restore` expects `lazy-pages.socket` (its `-W`), by device and
//! inode. `store` is the *fd store* of a task, by the pid in the names of the task's images ([`ANY_TASK`]: of
//! every task), the store's number in the starter's table of descriptors, and its inode. It is a socket whose
//! queue has the task's userfaultfds. While a target has missing memory, it has a descriptor of its store.
//! `phase` is the progress of the restore: a [`Phase`]. A starter's folder also has its `ledger`, which is
//! locked while a process of the streamer lives.

use std::fmt::Write as _;
use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Write as _};
use std::num::NonZeroU64;
use std::os::fd::{AsFd as _, OwnedFd, RawFd};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use nix::sys::stat::{SFlag, fstat};
use nix::unistd::geteuid;
use rewake_process::pidfd::{pidfd_getfd, pidfd_open};
use rewake_process::proc::processes;

use crate::dump_block::{ProcessId, has_ended};

/// The folder of the notes. Only this user may read it.
pub const SESSIONS: &str = "/run/rewake/sessions";

/// Version of the note. It changes when a line changes its meaning.
const VERSION: u64 = 2;
/// A file in the notes' folder that each process of the streamer has locked (flock(2)).
const LEDGER: &str = "ledger";
/// Bytes that are read of a file: a line for each of some thousand tasks.
const MAX_NOTE: u64 = 1 << 18;
/// In the place of a task's pid: the store is of every task.
pub const ANY_TASK: i32 = 0;
/// The note's name in its starter's folder.
const NOTE: &str = "session-1";
/// Suffix of a note's name while it is written.
const UNFINISHED: &str = ".new";

/// A file; no other one has the same id at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileId {
    /// The device, as `st_dev` has it.
    pub device: u64,
    /// The inode.
    pub inode: u64,
}

impl FileId {
    /// Returns the id of the file at a path.
    ///
    /// # Errors
    /// The file's status cannot be read.
    pub fn of(path: &Path) -> io::Result<Self> {
        let status = fs::metadata(path)?;
        Ok(Self { device: status.dev(), inode: status.ino() })
    }
}

/// An fd store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Store {
    /// Its number in the starter's table of descriptors.
    pub number: RawFd,
    /// The socket's inode.
    pub inode: u64,
}

/// The progress of a session's restore.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub enum Phase {
    /// No restore has connected.
    Listening = 1,
    /// A restore has connected, and the session does not have the userfaultfds of all tasks yet.
    Restoring = 2,
    /// The session has all of them.
    Running = 3,
}

impl Phase {
    fn of(number: u64) -> Option<Self> {
        [Self::Listening, Self::Restoring, Self::Running].into_iter().find(|phase| *phase as u64 == number)
    }
}

/// The note of a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionNote {
    /// The name of the starter's folder.
    pub folder: String,
    /// The process that starts the session's worker again.
    pub starter: ProcessId,
    /// The inode of the starter's pid namespace.
    pub pid_namespace: NonZeroU64,
    /// The directory in which `criu restore` expects `lazy-pages.socket`.
    pub work: FileId,
    /// The progress of the restore.
    pub phase: Phase,
    /// The fd stores of its tasks, by the pid in the names of a task's images.
    pub stores: Vec<(i32, Store)>,
}

/// All notes in a folder.
#[derive(Debug, Default)]
pub struct Notes {
    /// Notes that were read.
    pub notes: Vec<SessionNote>,
    /// Files that were not read, with the reasons.
    pub skipped: Vec<Skipped>,
}

/// A file that is not a note, or not trusted.
#[derive(Debug, thiserror::Error)]
#[error("{}: {reason}; it is not read", path.display())]
pub struct Skipped {
    /// The file.
    pub path: PathBuf,
    /// Why it is not read.
    pub reason: String,
}

impl SessionNote {
    /// Writes the note below `root` (usually [`SESSIONS`]) and replaces an earlier one of this session.
    /// Readers see either note as a whole.
    ///
    /// # Errors
    /// The kernel's.
    pub fn write(&self, root: &Path) -> io::Result<()> {
        let path = self.path(root);
        let folder = self.folder(root);
        DirBuilder::new().recursive(true).mode(0o700).create(&folder)?;
        let unfinished = with_suffix(&path, UNFINISHED);
        // A worker that was killed while it wrote may have left one.
        remove_file(&unfinished)?;
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&unfinished)?;
        file.write_all(self.text().as_bytes())?;
        fs::rename(&unfinished, &path)
    }

    /// Removes the note. With the last note it removes the starter's folder.
    ///
    /// # Errors
    /// The kernel's, except for a note that was removed already.
    pub fn remove(&self, root: &Path) -> io::Result<()> {
        let path = self.path(root);
        remove_file(&path)?;
        match fs::remove_dir(self.folder(root)) {
            Err(error) if !matches!(error.raw_os_error(), Some(libc::ENOTEMPTY | libc::ENOENT)) => Err(error),
            _ => Ok(()),
        }
    }

    /// Reads all notes below `root`, in any order; none where the folder does not exist. Files that are not
    /// notes, or that another user may have written, are skipped.
    ///
    /// # Errors
    /// `root` cannot be listed.
    pub fn all(root: &Path) -> io::Result<Notes> {
        let mut all = Notes::default();
        for folder in list(root)? {
            let path = folder.join(NOTE);
            match Self::read(&path) {
                Ok(Some(note)) => all.notes.push(note),
                // The streamer has not written it yet, or has removed it.
                Ok(None) => {}
                Err(reason) => all.skipped.push(Skipped { path, reason }),
            }
        }
        Ok(all)
    }

    /// Returns the session whose page server listens in a work directory. Of several notes the newest counts.
    /// Notes of sessions that no process serves do not count.
    ///
    /// # Errors
    /// `root` cannot be listed, or `/proc` cannot be read.
    pub fn of_work_dir(root: &Path, work: FileId) -> io::Result<Option<Self>> {
        let mut newest: Option<(SystemTime, Self)> = None;
        for note in Self::all(root)?.notes {
            if note.work != work || note.is_orphaned(root)? {
                continue;
            }
            let Ok(written) = fs::metadata(note.path(root)).and_then(|status| status.modified()) else {
                continue;
            };
            if newest.as_ref().is_none_or(|(time, _)| *time < written) {
                newest = Some((written, note));
            }
        }
        Ok(newest.map(|(_, note)| note))
    }

    /// Whether the starter in the note lives.
    ///
    /// # Errors
    /// `/proc` cannot be read.
    pub fn starter_lives(&self) -> io::Result<bool> {
        Ok(ProcessId::of(self.starter.pid)? == Some(self.starter))
    }

    /// Whether the starter has its pid in another pid namespace. This process may see no process of the
    /// streamer then.
    ///
    /// # Errors
    /// `/proc` cannot be read.
    pub fn is_in_another_pid_namespace(&self) -> io::Result<bool> {
        Ok(self.pid_namespace != own_pid_namespace()?)
    }

    /// Whether every process of the session's streamer has ended. Then its targets wait for `rewake recover`.
    ///
    /// # Errors
    /// The ledger cannot be opened.
    pub fn is_orphaned(&self, root: &Path) -> io::Result<bool> {
        let ledger = match File::open(self.folder(root).join(LEDGER)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(!self.starter_lives()?),
            ledger => ledger?,
        };
        // A lock that is granted is released at once, with the file.
        match ledger.try_lock_shared() {
            Ok(()) => Ok(true),
            Err(TryLockError::WouldBlock) => Ok(false),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }

    /// Reads the note again; None where the session has ended.
    ///
    /// # Errors
    /// It is not a trusted note any more.
    pub fn reread(&self, root: &Path) -> io::Result<Option<Self>> {
        Self::read(&self.path(root)).map_err(io::Error::other)
    }

    /// Returns the fd store of a task, by the pid in the names of the task's images.
    #[must_use]
    pub fn store_of(&self, task: i32) -> Option<Store> {
        let of_task = |(task_of, _): &&(i32, Store)| *task_of == task || *task_of == ANY_TASK;
        self.stores.iter().find(of_task).map(|(_, store)| *store)
    }

    /// Takes a descriptor of an fd store: from the session's starter, or from a worker that outlived the
    /// starter.
    ///
    /// # Errors
    /// ESRCH where no process has it any more; EBADF or EINVAL where the starter's descriptor is another one;
    /// EPERM where this process may not trace the starter.
    pub fn take(&self, store: Store) -> io::Result<OwnedFd> {
        match take_from(self.starter, store) {
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => take_from_worker(store),
            taken => taken,
        }
    }

    /// Returns the number of an fd store of this session in a process; None where the process has none, or
    /// has ended.
    ///
    /// # Errors
    /// The process's descriptors cannot be listed.
    pub fn held_by(&self, pid: i32) -> io::Result<Option<RawFd>> {
        let held = |(_, inode): &(RawFd, u64)| self.has_store(*inode);
        Ok(sockets_of(pid)?.into_iter().find(held).map(|(number, _)| number))
    }

    /// Returns whether the socket of this inode is an fd store of this session.
    #[must_use]
    pub fn has_store(&self, inode: u64) -> bool {
        self.stores.iter().any(|(_, store)| store.inode == inode)
    }

    fn folder(&self, root: &Path) -> PathBuf {
        root.join(&self.folder)
    }

    fn path(&self, root: &Path) -> PathBuf {
        self.folder(root).join(NOTE)
    }

    fn text(&self) -> String {
        let Self { folder: _, starter, pid_namespace, work, phase, stores } = self;
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = write!(
            text,
            "version {VERSION}\nstarter {} {}\nwork {} {}\nphase {}\npid-namespace {pid_namespace}\n",
            starter.pid, starter.started, work.device, work.inode, *phase as u64
        );
        for (task, store) in stores {
            let _ = writeln!(text, "store {task} {} {}", store.number, store.inode);
        }
        text
    }

    /// Returns None where the file does not exist.
    fn read(path: &Path) -> Result<Option<Self>, String> {
        let opened =
            OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path);
        let file = match opened {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened.map_err(|error| error.to_string())?,
        };
        refuse_foreign(&file)?;
        let mut text = String::new();
        file.take(MAX_NOTE).read_to_string(&mut text).map_err(|error| error.to_string())?;
        let folder = path.parent().and_then(Path::file_name).and_then(|name| name.to_str());
        let note = Self::parse(folder.unwrap_or_default(), &text)?;
        match note.starter.names(&note.folder) {
            true => Ok(Some(note)),
            false => Err(format!("it is in another starter's folder, expected {}", note.starter)),
        }
    }

    fn parse(folder: &str, text: &str) -> Result<Self, String> {
        let numbers = |key: &str, line: &str| {
            let numbers = line.split(' ').map(str::parse).collect::<Result<Vec<u64>, _>>();
            numbers.map_err(|error| format!("line {key:?}: {error}"))
        };
        let lines = |key| text.lines().filter_map(move |line| line.strip_prefix(key)?.strip_prefix(' '));
        let values = |key: &'static str| -> Result<Vec<u64>, String> {
            numbers(key, lines(key).next().ok_or_else(|| format!("it has no line {key:?}"))?)
        };
        let pair = |key: &'static str| match values(key)?[..] {
            [first, second] => Ok((first, second)),
            ref other => Err(format!("line {key:?}: expected two numbers, found {}", other.len())),
        };
        match values("version")?[..] {
            [VERSION] => {}
            ref other => return Err(format!("it has version {other:?}, expected {VERSION}")),
        }
        let int = |number: u64| i32::try_from(number).map_err(|error| format!("{number}: {error}"));
        let ((pid, started), (device, inode)) = (pair("starter")?, pair("work")?);
        let mut stores = Vec::new();
        for line in lines("store") {
            match numbers("store", line)?[..] {
                [task, number, inode] => stores.push((int(task)?, Store { number: int(number)?, inode })),
                ref other => {
                    return Err(format!("line \"store\": expected three numbers, found {}", other.len()));
                }
            }
        }
        let phase = match values("phase")?[..] {
            [number] => Phase::of(number).ok_or_else(|| format!("it has phase {number}, expected 1 to 3"))?,
            ref other => return Err(format!("line \"phase\": expected a number, found {}", other.len())),
        };
        let namespace = values("pid-namespace")?;
        let pid_namespace = match namespace[..] {
            [number] => NonZeroU64::new(number),
            _ => None,
        };
        let pid_namespace = pid_namespace
            .ok_or_else(|| format!("line \"pid-namespace\": expected an inode, found {namespace:?}"))?;
        Ok(Self {
            folder: folder.to_owned(),
            starter: ProcessId { pid: int(pid)?, started },
            pid_namespace,
            work: FileId { device, inode },
            phase,
            stores,
        })
    }
}

/// A worker shares the starter's table of descriptors: a store has the same number there.
fn take_from_worker(store: Store) -> io::Result<OwnedFd> {
    let link = PathBuf::from(format!("socket:[{}]", store.inode));
    let path = |pid: i32| format!("/proc/{pid}/fd/{}", store.number);
    let has_it = |pid: &i32| fs::read_link(path(*pid)).is_ok_and(|target| target == link);
    let pids = processes()?.into_iter();
    let take = |pid| take_from(ProcessId::of(pid).ok()??, store).ok();
    pids.filter(has_it).find_map(take).ok_or_else(|| io::Error::from_raw_os_error(libc::ESRCH))
}

fn take_from(process: ProcessId, store: Store) -> io::Result<OwnedFd> {
    let opened = pidfd_open(process.pid)?;
    // The pid may have been reused before it was opened, but not after.
    if ProcessId::of(process.pid)? != Some(process) {
        return Err(io::Error::from_raw_os_error(libc::ESRCH));
    }
    let taken = pidfd_getfd(opened.as_fd(), store.number)?;
    let status = fstat(&taken)?;
    let is_socket = SFlag::from_bits_truncate(status.st_mode) & SFlag::S_IFMT == SFlag::S_IFSOCK;
    match is_socket && status.st_ino == store.inode {
        true => Ok(taken),
        false => Err(io::Error::from_raw_os_error(libc::EINVAL)),
    }
}

/// Returns the inode of this process's pid namespace, as notes have it.
///
/// # Errors
/// `/proc` cannot be read.
pub fn own_pid_namespace() -> io::Result<NonZeroU64> {
    let inode = fs::metadata("/proc/self/ns/pid")?.ino();
    NonZeroU64::new(inode).ok_or_else(|| io::Error::other("/proc/self/ns/pid has inode 0"))
}

/// Returns the sockets that a process has open, by number and inode; none where it has ended. Where its first
/// thread has ended, another thread shows them.
///
/// # Errors
/// The process's descriptors cannot be listed.
pub fn sockets_of(pid: i32) -> io::Result<Vec<(RawFd, u64)>> {
    if let Some(sockets) = sockets_in(Path::new(&format!("/proc/{pid}/fd")))? {
        return Ok(sockets);
    }
    let threads = match fs::read_dir(format!("/proc/{pid}/task")) {
        Err(error) if has_ended(&error) => return Ok(Vec::new()),
        threads => threads?,
    };
    for thread in threads.flatten() {
        if let Some(sockets) = sockets_in(&thread.path().join("fd"))? {
            return Ok(sockets);
        }
    }
    Ok(Vec::new())
}

/// Returns the sockets of a thread's table of descriptors; None where the table is empty or the thread has
/// ended.
fn sockets_in(table: &Path) -> io::Result<Option<Vec<(RawFd, u64)>>> {
    let entries = match fs::read_dir(table) {
        Err(error) if has_ended(&error) => return Ok(None),
        entries => entries?,
    };
    let mut any = false;
    let mut sockets = Vec::new();
    for entry in entries {
        let entry = match entry {
            Err(error) if has_ended(&error) => break,
            entry => entry?,
        };
        any = true;
        // A descriptor that was closed meanwhile is skipped.
        let Ok(link) = fs::read_link(entry.path()) else { continue };
        let inode =
            link.to_str().and_then(|link| link.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok());
        let number = entry.file_name().to_str().and_then(|name| name.parse().ok());
        sockets.extend(number.zip(inode));
    }
    Ok(any.then_some(sockets))
}

/// Refuses a file that another user has written, or can write to.
fn refuse_foreign(file: &File) -> Result<(), String> {
    let status = file.metadata().map_err(|error| error.to_string())?;
    let own = geteuid().as_raw();
    if !status.is_file() {
        return Err("it is not a regular file".to_owned());
    }
    if status.uid() != own && status.uid() != 0 {
        return Err(format!("it belongs to user {}, expected {own} or root", status.uid()));
    }
    if status.mode() & 0o022 != 0 {
        return Err(format!("other users may write to it (mode {:o})", status.mode() & 0o777));
    }
    Ok(())
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Returns the entries of a folder; none where it does not exist.
fn list(folder: &Path) -> io::Result<Vec<PathBuf>> {
    match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        entries => entries?.map(|entry| Ok(entry?.path())).collect(),
    }
}

fn remove_file(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
