// SPDX-License-Identifier: MIT OR Apache-2.0
//! A whole image, checked and made ready to be served, before any restore is let in.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, bail};
use rewake_criu_images::{ImageDir, LazyPlan};
use rewake_pager::{Extent, Plan};
use rewake_store::PagesFile;

use crate::registered::registered;

/// What one task lacks, and where it is.
#[derive(Debug)]
pub struct TaskPlan {
    /// The pages.
    pub plan: Arc<Plan>,
    /// The files that the plan's extents name by index.
    pub files: Arc<Vec<Arc<PagesFile>>>,
    /// Addresses that come before the rest.
    pub first: Vec<Range<u64>>,
}

/// A checked image directory.
#[derive(Debug, Default)]
pub struct Image {
    /// Tasks by the pid that names their images; none for those without memory (zombies).
    plans: BTreeMap<u32, Option<TaskPlan>>,
}

impl Image {
    /// Reads and checks everything that serving will need.
    ///
    /// # Errors
    /// Any file is missing, damaged or truncated, or pages are not in the image at all.
    pub fn open(path: &Path) -> anyhow::Result<Self> {
        let images = ImageDir::open(path)?;
        images.inventory()?;
        let (mut plans, mut first) = (BTreeMap::new(), registered(&images));
        for task in images.tasks()? {
            let first = first.remove(&task.pid).unwrap_or_default();
            let plan = if task.state.has_memory() {
                Some(Self::task(&images, path, task.pid, first)?)
            } else {
                None
            };
            plans.insert(task.pid, plan);
        }
        Ok(Self { plans })
    }

    fn task(images: &ImageDir, path: &Path, pid: u32, first: Vec<Range<u64>>) -> anyhow::Result<TaskPlan> {
        let LazyPlan { files, extents, remote_pages } = images.lazy_plan(pid)?;
        if remote_pages > 0 {
            bail!(
                "{}/pagemap-{pid}.img: {remote_pages} pages are not in the image (it was made by `criu dump \
                 --lazy-pages`): they can only come from that dump's page server, which is not supported yet",
                path.display()
            );
        }
        let extent = |extent: rewake_criu_images::LazyExtent| Extent {
            target: extent.vaddr,
            file: extent.file,
            file_offset: extent.file_offset,
            pages: extent.pages,
        };
        let plan = Plan::new(extents.into_iter().map(extent).collect())
            .with_context(|| format!("{}/pagemap-{pid}.img", path.display()))?;
        let open = |file: rewake_criu_images::PagesFile| PagesFile::from_file(file.file, file.path);
        let files = files.into_iter().map(open).collect::<Result<_, _>>()?;
        Ok(TaskPlan { plan: Arc::new(plan), files: Arc::new(files), first })
    }

    /// Tasks, zombies included: each reports once.
    #[must_use]
    pub fn tasks(&self) -> usize {
        self.plans.len()
    }

    /// True when the image has this task.
    #[must_use]
    pub fn has_task(&self, pid: u32) -> bool {
        self.plans.contains_key(&pid)
    }

    /// The plan of a task with memory.
    #[must_use]
    pub fn plan(&self, pid: u32) -> Option<&TaskPlan> {
        self.plans.get(&pid)?.as_ref()
    }

    /// Lazy pages of all tasks.
    #[must_use]
    pub fn lazy_pages(&self) -> u64 {
        self.plans.values().flatten().map(|task| task.plan.pages()).sum()
    }
}
