// SPDX-License-Identifier: MIT OR Apache-2.0
//! Moves the bytes of an image's files, for CPU and GPU memory alike.
//!
//! An [`Engine`] transfers between an [`ImageFile`] and memory, with io_uring, threads or a simulation. Each
//! thread owns one. [`io_budget`] limits the background reads of all of them.
//!
//! CPU memory is read block by block ([`BLOCK`]) into buffers that the [`BlockCache`] lends. The cache
//! then publishes each block as a [`BlockRef`] for all that wait for it. GPU memory is
//! transferred in chunks of 2 MiB, between files and staging memory that copy engines access. No other
//! reader needs a chunk after its copy, so the cache does not keep it.
//!
//! A file may be a local copy some of whose pages have not arrived yet ([`FetchSource`]). Such pages are not
//! read: they are requested, and read when they have arrived.
//!
//! Invariants:
//! - *Never invented bytes*: only the owner of a buffer can publish it, and a read that is `Ok` has filled
//!   all of it. A file that ends early is an error that names the file, never zeros. A file that may have
//!   been written to since it was opened is an error, too. So is a block of a sealed file that has other
//!   bytes.
//! - *Bounded memory*: all buffers lie in one mapping whose size is the budget.
//! - *Single flight*: a block that several callers need is read once.
#![cfg_attr(not(test), deny(clippy::unwrap_used))]

mod buffer;
mod cache;
mod cache_regions;
mod class;
mod engine;
mod error;
mod fetch_source;
mod file;
mod free_memory;
mod identity;
pub mod io_budget;
mod memory;
mod page_cache;
mod presence;
mod shared_readers;
mod slots;
mod units;
mod verification;

pub use buffer::BufferSlice;
pub use cache::{Acquire, BlockCache, BlockRef, DEFAULT_BUDGET, LoadGuard};
pub use class::Class;
pub use engine::{
    Completion, DEMAND_RESERVE, DEPTH, Direction, Engine, MAX_EIO_RETRIES, MAX_INTERRUPTIONS,
    MAX_SHORT_CALLS, Request, SimPlan, read_now,
};
pub use error::{StoreError, TransferError};
pub use fetch_source::{FETCH_REQUEST_LEN, FetchReader, FetchRequest, FetchSource, FetchedFile, SentRequest};
pub use file::{ImageFile, ReadMode, keep_in_page_cache};
pub use identity::{FileKey, FileState};
pub use memory::Memory;
pub use presence::{PresenceMap, PresenceWriter, checked_presence_file, presence_file};
pub use slots::DEMAND_BUFFERS;
pub use units::{BLOCK, PAGE};
pub use verification::{BlockChecksums, ChecksumTable, block_checksum, checksum_of_zeros};
