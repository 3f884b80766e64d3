// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tracks which pages of an address space are missing, where their bytes are, and what to fill next.
//!
//! A [`Plan`] describes which bytes of which file belong at which address when the process starts. It never
//! changes; a process and all processes forked from it share it. A [`ResidencyMap`] follows one address space
//! from then on: pages become resident, and the program drops memory, moves memory and forks. It does no I/O,
//! reads no clock and starts no thread, so that simulation can test all of it (`tests/simulation`).
//!
//! # The rule for callers
//! Reading an event from a userfaultfd resumes the thread that caused it. An address that was looked up
//! before may mean something else afterwards. So callers lock the map:
//! - shared from [`ResidencyMap::locate`] or [`ResidencyMap::runs`] until the fill of those addresses and
//!   [`ResidencyMap::set_resident`] returned;
//! - exclusively from before an event is read until [`ResidencyMap::apply`] or [`ResidencyMap::fork`]
//!   returned.
//!
//! # Invariants ([`ResidencyMap::check`])
//! - Every page of the plan has one target address or is dropped; no two pages have the same target.
//! - A page is *settled* when it is resident or dropped. It never becomes missing again.
//! - `missing()` is the number of pages that are not settled. While [`ResidencyMap::set_resident`] runs on
//!   another thread it may be too high, but never too low: zero means that no page is missing.
//! - A block that the schedule calls done has no missing page.
#![cfg_attr(not(test), deny(clippy::unwrap_used))]
#![forbid(unsafe_code)]

mod bits;
mod change;
mod plan;
mod remaps;
mod residency_map;
mod schedule;
mod snapshot;
mod sweeps;

pub use change::{Change, ChangeError};
pub use plan::{Block, BlockIx, Extent, FileRun, PageIx, Plan, PlanError};
pub use residency_map::{Locate, Place, Prefetch, ResidencyMap, Run};
pub use schedule::{Finish, PROMOTED_BLOCKS};
pub use snapshot::{RestoreError, Segment};
pub use sweeps::{MAX_WINDOW, Sweeps};

/// Bytes in a page: the only page size that CRIU serves lazily on x86-64.
pub const PAGE_SIZE: u64 = 4096;
/// Pages in a block, an aligned 64 KiB of a pages file: the unit of claiming and reading. A thread waits
/// hardly longer for a block than for a page, and reading blocks wastes no disk bandwidth.
pub const BLOCK_PAGES: u64 = 16;

/// Counts and indices are 64 bits wide everywhere; slices want `usize`.
#[expect(clippy::cast_possible_truncation, reason = "the same width, asserted below")]
const fn index(value: u64) -> usize {
    value as usize
}

const _: () = assert!(usize::BITS == 64, "CRIU's lazy pages exist on 64-bit machines only");
