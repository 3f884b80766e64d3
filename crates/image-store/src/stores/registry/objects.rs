// SPDX-License-Identifier: MIT OR Apache-2.0
//! The blobs of a repository as objects: the blobs of artifacts that were read, and the ones that a push has
//! written.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::Write as _;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;
use futures::{FutureExt as _, StreamExt as _};
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result, UploadPart,
};

use super::artifact::Blob;
use super::client::RegistryClient;
use super::requests::RegistryError;
use crate::names::{INDEXES, MANIFESTS, PACKS, WORKING_SETS};
use crate::store::MAX_REQUESTS;

/// The name of this kind of store, for errors.
const STORE: &str = "registry";

type Blobs = Arc<Mutex<BTreeMap<String, Blob>>>;

/// The objects.
#[derive(Debug)]
pub(crate) struct RegistryObjects {
    client: RegistryClient,
    /// By the object's name, with its folder.
    blobs: Blobs,
}

impl fmt::Display for RegistryObjects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(STORE)
    }
}

impl RegistryObjects {
    pub(super) fn new(client: RegistryClient) -> Self {
        Self { client, blobs: Arc::default() }
    }

    /// Adds the objects of an artifact.
    pub(super) fn add(&self, objects: Vec<(String, Blob)>) {
        locked(&self.blobs).extend(objects);
    }

    /// Asks the registry for each object, and forgets those that it lacks: a manifest may name more than
    /// there is.
    pub(super) async fn forget_missing(&self) -> std::result::Result<(), RegistryError> {
        let blobs: Vec<_> =
            locked(&self.blobs).iter().map(|(path, blob)| (path.clone(), blob.clone())).collect();
        let asked = futures::stream::iter(blobs)
            .map(async |(path, blob)| Ok::<_, RegistryError>((path, self.client.has(&blob).await?)));
        let mut asked = std::pin::pin!(asked.buffer_unordered(MAX_REQUESTS));
        while let Some((path, found)) = asked.next().await.transpose()? {
            if !found {
                locked(&self.blobs).remove(&path);
            }
        }
        Ok(())
    }

    /// Returns an object's name with its folder, and its blob.
    pub(super) fn find(&self, (folder, name): (&str, &str)) -> Option<(String, Blob)> {
        let path = format!("{folder}/{name}");
        let blob = locked(&self.blobs).get(&path).cloned()?;
        Some((path, blob))
    }

    fn blob(&self, location: &Path) -> Result<Blob> {
        locked(&self.blobs).get(location.as_ref()).cloned().ok_or_else(|| missing(location))
    }
}

fn locked(blobs: &Blobs) -> MutexGuard<'_, BTreeMap<String, Blob>> {
    blobs.lock().unwrap_or_else(PoisonError::into_inner)
}

fn missing(location: &Path) -> Error {
    Error::NotFound { path: location.to_string(), source: RegistryError::Missing.into() }
}

fn failed(location: &Path, error: RegistryError) -> Error {
    match error {
        RegistryError::Missing => missing(location),
        error => Error::Generic { store: STORE, source: error.into() },
    }
}

fn unsupported() -> Error {
    Error::NotSupported { source: "a registry has images by their tags, and removes blobs itself".into() }
}

/// Whether objects of this name are blobs. Image names are tags, and only other stores have marks.
fn is_blob(location: &Path) -> bool {
    let folder = location.parts().next();
    folder.is_some_and(|folder| [PACKS, INDEXES, MANIFESTS, WORKING_SETS].contains(&folder.as_ref()))
}

fn meta(location: Path, length: u64) -> ObjectMeta {
    ObjectMeta {
        location,
        // What a tag uses is not removed, however old it is.
        last_modified: SystemTime::now().into(),
        size: length,
        e_tag: None,
        version: None,
    }
}

fn put_result() -> PutResult {
    PutResult { e_tag: None, version: None, extensions: Default::default() }
}

#[async_trait]
impl ObjectStore for RegistryObjects {
    async fn put_opts(&self, location: &Path, payload: PutPayload, _: PutOptions) -> Result<PutResult> {
        if !is_blob(location) {
            return Err(unsupported());
        }
        let put = self.client.put_bytes(payload.into()).await;
        let blob = put.map_err(|error| failed(location, error))?;
        locked(&self.blobs).insert(location.to_string(), blob);
        Ok(put_result())
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        _: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        let file = tempfile::tempfile().map_err(|error| failed_file(&error))?;
        let (client, blobs) = (self.client.clone(), Arc::clone(&self.blobs));
        Ok(Box::new(CollectedUpload { client, blobs, location: location.clone(), file, length: 0 }))
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let blob = self.blob(location)?;
        let invalid = |error| Error::Generic { store: STORE, source: Box::new(error) };
        let range = match &options.range {
            Some(range) => range.as_range(blob.length).map_err(invalid)?,
            None => 0..blob.length,
        };
        let meta = meta(location.clone(), blob.length);
        let (client, location, wanted) = (self.client.clone(), location.clone(), range.clone());
        // Read when its bytes are taken: the caller may refuse its length before that.
        let read = async move {
            if options.head || wanted.is_empty() {
                return Ok(Bytes::new());
            }
            client.range(&blob, wanted).await.map_err(|error| failed(&location, error))
        };
        let payload = GetResultPayload::Stream(futures::stream::once(read).boxed());
        Ok(GetResult { payload, meta, range, attributes: Default::default(), extensions: Default::default() })
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        let blob = self.blob(location)?;
        let reads = ranges.iter().map(|range| self.client.range(&blob, range.clone()));
        futures::future::try_join_all(reads).await.map_err(|error| failed(location, error))
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        locations.map(|_| Err(unsupported())).boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let prefix = prefix.map_or_else(String::new, |prefix| format!("{prefix}/"));
        let blobs = locked(&self.blobs);
        let found = blobs.iter().filter(|(path, _)| path.starts_with(&prefix));
        let found = found.map(|(path, blob)| Ok(meta(Path::from(path.as_str()), blob.length)));
        futures::stream::iter(found.collect::<Vec<_>>()).boxed()
    }

    async fn list_with_delimiter(&self, _: Option<&Path>) -> Result<ListResult> {
        Err(unsupported())
    }

    async fn copy_opts(&self, _: &Path, _: &Path, _: CopyOptions) -> Result<()> {
        Err(unsupported())
    }
}

/// A long object: a registry wants its hash at the end of the upload, and each attempt begins at its first
/// byte.
#[derive(Debug)]
struct CollectedUpload {
    client: RegistryClient,
    blobs: Blobs,
    location: Path,
    file: File,
    length: u64,
}

fn failed_file(error: &std::io::Error) -> Error {
    Error::Generic { store: STORE, source: format!("a temporary file: {error}").into() }
}

#[async_trait]
impl MultipartUpload for CollectedUpload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        let written = data.iter().try_for_each(|bytes| self.file.write_all(bytes));
        self.length += data.content_length() as u64;
        async move { written.map_err(|error| failed_file(&error)) }.boxed()
    }

    async fn complete(&mut self) -> Result<PutResult> {
        let file = self.file.try_clone().map_err(|error| failed_file(&error))?;
        let put = self.client.put_file(file, self.length).await;
        let blob = put.map_err(|error| failed(&self.location, error))?;
        locked(&self.blobs).insert(self.location.to_string(), blob);
        Ok(put_result())
    }

    async fn abort(&mut self) -> Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use object_store::ObjectStoreExt as _;

    use super::*;
    use crate::connect::READ_LIMITS;
    use crate::registry::client::blob_of;
    use crate::testing::run;

    #[test]
    fn the_length_of_an_object_is_known_before_it_is_read() {
        // Nothing listens there: a request would fail.
        let client = RegistryClient::new("127.0.0.1:1", "web", None, false, READ_LIMITS).unwrap();
        let objects = RegistryObjects::new(client);
        let blob = Blob { length: 1 << 40, ..blob_of(b"") };
        objects.add(vec![("working-sets/a".to_owned(), blob)]);
        run(async move {
            let found = objects.get(&Path::from("working-sets/a")).await.unwrap();
            assert_eq!((found.meta.size, found.range), (1 << 40, 0..1 << 40));
        });
    }
}
