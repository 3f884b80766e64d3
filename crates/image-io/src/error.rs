// SPDX-License-Identifier: MIT OR Apache-2.0
//! Errors of this crate. Every message has the file, the place and what to do.

use std::io;
use std::path::PathBuf;

/// A read that did not fill its buffer. The bytes in the buffer must not be used.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The file has no bytes at this offset: it is truncated, or the offset is wrong.
    #[error(
        "reading {expected} bytes at offset {offset} of {}: the file ends after {got} of them; \
         it is truncated or does not belong to this image: dump or copy it again",
        file.display()
    )]
    Short {
        /// Name the file was opened by.
        file: PathBuf,
        /// Byte offset in the file where the read began.
        offset: u64,
        /// Bytes requested.
        expected: usize,
        /// Bytes before the end of the file.
        got: usize,
    },
    /// The kernel refused the read, also when it was tried again.
    #[error(
        "reading {expected} bytes at offset {offset} of {}: failed after {tries} tries: {source}; \
         check the storage below it (kernel log) or use another copy of the image",
        file.display()
    )]
    Io {
        /// Name the file was opened by.
        file: PathBuf,
        /// Byte offset in the file where the read began.
        offset: u64,
        /// Bytes requested.
        expected: usize,
        /// How often the failing call was tried.
        tries: u32,
        /// The last refusal.
        r#source: io::Error,
    },
    /// The file system gave bytes in pieces so small that the bound on pieces was reached.
    #[error(
        "reading {expected} bytes at offset {offset} of {}: gave up after {reads} reads that gave {got} \
         bytes in all; the file system under it gives less than a page at a time: copy the image elsewhere",
        file.display()
    )]
    Fragmented {
        /// Name the file was opened by.
        file: PathBuf,
        /// Byte offset in the file where the read began.
        offset: u64,
        /// Bytes requested.
        expected: usize,
        /// Bytes read in all.
        got: usize,
        /// Reads issued.
        reads: u32,
    },
    /// The contents of the file may have changed since it was opened.
    #[error(
        "{}: the file changed while it was served: {what}; leave the files of an image as they are until all \
         memory is resident, and restore from an unchanged copy",
        file.display()
    )]
    Changed {
        /// Name the file was opened by.
        file: PathBuf,
        /// What changed.
        what: String,
    },
}

/// Setting up a file, the cache or an engine failed.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The pages file could not be opened or examined.
    #[error("opening pages file {}: {error}", file.display())]
    Open {
        /// Name the file was opened by.
        file: PathBuf,
        /// The kernel's answer.
        error: io::Error,
    },
    /// A directory, pipe, socket or device where a pages file was expected.
    #[error("opening pages file {}: expected a regular file", file.display())]
    NotRegular {
        /// Name the file was opened by.
        file: PathBuf,
    },
    /// An inherited file is not the one that was opened, or its contents may have changed.
    #[error(
        "taking over pages file {}: {what}; restore again from an unchanged copy of the image",
        file.display()
    )]
    Another {
        /// Name the file was opened by.
        file: PathBuf,
        /// What changed.
        what: String,
    },
    /// The budget is too small for a block and the demand buffers.
    #[error("making the block cache: a budget of {budget} bytes is too small; give it at least {least}")]
    Budget {
        /// Bytes requested.
        budget: usize,
        /// Smallest budget that works, in bytes.
        least: usize,
    },
    /// The kernel refused something that an engine or the cache needs.
    #[error("{act}: {error}")]
    Setup {
        /// What was being set up.
        act: &'static str,
        /// The kernel's answer.
        error: io::Error,
    },
}
