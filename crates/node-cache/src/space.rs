// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which images are removed for another one: those that were used least lately, and that no restore uses.

use std::sync::Arc;

use anyhow::{Context as _, bail};
use tracing::info;

use crate::entry::CacheEntry;
use crate::folder::CacheFolder;

/// Reserves space for an image of so many bytes at most. `others` are the other images.
///
/// # Errors
/// Too much is used by restores, or a file cannot be removed.
pub(crate) fn reserve(
    folder: &CacheFolder,
    entry: &CacheEntry,
    bytes: u64,
    others: &[Arc<CacheEntry>],
) -> anyhow::Result<()> {
    let others: Vec<&Arc<CacheEntry>> = others.iter().filter(|other| other.id != entry.id).collect();
    // What it has already is part of what it needs.
    let own = folder.allocated(entry.id);
    let mut kept: Vec<&Arc<CacheEntry>> = others.clone();
    kept.sort_by_key(|other| std::cmp::Reverse(folder.unused(other.id)));
    let mut candidates = kept.into_iter();
    loop {
        let used: u64 = others.iter().map(|other| folder.allocated(other.id).max(other.reserved())).sum();
        let free = folder.free().with_context(|| folder.path().display().to_string())?;
        // Space that is reserved for others, and not allocated yet, is not free.
        let awaited: u64 =
            others.iter().map(|other| other.reserved().saturating_sub(folder.allocated(other.id))).sum();
        let fits = used.saturating_add(bytes) <= folder.size();
        if fits && bytes.saturating_sub(own) <= free.saturating_sub(awaited) {
            entry.reserve(bytes);
            return Ok(());
        }
        let Some(next) = candidates.next() else {
            let size = folder.size();
            bail!(
                "{}: no space for image {:.16} of {bytes} bytes: {used} bytes of other images are in use, the cache may \
                 have {size} and the file system has {free} left: end restores, or start `rewake serve` with a larger \
                 --cache-size",
                folder.path().display(),
                entry.id
            );
        };
        let (id, had) = (next.id, folder.allocated(next.id));
        if had > 0 && next.evict(folder)? {
            info!("image {id:.16} was removed from the cache: {had} bytes, for image {:.16}", entry.id);
        }
    }
}
