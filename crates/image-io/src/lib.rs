// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads pages files once, into bounded memory, with io_uring, plain reads or a simulation.
//!
//! An [`Engine`] reads a [`PagesFile`] block by block ([`BLOCK`]) into buffers that the [`BlockCache`] lends.
//! The cache then publishes each block as a [`BlockRef`] for every session that needs it. All threads share
//! one cache; each thread owns one engine.
//!
//! [`files`] transfers GPU memory in both directions, in pieces of up to 2 MiB. [`io_budget`] limits the
//! background reads of both.
//!
//! Invariants:
//! - *Never invented bytes*: only the owner of a buffer can publish it, and a read that is `Ok` has filled
//!   all of it. A file that ends early is an error that names the file, never zeros. A file that may have
//!   been written to since it was opened is an error, too.
//! - *Bounded memory*: all buffers lie in one mapping whose size is the budget.
//! - *Single flight*: a block that several callers need is read once.

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
mod page_cache;
mod ring;
mod shared_readers;
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

/// Bytes in a page: the smallest unit of a read, and the alignment of every buffer and direct read.
pub const PAGE: usize = 4096;

/// Bytes in a block, an aligned part of a pages file: the unit of reading, caching and single flight.
///
/// A block has 16 pages. A page fault may wait for a whole block, so that nothing is read twice: disks that
/// read a page in 40 µs read a block in 75 µs. Adjacent blocks are submitted together ([`Engine::flush`]),
/// and the kernel makes one request of them: that gives a disk's full rate.
pub const BLOCK: usize = 64 * 1024;
