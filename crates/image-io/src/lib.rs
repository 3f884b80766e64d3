// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where bytes come from: pages files read once, into a bounded pool, by io_uring, plain reads or a simulation.
//!
//! The way of a byte: a [`PagesFile`] is read block by block ([`BLOCK`]) by an [`Engine`] into a buffer that
//! the [`BlockCache`] lends, and is then published there as a [`BlockRef`] for every session that wants it.
//! One cache serves all threads; each thread owns one engine.
//!
//! Beside it, [`files`]: transfers of large pieces in both directions, for the contents of buffer objects; and the [`pace`] that
//! both keep to.
//!
//! What holds here:
//! - *Never invented bytes*: a buffer is published only by whoever holds it, and a read that is `Ok` has
//!   filled all of it. A file that ends early is an error that names the file, never zeros; so is one that
//!   may have been written to since it was opened.
//! - *Bounded memory*: all buffers live in one mapping whose size is the budget.
//! - *Single flight*: a block that several callers want is read once.

mod buffer;
mod cache;
mod cache_regions;
pub mod engine;
mod error;
mod file;
pub mod files;
mod identity;
pub mod io_budget;
mod metrics;
mod notifier;
mod page_cache;
mod ring;
mod slots;

pub use buffer::BufferSlice;
pub use cache::{Acquire, BlockCache, BlockRef, DEFAULT_BUDGET, DEMAND_BUFFERS, LoadGuard};
pub use engine::{
    DefaultEngine, Done, Engine, Psync, Read, ReadMode, Sim, SimPlan, Uring, default_engine, read_now,
};
pub use error::{ReadError, StoreError};
pub use file::PagesFile;
pub use identity::{FileKey, FileState};
pub use metrics::{Counters, Metrics};
pub use notifier::Notifier;

/// Bytes in a page: the smallest thing that is read, and the alignment of every buffer and direct read.
pub const PAGE: usize = 4096;

/// Bytes in a block, an aligned piece of a pages file: the unit of reading, caching and single flight.
///
/// 16 pages: a page fault may wait for a whole block (on disks that take 40 µs for a page, a block takes 75), so
/// that nothing is read twice. For a disk's full speed, adjacent blocks are submitted together
/// ([`Engine::flush`]): the kernel makes one request of them.
pub const BLOCK: usize = 64 * 1024;
