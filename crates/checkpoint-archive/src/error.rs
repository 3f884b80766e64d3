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
    /// The file system has not enough space.
    #[error("{}: {length} bytes do not fit: the file system has {free} free", file.display())]
    Space {
        /// The file.
        file: PathBuf,
        /// Its bytes.
        length: u64,
        /// The bytes that are free.
        free: u64,
    },
}

/// The result of this crate's functions.
pub type Result<T, E = ArchiveError> = std::result::Result<T, E>;
