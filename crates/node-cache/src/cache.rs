// SPDX-License-Identifier: MIT OR Apache-2.0
//! The cache. All functions may wait for a store: they are for threads of their own.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use rewake_criu_images::{Digest, ImageDir};
use rewake_image_signature::Signers;
use rewake_image_store::{ImageStore, ImageUrl, PinnedImage, StoreSource, StoredImage};
use rewake_image_transfer::pull::{ID_DIGITS, PullReport, complete, keep_signature, pull, pull_eager_unread};
use tokio::runtime::{Handle, Runtime};
use tracing::{info, warn};

use crate::arriving::{ArrivingMemory, MemoryLost, SharedSockets};
use crate::entry::{CacheEntry, EntryPhase, Remake};
use crate::folder::CacheFolder;
use crate::images_served::{self, CacheImages};
use crate::space;

/// Threads that send requests to stores, and decompress.
const STORE_THREADS: usize = 2;

/// The images of stores on this host.
#[derive(Debug)]
pub struct NodeCache {
    folder: CacheFolder,
    runtime: Runtime,
    entries: Mutex<HashMap<Digest, Arc<CacheEntry>>>,
    /// One thread at a time makes space.
    space: Mutex<()>,
    counters: CacheCounters,
}

/// What is counted while the cache is open.
#[derive(Debug, Default)]
struct CacheCounters {
    hits: AtomicU64,
    misses: AtomicU64,
    failures: AtomicU64,
    /// Bytes that stores have sent.
    received: Arc<AtomicU64>,
}

/// What the cache has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CacheContents {
    /// Images that are complete.
    pub complete: u64,
    /// Images that are not.
    pub partial: u64,
    /// Bytes of all images on the disk.
    pub bytes: u64,
}

/// What was counted since the cache was opened, and its limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CacheCounts {
    /// Bytes that the images may have together.
    pub size: u64,
    /// Requests for an image that was here, or was being fetched for another request.
    pub hits: u64,
    /// Requests for an image that was fetched for them.
    pub misses: u64,
    /// Requests that failed.
    pub failures: u64,
    /// Bytes that stores have sent.
    pub store_bytes: u64,
}

/// An image that is not removed from the cache before this is dropped.
#[derive(Debug)]
pub struct CachePin {
    entry: Arc<CacheEntry>,
    path: PathBuf,
}

/// An image of the cache, for a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CachedImageState {
    /// Its id.
    pub id: Digest,
    /// Where it came from, if that is known.
    pub url: Option<ImageUrl>,
    /// Its bytes on the disk.
    pub bytes: u64,
    /// Whether all of it is here.
    pub complete: bool,
    /// The time since it was used.
    pub unused: Duration,
    /// Whether a restore uses it.
    pub in_use: bool,
}

impl CachePin {
    fn new(entry: &Arc<CacheEntry>, folder: &CacheFolder) -> Self {
        entry.pin();
        Self { entry: Arc::clone(entry), path: folder.image(entry.id) }
    }

    /// Returns the image's id.
    #[must_use]
    pub fn id(&self) -> Digest {
        self.entry.id
    }

    /// Returns the image's directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns whether all of the image is here.
    ///
    /// # Errors
    /// Its memory has stopped to arrive.
    pub fn is_complete(&self) -> anyhow::Result<bool> {
        self.entry.is_complete()
    }

    /// Returns the bytes that have not arrived.
    #[must_use]
    pub fn missing(&self) -> u64 {
        match self.entry.phase() {
            EntryPhase::Partial(memory) => memory.missing(),
            _ => 0,
        }
    }
}

impl Drop for CachePin {
    fn drop(&mut self) {
        self.entry.unpin();
    }
}

impl NodeCache {
    /// Opens the cache in a directory.
    ///
    /// # Errors
    /// The image server's socket cannot be made, or the kernel refuses threads.
    pub fn start(folder: CacheFolder) -> anyhow::Result<Arc<Self>> {
        let mut threads = tokio::runtime::Builder::new_multi_thread();
        let runtime = threads.worker_threads(STORE_THREADS).enable_all().build()?;
        let found = folder.images().with_context(|| folder.path().display().to_string())?;
        let entries = found.into_iter().map(|id| (id, Arc::new(CacheEntry::new(id, &folder)))).collect();
        let cache = Arc::new(Self {
            folder,
            runtime,
            entries: Mutex::new(entries),
            space: Mutex::default(),
            counters: CacheCounters::default(),
        });
        images_served::start(&cache.folder.socket(), Arc::new(CacheImages(Arc::downgrade(&cache))))?;
        Ok(cache)
    }

    fn entries(&self) -> MutexGuard<'_, HashMap<Digest, Arc<CacheEntry>>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns all images. Those are forgotten that are not here, and that no client waits for.
    fn all(&self) -> Vec<Arc<CacheEntry>> {
        let mut entries = self.entries();
        // Under this lock no other thread gets an entry.
        entries.retain(|id, entry| {
            let is_idle = Arc::strong_count(entry) == 1 && matches!(entry.phase(), EntryPhase::Idle);
            !is_idle || self.folder.image(*id).exists()
        });
        entries.values().cloned().collect()
    }

    /// Brings an image of a store, if it is not here: what CRIU reads itself. A fetcher brings the rest. `id`
    /// is the beginning of the id that it must have; the store is not asked if the image with that id is
    /// here.
    ///
    /// # Errors
    /// The store cannot be read, or has another image, or one whose signature a file of `signers` does not
    /// accept; or there is no space.
    pub fn acquire(
        self: &Arc<Self>,
        url: &ImageUrl,
        id: Option<&str>,
        signers: &[Signers],
    ) -> anyhow::Result<CachePin> {
        let acquired = self.find_or_bring(url, id, signers);
        let counter = match &acquired {
            Ok((_, false)) => &self.counters.hits,
            Ok((_, true)) => &self.counters.misses,
            Err(_) => &self.counters.failures,
        };
        counter.fetch_add(1, Ordering::Relaxed);
        acquired.map(|(pin, _)| pin)
    }

    /// [`NodeCache::acquire`], with whether this thread has brought the image.
    fn find_or_bring(
        self: &Arc<Self>,
        url: &ImageUrl,
        id: Option<&str>,
        signers: &[Signers],
    ) -> anyhow::Result<(CachePin, bool)> {
        if let Some(id) = id {
            ensure!(id.len() >= ID_DIGITS, "--id {id}: expected {ID_DIGITS} digits of an image id at least");
        }
        let known = id.and_then(|id| self.with_id(id).ok()).filter(|entry| entry.is_usable());
        let Some(entry) = known else {
            return self.acquire_from_store(url, id, signers);
        };
        let pin = CachePin::new(&entry, &self.folder);
        // The planner checks it again, with the manifest that it reads.
        Signers::check_image(signers, &ImageDir::open(pin.path())?, Some(entry.id), true)?;
        // A removal may have been faster.
        let is_brought = self.ensure(&entry, Remake::Unusable, Some(url), None)?;
        self.note_use(&entry);
        Ok((pin, is_brought))
    }

    fn acquire_from_store(
        self: &Arc<Self>,
        url: &ImageUrl,
        id: Option<&str>,
        signers: &[Signers],
    ) -> anyhow::Result<(CachePin, bool)> {
        let (store, stored) = self.find(url).with_context(|| self.hint(url))?;
        let is_it = id.is_none_or(|id| stored.id.to_string().starts_with(id));
        ensure!(is_it, "{url}: it is image {}, expected {}", stored.id, id.unwrap_or_default());
        let signature = stored.signature.clone();
        for signers in signers {
            signers.check(stored.id, signature.as_deref()).with_context(|| url.to_string())?;
        }
        let new = || Arc::new(CacheEntry::new(stored.id, &self.folder));
        let entry = Arc::clone(self.entries().entry(stored.id).or_insert_with(new));
        let pin = CachePin::new(&entry, &self.folder);
        let is_brought = self.ensure(&entry, Remake::Unusable, Some(url), Some((store, stored)))?;
        if pin.missing() == 0 {
            // The image may have been signed since it was brought.
            keep_signature(pin.path(), entry.id, signature.as_deref())?;
        }
        self.note_use(&entry);
        Ok((pin, is_brought))
    }

    fn note_use(&self, entry: &CacheEntry) {
        if let Err(error) = self.folder.note_use(entry.id) {
            warn!("{error:#}: image {} may be removed before others that were used earlier", entry.id);
        }
    }

    /// Asks a store for what has an image's name now.
    fn find(&self, url: &ImageUrl) -> anyhow::Result<(ImageStore, StoredImage)> {
        let store = ImageStore::open(&url.store)?.counting(&self.counters.received);
        let stored = self.runtime.block_on(store.image(&url.name))?;
        Ok((store, stored))
    }

    /// Returns what a user can do whose store cannot be read.
    fn hint(&self, url: &ImageUrl) -> String {
        let is_of = |entry: &&Arc<CacheEntry>| {
            matches!(entry.phase(), EntryPhase::Complete)
                && self.folder.origin(entry.id).as_ref() == Some(url)
        };
        let all = self.all();
        let Some(cached) = all.iter().filter(is_of).min_by_key(|entry| self.folder.unused(entry.id)) else {
            return url.to_string();
        };
        format!("{url}: the cache has image {id} of this name, which `--id {id}` restores", id = cached.id)
    }

    /// Brings an image, if that is necessary, from this store or from where it came from. `found`: what the
    /// store has under its name. Returns whether this thread has brought it.
    fn ensure(
        self: &Arc<Self>,
        entry: &Arc<CacheEntry>,
        remake: Remake,
        url: Option<&ImageUrl>,
        found: Option<(ImageStore, StoredImage)>,
    ) -> anyhow::Result<bool> {
        let mut is_brought = false;
        let ensured = entry.ensure(remake, |doubted| {
            is_brought = true;
            let origin = || self.folder.origin(entry.id);
            let url =
                url.cloned().or_else(origin).context("it is not known which store the image came from")?;
            let bring = || {
                let (store, stored) = found.map_or_else(|| self.find(&url), Ok)?;
                let (id, now) = (entry.id, stored.id);
                if now != id {
                    let reason = format!("the store has image {now} under this name by now, not {id}");
                    return Err(MemoryLost(reason).into());
                }
                let pinned = Arc::new(self.runtime.block_on(PinnedImage::of(&store, stored))?);
                entry.set_pinned(Arc::clone(&pinned));
                self.bring(entry, &url, &pinned, doubted)
            };
            bring().with_context(|| url.to_string())
        });
        ensured.map(|()| is_brought)
    }

    /// Copies what CRIU reads itself, and starts the fetcher; or copies all, where a wrong byte was found.
    fn bring(
        self: &Arc<Self>,
        entry: &Arc<CacheEntry>,
        url: &ImageUrl,
        pinned: &PinnedImage,
        doubted: bool,
    ) -> anyhow::Result<EntryPhase> {
        let (id, directory) = (entry.id, self.folder.image(entry.id));
        {
            let _one = self.space.lock().unwrap_or_else(PoisonError::into_inner);
            space::reserve(&self.folder, entry, pinned.image().bytes, &self.all())?;
        }
        self.folder.note_origin(id, url)?;
        if doubted {
            let is_free = self.folder.make_partial(id).with_context(|| directory.display().to_string())?;
            ensure!(
                is_free,
                "image {id} of the cache has a wrong block, and restores use the others: try again when \
                 they have ended"
            );
        }
        let (mut source, digits) = (StoreSource::of(pinned, self.runtime.handle().clone()), id.to_string());
        // What has arrived is found by its checksums, when the fetcher is started: it is not read here as
        // well.
        let copy = if doubted { pull } else { pull_eager_unread };
        let PullReport { sent, kept, left, .. } = copy(&mut source, &directory, Some(&digits), &[])?;
        info!("image {id}: {sent} bytes were sent, {kept} were here, {left} are left to restores");
        self.folder.end_doubt(id)?;
        if left == 0 {
            return Ok(EntryPhase::Complete);
        }
        let (cache, own) = (Arc::downgrade(self), Arc::downgrade(entry));
        let ended = move |memory: &Arc<ArrivingMemory>| {
            if let (Some(cache), Some(entry)) = (cache.upgrade(), own.upgrade()) {
                cache.ended(&entry, memory);
            }
        };
        let memory = ArrivingMemory::start(id, &directory, &self.folder.socket(), ended)?;
        Ok(EntryPhase::Partial(memory))
    }

    /// Compares all bytes of an image with its manifest, if they have arrived.
    fn ended(&self, entry: &CacheEntry, memory: &Arc<ArrivingMemory>) {
        if !entry.has(memory) {
            return;
        }
        if memory.failure().is_some() {
            return entry.lost(memory);
        }
        let completed = complete(&self.folder.image(entry.id)).map(drop);
        let read = entry.pinned().map_or(0, |pinned| pinned.bytes_read());
        match &completed {
            Ok(()) => info!("image {} is complete: {read} bytes were read from its store", entry.id),
            Err(error) => warn!("image {} is not complete: {error:#}", entry.id),
        }
        entry.completed(memory, completed);
    }

    /// Gives a streamer what brings the missing memory of an image; none: the image is complete.
    ///
    /// # Errors
    /// The cache does not have the image, or no more of its memory arrives.
    pub fn fetch(self: &Arc<Self>, id: &str) -> anyhow::Result<Option<SharedSockets>> {
        let entry = self.with_id(id)?;
        // It is not here if an earlier agent had its fetcher.
        self.ensure(&entry, Remake::Left, None, None)?;
        match entry.phase() {
            EntryPhase::Partial(memory) => memory.join().map(Some),
            _ => Ok(None),
        }
    }

    /// Returns the image whose directory this is, if some of its memory has not arrived.
    #[must_use]
    pub fn partial_at(&self, path: &Path) -> Option<Digest> {
        let id = self.folder.image_at(path)?;
        let entry = self.entries().get(&id).cloned()?;
        (!matches!(entry.phase(), EntryPhase::Complete)).then_some(id)
    }

    /// Notes that a restore, which has begun at a time, has found a wrong block in the image of this
    /// directory.
    pub fn doubt(&self, path: &Path, began: Instant) {
        let Some(id) = self.folder.image_at(path) else { return };
        let Some(entry) = self.entries().get(&id).cloned() else { return };
        if entry.doubt(began) {
            warn!(
                "image {id} of the cache has a wrong block: it is compared with its manifest before it \
                 is used again"
            );
            // The next agent knows it, too.
            if self.folder.is_complete(id)
                && let Err(error) = self.folder.note_doubt(id)
            {
                warn!("{error:#}: an agent that is started before that does not compare it");
            }
        }
    }

    /// Returns what was counted. It reads no file.
    #[must_use]
    pub fn counts(&self) -> CacheCounts {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let CacheCounters { hits, misses, failures, received } = &self.counters;
        CacheCounts {
            size: self.folder.size(),
            hits: get(hits),
            misses: get(misses),
            failures: get(failures),
            store_bytes: get(received),
        }
    }

    /// Looks at the files of all images.
    #[must_use]
    pub fn contents(&self) -> CacheContents {
        let images: Vec<Digest> = self
            .all()
            .into_iter()
            .map(|entry| entry.id)
            .filter(|id| self.folder.image(*id).is_dir())
            .collect();
        let complete = images.iter().filter(|id| self.folder.is_complete(**id)).count();
        CacheContents {
            complete: complete as u64,
            partial: (images.len() - complete) as u64,
            bytes: images.iter().map(|id| self.folder.allocated(*id)).sum(),
        }
    }

    /// Returns whether a path is the directory of an image of this cache.
    #[must_use]
    pub fn has_place(&self, path: &Path) -> bool {
        self.folder.image_at(path).is_some()
    }

    /// Lists the images, the one that was used last first.
    #[must_use]
    pub fn list(&self) -> Vec<CachedImageState> {
        let folder = &self.folder;
        let here = |entry: &Arc<CacheEntry>| folder.image(entry.id).is_dir();
        let mut images: Vec<CachedImageState> = self
            .all()
            .into_iter()
            .filter(here)
            .map(|entry| {
                let id = entry.id;
                let in_use = entry.is_pinned() || folder.is_leased(id);
                CachedImageState {
                    id,
                    url: folder.origin(id),
                    bytes: folder.allocated(id),
                    complete: folder.is_complete(id),
                    unused: folder.unused(id),
                    in_use,
                }
            })
            .collect();
        images.sort_by_key(|image| image.unused);
        images
    }

    /// Removes an image. Returns its bytes.
    ///
    /// # Errors
    /// There is none, or a restore uses it.
    pub fn remove(&self, id: &str) -> anyhow::Result<u64> {
        ensure!(id.len() >= ID_DIGITS, "{id}: expected {ID_DIGITS} digits of an image id at least");
        let entry = self.with_id(id)?;
        let bytes = self.folder.allocated(entry.id);
        ensure!(self.folder.image(entry.id).is_dir(), "the cache has no image {id}");
        ensure!(
            entry.evict(&self.folder)?,
            "image {} is in use: a restore reads it, or it is being copied",
            entry.id
        );
        Ok(bytes)
    }

    /// The threads that ask stores.
    pub(crate) fn runtime(&self) -> &Handle {
        self.runtime.handle()
    }

    /// Returns the one image whose id begins with these digits.
    pub(crate) fn with_id(&self, id: &str) -> anyhow::Result<Arc<CacheEntry>> {
        let all = self.all();
        let mut found = all.iter().filter(|entry| !id.is_empty() && entry.id.to_string().starts_with(id));
        let entry = found.next().with_context(|| format!("the cache has no image {id}"))?;
        ensure!(found.next().is_none(), "{id}: several images of the cache have an id that begins so");
        Ok(Arc::clone(entry))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rewake_criu_images::{Inventory, write};
    use rewake_image_store::push;
    use rewake_manifest::seal;
    use tempfile::TempDir;

    use rewake_image_transfer::server::exports::{ImageFolder as _, PeerRights};

    use super::*;
    use crate::folder::tests::{image, set_unused};

    const MEMORY: [u8; 5000] = [7; 5000];

    /// A store with an image none of whose memory is lazy.
    struct StoredImageScene {
        dir: TempDir,
        url: ImageUrl,
    }

    impl StoredImageScene {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let image = dir.path().join("image");
            fs::create_dir_all(dir.path().join("store")).unwrap();
            fs::create_dir(&image).unwrap();
            write::inventory(&image, &Inventory { version: 2, plugins: Vec::new(), run_id: None }).unwrap();
            fs::write(image.join("pages-1.img"), MEMORY).unwrap();
            seal(&image).unwrap();
            let url: ImageUrl = format!("file://{}/store/web", dir.path().display()).parse().unwrap();
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let store = ImageStore::open(&url.store).unwrap();
            runtime.block_on(push(&store, &image, &url.name)).unwrap();
            Self { dir, url }
        }

        /// An agent's cache of at most `size` bytes.
        fn cache(&self, size: u64) -> Arc<NodeCache> {
            let folder = CacheFolder::open(&self.dir.path().join("cache"), Some(size)).unwrap();
            NodeCache::start(folder).unwrap()
        }
    }

    #[test]
    fn a_complete_image_is_used_without_its_origin() {
        let scene = StoredImageScene::new();
        let cache = scene.cache(1 << 20);
        let id = cache.acquire(&scene.url, None, &[]).unwrap().id().to_string();
        fs::remove_file(cache.folder.path().join(format!("{id}.json"))).unwrap();
        assert!(cache.fetch(&id).unwrap().is_none(), "nothing is missing");
        let pin = cache.acquire(&scene.url, Some(&id), &[]).unwrap();
        assert!(fs::read(pin.path().join("pages-1.img")).unwrap() == MEMORY);
    }

    #[test]
    fn of_an_image_that_does_not_fit_nothing_is_kept() {
        let scene = StoredImageScene::new();
        let cache = scene.cache(1000);
        let error = cache.acquire(&scene.url, None, &[]).unwrap_err();
        assert!(format!("{error:#}").contains("no space for image"), "{error:#}");
        let entry = cache.entries().values().next().cloned().unwrap();
        assert!(entry.pinned().is_none(), "its index is not in memory any more");
        drop(entry);
        assert!(cache.list().is_empty() && cache.entries().is_empty());
    }

    #[test]
    fn the_next_agent_compares_an_image_with_a_wrong_block() {
        let scene = StoredImageScene::new();
        let cache = scene.cache(1 << 20);
        let path = cache.acquire(&scene.url, None, &[]).unwrap().path().to_owned();
        fs::write(path.join("pages-1.img"), [8; 5000]).unwrap();
        cache.doubt(&path, Instant::now());
        drop(cache);
        let cache = scene.cache(1 << 20);
        let id = cache.acquire(&scene.url, None, &[]).unwrap().id();
        assert!(fs::read(path.join("pages-1.img")).unwrap() == MEMORY);
        assert!(!cache.folder.is_doubted(id));
    }

    #[test]
    fn an_image_that_is_used_again_stays_when_another_must_go() {
        let scene = StoredImageScene::new();
        let folder = CacheFolder::open(&scene.dir.path().join("cache"), Some(1 << 20)).unwrap();
        let other = image(&folder, 7, MEMORY.len());
        let cache = NodeCache::start(folder).unwrap();
        let id = cache.acquire(&scene.url, None, &[]).unwrap().id();
        // The store is asked which image it has; or it is not.
        for expected in [None, Some(id.to_string())] {
            set_unused(&cache.folder, id, Duration::from_secs(200));
            set_unused(&cache.folder, other, Duration::from_secs(100));
            drop(cache.acquire(&scene.url, expected.as_deref(), &[]).unwrap());
            let used: Vec<Digest> = cache.list().iter().map(|image| image.id).collect();
            assert_eq!(used, [id, other], "{expected:?}");
        }
        let next = CacheEntry::new(Digest([9; 32]), &cache.folder);
        let bytes = cache.folder.size() - cache.folder.allocated(id);
        space::reserve(&cache.folder, &next, bytes, &cache.all()).unwrap();
        assert!(cache.folder.image(id).exists() && !cache.folder.image(other).exists());
    }

    #[test]
    fn a_request_for_a_parent_is_refused() {
        let scene = StoredImageScene::new();
        let cache = scene.cache(1 << 20);
        let images = CacheImages(Arc::downgrade(&cache));
        let error = images.open(Path::new("a7"), 1, &PeerRights::All).map(drop).unwrap_err();
        assert_eq!(error.to_string(), "images of the cache have no parents");
    }
}
