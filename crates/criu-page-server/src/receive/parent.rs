// SPDX-License-Identifier: MIT OR Apache-2.0
//! The parent of an image that is received: an incremental dump leaves out pages that it has.

use std::path::Path;

use anyhow::{Context as _, ensure};
use rewake_criu_images::{ImageDir, Pagemap, PagemapId};
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

    /// Reads the pagemap of a memory; none where the image has no pages of it.
    pub(super) fn pages(&self, id: PagemapId) -> anyhow::Result<Option<ParentPages>> {
        let found = self.0.pagemap_of(id)?;
        Ok(found
            .map(|map| ParentPages { file: self.0.path().join(id.file_name()).display().to_string(), map }))
    }

    /// The directory.
    pub(super) fn directory(&self) -> &ImageDir {
        &self.0
    }
}

/// The pages that a parent image has of one memory.
#[derive(Debug)]
pub(super) struct ParentPages {
    /// The pagemap's path, for messages.
    file: String,
    map: Pagemap,
}

impl ParentPages {
    /// Checks that the parent has all pages of a run. That these exist in its own parents was checked when it was
    /// received.
    ///
    /// # Errors
    /// It lacks one.
    pub(super) fn check(&self, run: PageRun) -> anyhow::Result<()> {
        let entries = &self.map.entries;
        let first = entries.partition_point(|entry| entry.end() <= run.vaddr());
        let mut at = run.vaddr();
        for entry in &entries[first..] {
            if entry.vaddr > at || at >= run.end() {
                break;
            }
            at = entry.end();
        }
        ensure!(
            at >= run.end(),
            "{} pages at {:#x} are said to be in the parent image, and {} lacks {at:#x}: dump again in full, or name \
             the image of the last dump with --prev-images-dir",
            run.pages(),
            run.vaddr(),
            self.file
        );
        Ok(())
    }
}
