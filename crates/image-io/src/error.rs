// SPDX-License-Identifier: MIT OR Apache-2.0
//! What can go wrong, with the file, the place and the way out in every message.

use std::io;
use std::path::PathBuf;

/// A read that did not fill its buffer. The bytes in the buffer must not be used.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The file has no bytes there: it is truncated, or the offset is wrong.
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
        /// Bytes asked for.
        expected: usize,
        /// Bytes there before the end of the file.
        got: usize,
    },
    /// The kernel refused the read, and went on refusing when it was tried again.
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
        /// Bytes asked for.
        expected: usize,
        /// How often the failing piece was tried.
        tries: u32,
        /// The last refusal.
        r#source: io::Error,
    },
    /// The file system gave bytes in pieces so small that the bound on pieces was reached.
    #[error(
        "reading {expected} bytes at offset {offset} of {}: gave up after {reads} reads that brought {got} \
         bytes in all; the file system under it gives less than a page at a time: copy the image elsewhere",
        file.display()
    )]
    Fragmented {
        /// Name the file was opened by.
        file: PathBuf,
        /// Byte offset in the file where the read began.
        offset: u64,
        /// Bytes asked for.
        expected: usize,
        /// Bytes read when it was given up.
        got: usize,
        /// Reads issued.
        reads: u32,
    },
    /// The file may have other contents than when it was opened.
    #[error(
        "{}: the file changed while it was served: {what}; leave the files of an image as they are until all \
         memory is resident, and restore from an unchanged copy",
        file.display()
    )]
    Changed {
        /// Name the file was opened by.
        file: PathBuf,
        /// What is not as it was.
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
    /// A file that was handed over is not the one that was opened, or its contents may have changed.
    #[error("taking over pages file {}: {what}; restore again from an unchanged copy of the image", file.display())]
    Another {
        /// Name the file was opened by.
        file: PathBuf,
        /// What is not as it was.
        what: String,
    },
    /// The budget cannot hold a block beside the demand buffers.
    #[error("making the block cache: a budget of {budget} bytes is too small; give it at least {least}")]
    Budget {
        /// Bytes asked for.
        budget: usize,
        /// Smallest budget that works, in bytes.
        least: usize,
    },
    /// The kernel refused something that an engine or the cache stands on.
    #[error("{act}: {error}")]
    Setup {
        /// What was being set up.
        act: &'static str,
        /// The kernel's answer.
        error: io::Error,
    },
}
