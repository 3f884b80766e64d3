// SPDX-License-Identifier: MIT OR Apache-2.0
//! Manifests of images. An image directory with a manifest is complete, and proves every byte of itself.
//!
//! * [`seal()`] reads an image and writes its manifest. [`verify()`] reads both and reports what differs;
//!   [`verify_files()`] reads the manifest only.
//! * [`ManifestReader`] reads a manifest record by record: a manifest may be longer than memory is.
//! * [`read_checksums`] gives a restore what it checks blocks of memory with.
//!
//! `docs/manifest.md` describes the format and what it guarantees.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable))]

mod checksums;
mod difference;
mod directory;
mod error;
mod format;
mod generated;
mod names;
mod parallel;
mod seal;
mod segment;
mod verify;

pub use checksums::{ImageChecksums, MemoryFile, read_chain, read_checksums, read_partial_checksums};
pub use difference::ImageDifference;
pub use directory::is_covered;
pub use error::{ManifestError, Result};
pub use format::{ManifestReader, ManifestRecord, SealedFile, SealedParent};
pub use names::{MANIFEST_NAME, MAX_WORKING_SET, PARENT, PARTIAL_NAME, WORKING_SET_NAME};
pub use seal::{SealReport, refuse_partial, seal};
pub use segment::{SealedChunk, SealedSegment};
pub use verify::{VerifyReport, verify, verify_files};
