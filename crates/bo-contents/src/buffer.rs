// SPDX-License-Identifier: MIT OR Apache-2.0
//! A buffer of a load or save.

use std::ops::RangeInclusive;

use rewake_sdma_copy::Bo;

use crate::process::Name;

/// A buffer that has bytes in a file.
#[derive(Debug, Clone)]
pub(crate) struct StoredBuffer {
    /// The index of the file among all processes' files.
    pub(crate) file: usize,
    /// The chunks that hold its bytes.
    pub(crate) chunks: RangeInclusive<u64>,
    /// The number of chunks that are not done. For a follower, these are chunks of its source.
    pub(crate) left: u64,
    /// The size of the buffer.
    pub(crate) bytes: u64,
    /// The engine's handle, from the first copy to the last.
    pub(crate) bo: Option<Bo>,
    /// Buffers with the same bytes.
    pub(crate) duplicates: Duplicates,
}

/// Other buffers that have a buffer's bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Duplicates {
    /// The buffer whose bytes are read for this one.
    pub(crate) source: Option<Name>,
    /// The buffers that this one's bytes are read for.
    pub(crate) followers: Vec<Name>,
}
