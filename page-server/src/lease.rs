// SPDX-License-Identifier: MIT OR Apache-2.0
//! Who uses an image directory, by locks that end with their holder.
//!
//! * A reader leases the image: a shared lock of its `inventory.img`, which stays where it is when the
//!   directory gets another name.
//! * A dump that writes into a directory, and a page server that receives one, lock the directory
//!   ([`rewake_process::file_lock`]). A reader does not: `rewake lazy-pages` locks its work directory for a
//!   moment, which may be the same.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use rewake_criu_images::INVENTORY_NAME;
use rewake_process::file_lock::acquired;

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
        acquired(locked).map(|locked| locked.then_some(Self(file)))
    }

    /// Leases the image for removing it: other leases are refused from now on. Returns false while it has a
    /// reader.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn make_exclusive(&self) -> io::Result<bool> {
        acquired(self.0.try_lock())
    }

    fn open(directory: &Path) -> io::Result<File> {
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        OpenOptions::new().read(true).custom_flags(flags).open(directory.join(INVENTORY_NAME))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

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
}
