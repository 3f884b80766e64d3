// SPDX-License-Identifier: MIT OR Apache-2.0
//! Units of I/O.

/// Bytes in a page: the alignment of every buffer and direct transfer.
pub const PAGE: usize = 4096;

/// Bytes in a block, an aligned part of a pages file: the unit of reading, caching and single flight.
///
/// A block has 16 pages. A page fault may wait for a whole block, so that nothing is read twice: disks that
/// read a page in 40 µs read a block in 75 µs. Adjacent blocks are submitted together
/// ([`Engine::flush`](crate::Engine::flush)), and the kernel makes one request of them: that gives a disk's
/// full rate.
pub const BLOCK: usize = 64 * 1024;
