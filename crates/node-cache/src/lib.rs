// SPDX-License-Identifier: MIT OR Apache-2.0
//! The node's cache: images of stores in directories of this host. Each is fetched once, whatever the number
//! of restores that want it, and they share its files and so its pages in the page cache.
//!
//! * [`NodeCache`]: the cache; start here. `entry`: one image, from its first bytes to the last. `arriving`:
//!   its fetcher, which all streamers share. `images_served`: where the fetcher reads the store.
//! * [`CacheFolder`]: the directories. `space`: which image is removed for another one.
//!
//! Every image is an ordinary image directory, complete or a partial copy. What has arrived is found by
//! checksums when an agent starts: no file says it.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable))]

mod arriving;
mod cache;
mod entry;
mod folder;
mod images_served;
mod space;

pub use arriving::{MemoryLost, SharedSockets};
pub use cache::{CacheContents, CacheCounts, CachePin, CachedImageState, NodeCache};
pub use folder::CacheFolder;
