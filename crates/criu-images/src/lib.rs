// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads, writes and validates CRIU's image formats; it never trusts a length.
//!
//! [`ImageDir`] is the entry point: it reads the inventory, the tasks, their mappings and their pages, and
//! checks each. [`ImageDir::lazy_plan`] returns where the bytes of every lazy page are, in the image or in
//! its parents. With the feature `testing`, `write` makes whole images, and `fuzz` feeds bytes to the
//! parsers.
//!
//! Sources for the formats: CRIU 4.1.1 and 4.2.1; this crate reads both.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable))]

pub mod amdgpu;
mod arriving;
mod digest;
mod dir;
mod eager;
mod error;
mod files;
mod frame;
#[cfg(feature = "testing")]
pub mod fuzz;
mod generated;
mod inventory;
mod lease;
mod memory_files;
mod mm;
pub mod open;
mod overcommit;
mod pagemap;
mod plan;
pub mod rewake;
mod stats;
mod tasks;
mod user_namespace;
#[cfg(feature = "testing")]
pub mod write;

pub use arriving::{ARRIVING_NAME, add_arriving_file};
pub use digest::Digest;
pub use dir::{INVENTORY_NAME, ImageDir, MAX_PARENTS};
pub use error::{ImageError, Result};
pub use files::MAX_FILES;
pub use inventory::{IMAGE_VERSION, Inventory};
pub use lease::ImageLease;
pub use memory_files::{CHUNK, GPU_HEADER, MemoryFiles, MemoryPlace, is_gpu_pages_file};
pub use mm::{MAX_VMAS, Mm, Vma};
pub use overcommit::{LazyMappings, Overcommit};
pub use pagemap::{
    Generation, MAX_PAGEMAP_ENTRIES, PageFlags, Pagemap, PagemapEntry, PagemapId, pagemap_head,
    pagemap_record,
};
pub use plan::{LazyExtent, LazyPlan, PagesFile, RemotePlan, pages_name};
pub use stats::PageStats;
pub use tasks::{MAX_TASKS, Task, TaskState};
pub use user_namespace::user_namespace_refusal;

/// Bytes in a page of an image: CRIU writes only base pages.
pub const PAGE: u64 = 4096;

/// The mode of an image's file, from which the umask takes. A task in a user namespace opens files of its
/// image itself, as that namespace's root, so it must be able to read what another user has written. CRIU
/// makes them so, too.
pub const FILE_MODE: u32 = 0o644;
/// [`PAGE`] as a buffer length.
const PAGE_LEN: usize = 4096;
