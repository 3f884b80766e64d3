// SPDX-License-Identifier: MIT OR Apache-2.0
//! A store of images in a bucket, a directory or an OCI registry: chunks once across images, in packs; an index for
//! each image.
//!
//! * [`ImageStore`]: a store, its images, and their names. [`push`](push()) stores an image, [`verify`](verify())
//!   compares one with its manifest, [`collect_garbage`] removes what no image uses.
//! * [`StoreSource`]: where `rewake_image_pull` gets an image from. [`StoreFolder`]: what an image server serves.
//!   [`PinnedImage`]: an image for both, whose name may get another one.
//! * `blocks`: chunks in packs, readable by block. `format`: names and indexes. `connect`, `profile`: credentials.
//! * `registry`: a repository of an OCI registry as a store, and an image as an OCI artifact.
//!
//! No act needs a condition that the store checks. Two pushes write an object of the same name only where it names an
//! image. What is removed waits for a day before its bytes go: `docs/store.md` says why that is enough.
#![forbid(unsafe_code)]

mod blocks;
mod connect;
mod error;
mod format;
mod garbage;
mod generated;
mod manifest_bytes;
mod names;
mod pack;
mod pack_run;
mod pinned;
mod profile;
mod push;
mod read_ahead;
mod reader;
mod registry;
mod served;
mod shared_reads;
mod source;
mod store;
mod stored_range;
#[cfg(test)]
mod testing;
mod url;
mod verify;
#[cfg(test)]
mod walk;
mod working_set;

pub use error::{ImageStoreError, Result};
pub use format::StoredImage;
pub use garbage::{GRACE, GarbageReport, collect_garbage};
pub use pinned::PinnedImage;
pub use push::{StorePushReport, push};
pub use served::StoreFolder;
pub use source::StoreSource;
pub use store::ImageStore;
pub use url::{ImageUrl, StoreUrl};
pub use verify::{StoreVerifyReport, WrongChunk, verify};
