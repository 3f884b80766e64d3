// SPDX-License-Identifier: MIT OR Apache-2.0
//! Leases of an image: a dump that replaces it keeps its files for as long as a session may read them.
//!
//! A lease is a shared lock (`flock(2)`) of `inventory.img`. It belongs to the open file, so it lasts until the last
//! process has closed its copy of the descriptor. The session's fd store has one, like of the pages files.

use std::fs::{File, TryLockError};

use anyhow::bail;
use rewake_criu_images::{INVENTORY_NAME, ImageDir};

/// Leases an image; `None` where the directory has no inventory, or the file system has no locks.
///
/// # Errors
/// The image is being removed.
pub(crate) fn lease(images: &ImageDir) -> anyhow::Result<Option<File>> {
    let Some((_, inventory, _)) = images.file(INVENTORY_NAME)? else { return Ok(None) };
    match inventory.try_lock_shared() {
        Ok(()) => Ok(Some(inventory)),
        Err(TryLockError::WouldBlock) => {
            bail!("{}: another image is taking its place; try again", images.path().display())
        }
        Err(TryLockError::Error(_)) => Ok(None),
    }
}
