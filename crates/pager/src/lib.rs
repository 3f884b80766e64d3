// SPDX-License-Identifier: MIT OR Apache-2.0
//! Residency of one address space: which page is missing, where its bytes are, what to fill next.
//!
//! A [`Plan`] says which bytes of which file belong at which address when the process starts; it never
//! changes and is shared by a process and everything forked from it. A [`Space`] follows one address space
//! from there: pages become resident, the program drops and moves memory, forks. It does no I/O, has no
//! clock and starts no thread, so that all of it can be tested by simulation (`tests/simulation`).
//!
//! # The rule for callers
//! Reading an event from a userfaultfd lets the program go on; an address that was looked up before the
//! event was read may mean something else after. So: hold a `Space` shared from [`Space::locate`] or
//! [`Space::runs`] until the fill of those addresses returned and [`Space::set_resident`] was called, and
//! exclusively from before an event is read until [`Space::apply`] (or [`Space::fork`]) returned.
//!
//! # Invariants ([`Space::check`])
//! - Every page of the plan is at one target address or dropped; no two pages have the same target.
//! - A page is *settled* when it is resident or dropped, and never again becomes missing.
//! - `missing()` is the number of pages not settled. While [`Space::set_resident`] runs on another thread it
//!   may be too high, never too low: zero means that nothing is missing.
//! - A block that the schedule calls done has no missing page.

#![forbid(unsafe_code)]

mod bits;
mod change;
mod plan;
mod remaps;
mod residency_map;
mod schedule;
mod snapshot;

pub use change::{Change, ChangeError};
pub use plan::{Block, BlockIx, Extent, PageIx, Plan, PlanError};
pub use residency_map::{Locate, Place, ResidencyMap, Run};
pub use schedule::{Finish, PROMOTED_BLOCKS};
pub use snapshot::{RestoreError, Segment};

/// Bytes in a page: the only size that CRIU serves lazily on x86-64.
pub const PAGE_SIZE: u64 = 4096;
/// Pages in a block, an aligned 64 KiB of a pages file and the unit of claiming and reading: small enough that
/// a thread which waits for one waits hardly longer than for a page, large enough that reading blocks instead
/// of pages wastes nothing of the disk.
pub const BLOCK_PAGES: u64 = 16;

/// Counts and indices are 64 bits wide everywhere; slices want `usize`.
#[expect(clippy::cast_possible_truncation, reason = "the same width, asserted below")]
const fn index(value: u64) -> usize {
    value as usize
}

const _: () = assert!(usize::BITS == 64, "CRIU's lazy pages exist on 64-bit machines only");
