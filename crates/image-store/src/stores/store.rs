// SPDX-License-Identifier: MIT OR Apache-2.0
//! The objects of a store: requests, with the object in each error.

use std::collections::BTreeMap;
use std::io::Read;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use futures::{StreamExt as _, TryStreamExt as _};
use object_store::buffered::BufWriter;
use object_store::path::Path;
use object_store::{Error, GetOptions, GetResultPayload, ObjectStore, ObjectStoreExt as _};
use tokio::io::AsyncWriteExt as _;

use rewake_criu_images::{Digest, ImageDir};
use rewake_manifest::ManifestReader;

use crate::answer::request;
use crate::connect::{self, Connected};
use crate::error::{ImageStoreError, Result};
use crate::format::{ChunkLocation, ImageIndex};
use crate::names::{CLOCK, DAMAGED, INDEXES, NAMES, PACKS, REMOVED, is_object, random};
use crate::registry::ImageRepository;
use crate::report::StoredImage;
use crate::url::StoreUrl;

/// Requests that are outstanding at once, of one command.
pub(crate) const MAX_REQUESTS: usize = 16;
/// Indexes that are in memory at once, of those that a command reads one after another.
pub(crate) const MAX_INDEXES: usize = 2;
/// The longest index, in bytes: that of an image of some 4 TiB.
pub(crate) const MAX_INDEX: u64 = 256 << 20;
/// The longest object of a name, in bytes; one has some 200.
const MAX_NAME_OBJECT: u64 = 4 << 10;
/// Time in which a store says how long an object is, of which it has refused a range.
const HEAD_LIMIT: Duration = Duration::from_secs(10);
/// The longest marker, in bytes.
const MAX_MARKER: u64 = 64;
/// The object that proves that a place is a store, and of which version. The first push writes it.
pub(crate) const MARKER: &str = "rewake-store";
const MARKER_BYTES: &[u8] = b"rewake-store 1\n";
/// Bytes of one request that writes a long object. A longer object is written in parts.
const PART: usize = 16 << 20;

/// A store of images: a bucket, a directory, or a repository of a registry.
#[derive(Debug, Clone)]
pub struct ImageStore {
    objects: Arc<dyn ObjectStore>,
    url: String,
    /// Of a store in a registry: its names are tags.
    repository: Option<Arc<ImageRepository>>,
    /// Bytes of objects that were received.
    received: Arc<AtomicU64>,
    /// The folders above it in its bucket, with their URLs: no store is made inside another one.
    above: Arc<[(String, Arc<dyn ObjectStore>)]>,
}

/// An object of a listing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ListedObject {
    pub(crate) length: u64,
    /// By the store's clock.
    pub(crate) written: SystemTime,
}

impl ImageStore {
    /// Opens a store for reading.
    ///
    /// # Errors
    /// There is no such directory, or no credentials, or the configuration is not usable.
    pub fn open(url: &StoreUrl) -> Result<Self> {
        Ok(Self::connected(connect::connect(url, false)?, url))
    }

    /// Adds the bytes of objects that are received from now on to a counter.
    #[must_use]
    pub fn counting(self, received: &Arc<AtomicU64>) -> Self {
        Self { received: Arc::clone(received), ..self }
    }

    /// Opens a store for a push. The directory of a new store is made.
    ///
    /// # Errors
    /// As for [`ImageStore::open`].
    pub fn create(url: &StoreUrl) -> Result<Self> {
        Ok(Self::connected(connect::connect(url, true)?, url))
    }

    pub(crate) fn connected(connected: Connected, url: &StoreUrl) -> Self {
        let (objects, above, repository): (Arc<dyn ObjectStore>, _, _) = match connected {
            Connected::Objects { objects, above } => (objects, above, None),
            Connected::Repository(repository) => (repository.objects(), Vec::new(), Some(repository)),
        };
        let (url, above) = (url.to_string(), above.into());
        Self { objects, url, repository, received: Arc::default(), above }
    }

    #[cfg(test)]
    pub(crate) fn of(objects: Arc<dyn ObjectStore>) -> Self {
        let (url, above) = ("test:".to_owned(), Arc::default());
        Self { objects, url, repository: None, received: Arc::default(), above }
    }

    /// Makes the place a store, if it is none.
    ///
    /// # Errors
    /// A folder above is a store.
    pub(crate) async fn mark(&self) -> Result<()> {
        match self.require().await {
            Err(ImageStoreError::NoStore { .. }) => {
                for (outer, objects) in self.above.iter() {
                    // A place that may not be read is another's, and no reason to refuse this one.
                    if objects.head(&Path::from(MARKER)).await.is_ok() {
                        return Err(self.setup(&inside_another(outer)));
                    }
                }
                let bytes = Bytes::from_static(MARKER_BYTES);
                let written = self.objects.put(&Path::from(MARKER), bytes.into()).await;
                written.map(drop).map_err(request("write", &self.image_url(MARKER)))
            }
            found => found,
        }
    }

    /// Refuses a name that is a store: in `file:///srv/store` the image's name is missing, if that is a
    /// store.
    pub(crate) async fn require_image_name(&self, name: &str) -> Result<()> {
        if self.repository.is_some() {
            return Ok(());
        }
        match self.objects.head(&path(name, MARKER)).await {
            Ok(_) => Err(ImageStoreError::NoName { url: self.image_url(name) }),
            // A store that may not be read is none that this command can use.
            Err(Error::NotFound { .. } | Error::PermissionDenied { .. } | Error::Unauthenticated { .. }) => {
                Ok(())
            }
            Err(error) => Err(request("read", &self.object(name, MARKER))(error)),
        }
    }

    /// Refuses a place that is no store of this version.
    pub(crate) async fn require(&self) -> Result<()> {
        if self.repository.is_some() {
            // A type of artifact is proof enough.
            return Ok(());
        }
        let (path, object) = (Path::from(MARKER), self.image_url(MARKER));
        match self.read_at(&path, &object, MAX_MARKER).await? {
            None => Err(ImageStoreError::NoStore { url: self.url.clone() }),
            Some(bytes) if bytes == MARKER_BYTES => Ok(()),
            Some(_) => Err(self.setup(
                "its object `rewake-store` is not that of this version: use the release that wrote it",
            )),
        }
    }

    /// Refuses a registry: it removes blobs by rules of its own.
    pub(crate) fn require_removable(&self) -> Result<()> {
        if self.repository.is_none() {
            return Ok(());
        }
        Err(self.setup(
            "a registry removes images itself: delete the tag there, with `skopeo delete` for example, and \
             have the registry collect its garbage",
        ))
    }

    /// Begins the push of an image: a registry has more of it than a bucket. `manifest`: a reader of its own.
    pub(crate) async fn begin(
        &self,
        images: &ImageDir,
        manifest: impl FnOnce() -> Result<ManifestReader>,
        name: &str,
    ) -> Result<()> {
        self.require_image_name(name).await?;
        let Some(repository) = &self.repository else { return self.mark().await };
        repository.begin(images, manifest()?, name).await
    }

    /// Gives an image its name: its manifest, its index and its packs are in the store.
    pub(crate) async fn publish(&self, image: StoredImage, chunks: &[(Digest, ChunkLocation)]) -> Result<()> {
        let Some(repository) = &self.repository else {
            return self.put(NAMES, &image.name, image.encode()).await;
        };
        let packs = chunks.iter().map(|(_, chunk)| Arc::clone(&chunk.pack));
        repository.publish(image, &packs.collect()).await
    }

    /// Returns the chunks of an image that [`ImageStore::publish`] needs to give it its name again.
    pub(crate) async fn packs_of(&self, image: &StoredImage) -> Result<Vec<(Digest, ChunkLocation)>> {
        if self.repository.is_none() {
            return Ok(Vec::new());
        }
        let index = self.index(&image.version).await?;
        Ok(index.map(|index| index.chunks).unwrap_or_default())
    }

    /// Lists the images. An entry is an error where an image's object cannot be read.
    ///
    /// # Errors
    /// The place is no store, or it cannot be listed.
    pub async fn images(&self) -> Result<Vec<(String, Result<StoredImage>)>> {
        self.require().await?;
        let names = match &self.repository {
            Some(repository) => repository.tags().await?,
            None => self.list(NAMES).await?.into_keys().collect(),
        };
        let images = futures::stream::iter(names).map(async |name| {
            let image = self.image(&name).await;
            (name, image)
        });
        let images = images.buffered(MAX_REQUESTS);
        let is_ours = |image: &Result<_>| !matches!(image, Err(ImageStoreError::OtherArtifact { .. }));
        Ok(images.filter(|(_, image)| std::future::ready(is_ours(image))).collect().await)
    }

    /// Reads what the store has under an image's name.
    ///
    /// # Errors
    /// There is no image of this name, or its object is damaged.
    pub async fn image(&self, name: &str) -> Result<StoredImage> {
        match self.find(name).await? {
            Some(image) => Ok(image),
            None => {
                self.require_image_name(name).await?;
                Err(ImageStoreError::NoImage { url: self.image_url(name) })
            }
        }
    }

    pub(crate) async fn find(&self, name: &str) -> Result<Option<StoredImage>> {
        if let Some(repository) = &self.repository {
            return repository.find(name).await;
        }
        let Some(bytes) = self.read(NAMES, name, MAX_NAME_OBJECT).await? else { return Ok(None) };
        StoredImage::decode(&bytes, name, &self.object(NAMES, name)).map(Some)
    }

    /// Removes an image's name, and returns the image's id unless its object is damaged. `collect_garbage`
    /// removes its bytes later. The mark is written first: if the name stays, `collect_garbage` removes the
    /// mark.
    ///
    /// # Errors
    /// There is no image of this name, or no store; a push has replaced the image meanwhile; or the store
    /// refuses.
    pub async fn remove(&self, name: &str) -> Result<Option<Digest>> {
        self.require_removable()?;
        self.require_image_name(name).await?;
        self.require().await?;
        let image = match self.image(name).await {
            // Its index has no name from now on, so `collect_garbage` finds it.
            Err(ImageStoreError::Damaged { .. }) => return self.delete(NAMES, name).await.map(|()| None),
            image => image?,
        };
        self.put(REMOVED, &image.version, Vec::new()).await?;
        match self.find(name).await? {
            // Another `rewake rm` was first.
            None => {}
            Some(found) if found.version == image.version => self.delete(NAMES, name).await?,
            Some(_) => return Err(ImageStoreError::Replaced { url: self.image_url(name) }),
        }
        Ok(Some(image.id))
    }

    /// Reads an index; `None` if there is none of this name.
    pub(crate) async fn index(&self, version: &str) -> Result<Option<ImageIndex>> {
        let Some(found) = self.head(INDEXES, version).await? else { return Ok(None) };
        let object = self.object(INDEXES, version);
        limited(&object, found.length, MAX_INDEX)?;
        let mut bytes = Vec::new();
        while (bytes.len() as u64) < found.length {
            let start = bytes.len() as u64;
            let range = start..found.length.min(start + PART as u64);
            match self.get_range(INDEXES, version, range).await {
                Ok(part) => bytes.extend(part),
                // `collect_garbage` has removed it meanwhile.
                Err(ImageStoreError::Damaged { .. }) if self.head(INDEXES, version).await?.is_none() => {
                    return Ok(None);
                }
                Err(error) => return Err(error),
            }
        }
        ImageIndex::decode(&bytes, version, &object).map(Some)
    }

    /// Returns the store's time. Ages are differences of its own times: hosts may have other clocks.
    pub(crate) async fn now(&self) -> Result<SystemTime> {
        if self.repository.is_some() {
            // Nothing there has an age.
            return Ok(SystemTime::now());
        }
        let name = random().map_err(|error| self.setup(&error.to_string()))?;
        self.put(CLOCK, &name, Vec::new()).await?;
        let found = self.objects.head(&path(CLOCK, &name)).await;
        let found = found.map_err(request("read", &self.object(CLOCK, &name)))?;
        self.delete(CLOCK, &name).await?;
        Ok(found.last_modified.into())
    }

    /// Returns what a listing would say of an object: a listing may lack one that exists.
    pub(crate) async fn head(&self, folder: &str, name: &str) -> Result<Option<ListedObject>> {
        match self.objects.head(&path(folder, name)).await {
            Err(error) if is_missing(&error) => Ok(None),
            found => {
                let found = found.map_err(request("read", &self.object(folder, name)))?;
                Ok(Some(ListedObject { length: found.size, written: found.last_modified.into() }))
            }
        }
    }

    /// Lists the store's objects in a folder.
    pub(crate) async fn list(&self, folder: &str) -> Result<BTreeMap<String, ListedObject>> {
        let listing = self.objects.list(Some(&Path::from(folder)));
        let listing = listing.try_filter_map(async |found| {
            let object = ListedObject { length: found.size, written: found.last_modified.into() };
            let name = found.location.as_ref().strip_prefix(folder).and_then(|rest| rest.strip_prefix('/'));
            Ok(name.filter(|name| is_object(folder, name)).map(|name| (name.to_owned(), object)))
        });
        listing.try_collect().await.map_err(request("list", &format!("{}/{folder}", self.url)))
    }

    /// Lists the packs that a push may use: not those in which `verify` has found wrong bytes, and not those
    /// that a registry has lost.
    pub(crate) async fn sound_packs(&self) -> Result<BTreeMap<String, ListedObject>> {
        if let Some(repository) = &self.repository {
            repository.forget_missing().await?;
        }
        let (mut packs, damaged) = (self.list(PACKS).await?, self.list(DAMAGED).await?);
        packs.retain(|name, _| !damaged.contains_key(name));
        Ok(packs)
    }

    /// Reads an object of at most `most` bytes as a whole. Returns `None` if the object does not exist.
    pub(crate) async fn read(&self, folder: &str, name: &str, most: u64) -> Result<Option<Vec<u8>>> {
        self.read_at(&path(folder, name), &self.object(folder, name), most).await
    }

    /// [`ImageStore::read`], of any path. `object` is its name in messages.
    async fn read_at(&self, path: &Path, object: &str, most: u64) -> Result<Option<Vec<u8>>> {
        let found = match self.objects.get(path).await {
            Err(error) if is_missing(&error) => return Ok(None),
            found => found.map_err(request("read", object))?,
        };
        limited(object, found.meta.size, most)?;
        let (mut bytes, mut parts) = (Vec::new(), found.into_stream());
        while let Some(part) = parts.next().await {
            let part = match part {
                // A registry is asked for it only now.
                Err(error) if is_missing(&error) => return Ok(None),
                part => part.map_err(request("read", object))?,
            };
            self.received.fetch_add(part.len() as u64, Ordering::Relaxed);
            bytes.extend(part);
            limited(object, bytes.len() as u64, most)?;
        }
        Ok(Some(bytes))
    }

    /// Reads a range of an object.
    pub(crate) async fn get_range(&self, folder: &str, name: &str, range: Range<u64>) -> Result<Bytes> {
        let object = self.object(folder, name);
        let length = range.end - range.start;
        let found = self.range(&path(folder, name), range.clone()).await;
        let received = found.as_ref().map_or(0, Bytes::len);
        self.received.fetch_add(received as u64, Ordering::Relaxed);
        match found {
            Ok(bytes) if bytes.len() as u64 == length => Ok(bytes),
            Ok(bytes) if bytes.len() as u64 > length => {
                let what = format!("more than the {length} bytes from offset {}", range.start);
                Err(ImageStoreError::Damaged { object, what })
            }
            Ok(bytes) => {
                let what = format!("{} bytes from offset {}, expected {length}", bytes.len(), range.start);
                Err(ImageStoreError::Damaged { object, what })
            }
            Err(error) if is_missing(&error) => {
                Err(ImageStoreError::Damaged { object, what: "it is missing".to_owned() })
            }
            // Stores refuse a range past the end in ways of their own.
            Err(error) => match tokio::time::timeout(HEAD_LIMIT, self.head(folder, name)).await {
                Ok(Ok(Some(found))) if found.length < range.end => {
                    let what = format!("it has {} bytes, expected at least {}", found.length, range.end);
                    Err(ImageStoreError::Damaged { object, what })
                }
                _ => Err(request("read", &object)(error)),
            },
        }
    }

    /// Reads a range, and the part in which the first byte behind it arrives. What a server sends after that
    /// is not read, because it may send without end.
    async fn range(&self, path: &Path, range: Range<u64>) -> object_store::Result<Bytes> {
        let length = range.end - range.start;
        let found = self.objects.get_opts(path, GetOptions::new().with_range(Some(range))).await?;
        let GetResultPayload::Stream(mut parts) = found.payload else {
            // An open file of a directory, of which the range is read at once.
            return found.bytes().await;
        };
        let mut bytes = Vec::new();
        while bytes.len() as u64 <= length
            && let Some(part) = parts.try_next().await?
        {
            bytes.extend_from_slice(&part);
        }
        Ok(bytes.into())
    }

    /// Writes an object: it exists as a whole, or not at all.
    pub(crate) async fn put(&self, folder: &str, name: &str, bytes: Vec<u8>) -> Result<()> {
        let written = self.objects.put(&path(folder, name), bytes.into()).await;
        written.map(drop).map_err(request("write", &self.object(folder, name)))
    }

    /// Writes an object that may be long.
    pub(crate) async fn put_from(&self, folder: &str, name: &str, mut from: impl Read) -> Result<()> {
        let object = self.object(folder, name);
        let failed = |error: std::io::Error| ImageStoreError::Request {
            act: "write",
            object: object.clone(),
            reason: crate::answer::reason(&error.to_string()),
        };
        let writer = BufWriter::with_capacity(Arc::clone(&self.objects), path(folder, name), PART);
        let mut writer = writer.with_max_concurrency(1);
        let mut buffer = vec![0; 1 << 20];
        loop {
            let length = from.read(&mut buffer).map_err(&failed)?;
            if length == 0 {
                return writer.shutdown().await.map_err(&failed);
            }
            writer.write_all(&buffer[..length]).await.map_err(&failed)?;
        }
    }

    /// Removes an object, if it exists.
    pub(crate) async fn delete(&self, folder: &str, name: &str) -> Result<()> {
        match self.objects.delete(&path(folder, name)).await {
            Ok(()) | Err(Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(request("remove", &self.object(folder, name))(error)),
        }
    }

    /// Returns an object's name for messages.
    pub(crate) fn object(&self, folder: &str, name: &str) -> String {
        format!("{}/{folder}/{name}", self.url)
    }

    pub(crate) fn setup(&self, what: &str) -> ImageStoreError {
        ImageStoreError::Setup { url: self.url.clone(), what: what.to_owned() }
    }

    /// Returns the image's URL in this store, for messages.
    #[must_use]
    pub fn image_url(&self, name: &str) -> String {
        let separator = if self.repository.is_some() { ':' } else { '/' };
        format!("{}{separator}{name}", self.url)
    }
}

/// What is wrong with a new store inside another one.
pub(crate) fn inside_another(outer: &str) -> String {
    format!(
        "{outer} is a store, and no store is made inside another one: push to {outer}/NAME, or use a folder \
         beside it"
    )
}

/// Refuses an object that is too long, before memory is taken for it.
pub(crate) fn limited(object: &str, length: u64, most: u64) -> Result<()> {
    if length <= most {
        return Ok(());
    }
    let what = format!("it has {length} bytes, expected at most {most}");
    Err(ImageStoreError::Damaged { object: object.to_owned(), what })
}

/// Whether an object does not exist. A bucket that does not exist is another failure.
fn is_missing(error: &Error) -> bool {
    matches!(error, Error::NotFound { .. }) && !error.to_string().contains("NoSuchBucket")
}

fn path(folder: &str, name: &str) -> Path {
    Path::from_iter([folder, name])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{TestObjects, run};

    #[test]
    fn a_range_that_never_ends_is_cut_after_its_length() {
        run(async {
            let (objects, store) = TestObjects::new();
            objects.replace(PACKS, "a", vec![7; 100]).await;
            assert_eq!(store.get_range(PACKS, "a", 10..20).await.unwrap(), vec![7; 10]);
            objects.send_parts(64);
            let refused = store.get_range(PACKS, "a", 10..20).await.unwrap_err().to_string();
            assert!(refused.contains("more than the 10 bytes from offset 10"), "{refused}");
            // The first part had the whole range, and more.
            assert_eq!(objects.parts_left(), 63);
        });
    }
}
