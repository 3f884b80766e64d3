// SPDX-License-Identifier: MIT OR Apache-2.0
//! This crate in a program without stores: each use of a store is refused before it begins. There is no value
//! of the types that a store makes, so nothing can be done with one.

use std::convert::Infallible;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use rewake_criu_images::Digest;
use rewake_image_transfer::pull::{ChunkPlace, ChunkSource};
use rewake_image_transfer::server::exports::{ImageFolder, OpenImage, PeerRights};
use rewake_manifest::SealedChunk;
use tokio::runtime::Handle;

use crate::error::{ImageStoreError, Result};
use crate::report::{GarbageReport, StorePushReport, StoreVerifyReport, StoredImage, WrongChunk};
use crate::url::StoreUrl;

/// Refuses what needs a store.
///
/// # Errors
/// Always [`ImageStoreError::NotBuilt`].
pub fn need_stores(what: &str) -> Result<()> {
    Err(ImageStoreError::NotBuilt { what: what.to_owned() })
}

/// A store: none can be opened.
#[derive(Debug, Clone, Copy)]
pub struct ImageStore(Infallible);

impl ImageStore {
    /// Refuses to open a store.
    ///
    /// # Errors
    /// Always [`ImageStoreError::NotBuilt`].
    pub fn open(url: &StoreUrl) -> Result<Self> {
        Err(ImageStoreError::NotBuilt { what: url.to_string() })
    }

    /// Refuses to make a store.
    ///
    /// # Errors
    /// Always [`ImageStoreError::NotBuilt`].
    pub fn create(url: &StoreUrl) -> Result<Self> {
        Self::open(url)
    }

    /// Cannot be called: there is no store.
    #[must_use]
    pub fn counting(self, _received: &Arc<AtomicU64>) -> Self {
        match self.0 {}
    }

    /// Cannot be called: there is no store.
    ///
    /// # Errors
    /// None.
    pub async fn images(&self) -> Result<Vec<(String, Result<StoredImage>)>> {
        match self.0 {}
    }

    /// Cannot be called: there is no store.
    ///
    /// # Errors
    /// None.
    pub async fn image(&self, _name: &str) -> Result<StoredImage> {
        match self.0 {}
    }

    /// Cannot be called: there is no store.
    ///
    /// # Errors
    /// None.
    pub async fn remove(&self, _name: &str) -> Result<Option<Digest>> {
        match self.0 {}
    }
}

/// Cannot be called: there is no store.
///
/// # Errors
/// None.
pub async fn push(store: &ImageStore, _directory: &Path, _name: &str) -> Result<StorePushReport> {
    match store.0 {}
}

/// Cannot be called: there is no store.
///
/// # Errors
/// None.
pub async fn verify(
    store: &ImageStore,
    _name: &str,
    _report: impl FnMut(&WrongChunk),
) -> Result<StoreVerifyReport> {
    match store.0 {}
}

/// Cannot be called: there is no store.
///
/// # Errors
/// None.
pub async fn collect_garbage(store: &ImageStore, _grace: Duration) -> Result<GarbageReport> {
    match store.0 {}
}

/// An image of a store that was opened: there is none.
#[derive(Debug)]
pub struct PinnedImage(Infallible);

impl PinnedImage {
    /// Cannot be called: there is no store.
    ///
    /// # Errors
    /// None.
    pub async fn of(store: &ImageStore, _image: StoredImage) -> Result<Self> {
        match store.0 {}
    }

    /// Cannot be called: there is no image.
    #[must_use]
    pub fn bytes_read(&self) -> u64 {
        match self.0 {}
    }

    /// Cannot be called: there is no image.
    #[must_use]
    pub fn image(&self) -> &StoredImage {
        match self.0 {}
    }

    /// Cannot be called: there is no image.
    ///
    /// # Errors
    /// None.
    pub fn open_files(&self, _runtime: &Handle) -> anyhow::Result<Box<dyn OpenImage>> {
        match self.0 {}
    }
}

/// Where a copy of an image comes from: no store.
#[derive(Debug)]
pub struct StoreSource(Infallible);

impl StoreSource {
    /// Cannot be called: there is no store.
    ///
    /// # Errors
    /// None.
    pub async fn open(store: &ImageStore, _name: &str) -> Result<Self> {
        match store.0 {}
    }

    /// Cannot be called: there is no image.
    #[must_use]
    pub fn of(pinned: &PinnedImage, _runtime: Handle) -> Self {
        match pinned.0 {}
    }
}

impl ChunkSource for StoreSource {
    fn signature(&self) -> Option<&[u8]> {
        match self.0 {}
    }

    fn image_id(&self) -> Digest {
        match self.0 {}
    }

    fn manifest_length(&self) -> u64 {
        match self.0 {}
    }

    fn has_room(&self) -> bool {
        match self.0 {}
    }

    fn request_manifest(&mut self, _offset: u64, _length: u32) -> anyhow::Result<()> {
        match self.0 {}
    }

    fn request_chunk(&mut self, _place: ChunkPlace, _chunk: &SealedChunk) -> anyhow::Result<()> {
        match self.0 {}
    }

    fn next_data(&mut self, _into: &mut Vec<u8>) -> anyhow::Result<u64> {
        match self.0 {}
    }

    fn working_set(&mut self, _into: &mut Vec<u8>) -> Option<u64> {
        match self.0 {}
    }
}

/// A store whose images are served: there is none.
#[derive(Debug)]
pub struct StoreFolder(Infallible);

impl StoreFolder {
    /// Cannot be called: there is no store.
    #[must_use]
    pub fn new(store: ImageStore, _runtime: Handle) -> Self {
        match store.0 {}
    }
}

impl ImageFolder for StoreFolder {
    fn open(&self, _name: &Path, _ancestor: u32, _rights: &PeerRights) -> anyhow::Result<Box<dyn OpenImage>> {
        match self.0 {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_is_refused_with_what_to_build() {
        let url: StoreUrl = "s3://bucket/images".parse().unwrap();
        let refusals = [
            ImageStore::open(&url).unwrap_err(),
            ImageStore::create(&url).unwrap_err(),
            need_stores("s3://bucket/images").unwrap_err(),
        ];
        for refusal in refusals {
            assert_eq!(
                refusal.to_string(),
                "s3://bucket/images: this rewake was built without stores: `cargo build --release -p rewake` \
                 builds one that has them"
            );
        }
    }
}
