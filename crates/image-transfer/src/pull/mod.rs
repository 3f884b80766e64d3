// SPDX-License-Identifier: MIT OR Apache-2.0
//! Copies a sealed image from another host into a directory. The manifest comes first, so zeros are not sent,
//! duplicates are sent once, and each chunk is checked by its hash before it is written. The directory
//! becomes an image when its manifest is put in place, at the end, after all files are on the disk.
//!
//! * [`pull`](pull()): the whole of it. `source`: the connection, and a new one after a cut. `chunks`: which
//!   chunks there are, and where each one comes from. `target`: the files in the directory.

mod chunks;
mod image;
mod source;
mod target;

pub use chunks::ChunkPlace;
pub use image::{
    ID_DIGITS, MAX_MANIFEST, PullReport, complete, complete_image, pull, pull_eager, pull_eager_unread,
};
pub use source::{ChunkSource, ImageSource};
pub use target::keep_signature;
