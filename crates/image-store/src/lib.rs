// SPDX-License-Identifier: MIT OR Apache-2.0
//! A store of images in a bucket, a directory or an OCI registry: chunks once across images, in packs; an
//! index for each image.
//!
//! * [`ImageStore`]: a store, its images, and their names. [`push`](push()) stores an image,
//!   [`verify`](verify()) compares one with its manifest, [`collect_garbage`] removes what no image uses.
//! * [`StoreSource`]: where `rewake_image_transfer::pull` gets an image from. [`StoreFolder`]: what an image
//!   server serves. [`PinnedImage`]: an image for both, whose name may get another one.
//! * `stores`: all that needs the feature `stores`. `absent`: the same names in a program without it, where
//!   each use of a store is refused, with what to build.
//! * In `stores`, `blocks`: chunks in packs, readable by block. `format`: names and indexes. `connect`,
//!   `profile`: credentials. `registry`: a repository of an OCI registry as a store, and an image as an OCI
//!   artifact.
//!
//! No act needs a condition that the store checks. Two pushes write an object of the same name only where it
//! names an image. What is removed waits for a day before its bytes go: `docs/store.md` says why that is
//! enough.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable))]

mod error;
mod report;
mod url;

// Its tests run in every build of tests.
#[cfg(any(test, not(feature = "stores")))]
#[cfg_attr(feature = "stores", allow(dead_code, unreachable_pub))]
mod absent;
#[cfg(feature = "stores")]
mod stores;

pub use error::{ImageStoreError, Result};
pub use report::{GRACE, GarbageReport, StorePushReport, StoreVerifyReport, StoredImage, WrongChunk};
pub use url::{ImageUrl, StoreUrl};

#[cfg(not(feature = "stores"))]
pub use absent::{
    ImageStore, PinnedImage, StoreFolder, StoreSource, collect_garbage, need_stores, push, verify,
};
// Its modules are this crate's.
#[cfg(feature = "stores")]
use stores::*;
#[cfg(feature = "stores")]
pub use stores::{
    garbage::collect_garbage, need_stores, pinned::PinnedImage, push::push, served::StoreFolder,
    source::StoreSource, store::ImageStore, verify::verify,
};
