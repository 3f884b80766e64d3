// SPDX-License-Identifier: MIT OR Apache-2.0
//! The parent of an image that is received: an incremental dump leaves out pages that it has.

use std::path::Path;

use anyhow::{Context as _, bail, ensure};
use rewake_criu_images::{ImageDir, PageFlags, Pagemap, PagemapId};
use rewake_page_protocol::PageRun;

/// The name of the link to it in an image directory.
pub(super) const LINK: &str = "parent";

/// A parent image.
#[derive(Debug)]
pub(super) struct ParentImage(ImageDir);

impl ParentImage {
    /// Opens the image that `--prev-images-dir` names, relative to `images`.
    ///
    /// # Errors
    /// It does not exist, or `images` has another parent already.
    pub(super) fn named(images: &Path, previous: &Path) -> anyhow::Result<Self> {
        let option = || format!("--prev-images-dir {}, below {}", previous.display(), images.display());
        let named = ImageDir::open(images.join(previous)).with_context(option)?;
        if let Some(linked) = Self::linked(images)? {
            ensure!(
                linked.0.id() == named.id(),
                "{}: it is not what {} links to: remove the link, or give the same directory",
                option(),
                images.join(LINK).display()
            );
        }
        Ok(Self(named))
    }

    /// Opens the image that `images` links to; none without a link.
    pub(super) fn linked(images: &Path) -> anyhow::Result<Option<Self>> {
        Ok(ImageDir::open(images)?.parent()?.map(Self))
    }

    /// Reads the pagemaps of a memory in this image and in those that it leaves pages to; none where this
    /// image has no pages of it.
    pub(super) fn pages(&self, id: PagemapId) -> anyhow::Result<Option<ParentPages>> {
        let Some(map) = self.0.pagemap_of(id)? else { return Ok(None) };
        let mut levels = vec![AncestorPages::of(&self.0, id, map)];
        let mut next = self.0.parent()?;
        while levels.last().is_some_and(AncestorPages::has_holes)
            && let Some(directory) = next.take()
            && let Some(map) = directory.pagemap_of(id)?
        {
            levels.push(AncestorPages::of(&directory, id, map));
            next = directory.parent()?;
        }
        Ok(Some(ParentPages { levels }))
    }

    /// The directory.
    pub(super) fn directory(&self) -> &ImageDir {
        &self.0
    }
}

/// The pages that a parent image and its parents have of one memory.
#[derive(Debug)]
pub(super) struct ParentPages {
    /// From the youngest image to the oldest.
    levels: Vec<AncestorPages>,
}

/// The pages of one ancestor image.
#[derive(Debug)]
struct AncestorPages {
    /// The pagemap's path, for messages.
    file: String,
    map: Pagemap,
}

impl AncestorPages {
    fn of(directory: &ImageDir, id: PagemapId, map: Pagemap) -> Self {
        Self { file: directory.path().join(id.file_name()).display().to_string(), map }
    }

    fn has_holes(&self) -> bool {
        self.map.entries.iter().any(|entry| entry.flags.has(PageFlags::PARENT))
    }
}

impl ParentPages {
    /// Checks that the bytes of all pages of a run are in the file of the parent, or of one of its parents.
    /// Lazy pages that a `criu dump --lazy-pages` kept are in none.
    ///
    /// # Errors
    /// One is not.
    pub(super) fn check(&self, run: PageRun) -> anyhow::Result<()> {
        if let Err((file, at)) = Self::find(&self.levels, run.vaddr(), run.end()) {
            bail!(
                "{} pages at {:#x} are said to be in the parent image, and {file} lacks the bytes of \
                 {at:#x}: dump again in full, or name the image of the last dump with --prev-images-dir",
                run.pages(),
                run.vaddr(),
            );
        }
        Ok(())
    }

    /// Looks for the pages from `start` to `end`. Returns the first that is in no file, and the pagemap that
    /// should have it. At most [`rewake_criu_images::MAX_PARENTS`] levels deep.
    fn find(levels: &[AncestorPages], start: u64, end: u64) -> Result<(), (&str, u64)> {
        let Some((level, older)) = levels.split_first() else { return Err(("no further parent", start)) };
        let entries = &level.map.entries;
        let first = entries.partition_point(|entry| entry.end() <= start);
        let mut at = start;
        for entry in &entries[first..] {
            if at >= end || entry.vaddr > at {
                break;
            }
            let part = entry.end().min(end);
            if entry.flags.has(PageFlags::PARENT) {
                Self::find(older, at, part)?;
            } else if !entry.flags.has(PageFlags::PRESENT) {
                break;
            }
            at = part;
        }
        if at < end { Err((&level.file, at)) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use rewake_criu_images::Generation;

    use super::*;

    const FIRST: u64 = 0x10000;

    /// An image with one run of four pages for each of these flags.
    fn level(file: &str, flags: &[PageFlags]) -> AncestorPages {
        let starts = (0..).map(|number| FIRST + number * 0x4000);
        let runs = starts.zip(flags).map(|(start, flags)| (start, 4, *flags));
        AncestorPages { file: file.to_owned(), map: Pagemap::new(1, Generation::Wide, runs) }
    }

    fn check(levels: Vec<AncestorPages>, start: u64, pages: u64) -> Result<(), String> {
        let pages = ParentPages { levels }.check(PageRun::new(start, pages).unwrap());
        pages.map_err(|error| error.to_string())
    }

    const PRESENT: PageFlags = PageFlags::PRESENT;
    const PARENT: PageFlags = PageFlags::PARENT;
    const LAZY: PageFlags = PageFlags::LAZY;

    #[test]
    fn pages_in_the_file_of_a_parent_are_found() {
        let lazy = PageFlags(LAZY.0 | PRESENT.0);
        assert_eq!(check(vec![level("new", &[PRESENT, lazy])], FIRST, 8), Ok(()));
        assert_eq!(check(vec![level("new", &[PRESENT])], FIRST + 0x1000, 2), Ok(()));
    }

    #[test]
    fn lazy_pages_that_are_in_no_file_are_missing() {
        let error = check(vec![level("new", &[PRESENT, LAZY])], FIRST, 8).unwrap_err();
        assert!(error.contains("new lacks the bytes of 0x14000"), "{error}");
    }

    #[test]
    fn pages_of_a_parent_s_parent_must_be_in_its_file() {
        let old = |flags| vec![level("new", &[PRESENT, PARENT]), level("old", &[LAZY, flags])];
        assert_eq!(check(old(PRESENT), FIRST, 8), Ok(()));
        let error = check(old(LAZY), FIRST, 8).unwrap_err();
        assert!(error.contains("old lacks the bytes of 0x14000"), "{error}");
        let error = check(vec![level("new", &[PARENT])], FIRST + 0x1000, 1).unwrap_err();
        assert!(error.contains("no further parent lacks the bytes of 0x11000"), "{error}");
    }

    #[test]
    fn pages_between_and_after_runs_are_missing() {
        let error = check(vec![level("new", &[PRESENT])], FIRST, 5).unwrap_err();
        assert!(error.contains("0x14000"), "{error}");
        let error = check(vec![level("new", &[PRESENT])], FIRST - 0x1000, 2).unwrap_err();
        assert!(error.contains("0xf000"), "{error}");
    }
}
