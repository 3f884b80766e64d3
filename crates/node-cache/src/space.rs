// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which images are evicted for another one: the least recently used images that no restore uses.

use std::sync::Arc;

use anyhow::{Context as _, bail};
use tracing::info;

use crate::entry::CacheEntry;
use crate::folder::CacheFolder;

/// Reserves space for an image of at most `bytes` bytes. `others` are the other images.
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
    let has = |other: &Arc<CacheEntry>| folder.allocated(other.id).max(other.reserved());
    let used_least = |other: &&Arc<CacheEntry>| std::cmp::Reverse(folder.unused(other.id));
    let mut removable: Vec<&Arc<CacheEntry>> =
        others.iter().copied().filter(|other| has(other) > 0 && other.is_removable(folder)).collect();
    removable.sort_by_key(used_least);
    // Evictable bytes. If they are not enough, no image is evicted.
    let mut spared: u64 = removable.iter().map(|other| has(other)).sum();
    let mut candidates = removable.into_iter();
    loop {
        let used: u64 = others.iter().map(|other| has(other)).sum();
        let free = folder.free().with_context(|| folder.path().display().to_string())?;
        // Space that is reserved for others, and not allocated yet, is not free.
        let awaited: u64 =
            others.iter().map(|other| other.reserved().saturating_sub(folder.allocated(other.id))).sum();
        let fits = |gone: u64| {
            used.saturating_add(bytes) <= folder.size().saturating_add(gone)
                && bytes.saturating_sub(own) <= free.saturating_add(gone).saturating_sub(awaited)
        };
        if fits(0) {
            entry.reserve(bytes);
            return Ok(());
        }
        let next = if fits(spared) { candidates.next() } else { None };
        let Some(next) = next else {
            let size = folder.size();
            bail!(
                "{}: no space for image {} of {bytes} bytes: {used} bytes of other images are in use, \
                 the cache may have {size} and the file system has {free} left: end restores, or start \
                 `rewake serve` with a larger --cache-size",
                folder.path().display(),
                entry.id
            );
        };
        let (id, had) = (next.id, has(next));
        spared = spared.saturating_sub(had);
        if next.evict(folder)? {
            info!("image {id} was removed from the cache: {had} bytes, for image {}", entry.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rewake_criu_images::{Digest, ImageLease};

    use super::*;
    use crate::folder::tests::{folder, image, set_unused};

    const SIZE: u64 = 1 << 20;

    /// Entries of images, the oldest first.
    fn entries(folder: &CacheFolder, numbers: &[u8], bytes: usize) -> Vec<Arc<CacheEntry>> {
        let make = |number: &u8| {
            let id = image(folder, *number, bytes);
            set_unused(folder, id, Duration::from_secs(100 - u64::from(*number)));
            Arc::new(CacheEntry::new(id, folder))
        };
        numbers.iter().map(make).collect()
    }

    #[test]
    fn images_that_were_used_least_lately_make_room() {
        let (_dir, folder) = folder(SIZE);
        let all = entries(&folder, &[1, 2, 3], 300 << 10);
        let next = CacheEntry::new(Digest([9; 32]), &folder);
        reserve(&folder, &next, 400 << 10, &all).unwrap();
        let left = |number: u8| folder.image(Digest([number; 32])).exists();
        assert_eq!([1, 2, 3].map(left), [false, true, true]);
        assert_eq!(next.reserved(), 400 << 10);
    }

    #[test]
    fn an_image_that_cannot_fit_removes_none() {
        let (_dir, folder) = folder(SIZE);
        let all = entries(&folder, &[1, 2], 400 << 10);
        let next = CacheEntry::new(Digest([9; 32]), &folder);
        assert!(reserve(&folder, &next, SIZE + 1, &all).is_err());
        all[1].pin();
        assert!(reserve(&folder, &next, 700 << 10, &all).is_err());
        assert!(all.iter().all(|entry| folder.image(entry.id).exists()));
        assert_eq!(next.reserved(), 0);
    }

    #[test]
    fn an_image_in_use_stays_and_no_space_is_one_error() {
        let (_dir, folder) = folder(SIZE);
        let all = entries(&folder, &[1, 2], 400 << 10);
        let lease = ImageLease::shared(&folder.image(all[0].id)).unwrap().unwrap();
        all[1].pin();
        let next = CacheEntry::new(Digest([9; 32]), &folder);
        let error = reserve(&folder, &next, 400 << 10, &all).unwrap_err().to_string();
        assert!(error.contains("no space for image 0909090909090909") && error.contains("--cache-size"));
        drop(lease);
        reserve(&folder, &next, 400 << 10, &all).unwrap();
        assert!(!folder.image(all[0].id).exists() && folder.image(all[1].id).exists());
    }

    #[test]
    fn what_others_have_reserved_is_not_free() {
        let (_dir, folder) = folder(SIZE);
        let other = Arc::new(CacheEntry::new(Digest([1; 32]), &folder));
        other.reserve(700 << 10);
        other.pin();
        let next = CacheEntry::new(Digest([9; 32]), &folder);
        assert!(reserve(&folder, &next, 400 << 10, &[Arc::clone(&other)]).is_err());
        reserve(&folder, &next, 300 << 10, &[other]).unwrap();
    }
}
