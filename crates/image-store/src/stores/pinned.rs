// SPDX-License-Identifier: MIT OR Apache-2.0
//! An image of a store that was opened: it stays the same when a push gives its name to another image.

use std::sync::{Arc, Mutex};

use crate::error::Result;
use crate::reader::ChunkReader;
use crate::report::StoredImage;
use crate::served::StoredFiles;
use crate::store::ImageStore;

/// An open image. What is read of it for a copy and for restores has one index in memory.
#[derive(Debug)]
pub struct PinnedImage {
    pub(crate) store: ImageStore,
    pub(crate) image: StoredImage,
    pub(crate) reader: Arc<ChunkReader>,
    /// The recorded working set, as it was when the image was opened.
    pub(crate) working_set: Option<Arc<[u8]>>,
    /// For an image server; none until the first client.
    pub(crate) files: Mutex<Option<Arc<StoredFiles>>>,
}

impl PinnedImage {
    /// Opens an image.
    ///
    /// # Errors
    /// There is no such image, or its index is damaged, or the store cannot be read.
    pub async fn open(store: &ImageStore, name: &str) -> Result<Self> {
        Self::of(store, store.image(name).await?).await
    }

    /// Opens what [`ImageStore::image`] has found.
    ///
    /// # Errors
    /// Its index is damaged, or the store cannot be read.
    pub async fn of(store: &ImageStore, image: StoredImage) -> Result<Self> {
        // At once: a restore waits for both.
        let (reader, working_set) = tokio::join!(ChunkReader::open(store, &image), store.working_set(&image));
        let (store, reader, files) = (store.clone(), Arc::new(reader?), Mutex::default());
        Ok(Self { store, image, reader, working_set, files })
    }

    /// Returns the bytes of chunks that the store has sent.
    #[must_use]
    pub fn bytes_read(&self) -> u64 {
        self.reader.bytes_read()
    }

    /// Returns what the store says about it.
    #[must_use]
    pub fn image(&self) -> &StoredImage {
        &self.image
    }
}
