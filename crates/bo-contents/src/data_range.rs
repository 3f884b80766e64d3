// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranges of files that are read.

/// A range of a file that is not a hole, in whole pages. In a sealed file it is in whole blocks, which are
/// checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DataRange {
    pub(crate) start: u64,
    pub(crate) end: u64,
}
