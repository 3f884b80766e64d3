// SPDX-License-Identifier: MIT OR Apache-2.0
//! What an engine is given, and what it returns.

use std::sync::Arc;

use crate::buffer::BufferSlice;
use crate::class::Class;
use crate::error::TransferError;
use crate::file::ImageFile;
use crate::units::PAGE;

/// The direction of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the file into memory.
    Read,
    /// From memory into the file.
    Write,
}

impl Direction {
    pub(super) fn act(self) -> &'static str {
        match self {
            Self::Read => "reading",
            Self::Write => "writing",
        }
    }
}

/// A range of a file and the memory to transfer it to or from.
#[derive(Debug)]
pub struct Request<M> {
    /// A number for the caller, returned unchanged.
    pub token: u64,
    /// The file.
    pub file: Arc<ImageFile>,
    /// The direction.
    pub direction: Direction,
    /// Why the transfer is made.
    pub class: Class,
    /// First byte in the file.
    pub offset: u64,
    /// The memory. The engine owns it until a [`Completion`] returns it.
    pub memory: M,
    /// Offset of the first byte in the memory.
    pub at: usize,
    /// Number of bytes. A transfer can be direct if offset, place and length are multiples of a page.
    pub bytes: usize,
    /// Bytes that a read must get at least: less than `bytes` where the file ends inside its last page.
    pub needed: usize,
}

impl Request<BufferSlice> {
    /// A read that fills a buffer from `offset` on.
    #[must_use]
    pub fn fill(token: u64, file: &Arc<ImageFile>, offset: u64, memory: BufferSlice, class: Class) -> Self {
        let (file, direction, needed) = (Arc::clone(file), Direction::Read, memory.len());
        // Whole pages, for direct reads: buffers have them.
        let bytes = needed.next_multiple_of(PAGE);
        Self { token, file, direction, class, offset, memory, at: 0, bytes, needed }
    }
}

/// A transfer that is over. Transfers end in any order.
#[derive(Debug)]
pub struct Completion<M> {
    /// The request's token.
    pub token: u64,
    /// The request's class.
    pub class: Class,
    /// The request's memory. After a read, its `needed` bytes are the file's when `result` is `Ok`. Else they
    /// must not be used as data.
    pub memory: M,
    /// The outcome.
    pub result: Result<(), TransferError>,
}
