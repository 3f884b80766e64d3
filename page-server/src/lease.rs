// SPDX-License-Identifier: MIT OR Apache-2.0
//! Leases of image directories: who reads one, and who may remove or fill it.
//!
//! A lease is a lock on the directory (`flock(2)`). Readers share it; a writer has it alone. The kernel ends it
//! with the last descriptor of its holder, so a killed holder leaves none. No one waits for a lease.

use std::fs::{File, TryLockError};
use std::io;
use std::path::Path;

use nix::fcntl::{FcntlArg, FdFlag, fcntl};

/// A lease of a directory, for as long as it is not dropped.
#[derive(Debug)]
pub struct ImageLease(File);

impl ImageLease {
    /// Leases a directory for reading; `None` while it has a writer.
    ///
    /// # Errors
    /// The directory cannot be opened or locked.
    pub fn shared(directory: &Path) -> io::Result<Option<Self>> {
        let file = File::open(directory)?;
        let locked = file.try_lock_shared();
        found(locked).map(|locked| locked.then_some(Self(file)))
    }

    /// Leases a directory for writing; `None` while anyone else has a lease.
    ///
    /// # Errors
    /// The directory cannot be opened or locked.
    pub fn exclusive(directory: &Path) -> io::Result<Option<Self>> {
        let file = File::open(directory)?;
        let locked = file.try_lock();
        found(locked).map(|locked| locked.then_some(Self(file)))
    }

    /// Turns a lease for reading into one for writing. Returns false while anyone else has a lease.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn make_exclusive(&self) -> io::Result<bool> {
        found(self.0.try_lock())
    }

    /// Has programs that are started from now on share the lease: it ends with the last of them.
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
    use std::process::Command;

    use super::*;

    #[test]
    fn readers_share_a_lease_and_a_writer_has_it_alone() {
        let dir = tempfile::tempdir().unwrap();
        let shared = || ImageLease::shared(dir.path()).unwrap();
        let exclusive = || ImageLease::exclusive(dir.path()).unwrap();
        let (one, two) = (shared().unwrap(), shared().unwrap());
        assert!(exclusive().is_none() && !one.make_exclusive().unwrap());
        drop(two);
        assert!(one.make_exclusive().unwrap());
        assert!(shared().is_none() && exclusive().is_none());
        drop(one);
        assert!(exclusive().is_some());
    }

    #[test]
    fn a_lease_ends_when_its_last_holder_is_killed() {
        let dir = tempfile::tempdir().unwrap();
        let lease = ImageLease::exclusive(dir.path()).unwrap().unwrap();
        lease.inherit().unwrap();
        let mut holder = Command::new("sleep").arg("1000").spawn().unwrap();
        drop(lease);
        assert!(ImageLease::shared(dir.path()).unwrap().is_none());
        holder.kill().unwrap();
        holder.wait().unwrap();
        assert!(ImageLease::shared(dir.path()).unwrap().is_some());
    }
}
