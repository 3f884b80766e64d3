// SPDX-License-Identifier: MIT OR Apache-2.0
//! Copies a sealed image from another host into a directory. The manifest comes first, so zeros are not sent,
//! duplicates are sent once, and each chunk is checked by its hash before it is written. The directory
//! becomes an image when its manifest is put in place, at the end, after all files are on the disk.
//!
//! * [`pull`](pull()): the whole of it. `source`: the connection, and a new one after a cut. `chunks`: which chunks
//!   there are, and where each one comes from. `target`: the files in the directory.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable))]

mod chunks;
mod pull;
mod source;
mod target;

pub use chunks::ChunkPlace;
pub use pull::{
    ID_DIGITS, MAX_MANIFEST, PullReport, complete, complete_image, pull, pull_eager, pull_eager_unread,
};
pub use source::{ChunkSource, ImageSource};
