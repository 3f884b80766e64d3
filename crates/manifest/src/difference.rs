// SPDX-License-Identifier: MIT OR Apache-2.0
//! Differences between an image and its manifest.

use std::fmt;

use rewake_criu_images::MemoryPlace;

use crate::names::PARENT;

/// A difference between an image and its manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ImageDifference {
    /// A file is missing.
    Missing {
        /// Its name.
        file: String,
    },
    /// A file of an image that was not sealed. A restore may read it.
    Added {
        /// Its name.
        file: String,
    },
    /// A file has another length.
    Length {
        /// Its name.
        file: String,
        /// Its length in bytes when it was sealed.
        sealed: u64,
        /// Its length now.
        found: u64,
    },
    /// A file cannot be read, or a part of it.
    Unreadable {
        /// Its name.
        file: String,
        /// Why.
        reason: String,
    },
    /// Some bytes of a file are not those that were sealed: at least one in each block, or in the chunk.
    Bytes {
        /// Its name.
        file: String,
        /// The first byte.
        offset: u64,
        /// The number of bytes.
        length: u64,
        /// The memory at `offset`, if this is known.
        place: Option<MemoryPlace>,
    },
    /// The link `parent` says something else, or leads to another image.
    Parent {
        /// What is wrong.
        what: String,
    },
}

impl fmt::Display for ImageDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing { file } => write!(f, "{file}: missing"),
            Self::Added { file } => write!(f, "{file}: not sealed: it was added later"),
            Self::Length { file, sealed, found } => {
                let what = if found < sealed { "truncated" } else { "longer" };
                write!(f, "{file}: {what}: {found} bytes, sealed with {sealed}")
            }
            Self::Unreadable { file, reason } => write!(f, "{file}: {reason}"),
            Self::Bytes { file, offset, length, place } => {
                write!(f, "{file}: wrong bytes in the {length} from offset {offset}")?;
                place.as_ref().map_or(Ok(()), |place| write!(f, " ({place})"))
            }
            Self::Parent { what } => write!(f, "{PARENT}: {what}"),
        }
    }
}
