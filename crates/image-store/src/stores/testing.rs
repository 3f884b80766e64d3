// SPDX-License-Identifier: MIT OR Apache-2.0
//! For tests: a store with a clock that tests set, which ends in the middle of a push and gives wrong
//! answers.

use std::collections::HashMap;
use std::fmt;
use std::fs;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use bytes::Bytes;
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use futures::{FutureExt as _, StreamExt as _, TryStreamExt as _};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, ObjectStoreExt as _, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use rewake_criu_images::{Inventory, write};
use rewake_manifest::seal;

use crate::store::ImageStore;

/// What the tests of a store change.
#[derive(Debug)]
pub(crate) struct TestObjects {
    inner: InMemory,
    now: Mutex<SystemTime>,
    written: Mutex<HashMap<Path, SystemTime>>,
    /// Writes until the process that writes is killed.
    writes_left: AtomicUsize,
    is_dead: AtomicBool,
    /// What is done before the first write into a folder.
    before: Mutex<HashMap<&'static str, Act>>,
    /// Reads of ranges that get too few bytes, or bytes of other places.
    short_reads: AtomicUsize,
    other_reads: AtomicUsize,
    /// Parts of 1 MiB that the next answer to a range has in the place of its bytes.
    parts_left: Arc<AtomicUsize>,
    /// The folder that listings show as empty.
    hidden: Mutex<Option<&'static str>>,
    /// The folder whose objects may not be read.
    refused: Mutex<Option<&'static str>>,
}

struct Act(BoxFuture<'static, ()>);

impl fmt::Debug for Act {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Act")
    }
}

impl fmt::Display for TestObjects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TestObjects")
    }
}

impl TestObjects {
    pub(crate) fn new() -> (Arc<Self>, ImageStore) {
        let objects = Arc::new(Self {
            inner: InMemory::new(),
            now: Mutex::new(SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000)),
            written: Mutex::default(),
            writes_left: AtomicUsize::new(usize::MAX),
            is_dead: AtomicBool::new(false),
            before: Mutex::default(),
            short_reads: AtomicUsize::new(0),
            other_reads: AtomicUsize::new(0),
            parts_left: Arc::default(),
            hidden: Mutex::default(),
            refused: Mutex::default(),
        });
        (Arc::clone(&objects), ImageStore::of(objects))
    }

    pub(crate) fn pass(&self, hours: u64) {
        *self.now.lock().unwrap() += Duration::from_secs(hours * 3600);
    }

    /// The process that writes is killed after `writes` more writes.
    pub(crate) fn kill_after(&self, writes: usize) {
        self.writes_left.store(writes, Ordering::Relaxed);
    }

    /// Another process uses the store.
    pub(crate) fn revive(&self) {
        self.writes_left.store(usize::MAX, Ordering::Relaxed);
        self.is_dead.store(false, Ordering::Relaxed);
    }

    /// Does this before the first write into a folder.
    pub(crate) fn before(&self, folder: &'static str, act: impl Future<Output = ()> + Send + 'static) {
        self.before.lock().unwrap().insert(folder, Act(act.boxed()));
    }

    pub(crate) fn short_reads(&self, count: usize) {
        self.short_reads.store(count, Ordering::Relaxed);
    }

    pub(crate) fn other_reads(&self, count: usize) {
        self.other_reads.store(count, Ordering::Relaxed);
    }

    /// The answer to a range is not the range, but this many parts of 1 MiB.
    pub(crate) fn send_parts(&self, count: usize) {
        self.parts_left.store(count, Ordering::Relaxed);
    }

    /// Returns how many of them were not read.
    pub(crate) fn parts_left(&self) -> usize {
        self.parts_left.load(Ordering::Relaxed)
    }

    /// The store refuses to read the objects of a folder.
    pub(crate) fn refuse(&self, folder: Option<&'static str>) {
        *self.refused.lock().unwrap() = folder;
    }

    /// Listings of a folder are empty: what it has can be read by name only.
    pub(crate) fn hide(&self, folder: Option<&'static str>) {
        *self.hidden.lock().unwrap() = folder;
    }

    /// Returns the names in a folder.
    pub(crate) async fn names(&self, folder: &str) -> Vec<String> {
        let listing = self.inner.list(Some(&Path::from(folder)));
        let names = listing.map_ok(|found| found.location.filename().unwrap().to_owned());
        let mut names: Vec<String> = names.try_collect().await.unwrap();
        names.sort();
        names
    }

    pub(crate) async fn read(&self, folder: &str, name: &str) -> Vec<u8> {
        self.inner.get(&Path::from_iter([folder, name])).await.unwrap().bytes().await.unwrap().to_vec()
    }

    pub(crate) async fn replace(&self, folder: &str, name: &str, bytes: Vec<u8>) {
        self.inner.put(&Path::from_iter([folder, name]), bytes.into()).await.unwrap();
    }

    pub(crate) async fn remove(&self, folder: &str, name: &str) {
        self.inner.delete(&Path::from_iter([folder, name])).await.unwrap();
    }

    fn check_alive(&self) -> Result<()> {
        if self.is_dead.load(Ordering::Relaxed) {
            return Err(Error::Generic { store: "test", source: "killed".into() });
        }
        Ok(())
    }

    fn dated(&self, mut meta: ObjectMeta) -> ObjectMeta {
        if let Some(time) = self.written.lock().unwrap().get(&meta.location) {
            meta.last_modified = (*time).into();
        }
        meta
    }
}

#[async_trait]
impl ObjectStore for TestObjects {
    async fn put_opts(&self, location: &Path, payload: PutPayload, opts: PutOptions) -> Result<PutResult> {
        self.check_alive()?;
        let folder = location.parts().next().unwrap();
        let act = self.before.lock().unwrap().remove(folder.as_ref());
        if let Some(Act(act)) = act {
            act.await;
        }
        let left =
            self.writes_left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        if left.is_err() {
            self.is_dead.store(true, Ordering::Relaxed);
            self.check_alive()?;
        }
        let now = *self.now.lock().unwrap();
        self.written.lock().unwrap().insert(location.clone(), now);
        self.inner.put_opts(location, payload, opts).await
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        opts: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.inner.put_multipart_opts(location, opts).await
    }

    async fn get_opts(&self, location: &Path, mut options: GetOptions) -> Result<GetResult> {
        self.check_alive()?;
        let folder = location.parts().next();
        if folder.as_ref().map(AsRef::as_ref) == *self.refused.lock().unwrap() {
            let (path, source) = (location.to_string(), "refused".into());
            return Err(Error::PermissionDenied { path, source });
        }
        if let Some(object_store::GetRange::Bounded(range)) = &mut options.range {
            let less = |count: &AtomicUsize| {
                count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok()
            };
            if less(&self.short_reads) {
                range.end -= 1;
            }
            if less(&self.other_reads) {
                let length = range.end - range.start;
                *range = Range { start: 0, end: length };
            }
        }
        let is_range = options.range.is_some();
        let mut found = self.inner.get_opts(location, options).await?;
        if is_range && self.parts_left() > 0 {
            let left = Arc::clone(&self.parts_left);
            let parts = futures::stream::iter(std::iter::from_fn(move || {
                let sent =
                    left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
                sent.ok().map(|_| Ok(Bytes::from(vec![7; 1 << 20])))
            }));
            found.payload = GetResultPayload::Stream(parts.boxed());
        }
        found.meta = self.dated(found.meta);
        Ok(found)
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        self.inner.get_ranges(location, ranges).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        if let Err(error) = self.check_alive() {
            return futures::stream::iter([Err(error)]).boxed();
        }
        self.inner.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        if let Err(error) = self.check_alive() {
            return futures::stream::iter([Err(error)]).boxed();
        }
        let hidden = *self.hidden.lock().unwrap();
        if hidden.is_some() && prefix.map(Path::as_ref) == hidden {
            return futures::stream::empty().boxed();
        }
        let found = self.inner.list(prefix).collect::<Vec<_>>().now_or_never().unwrap();
        let dated: Vec<_> = found.into_iter().map(|meta| meta.map(|meta| self.dated(meta))).collect();
        futures::stream::iter(dated).boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.inner.copy_opts(from, to, options).await
    }
}

/// A sealed image with this memory; removed when dropped.
pub(crate) struct TestImage(tempfile::TempDir);

impl TestImage {
    pub(crate) fn new(memory: &[u8]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let run_id = Some(blake3::hash(memory).to_string().into());
        write::inventory(dir.path(), &Inventory { version: 2, plugins: Vec::new(), run_id }).unwrap();
        fs::write(dir.path().join("pages-1.img"), memory).unwrap();
        seal(dir.path()).unwrap();
        Self(dir)
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.0.path().to_owned()
    }
}

/// Bytes that do not compress.
pub(crate) fn random_bytes(seed: &str, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    blake3::Hasher::new().update(seed.as_bytes()).finalize_xof().fill(&mut bytes);
    bytes
}

/// Runs a test with a store.
pub(crate) fn run(test: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap()
        .block_on(test);
}
