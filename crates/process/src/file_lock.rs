// SPDX-License-Identifier: MIT OR Apache-2.0
//! Locks of files and directories (`flock(2)`). A lock ends with the last descriptor of its open file, so a
//! killed holder leaves none. No one waits for a lock here.

use std::ffi::OsStr;
use std::fs::{self, File, Metadata, TryLockError};
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{MetadataExt as _, fchown};
use std::path::{Path, PathBuf};

use crate::check;

/// Returns whether an attempt has got the lock; false where another open file has it.
///
/// # Errors
/// The kernel refuses, or the file system has no locks.
pub fn acquired(attempt: Result<(), TryLockError>) -> io::Result<bool> {
    match attempt {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// A directory that one process, and those that it starts, write into, for as long as this is not dropped.
#[derive(Debug)]
pub struct DirectoryLock(File);

impl DirectoryLock {
    /// Locks a directory; `None` while another process has its lock.
    ///
    /// # Errors
    /// The directory cannot be opened, or the file system has no locks of directories.
    pub fn take(directory: &Path) -> io::Result<Option<Self>> {
        let file = File::open(directory)?;
        Ok(acquired(file.try_lock())?.then_some(Self(file)))
    }

    /// The directory.
    #[must_use]
    pub fn directory(&self) -> &File {
        &self.0
    }

    /// Whether this path still names the locked directory.
    #[must_use]
    pub fn is_of(&self, path: &Path) -> bool {
        let (Ok(own), Ok(now)) = (self.0.metadata(), path.symlink_metadata()) else { return false };
        (own.dev(), own.ino()) == (now.dev(), now.ino())
    }

    /// Gives the directory the owner and mode of another one.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn give_to(&self, like: &Metadata) -> io::Result<()> {
        fchown(&self.0, Some(like.uid()), Some(like.gid()))?;
        self.0.set_permissions(like.permissions())
    }

    /// Has programs that are started from now on share the lock: it ends with the last of them.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn inherit(&self) -> io::Result<()> {
        // SAFETY: integers only; the descriptor is open.
        check(unsafe { libc::fcntl(self.0.as_raw_fd(), libc::F_SETFD, 0) }.into()).map(drop)
    }
}

/// A directory that its writer left, and its lock: until this is dropped no other process removes it.
#[derive(Debug)]
pub struct Leftover {
    /// The directory.
    pub path: PathBuf,
    _lock: DirectoryLock,
}

impl Leftover {
    /// Finds the directories in `folder` whose names `is_one` accepts, and that no process has locked.
    ///
    /// # Errors
    /// `folder` cannot be listed.
    pub fn all(folder: &Path, is_one: impl Fn(&OsStr) -> bool) -> io::Result<Vec<Self>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            if !is_one(&entry.file_name()) || !entry.file_type()?.is_dir() {
                continue;
            }
            let path = entry.path();
            // It may have been removed since, or be another user's.
            if let Ok(Some(lock)) = DirectoryLock::take(&path) {
                found.push(Self { path, _lock: lock });
            }
        }
        Ok(found)
    }

    /// Removes the directory.
    ///
    /// # Errors
    /// It cannot be removed.
    pub fn remove(self) -> io::Result<()> {
        fs::remove_dir_all(&self.path)
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn a_lock_ends_when_the_last_that_shares_it_is_killed() {
        let dir = tempfile::tempdir().unwrap();
        let lock = DirectoryLock::take(dir.path()).unwrap().unwrap();
        lock.inherit().unwrap();
        let mut holder = Command::new("sleep").arg("1000").spawn().unwrap();
        drop(lock);
        assert!(DirectoryLock::take(dir.path()).unwrap().is_none());
        holder.kill().unwrap();
        holder.wait().unwrap();
        until(|| DirectoryLock::take(dir.path()).unwrap().is_some());
    }

    /// Waits for a lock that has no holder: children of other tests of this process share it until they are
    /// executed.
    fn until(is_free: impl Fn() -> bool) {
        let end = Instant::now() + Duration::from_secs(20);
        while !is_free() {
            assert!(Instant::now() < end, "the lock has no holder");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn leftovers_are_directories_of_the_name_that_no_process_has_locked() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        ["x-1", "x-2", "y-3"].iter().for_each(|name| fs::create_dir(path(name)).unwrap());
        fs::write(path("x-4"), "").unwrap();
        let lock = DirectoryLock::take(&path("x-1")).unwrap().unwrap();
        let is_one = |name: &OsStr| name.to_string_lossy().starts_with("x-");
        let found = Leftover::all(dir.path(), is_one).unwrap();
        assert_eq!(found.iter().map(|one| one.path.clone()).collect::<Vec<_>>(), [path("x-2")]);
        assert!(Leftover::all(dir.path(), is_one).unwrap().is_empty(), "they are locked");
        found.into_iter().for_each(|one| one.remove().unwrap());
        assert!(!path("x-2").exists() && path("y-3").exists());
        drop(lock);
        until(|| Leftover::all(dir.path(), is_one).unwrap().len() == 1);
    }
}
