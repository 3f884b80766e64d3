// SPDX-License-Identifier: MIT OR Apache-2.0
//! An image that a session serves: which bytes of which open file belong at which address.
//!
//! An image is hostile input, so no process of a session parses one. The [planner](crate::planner) does, in
//! a confined process, and returns its plans in a sealed memory file with the descriptors of the pages files
//! ([`Image::open`]). A successor gets both ([`Image::seal`]). No path is looked up a second time (I7).

pub(crate) mod draft;
mod file_place;
mod opened_by;
pub(crate) mod remote_memory;
pub(crate) mod sealed;

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, ensure};
use remote_memory::RemoteMemory;
use rewake_criu_images::{Digest, ImageDir};
use rewake_image_io::ImageFile;
use rewake_pager::{Plan, Prefetch};
use rewake_process::names::printable;
use tokio::sync::oneshot;

use crate::session::WorkingSetPart;
use crate::{planner, sys};

/// The missing pages of one task, and where their bytes are.
#[derive(Debug)]
pub struct TaskPlan {
    /// The missing pages.
    pub plan: Arc<Plan>,
    /// The files that the plan's extents name by index.
    pub files: Arc<Vec<Arc<ImageFile>>>,
    /// Addresses that are loaded before all others.
    pub first: Vec<Range<u64>>,
    /// The recorded working set, which is loaded next.
    pub working_set: Vec<Prefetch>,
}

/// Where the memory of an image is when a session begins.
#[derive(Debug, Clone)]
pub enum LazyMemory {
    /// In the image.
    Here,
    /// On a page server. A cache file in this directory gets memory of tasks. Files of the image that arrive
    /// get theirs.
    OnPageServer(PathBuf),
    /// On an image server. The files of the image, whose manifest is partial, get what they lack.
    OnImageServer,
    /// The same, for the agent: streamers share what arrives.
    ForCache,
    /// The agent has the image's files completed. This is its presence map.
    InCache(Arc<OwnedFd>),
}

/// A checked image directory.
#[derive(Debug, Default)]
pub struct Image {
    /// Tasks by the pid in the names of their images. None for those without memory (zombies).
    plans: BTreeMap<u32, Option<TaskPlan>>,
    /// The pages files of all tasks, each once. Also those with GPU memory of which another host has some bytes.
    files: Vec<Arc<ImageFile>>,
    /// Has the memory that another host has.
    remote: Option<RemoteMemory>,
    /// Device and inode of the image directory.
    directory: (u64, u64),
    digest: Digest,
    /// See [`rewake_criu_images::ImageDir::dump_id`].
    dump: Digest,
    /// Why the recorded working set is not used; empty: it is, or there is none.
    working_set_note: String,
    /// Whether buffers of GPUs belong to the recorded working set.
    has_first_buffers: bool,
    /// Why CRIU can restore it on this machine, but not lazily; none: it can, or a successor has the image.
    not_lazy: Option<NotLazy>,
    /// The leases of the image and its parents.
    leases: Vec<OwnedFd>,
    /// The memory file that has all of this; none in tests.
    sealed: Option<OwnedFd>,
}

/// Why CRIU can restore an image on this machine, but not lazily.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("this image cannot be restored lazily on this machine: {0}")]
pub struct NotLazy(pub String);

impl Image {
    /// Has an image checked and planned by a confined process. It blocks, up to the planner's time limit.
    ///
    /// # Errors
    /// Fails when a file is missing, damaged or truncated, or when the image lacks pages; also when the
    /// planner exceeds a limit.
    pub fn open(path: &Path) -> anyhow::Result<Self> {
        planner::plan(path, &LazyMemory::Here)
    }

    /// [`Image::open`] for the control thread, which serves other requests meanwhile.
    ///
    /// # Errors
    /// As for [`Image::open`].
    pub async fn open_in_background(path: PathBuf, memory: LazyMemory) -> anyhow::Result<Self> {
        let (sender, opened) = oneshot::channel();
        let plan = move || planner::plan(&path, &memory);
        // A receiver that has ended was asked to stop.
        let open = move || drop(sender.send(plan()));
        sys::thread_without_signals("planner", open).context("starting a thread")?;
        opened.await.context("the thread that plans the restore has ended")?
    }

    /// Notes why CRIU cannot restore the image lazily on this machine; an empty reason: it can.
    pub(crate) fn that_is_not_lazy(self, reason: String) -> Self {
        Self { not_lazy: (!reason.is_empty()).then_some(NotLazy(reason)), ..self }
    }

    /// Returns why CRIU can restore the image on this machine, but not lazily.
    #[must_use]
    pub fn not_lazy(&self) -> Option<&NotLazy> {
        self.not_lazy.as_ref()
    }

    /// Returns device and inode of the image directory.
    #[must_use]
    pub fn directory(&self) -> (u64, u64) {
        self.directory
    }

    /// Returns the pages files of all tasks, and those with GPU memory of which another host has some bytes.
    pub(crate) fn files(&self) -> &[Arc<ImageFile>] {
        &self.files
    }

    /// Returns a digest of the parsed CRIU files, which identifies the image. It does not cover the contents
    /// of memory.
    #[must_use]
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// Returns the id of the dump that made the image.
    pub(crate) fn dump(&self) -> Digest {
        self.dump
    }

    /// Returns the parts of the recorded working set.
    pub(crate) fn working_set_parts(&self) -> Vec<WorkingSetPart> {
        let of_cpus = self.plans.values().flatten().any(|task| !task.working_set.is_empty());
        let parts = [(of_cpus, WorkingSetPart::Cpus), (self.has_first_buffers, WorkingSetPart::Gpus)];
        parts.into_iter().filter_map(|(has, part)| has.then_some(part)).collect()
    }

    /// Returns why the recorded working set is not used; none if it is, or if there is none.
    pub(crate) fn working_set_note(&self) -> Option<String> {
        (!self.working_set_note.is_empty()).then(|| printable(self.working_set_note.as_bytes()))
    }

    /// Opens the image directory again.
    ///
    /// # Errors
    /// Another directory has its path now.
    pub(crate) fn open_directory(&self, path: &Path) -> anyhow::Result<ImageDir> {
        let images = ImageDir::open(path)?;
        ensure!(images.id() == self.directory, "{}: the path has another directory now", path.display());
        Ok(images)
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
