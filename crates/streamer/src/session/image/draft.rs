// SPDX-License-Identifier: MIT OR Apache-2.0
//! Parses an image and plans its restore. Only the planner does that, and tests.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::path::PathBuf;

use anyhow::{Context as _, bail, ensure};
use rewake_criu_images::{Digest, ImageDir, LazyExtent, LazyPlan};
use rewake_image_io::FileState;
use rewake_manifest::{ImageChecksums, read_chain};
use rewake_pager::{Extent, Plan};

use super::lease::lease;
use crate::session::gpu_pinned::gpu_registered_ranges;

/// What a session needs of an image, as its planner found it.
#[derive(Debug, Default)]
pub(crate) struct Draft {
    /// Device and inode of the image directory.
    pub(crate) directory: (u64, u64),
    /// See [`ImageDir::dump_id`].
    pub(crate) dump: Digest,
    pub(crate) digest: Digest,
    /// The pages files of all tasks, each once.
    pub(crate) files: Vec<DraftFile>,
    /// Tasks by the pid in the names of their images. None for those without memory (zombies).
    pub(crate) tasks: BTreeMap<u32, Option<DraftTask>>,
    /// The leases of the image and its parents.
    pub(crate) leases: Vec<File>,
    /// The checksums of the files' blocks.
    pub(crate) checksums: Vec<u64>,
    /// The index in `files` of each inode's file.
    by_inode: BTreeMap<(u64, u64), usize>,
}

/// A pages file.
#[derive(Debug)]
pub(crate) struct DraftFile {
    pub(crate) file: File,
    pub(crate) path: PathBuf,
    pub(crate) state: FileState,
    /// The place in [`Draft::checksums`] of its first block; none if its image is not sealed.
    pub(crate) checksums: Option<usize>,
}

/// The missing pages of one task.
#[derive(Debug)]
pub(crate) struct DraftTask {
    pub(crate) extents: Vec<Extent>,
    /// The files that the extents name by index, each as an index in [`Draft::files`].
    pub(crate) files: Vec<usize>,
    /// Addresses that are loaded before all others.
    pub(crate) first: Vec<Range<u64>>,
}

impl Draft {
    /// Reads and checks everything that a session needs.
    ///
    /// # Errors
    /// Fails when a file is missing, damaged or truncated, or when the image lacks pages.
    pub(crate) fn read(images: &ImageDir) -> anyhow::Result<Self> {
        let parents = images.ancestors();
        let chain: Vec<&ImageDir> = [images].into_iter().chain(&parents).collect();
        let leases =
            chain.iter().filter_map(|images| lease(images).transpose()).collect::<anyhow::Result<_>>()?;
        let mut draft = Self { directory: images.id(), dump: images.dump_id()?, leases, ..Self::default() };
        let mut first = gpu_registered_ranges(images);
        for task in images.tasks()? {
            let first = first.remove(&task.pid).unwrap_or_default();
            let plan =
                if task.state.has_memory() { Some(draft.task(images, task.pid, first)?) } else { None };
            draft.tasks.insert(task.pid, plan);
        }
        draft.digest = images.digest();
        draft.add_checksums(read_chain(&chain)?)?;
        Ok(draft)
    }

    fn task(&mut self, images: &ImageDir, pid: u32, first: Vec<Range<u64>>) -> anyhow::Result<DraftTask> {
        let LazyPlan { files, extents, remote_pages } = images.lazy_plan(pid)?;
        let pagemap = || format!("{}/pagemap-{pid}.img", images.path().display());
        if remote_pages > 0 {
            bail!(
                "{}: {remote_pages} pages are not in the image (it was made by `criu dump --lazy-pages`): \
                 they can only come from that dump's page server, which is not supported yet",
                pagemap()
            );
        }
        let extent = |extent: LazyExtent| Extent {
            target: extent.vaddr,
            file: extent.file,
            file_offset: extent.file_offset,
            pages: extent.pages,
        };
        let plan = Plan::new(extents.into_iter().map(extent).collect()).with_context(pagemap)?;
        let files = files.into_iter().map(|file| self.file(file.file, file.path));
        let files = files.collect::<anyhow::Result<_>>()?;
        Ok(DraftTask { extents: plan.into_extents(), files, first })
    }

    /// Adds the checksums of the files, from the manifest of the directory that each is in.
    fn add_checksums(&mut self, chain: Vec<Option<ImageChecksums>>) -> anyhow::Result<()> {
        for (name, memory) in chain.into_iter().flatten().flat_map(|image| image.memory) {
            let Some(file) = self.by_inode.get(&memory.identity).and_then(|at| self.files.get_mut(*at))
            else {
                continue;
            };
            ensure!(file.state.key.len == memory.length, "{name}: its length changed while it was opened");
            file.checksums = Some(self.checksums.len());
            self.checksums.extend(memory.checksums);
        }
        Ok(())
    }

    /// Returns the index of an open file. A file that another task has already is closed.
    fn file(&mut self, file: File, path: PathBuf) -> anyhow::Result<usize> {
        let state = FileState::of(&file).with_context(|| format!("stat {}", path.display()))?;
        let at = *self.by_inode.entry((state.key.dev, state.key.ino)).or_insert(self.files.len());
        if at == self.files.len() {
            self.files.push(DraftFile { file, path, state, checksums: None });
        }
        Ok(at)
    }
}
