// SPDX-License-Identifier: MIT OR Apache-2.0
//! Errors of archives.

use std::io;
use std::path::PathBuf;

/// Why an archive was not extracted. Every message has the file, and what is wrong.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ArchiveError {
    /// The archive is not one of a checkpoint, or not whole.
    #[error("{}: {what}", archive.display())]
    Archive {
        /// The archive.
        archive: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// The directory has files.
    #[error("{}: not empty: use a new directory", directory.display())]
    NotEmpty {
        /// The directory.
        directory: PathBuf,
    },
    /// A file or the directory cannot be written.
    #[error("{}: cannot write it: {reason}", directory.display())]
    Directory {
        /// The file or the directory.
        directory: PathBuf,
        /// The operating system's answer.
        reason: io::Error,
    },
    /// A short archive became bytes of a number that may be meant to fill the file system.
    #[error(
        "{}: its {length} bytes became more than {limit} bytes that are not zeros, expected at most {ratio} \
         for each, or 1/{share} of the free space: extract it where more is free, if you trust it",
        archive.display()
    )]
    Expands {
        /// The archive.
        archive: PathBuf,
        /// Its bytes.
        length: u64,
        /// The most bytes that it may become.
        limit: u64,
        /// What each of its bytes may become, on average.
        ratio: u64,
        /// The part of the free space that it may fill in any case.
        share: u64,
    },
    /// The file system has not enough space.
    #[error("{}: {length} bytes do not fit: the file system has {free} free", file.display())]
    Space {
        /// The file.
        file: PathBuf,
        /// Its bytes, and the bytes of the files before it, holes included.
        length: u64,
        /// The bytes that were free before the first file.
        free: u64,
    },
}

/// The result of this crate's functions.
pub type Result<T, E = ArchiveError> = std::result::Result<T, E>;
