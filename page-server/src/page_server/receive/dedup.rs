// SPDX-License-Identifier: MIT OR Apache-2.0
//! `--auto-dedup`: pages that a new image has become holes of its parents' files. No reader looks for a page
//! in a parent if the child has it.

use std::fs::File;
use std::path::Path;

use anyhow::Context as _;
use nix::fcntl::{FallocateFlags, OFlag, fallocate, openat};
use nix::sys::stat::Mode;
use rewake_criu_images::{ImageDir, PageFlags, Pagemap, PagemapEntry, PagemapId, pages_name};

use super::parent::ParentImage;

/// Punches the pages of these memories of the image in `folder` out of its parents. Returns the number of
/// bytes.
///
/// # Errors
/// A file is damaged or cannot be changed. Those before it were changed.
pub(super) fn punch_all(folder: &Path, memories: &[PagemapId], parent: &ParentImage) -> anyhow::Result<u64> {
    let image = ImageDir::open(folder)?;
    let mut bytes = 0;
    for id in memories {
        if let Some(own) = image.pagemap_of(*id)? {
            bytes += punch(&own, *id, parent.directory())?;
        }
    }
    Ok(bytes)
}

/// Punches the pages of `own` out of a parent and its parents.
fn punch(own: &Pagemap, id: PagemapId, parent: &ImageDir) -> anyhow::Result<u64> {
    let Some(map) = parent.pagemap_of(id)? else { return Ok(0) };
    let mut bytes = 0;
    let ranges: Vec<(u64, u64)> = superseded(own, &map).collect();
    if !ranges.is_empty() {
        let name = pages_name(map.pages_id);
        let punched = || -> nix::Result<u64> {
            let flags = OFlag::O_WRONLY | OFlag::O_CLOEXEC | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
            let file = File::from(openat(parent, name.as_str(), flags, Mode::empty())?);
            let mode = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
            for (offset, len) in &ranges {
                fallocate(&file, mode, offset.cast_signed(), len.cast_signed())?;
            }
            Ok(ranges.iter().map(|(_, len)| len).sum())
        };
        bytes +=
            punched().with_context(|| format!("{}: making holes", parent.path().join(&name).display()))?;
    }
    match parent.parent()? {
        Some(next) => Ok(bytes + punch(own, id, &next)?),
        None => Ok(bytes),
    }
}

/// Returns the offsets and lengths of the pages in `older`'s file that `newer` has in its own.
fn superseded(newer: &Pagemap, older: &Pagemap) -> impl Iterator<Item = (u64, u64)> {
    let is_present =
        |entry: &&PagemapEntry| entry.flags.has(PageFlags::PRESENT) && !entry.flags.has(PageFlags::PARENT);
    newer.entries.iter().filter(is_present).flat_map(move |entry| {
        let first = older.entries.partition_point(|old| old.end() <= entry.vaddr);
        let overlapping = older.entries[first..].iter().take_while(|old| old.vaddr < entry.end());
        overlapping.filter(is_present).map(|old| {
            let (start, end) = (entry.vaddr.max(old.vaddr), entry.end().min(old.end()));
            (old.file_offset + (start - old.vaddr), end - start)
        })
    })
}
