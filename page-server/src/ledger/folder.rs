// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where ledgers lie: one folder for each starter below `/run/rewake/sessions`, with its ledger.
//!
//! The ledger is written before the first userfaultfd is taken. The processes of a streamer share one lock on it
//! (flock(2), by one open file). A process that gets the lock knows that all of them have ended, and that no other
//! process recovers the same sessions.

use std::fs::{self, DirBuilder, File, TryLockError};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail};
use nix::unistd::geteuid;
use rewake_handover::{Gated, SESSIONS};
use tracing::warn;

use super::Ledger;

const LEDGER: &str = "ledger";
const UNFINISHED: &str = "ledger.new";
/// Tries to get a ledger's lock when its starter lives and when it does not, and time between them: 20 ms, 3 s.
const LOCK_TRIES: u32 = 5;
const DYING_TRIES: u32 = 750;
const LOCK_PAUSE: Duration = Duration::from_millis(4);

/// Where the folders of this user's starters are: `/run/rewake/sessions` for root, else
/// `$XDG_RUNTIME_DIR/rewake/sessions`.
///
/// # Errors
/// Not root, and the variable is not set.
pub fn root() -> anyhow::Result<PathBuf> {
    if geteuid().is_root() {
        return Ok(PathBuf::from(SESSIONS));
    }
    let folder = std::env::var_os("XDG_RUNTIME_DIR").filter(|folder| !folder.is_empty());
    let folder = folder.context("XDG_RUNTIME_DIR is not set: expected a folder for the sessions' ledger")?;
    Ok(Path::new(&folder).join("rewake/sessions"))
}

/// A starter's folder, locked by this process and all that inherit its descriptors.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    /// Unlocked when no process has it open any more.
    lock: File,
}

/// `File::try_lock` or `File::try_lock_shared`.
type TryLock = fn(&File) -> Result<(), TryLockError>;

/// A folder that another process of ours has locked: its sessions are served.
#[derive(Debug)]
pub struct InUse;

impl Folder {
    /// Makes the folder of this process, with an empty ledger.
    ///
    /// # Errors
    /// The folder or the ledger cannot be made.
    pub fn create() -> anyhow::Result<(Self, Ledger)> {
        Self::create_below(&root()?, &this_process()?.to_string())
    }

    /// Makes a folder that was taken the folder of this process.
    ///
    /// # Errors
    /// It cannot be renamed.
    pub fn rename(&mut self) -> anyhow::Result<()> {
        let path = self.path.with_file_name(this_process()?.to_string());
        fs::rename(&self.path, &path).with_context(|| format!("renaming {}", self.path.display()))?;
        self.path = path;
        Ok(())
    }

    fn create_below(root: &Path, name: &str) -> anyhow::Result<(Self, Ledger)> {
        let path = root.join(name);
        let make = || -> anyhow::Result<(Self, Ledger)> {
            DirBuilder::new().recursive(true).mode(0o700).create(&path)?;
            // It gets its name when it is locked: `rewake recover` would take an unlocked one.
            let unfinished = path.join(UNFINISHED);
            let file = File::options().read(true).write(true).create_new(true).open(&unfinished)?;
            let lock =
                lock(file, File::try_lock)?.ok_or_else(|| io::Error::from_raw_os_error(libc::EWOULDBLOCK))?;
            // Opened once more: a mapping keeps the file open, and a process that has the mapping is not one that
            // serves.
            let ledger = Ledger::in_file(&File::options().read(true).write(true).open(&unfinished)?)?;
            fs::rename(&unfinished, path.join(LEDGER))?;
            Ok((Self { path: path.clone(), lock }, ledger))
        };
        make().with_context(|| format!("making the ledger in {}", path.display()))
    }

    /// The folders of all starters of this user.
    ///
    /// # Errors
    /// The folder that holds them cannot be read.
    pub fn all() -> anyhow::Result<Vec<PathBuf>> {
        Self::below(&root()?)
    }

    fn below(root: &Path) -> anyhow::Result<Vec<PathBuf>> {
        let entries = match fs::read_dir(root) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.with_context(|| format!("reading {}", root.display()))?,
        };
        let mut paths: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
        paths.retain(|path| path.join(LEDGER).exists());
        paths.sort();
        Ok(paths)
    }

    /// Takes the folder of a starter all of whose processes have ended.
    ///
    /// # Errors
    /// The ledger cannot be read, or another version of this program wrote it.
    pub fn take(path: &Path) -> anyhow::Result<Result<(Self, Ledger), InUse>> {
        Self::lock(path, File::try_lock)
    }

    /// As [`take`](Self::take), for a process that only reads the ledger: several may at one time.
    ///
    /// # Errors
    /// As there.
    pub fn look(path: &Path) -> anyhow::Result<Result<(Self, Ledger), InUse>> {
        Self::lock(path, File::try_lock_shared)
    }

    fn lock(path: &Path, how: TryLock) -> anyhow::Result<Result<(Self, Ledger), InUse>> {
        let name = path.join(LEDGER);
        let file = match open(path) {
            // Another process recovers it, and has renamed or removed the folder.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Err(InUse)),
            file => file.with_context(|| format!("opening {}", name.display()))?,
        };
        let mut tries = 0;
        let locked = loop {
            if let Some(locked) = file.try_clone().and_then(|file| lock(file, how)).transpose() {
                break Some(locked);
            }
            // A plugin or `rewake status` that looks has the lock for a moment. Processes that were killed have it
            // until the kernel has taken them apart.
            tries += 1;
            if tries >= if starter_lives(path) { LOCK_TRIES } else { DYING_TRIES } {
                break None;
            }
            std::thread::sleep(LOCK_PAUSE);
        };
        let Some(lock) = locked else { return Ok(Err(InUse)) };
        let lock = lock.with_context(|| format!("locking {}", name.display()))?;
        let ledger = match open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Err(InUse)),
            file => file.and_then(|file| Ledger::of_file(&file)),
        };
        let ledger = ledger.with_context(|| format!("mapping {}", name.display()))?;
        let Some(ledger) = ledger else {
            bail!(
                "{}: another version of rewake wrote this ledger, and processes may wait for its sessions: \
                 run `rewake recover` of that version",
                name.display()
            );
        };
        Ok(Ok((Self { path: path.to_owned(), lock }, ledger)))
    }

    /// The folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the folder: nothing depends on its sessions any more.
    pub fn remove(self) {
        if let Err(error) = fs::remove_dir_all(&self.path) {
            warn!(%error, "removing {}", self.path.display());
        }
        drop(self.lock);
    }
}

/// Whether the process lives that a folder is named after.
fn starter_lives(folder: &Path) -> bool {
    let name = folder.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let of = name.split_once('-').and_then(|(pid, start)| Some((pid.parse().ok()?, start.parse().ok()?)));
    of.is_some_and(|(pid, started)| Gated::of(pid).is_ok_and(|of| of == Some(Gated { pid, started })))
}

fn this_process() -> anyhow::Result<Gated> {
    let own = Gated::of(std::process::id().cast_signed()).context("looking at this process")?;
    own.context("this process has ended")
}

/// The ledger of a folder, for reading and writing.
fn open(folder: &Path) -> io::Result<File> {
    File::options().read(true).write(true).open(folder.join(LEDGER))
}

/// None when another process has the lock.
fn lock(file: File, how: TryLock) -> io::Result<Option<File>> {
    match how(&file) {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::watched::until;

    /// A child of another test may have a copy of a descriptor that is dropped here, for a moment.
    fn locked(path: &Path, how: TryLock) -> anyhow::Result<(Folder, Ledger)> {
        let mut locked = None;
        until(|| {
            locked = Folder::lock(path, how).map(Result::ok).transpose();
            locked.is_some()
        });
        locked.unwrap()
    }

    #[test]
    fn a_ledger_is_taken_when_its_starter_has_ended_and_not_before() {
        let root = tempfile::tempdir().unwrap();
        let (folder, ledger) = Folder::create_below(root.path(), "1-2").unwrap();
        let index = ledger.take_session().unwrap();
        let path = folder.path().to_owned();
        assert_eq!(Folder::below(root.path()).unwrap(), [path.as_path()]);
        assert!(Folder::take(&path).unwrap().is_err());
        drop(folder);
        let first = locked(&path, File::try_lock_shared).unwrap();
        assert!(Folder::look(&path).unwrap().is_ok(), "several look at it");
        assert!(Folder::take(&path).unwrap().is_err(), "no process recovers it meanwhile");
        drop(first);
        let (taken, ledger) = locked(&path, File::try_lock).unwrap();
        assert_eq!(ledger.sessions()[index].state(), super::super::SessionState::Listening);
        assert!(Folder::take(&path).unwrap().is_err(), "one process recovers it");
        taken.remove();
        assert_eq!(Folder::below(root.path()).unwrap().len(), 0);
    }

    #[test]
    fn a_ledger_of_another_version_is_left_alone() {
        let root = tempfile::tempdir().unwrap();
        let (folder, _) = Folder::create_below(root.path(), "1-2").unwrap();
        let path = folder.path().to_owned();
        drop(folder);
        let file = File::options().write(true).open(path.join(LEDGER)).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &[0xff; 16], 0).unwrap();
        let error = locked(&path, File::try_lock).unwrap_err().to_string();
        assert!(error.contains("another version of rewake"), "{error}");
        assert!(path.join(LEDGER).exists());
    }
}
