// SPDX-License-Identifier: MIT OR Apache-2.0
//! An image that a session serves: which bytes of which open file belong at which address.
//!
//! An image is hostile input, so no process of a session parses one. The [planner](crate::planner) does, in
//! a confined process, and returns its plans in a sealed memory file with the descriptors of the pages files
//! ([`planner::open`](crate::planner::open)). A successor gets both ([`Image::seal`]). No path is looked up a
//! second time as long as one of the streamer's processes lives (I7); `rewake recover` opens the files again,
//! and each must be the same file ([`session_store`](crate::ledger::session_store)).

pub(crate) mod draft;
mod file_place;
mod opened_by;
pub(crate) mod plan_file;
pub(crate) mod remote_memory;
pub(crate) mod sealed;

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::ensure;
use remote_memory::RemoteMemory;
use rewake_criu_images::{Digest, ImageDir};
use rewake_image_io::ImageFile;
use rewake_pager::{Plan, Prefetch};
use rewake_process::names::printable;

use crate::session::WorkingSetPart;

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
    /// The root of the tree.
    root: u32,
    /// The pages files of all tasks, each once. Also those with GPU memory of which another host has some
    /// bytes.
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

    /// Returns why the recorded working set is not used, or `None` if it is, or if there is none.
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

    /// Returns the root of the tree, by the pid in the names of its images.
    pub(crate) fn root(&self) -> i32 {
        self.root.cast_signed()
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
