// SPDX-License-Identifier: MIT OR Apache-2.0
//! Opens and checks a whole image before a session accepts a restore.
//!
//! It opens the directory once, and every file relative to it. Afterwards the session uses the open files and
//! the plans made from them, and a successor gets both ([`Image::seal`]). No path is looked up a second time
//! (I7).

mod sealed;

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, bail};
use rewake_criu_images::{Digest, ImageDir, LazyPlan};
use rewake_image_io::ImageFile;
use rewake_pager::{Extent, Plan};

use crate::session::gpu_pinned::gpu_registered_ranges;

/// The missing pages of one task, and where their bytes are.
#[derive(Debug)]
pub struct TaskPlan {
    /// The missing pages.
    pub plan: Arc<Plan>,
    /// The files that the plan's extents name by index.
    pub files: Arc<Vec<Arc<ImageFile>>>,
    /// Addresses that are loaded before all others.
    pub first: Vec<Range<u64>>,
}

/// A checked image directory.
#[derive(Debug, Default)]
pub struct Image {
    /// Tasks by the pid in the names of their images. None for those without memory (zombies).
    plans: BTreeMap<u32, Option<TaskPlan>>,
    /// The pages files of all tasks, each once.
    files: Vec<Arc<ImageFile>>,
    /// The index in `files` of each inode's file.
    by_inode: HashMap<(u64, u64), usize>,
    digest: Digest,
}

impl Image {
    /// Reads and checks everything that a session needs.
    ///
    /// # Errors
    /// Fails when a file is missing, damaged or truncated, or when the image lacks pages.
    pub fn open(path: &Path) -> anyhow::Result<Self> {
        let images = ImageDir::open(path)?;
        images.inventory()?;
        let mut image = Self::default();
        let mut first = gpu_registered_ranges(&images);
        for task in images.tasks()? {
            let first = first.remove(&task.pid).unwrap_or_default();
            let plan =
                if task.state.has_memory() { Some(image.task(&images, task.pid, first)?) } else { None };
            image.plans.insert(task.pid, plan);
        }
        image.digest = images.digest();
        Ok(image)
    }

    fn task(&mut self, images: &ImageDir, pid: u32, first: Vec<Range<u64>>) -> anyhow::Result<TaskPlan> {
        let LazyPlan { files, extents, remote_pages } = images.lazy_plan(pid)?;
        let pagemap = || format!("{}/pagemap-{pid}.img", images.path().display());
        if remote_pages > 0 {
            bail!(
                "{}: {remote_pages} pages are not in the image (it was made by `criu dump --lazy-pages`): they \
                 can only come from that dump's page server, which is not supported yet",
                pagemap()
            );
        }
        let extent = |extent: rewake_criu_images::LazyExtent| Extent {
            target: extent.vaddr,
            file: extent.file,
            file_offset: extent.file_offset,
            pages: extent.pages,
        };
        let plan = Plan::new(extents.into_iter().map(extent).collect()).with_context(pagemap)?;
        let open = |file: rewake_criu_images::PagesFile| {
            anyhow::Ok(self.deduplicate(ImageFile::from_file(file.file, file.path)?))
        };
        let files = files.into_iter().map(open).collect::<Result<_, _>>()?;
        Ok(TaskPlan { plan: Arc::new(plan), files: Arc::new(files), first })
    }

    /// Returns the open file of the same inode if a task has it already, and adds `file` otherwise.
    fn deduplicate(&mut self, file: Arc<ImageFile>) -> Arc<ImageFile> {
        let at = *self.by_inode.entry(inode(&file)).or_insert(self.files.len());
        if at == self.files.len() {
            file.join();
            self.files.push(file);
        }
        Arc::clone(&self.files[at])
    }

    /// Returns a digest of the parsed CRIU files, which identifies the image. It does not cover the contents
    /// of memory.
    #[must_use]
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// Returns the number of tasks, zombies included. Each of them reports once.
    #[must_use]
    pub fn tasks(&self) -> usize {
        self.plans.len()
    }

    /// Returns whether the image has this task.
    #[must_use]
    pub fn has_task(&self, pid: u32) -> bool {
        self.plans.contains_key(&pid)
    }

    /// Returns the plan of a task with memory.
    #[must_use]
    pub fn plan(&self, pid: u32) -> Option<&TaskPlan> {
        self.plans.get(&pid)?.as_ref()
    }

    /// Returns the number of lazy pages of all tasks.
    #[must_use]
    pub fn lazy_pages(&self) -> u64 {
        self.plans.values().flatten().map(|task| task.plan.pages()).sum()
    }
}

fn inode(file: &ImageFile) -> (u64, u64) {
    (file.key().dev, file.key().ino)
}
