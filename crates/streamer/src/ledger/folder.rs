// SPDX-License-Identifier: MIT OR Apache-2.0
//! Makes and finds the folders of ledgers: each starter has one below `/run/rewake/sessions`.
//!
//! A starter makes its ledger before it takes the first userfaultfd. The processes of a streamer share one
//! lock on it (flock(2), by one open file). A process that gets the lock knows that all of them have ended,
//! and that no other process recovers the same sessions.

use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File, TryLockError};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail};
use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
use nix::unistd::geteuid;
use rewake_plugin_protocol::{ProcessId, SESSIONS};
use rewake_process::file_lock::acquired;
use tracing::warn;

use super::Ledger;

const LEDGER: &str = "ledger";
const UNFINISHED: &str = "ledger.new";
/// How often to try for a ledger's lock while its starter lives: 20 ms in all.
const LOCK_TRIES: u32 = 5;
/// How often to try once its starter has ended: 3 s in all.
const DYING_TRIES: u32 = 750;
/// The pause between two tries.
const LOCK_INTERVAL: Duration = Duration::from_millis(4);

/// Returns the directory of this user's folders: `/run/rewake/sessions` for root, else
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
    /// The kernel unlocks it when no process has it open any more.
    lock: File,
}

/// The process that starts a session's worker again.
#[derive(Debug, Clone)]
pub struct Starter {
    /// The process.
    pub process: ProcessId,
    /// The name of its folder.
    pub folder: String,
}

/// Either `File::try_lock` or `File::try_lock_shared`.
type TryLock = fn(&File) -> Result<(), TryLockError>;

/// Another process of Rewake has locked the folder: it serves the sessions.
#[derive(Debug)]
pub struct FolderInUse;

impl Folder {
    /// Makes the folder of this process, with an empty ledger.
    ///
    /// # Errors
    /// The folder or the ledger cannot be made.
    pub fn create() -> anyhow::Result<(Self, Ledger)> {
        Self::create_below(&root()?, &this_process()?.to_string())
    }

    /// Returns this process with the name of this folder.
    ///
    /// # Errors
    /// `/proc` cannot be read.
    pub fn starter(&self) -> anyhow::Result<Starter> {
        let folder = self.path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        Ok(Starter { process: this_process()?, folder: folder.to_owned() })
    }

    /// Renames a recovered folder, so that it is named after this process.
    ///
    /// # Errors
    /// It cannot be renamed.
    pub fn rename(&mut self) -> anyhow::Result<()> {
        let name = this_process()?.to_string();
        let root = self.path.parent().unwrap_or_else(|| Path::new("/"));
        let rename =
            |path: &Path| Ok(renameat2(AT_FDCWD, &self.path, AT_FDCWD, path, RenameFlags::RENAME_NOREPLACE)?);
        let (path, ()) = in_new_folder(root, &name, rename)
            .with_context(|| format!("renaming {}", self.path.display()))?;
        self.path = path;
        Ok(())
    }

    fn create_below(root: &Path, name: &str) -> anyhow::Result<(Self, Ledger)> {
        DirBuilder::new().recursive(true).mode(0o700).create(root).with_context(|| {
            format!(
                "making {}, where a successor finds the restore: mount a writable tmpfs there",
                root.display()
            )
        })?;
        let make = |path: &Path| DirBuilder::new().mode(0o700).create(path);
        let (path, ()) = in_new_folder(root, name, make)
            .with_context(|| format!("making a folder in {}", root.display()))?;
        let make = || -> anyhow::Result<(Self, Ledger)> {
            // It gets its name only when it is locked: `rewake recover` would take one that is not.
            let unfinished = path.join(UNFINISHED);
            let file = File::options().read(true).write(true).create_new(true).open(&unfinished)?;
            let lock =
                lock(file, File::try_lock)?.ok_or_else(|| io::Error::from_raw_os_error(libc::EWOULDBLOCK))?;
            // A mapping keeps its open file open, and a process with the mapping does not always serve. So
            // the mapping has an open file of its own, without the lock.
            let ledger = Ledger::in_file(&File::options().read(true).write(true).open(&unfinished)?)?;
            fs::rename(&unfinished, path.join(LEDGER))?;
            let folder = Self { path: path.clone(), lock };
            ledger.keep_folder(folder.open_directory()?);
            Ok((folder, ledger))
        };
        make().with_context(|| format!("making the ledger in {}", path.display()))
    }

    /// Returns the folders of all starters of this user.
    ///
    /// # Errors
    /// The folder that holds them cannot be read.
    pub fn all() -> anyhow::Result<Vec<PathBuf>> {
        Self::below(&root()?)
    }

    fn below(root: &Path) -> anyhow::Result<Vec<PathBuf>> {
        Self::with_file(root, LEDGER)
    }

    fn with_file(root: &Path, name: &str) -> anyhow::Result<Vec<PathBuf>> {
        let entries = match fs::read_dir(root) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.with_context(|| format!("reading {}", root.display()))?,
        };
        let mut paths: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
        paths.retain(|path| path.join(name).exists());
        paths.sort();
        Ok(paths)
    }

    /// Locks the folder of a streamer whose processes have all ended.
    ///
    /// # Errors
    /// The ledger cannot be read, or another version of this program wrote it.
    pub fn take(path: &Path) -> anyhow::Result<Result<(Self, Ledger), FolderInUse>> {
        Self::lock(path, File::try_lock)
    }

    /// Locks a folder as [`take`](Self::take) does, but shared: several processes may read the ledger at one
    /// time.
    ///
    /// # Errors
    /// As for [`take`](Self::take).
    pub fn look(path: &Path) -> anyhow::Result<Result<(Self, Ledger), FolderInUse>> {
        Self::lock(path, File::try_lock_shared)
    }

    fn lock(path: &Path, how: TryLock) -> anyhow::Result<Result<(Self, Ledger), FolderInUse>> {
        let name = path.join(LEDGER);
        let file = match open(path) {
            // Another process has recovered it, and has renamed or removed the folder.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Err(FolderInUse)),
            file => file.with_context(|| format!("opening {}", name.display()))?,
        };
        let mut tries = 0;
        let locked = loop {
            if let Some(locked) = file.try_clone().and_then(|file| lock(file, how)).transpose() {
                break Some(locked);
            }
            // A plugin or `rewake status` that reads it has the lock for a moment. Killed processes have it
            // until the kernel has closed their files.
            tries += 1;
            if tries >= if starter_lives(path) { LOCK_TRIES } else { DYING_TRIES } {
                break None;
            }
            std::thread::sleep(LOCK_INTERVAL);
        };
        let Some(lock) = locked else { return Ok(Err(FolderInUse)) };
        let lock = lock.with_context(|| format!("locking {}", name.display()))?;
        let ledger = match open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Err(FolderInUse)),
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

    /// Opens the folder, for [`Ledger::keep_folder`].
    ///
    /// # Errors
    /// EMFILE.
    pub(crate) fn open_directory(&self) -> io::Result<File> {
        File::open(&self.path)
    }

    /// Returns the path of the folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file of what processes keep of the session, in the ledger's place.
    pub const LEFT: &str = "left";

    /// Puts a note in the place of the ledger: the session is over.
    ///
    /// # Errors
    /// It cannot be written: the folder is removed.
    pub fn leave(self, note: &[u8]) -> anyhow::Result<()> {
        let (new, path) = (self.path.join("left.new"), self.path.join(Self::LEFT));
        let written = fs::write(&new, note).and_then(|()| fs::rename(&new, &path));
        if let Err(error) = written {
            self.remove();
            return Err(error).with_context(|| format!("writing {}", path.display()));
        }
        let files = fs::read_dir(&self.path).with_context(|| format!("reading {}", self.path.display()))?;
        let names = files.filter_map(|file| Some(file.ok()?.file_name())).filter(|name| name != Self::LEFT);
        // The ledger is the last: without it, no process looks for the others.
        let others: Vec<_> = names.filter(|name| name != LEDGER).collect();
        let remove = |name: &OsStr| fs::remove_file(self.path.join(name));
        others.iter().try_for_each(|name| remove(name)).context("removing what a successor would need")?;
        remove(OsStr::new(LEDGER)).context("removing the ledger")
    }

    /// Returns the folders with such a note.
    ///
    /// # Errors
    /// The folder that holds them cannot be read.
    pub fn all_left() -> anyhow::Result<Vec<PathBuf>> {
        Self::with_file(&root()?, Self::LEFT)
    }

    /// Removes the folder, when nothing depends on its sessions any more.
    pub fn remove(self) {
        if let Err(error) = fs::remove_dir_all(&self.path) {
            warn!(%error, "removing {}", self.path.display());
        }
        drop(self.lock);
    }
}

/// Returns true if the process lives after which the folder is named.
fn starter_lives(folder: &Path) -> bool {
    let name = folder.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let mut numbers = name.split('-');
    let mut number = || numbers.next()?.parse::<u64>().ok();
    let starter = number().and_then(|pid| Some((i32::try_from(pid).ok()?, number()?)));
    let lives = |(pid, started)| ProcessId::of(pid).is_ok_and(|now| now == Some(ProcessId { pid, started }));
    starter.is_some_and(lives)
}

/// Calls `make` with a path that does not exist yet: `name`, or `name` with a number. Starters in two pid
/// namespaces can have the same pid and start time.
fn in_new_folder<T>(
    root: &Path,
    name: &str,
    make: impl Fn(&Path) -> io::Result<T>,
) -> io::Result<(PathBuf, T)> {
    let mut path = root.join(name);
    for number in 1.. {
        match make(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            made => return Ok((path, made?)),
        }
        path = root.join(format!("{name}-{number}"));
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

fn this_process() -> anyhow::Result<ProcessId> {
    let own = ProcessId::of(std::process::id().cast_signed()).context("looking at this process")?;
    own.context("this process has ended")
}

/// Opens the ledger of a folder for reading and writing.
fn open(folder: &Path) -> io::Result<File> {
    File::options().read(true).write(true).open(folder.join(LEDGER))
}

/// Locks a ledger, or `None` if another process has the lock.
fn lock(file: File, how: TryLock) -> io::Result<Option<File>> {
    Ok(acquired(how(&file))?.then_some(file))
}

#[cfg(test)]
mod tests {
    use super::super::SessionState;
    use super::*;
    use crate::uffd_child::until;

    /// Retries until the lock is free: a child of another test may have a copy of the descriptor for a
    /// moment.
    fn locked(path: &Path, how: TryLock) -> anyhow::Result<(Folder, Ledger)> {
        let mut locked = None;
        until(|| {
            locked = Folder::lock(path, how).map(Result::ok).transpose();
            locked.is_some()
        });
        locked.unwrap()
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_named_with_the_way_out() {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join("run"), "").unwrap();
        let error =
            format!("{:#}", Folder::create_below(&root.path().join("run/rewake"), "1-2").unwrap_err());
        assert!(error.starts_with("making ") && error.contains("/run/rewake, where a successor"), "{error}");
        assert!(error.contains("mount a writable tmpfs there: Not a directory"), "{error}");
    }

    #[test]
    fn a_ledger_is_taken_when_its_starter_has_ended_and_not_before() {
        let root = tempfile::tempdir().unwrap();
        let (folder, ledger) = Folder::create_below(root.path(), "1-2").unwrap();
        ledger.session().set_state(SessionState::Listening);
        let path = folder.path().to_owned();
        assert_eq!(Folder::below(root.path()).unwrap(), [path.as_path()]);
        assert!(Folder::take(&path).unwrap().is_err());
        drop(folder);
        let first = locked(&path, File::try_lock_shared).unwrap();
        assert!(Folder::look(&path).unwrap().is_ok(), "several processes read it");
        assert!(Folder::take(&path).unwrap().is_err(), "no process recovers it meanwhile");
        drop(first);
        let (taken, ledger) = locked(&path, File::try_lock).unwrap();
        assert_eq!(ledger.session().state(), SessionState::Listening);
        assert!(Folder::take(&path).unwrap().is_err(), "one process recovers it");
        taken.remove();
        assert_eq!(Folder::below(root.path()).unwrap().len(), 0);
    }

    #[test]
    fn starters_of_two_pid_namespaces_with_one_name_have_folders_of_their_own() {
        let root = tempfile::tempdir().unwrap();
        let make = || Folder::create_below(root.path(), "1-2").unwrap().0;
        let (first, second, mut third) = (make(), make(), make());
        let names = [&first, &second, &third].map(|folder| folder.starter().unwrap().folder);
        assert_eq!(names, ["1-2", "1-2-1", "1-2-2"]);
        let own = this_process().unwrap().to_string();
        fs::create_dir_all(root.path().join(&own).join("ledger")).unwrap();
        third.rename().unwrap();
        assert_eq!(third.path(), root.path().join(format!("{own}-1")));
        assert!(starter_lives(third.path()));
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
