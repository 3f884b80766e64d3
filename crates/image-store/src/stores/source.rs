// SPDX-License-Identifier: MIT OR Apache-2.0
//! An image of a store as a source of `rewake pull`: reads run ahead of the chunks that are written.

use std::collections::VecDeque;
use std::sync::Arc;

use anyhow::Context as _;
use rewake_criu_images::Digest;
use rewake_image_transfer::pull::{ChunkPlace, ChunkSource};
use rewake_manifest::SealedChunk;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use crate::error::Result;
use crate::names::MANIFESTS;
use crate::pinned::PinnedImage;
use crate::reader::ChunkReader;
use crate::report::StoredImage;
use crate::store::{ImageStore, MAX_REQUESTS};

/// An image of a store. Its reads run in a runtime that must have threads of its own.
#[derive(Debug)]
pub struct StoreSource {
    runtime: Handle,
    store: ImageStore,
    image: StoredImage,
    reader: Arc<ChunkReader>,
    working_set: Option<Arc<[u8]>>,
    outstanding: VecDeque<JoinHandle<Result<TravelledBytes>>>,
}

/// Bytes of a read, and how many travelled for them.
type TravelledBytes = (Vec<u8>, u64);

impl StoreSource {
    /// Opens an image.
    ///
    /// # Errors
    /// There is no such image, or its index is damaged, or the store cannot be read.
    pub async fn open(store: &ImageStore, name: &str) -> Result<Self> {
        Ok(Self::of(&PinnedImage::open(store, name).await?, Handle::current()))
    }

    /// Reads an open image.
    #[must_use]
    pub fn of(pinned: &PinnedImage, runtime: Handle) -> Self {
        let PinnedImage { store, image, reader, working_set, .. } = pinned;
        let (store, image, reader) = (store.clone(), image.clone(), Arc::clone(reader));
        Self { runtime, store, image, reader, working_set: working_set.clone(), outstanding: VecDeque::new() }
    }
}

impl ChunkSource for StoreSource {
    fn image_id(&self) -> Digest {
        self.image.id
    }

    fn manifest_length(&self) -> u64 {
        self.image.manifest_length
    }

    fn has_room(&self) -> bool {
        self.outstanding.len() < MAX_REQUESTS
    }

    fn request_manifest(&mut self, offset: u64, length: u32) -> anyhow::Result<()> {
        let (store, version) = (self.store.clone(), self.image.version.clone());
        self.outstanding.push_back(self.runtime.spawn(async move {
            let range = offset..offset + u64::from(length);
            let bytes = store.get_range(MANIFESTS, &version, range).await?;
            Ok((bytes.into(), length.into()))
        }));
        Ok(())
    }

    fn request_chunk(&mut self, _: ChunkPlace, chunk: &SealedChunk) -> anyhow::Result<()> {
        let (reader, SealedChunk { length, digest }) = (Arc::clone(&self.reader), *chunk);
        self.outstanding.push_back(self.runtime.spawn(async move {
            let bytes = reader.chunk(digest, length).await?;
            Ok((bytes, reader.locate(digest)?.stored_length().into()))
        }));
        Ok(())
    }

    fn next_data(&mut self, into: &mut Vec<u8>) -> anyhow::Result<u64> {
        let read = self.outstanding.pop_front().context("no read is outstanding")?;
        let (bytes, travelled) = self.runtime.block_on(read).context("a read ended early")??;
        *into = bytes;
        Ok(travelled)
    }

    fn signature(&self) -> Option<&[u8]> {
        self.image.signature.as_deref()
    }

    fn claimed_bytes(&self) -> Option<u64> {
        Some(self.image.bytes)
    }

    fn working_set(&mut self, into: &mut Vec<u8>) -> Option<u64> {
        into.clear();
        into.extend(self.working_set.as_deref()?);
        Some(into.len() as u64)
    }
}

#[cfg(test)]
mod tests {
    use rewake_image_transfer::pull::pull;

    use super::*;
    use crate::push::push;
    use crate::testing::{TestImage, TestObjects, random_bytes};

    #[test]
    fn an_image_of_another_size_than_its_name_says_is_refused_before_a_file_is_made() {
        let image = TestImage::new(&random_bytes("memory", 2 << 20));
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let (_objects, store) = TestObjects::new();
        runtime.block_on(push(&store, &image.path(), "web")).unwrap();
        let stored = runtime.block_on(store.image("web")).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let copy = folder.path().join("copy");
        let pulled = |bytes: u64| {
            let claimed = StoredImage { bytes, ..stored.clone() };
            let pinned = runtime.block_on(PinnedImage::of(&store, claimed)).unwrap();
            pull(&mut StoreSource::of(&pinned, runtime.handle().clone()), &copy, None, &[])
        };
        for claimed in [1, stored.bytes - 1, stored.bytes + 1, u64::MAX] {
            let error = pulled(claimed).unwrap_err().to_string();
            assert!(
                error.contains(&format!("the source says that the image has {claimed} bytes")),
                "{error}"
            );
            assert!(!copy.exists());
        }
        assert_eq!(pulled(stored.bytes).unwrap().id, stored.id);
    }
}
