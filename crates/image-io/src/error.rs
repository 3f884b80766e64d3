// SPDX-License-Identifier: MIT OR Apache-2.0
//! Errors of this crate. Every message has the file, the place and what to do.

use std::io;
use std::path::{Path, PathBuf};

/// A transfer that was not done to its end. Bytes that were read must not be used.
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    /// The file has no bytes at this offset: it is truncated, or the offset is wrong.
    #[error(
        "reading {expected} bytes at offset {offset} of {}: the file ends after {got} of them; \
         it is truncated or does not belong to this image: dump or copy it again",
        file.display()
    )]
    Short {
        /// Name the file was opened by.
        file: PathBuf,
        /// Byte offset in the file where the transfer began.
        offset: u64,
        /// Bytes that were needed.
        expected: usize,
        /// Bytes before the end of the file.
        got: usize,
    },
    /// The kernel refused the transfer, also when it was tried again.
    #[error(
        "{act} {expected} bytes at offset {offset} of {}: failed after {tries} tries: {source}; \
         check the storage below it (kernel log) or use another copy of the image",
        file.display()
    )]
    Io {
        /// What was done.
        act: &'static str,
        /// Name the file was opened by.
        file: PathBuf,
        /// Byte offset in the file where the transfer began.
        offset: u64,
        /// Bytes that were needed.
        expected: usize,
        /// How often the failing call was tried.
        tries: u32,
        /// The last refusal.
        r#source: io::Error,
    },
    /// The file system gave bytes in pieces so small that the bound on pieces was reached.
    #[error(
        "{act} {expected} bytes at offset {offset} of {}: gave up after {calls} calls that moved {got} \
         bytes in all; the file system under it moves less than a page at a time: copy the image elsewhere",
        file.display()
    )]
    Fragmented {
        /// What was done.
        act: &'static str,
        /// Name the file was opened by.
        file: PathBuf,
        /// Byte offset in the file where the transfer began.
        offset: u64,
        /// Bytes that were needed.
        expected: usize,
        /// Bytes transferred in all.
        got: usize,
        /// Calls issued.
        calls: u32,
    },
    /// A block is not what was sealed.
    #[error(
        "reading {length} bytes at offset {offset} of {}: some are not those that were sealed, also when \
         they are read past the page cache; run `rewake verify` on the image directory for all that is \
         damaged, and restore from another copy",
        file.display()
    )]
    Damaged {
        /// Name the file was opened by.
        file: PathBuf,
        /// Byte offset in the file where the block begins.
        offset: u64,
        /// Bytes of the block.
        length: usize,
    },
    /// A page is not what a page server sent and this host stored.
    #[error(
        "reading {length} bytes at offset {offset} of {}: they are not those that arrived, because the disk \
         has lost what was written to it, or another program has written there; restore again, with another \
         work directory",
        file.display()
    )]
    Lost {
        /// Name of the file.
        file: PathBuf,
        /// Byte offset in the file where the page begins.
        offset: u64,
        /// Bytes of the page.
        length: usize,
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

impl TransferError {
    /// Says that a file ends after `got` of the expected bytes.
    pub(crate) fn short(file: &Path, offset: u64, expected: usize, got: usize) -> Self {
        Self::Short { file: file.to_path_buf(), offset, expected, got }
    }
}

/// Setting up a file, the cache or an engine failed.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The file could not be opened or examined.
    #[error("opening {}: {error}", file.display())]
    Open {
        /// Name the file was opened by.
        file: PathBuf,
        /// The kernel's answer.
        error: io::Error,
    },
    /// A directory, pipe, socket or device where a file was expected.
    #[error("opening {}: expected a regular file", file.display())]
    NotRegular {
        /// Name the file was opened by.
        file: PathBuf,
    },
    /// An inherited file is not the one that was opened, or its contents may have changed.
    #[error(
        "taking over {}: {what}; restore again from an unchanged copy of the image",
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
        /// Bytes that were needed.
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
