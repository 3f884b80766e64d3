// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reports what an image directory contains, for users and scripts. `docs/diagnose.md` explains the numbers.
//!
//! * [`collect`]: reads all files, and lists what cannot be read.
//! * [`gpu`]: the files of CRIU's amdgpu plugin.
//! * [`text`]: writes the tables.

pub mod collect;
pub mod gpu;
pub mod text;

use rewake_criu_images::PageStats;
use serde::{Serialize, Serializer};

/// One image directory. As JSON it is the stable shape of `rewake inspect --json`: fields are added, never
/// renamed. What could not be read is null, and `damage` says why.
#[derive(Debug, Serialize)]
pub struct InspectReport {
    /// The directory, as the caller named it.
    pub images_dir: String,
    /// Parent images, the nearest first.
    pub parent_dirs: Vec<String>,
    /// The version of the image format.
    pub image_version: Option<u32>,
    /// The image id, if the image is sealed.
    pub image_id: Option<String>,
    /// The fingerprint of the key that has signed the image id, or what is wrong with the signature.
    pub signed_by: Option<String>,
    /// The id of the dump, if CRIU wrote one.
    pub run_id: Option<String>,
    /// CRIU plugins that the restore will need.
    pub plugins: Vec<String>,
    /// The size of a page in bytes.
    pub page_bytes: u64,
    /// Whether a restore can be served lazily.
    pub lazy: Lazy,
    /// The tasks, each after its parent.
    pub tasks: Vec<TaskReport>,
    /// The GPU state.
    pub gpu: gpu::GpuReport,
    /// Sums over what could be read.
    pub totals: Totals,
    /// The directory's image files, by name.
    pub files: Vec<FileReport>,
    /// A message for each damaged or missing item.
    pub damage: Vec<String>,
}

/// Whether a restore can be served lazily.
#[derive(Debug, Serialize)]
pub struct Lazy {
    /// The answer.
    pub verdict: Verdict,
    /// The reason, if the answer is not yes.
    pub reason: Option<String>,
}

/// Whether an image can be served lazily.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// Yes, from the image's files.
    Yes,
    /// Only the dump's page server has some pages.
    NeedsPageServer,
    /// Not on this machine: its kernel refuses what CRIU maps for that.
    NotHere,
    /// No: the image is damaged.
    No,
}

/// One task.
#[derive(Debug, Serialize)]
pub struct TaskReport {
    /// The task's pid in its pid namespace.
    pub pid: u32,
    /// Its parent's pid; 0 for the root.
    pub ppid: u32,
    /// Its process group.
    pub pgid: u32,
    /// Its session.
    pub sid: u32,
    /// The distance from the root of the tree.
    #[serde(skip)]
    pub depth: usize,
    /// alive, stopped, zombie, or "unknown N".
    pub state: Option<String>,
    /// Its short name; what is not UTF-8 in it is U+FFFD.
    pub comm: Option<String>,
    /// All its threads, the main one included.
    pub threads: Vec<u32>,
    /// The sum of its mappings.
    pub mapped_bytes: Option<u64>,
    /// The sum of its mappings that CRIU restores lazily.
    pub lazy_able_bytes: Option<u64>,
    /// Its pages; null for a task without memory.
    pub pages: Option<Pages>,
    /// Its mappings; null for a task without memory.
    pub vmas: Option<Vec<VmaReport>>,
}

/// Numbers of pages. `total = lazy + eager = present + parent + remote`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Pages {
    /// Pages that the image lists.
    pub total: u64,
    /// Pages that are loaded while the task runs.
    pub lazy: u64,
    /// Pages that are loaded before the task runs.
    pub eager: u64,
    /// Pages in this directory.
    pub present: u64,
    /// Pages in a parent image.
    pub parent: u64,
    /// Pages that the dump's page server has.
    pub remote: u64,
    /// Present pages that are all zeros; null if they could not be read.
    pub zero: Option<u64>,
}

impl Pages {
    fn new(stats: &PageStats, zero: Option<u64>) -> Self {
        Self {
            total: stats.total,
            lazy: stats.lazy,
            eager: stats.eager,
            present: stats.present,
            parent: stats.in_parent,
            remote: stats.remote,
            zero,
        }
    }

    /// Adds another task's pages. The sums saturate: a damaged image can claim more than fits in 64 bits.
    fn add(&mut self, other: &Self) {
        let sums = [
            (&mut self.total, other.total),
            (&mut self.lazy, other.lazy),
            (&mut self.eager, other.eager),
            (&mut self.present, other.present),
            (&mut self.parent, other.parent),
            (&mut self.remote, other.remote),
        ];
        for (sum, more) in sums {
            *sum = sum.saturating_add(more);
        }
        self.zero = self.zero.zip(other.zero).map(|(sum, more)| sum.saturating_add(more));
    }
}

/// One mapping, or a guard inside one.
#[derive(Debug, Serialize)]
pub struct VmaReport {
    /// The first address, as hexadecimal text: JSON's numbers end at 2^53.
    #[serde(serialize_with = "hexadecimal")]
    pub start: u64,
    /// The first address after it.
    #[serde(serialize_with = "hexadecimal")]
    pub end: u64,
    /// Its length.
    pub bytes: u64,
    /// The kind of mapping.
    pub kind: &'static str,
    /// The PROT_* flags as text: `rwx`.
    #[serde(serialize_with = "protection")]
    pub prot: u32,
    /// Whether CRIU restores it lazily.
    pub lazy_able: bool,
    /// Its pages that the image lists; all others are zeros or have the mapped file's contents.
    pub pages: u64,
    /// Its pages that are loaded while the task runs.
    pub lazy_pages: u64,
}

/// One file of the directory.
#[derive(Debug, Serialize)]
pub struct FileReport {
    /// Its name.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// The task whose pages these are, for a pages file; null for shared memory and other files.
    pub task: Option<u32>,
}

/// Sums over what could be read.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub struct Totals {
    /// The number of tasks.
    pub tasks: usize,
    /// The number of threads.
    pub threads: usize,
    /// The bytes of all mappings.
    pub mapped_bytes: u64,
    /// The bytes of mappings that CRIU restores lazily.
    pub lazy_able_bytes: u64,
    /// The pages of tasks, without shared memory.
    pub pages: Pages,
    /// The number of image files.
    pub files: usize,
    /// The sum of their lengths.
    pub file_bytes: u64,
}

impl Totals {
    fn of(tasks: &[TaskReport], files: &[FileReport]) -> Self {
        let pages = Pages { zero: Some(0), ..Pages::default() };
        let mut totals = Self { tasks: tasks.len(), files: files.len(), pages, ..Self::default() };
        for task in tasks {
            totals.threads = totals.threads.saturating_add(task.threads.len());
            totals.mapped_bytes = totals.mapped_bytes.saturating_add(task.mapped_bytes.unwrap_or(0));
            totals.lazy_able_bytes = totals.lazy_able_bytes.saturating_add(task.lazy_able_bytes.unwrap_or(0));
            if let Some(pages) = &task.pages {
                totals.pages.add(pages);
            }
        }
        totals.file_bytes = files.iter().fold(0, |sum, file| u64::saturating_add(sum, file.bytes));
        totals
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn hexadecimal<S: Serializer>(address: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&format_args!("{address:#x}"))
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn protection<S: Serializer>(prot: &u32, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&text::protection(*prot))
}

#[cfg(test)]
mod tests;
