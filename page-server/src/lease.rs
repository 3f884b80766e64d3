// SPDX-License-Identifier: MIT OR Apache-2.0
//! Who uses an image directory: locks (`flock(2)`) that end with the last descriptor of their holder, so that a
//! killed holder leaves none. No one waits for one.
//!
//! * A reader leases the image: a shared lock of its `inventory.img`, which stays where it is when the directory
//!   gets another name.
//! * A dump that writes into a directory locks the directory. A reader does not: `rewake lazy-pages` locks its
//!   work directory for a moment, which may be the same.

use std::fs::{File, Metadata, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, fchown};
use std::path::Path;

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use rewake_criu_images::INVENTORY_NAME;

/// A lease of an image, for as long as it is not dropped.
#[derive(Debug)]
pub struct ImageLease(File);

impl ImageLease {
    /// Leases the image in a directory for reading; `None` while it is being removed.
    ///
    /// # Errors
    /// The directory has no image, or the file system has no locks.
    pub fn shared(directory: &Path) -> io::Result<Option<Self>> {
        let file = Self::open(directory)?;
        let locked = file.try_lock_shared();
        found(locked).map(|locked| locked.then_some(Self(file)))
    }

    /// Leases the image for removing it: other leases are refused from now on. Returns false while it has a
    /// reader.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn make_exclusive(&self) -> io::Result<bool> {
        found(self.0.try_lock())
    }

    fn open(directory: &Path) -> io::Result<File> {
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        OpenOptions::new().read(true).custom_flags(flags).open(directory.join(INVENTORY_NAME))
    }
}

/// A directory that a dump writes into, for as long as this is not dropped.
#[derive(Debug)]
pub struct DumpLock(File);

impl DumpLock {
    /// Locks a directory; `None` while another dump writes into it.
    ///
    /// # Errors
    /// The directory cannot be opened, or the file system has no locks of directories.
    pub fn take(directory: &Path) -> io::Result<Option<Self>> {
        let file = File::open(directory)?;
        let locked = file.try_lock();
        found(locked).map(|locked| locked.then_some(Self(file)))
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
        fcntl(&self.0, FcntlArg::F_SETFD(FdFlag::empty())).map(drop).map_err(io::Error::from)
    }
}

fn found(locked: Result<(), TryLockError>) -> io::Result<bool> {
    match locked {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::process::Command;

    use super::*;

    #[test]
    fn readers_share_a_lease_and_none_is_given_while_an_image_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let shared = || ImageLease::shared(dir.path());
        assert_eq!(shared().unwrap_err().kind(), io::ErrorKind::NotFound);
        fs::write(dir.path().join(INVENTORY_NAME), "").unwrap();
        let (one, two) = (shared().unwrap().unwrap(), shared().unwrap().unwrap());
        assert!(!one.make_exclusive().unwrap());
        drop(two);
        assert!(one.make_exclusive().unwrap() && shared().unwrap().is_none());
        drop(one);
        assert!(shared().unwrap().is_some());
    }

    #[test]
    fn a_lock_of_a_dump_ends_when_the_last_that_shares_it_is_killed() {
        let dir = tempfile::tempdir().unwrap();
        let lock = DumpLock::take(dir.path()).unwrap().unwrap();
        lock.inherit().unwrap();
        let mut holder = Command::new("sleep").arg("1000").spawn().unwrap();
        drop(lock);
        assert!(DumpLock::take(dir.path()).unwrap().is_none());
        holder.kill().unwrap();
        holder.wait().unwrap();
        assert!(DumpLock::take(dir.path()).unwrap().is_some());
    }
}
