// SPDX-License-Identifier: MIT OR Apache-2.0
//! Who reads an image, by locks that end with their holder.
//!
//! A reader leases the image: a shared lock (`flock(2)`) of its `inventory.img`, which stays where it is when
//! the directory gets another name. The lock belongs to the open file, so it lasts until the last process has
//! closed its copy of the descriptor. A dump that replaces the image keeps its files until then.

use std::ffi::OsStr;
use std::fs::{File, TryLockError};
use std::io;
use std::path::Path;

use rewake_process::file_lock::acquired;

use crate::{INVENTORY_NAME, ImageDir, ImageError, Result, open};

/// A lease of an image, for as long as it is not dropped.
#[derive(Debug)]
pub struct ImageLease(File);

impl ImageLease {
    /// Leases an open image; none where the directory has no inventory, or the file system has no locks.
    ///
    /// # Errors
    /// The image is being removed.
    pub fn of(images: &ImageDir) -> Result<Option<Self>> {
        let Some((path, inventory, _)) = images.file(INVENTORY_NAME)? else { return Ok(None) };
        match inventory.try_lock_shared() {
            Ok(()) => Ok(Some(Self(inventory))),
            Err(TryLockError::WouldBlock) => Err(ImageError::BeingReplaced { file: path }),
            Err(TryLockError::Error(_)) => Ok(None),
        }
    }

    /// Leases the image in a directory; none while it is being removed.
    ///
    /// # Errors
    /// The directory has no image, or the file system has no locks.
    pub fn shared(directory: &Path) -> io::Result<Option<Self>> {
        let file =
            open::open(File::open(directory)?, OsStr::new(INVENTORY_NAME)).map_err(io::Error::other)?;
        let file = file.ok_or_else(|| io::Error::from(nix::errno::Errno::ENOENT))?;
        Ok(acquired(file.try_lock_shared())?.then_some(Self(file)))
    }

    /// Leases the image for removing it: other leases are refused from now on. Returns false while it has a
    /// reader.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn make_exclusive(&self) -> io::Result<bool> {
        acquired(self.0.try_lock())
    }

    /// Returns the locked file: the lease lasts as long as it and its copies.
    #[must_use]
    pub fn into_file(self) -> File {
        self.0
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
        let images = ImageDir::open(dir.path()).unwrap();
        assert_eq!(shared().unwrap_err().kind(), io::ErrorKind::NotFound);
        assert!(ImageLease::of(&images).unwrap().is_none());
        fs::write(dir.path().join(INVENTORY_NAME), "").unwrap();
        let (one, two) = (shared().unwrap().unwrap(), ImageLease::of(&images).unwrap().unwrap());
        assert!(!one.make_exclusive().unwrap());
        let copy = two.into_file().try_clone().unwrap();
        assert!(!one.make_exclusive().unwrap());
        drop(copy);
        assert!(one.make_exclusive().unwrap() && shared().unwrap().is_none());
        let refused = ImageLease::of(&images).unwrap_err();
        assert!(matches!(refused, ImageError::BeingReplaced { .. }), "{refused}");
        drop(one);
        assert!(shared().unwrap().is_some());
    }
}
