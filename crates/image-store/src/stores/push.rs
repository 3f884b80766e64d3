// SPDX-License-Identifier: MIT OR Apache-2.0
//! Stores an image: packs first, then its manifest, its index, and its name. What was written before a
//! failure is no image, and the next push uses it.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::fs::File;
use std::num::NonZero;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, SystemTime};

use futures::StreamExt as _;
use nix::time::{ClockId, clock_gettime};
use rewake_criu_images::{Digest, ImageDir, ImageLease};
use rewake_image_signature::{ImageSignature, MAX_SIGNATURE};
use rewake_manifest::{
    MANIFEST_NAME, ManifestError, ManifestReader, ManifestRecord, SealedChunk, refuse_partial,
};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tracing::warn;

use crate::blocks::{self, StoredBlocks};
use crate::error::{ImageStoreError, Result};
use crate::format::{ChunkLocation, ImageIndex};
use crate::manifest_bytes::ManifestBytes;
use crate::names::{INDEXES, MANIFESTS, PACKS, REMOVED, hash_part, random};
use crate::pack::{PackedChunk, Packs};
use crate::report::{GRACE, StorePushReport, StoredImage};
use crate::store::{ImageStore, ListedObject, MAX_INDEX, MAX_INDEXES};
use crate::working_set;

/// The longest time that a push may take. What it uses is not removed for [`GRACE`], which is longer.
pub(crate) const PUSH_LIMIT: Duration = Duration::from_secs(8 * 3600);
/// The age up to which a pack is used that no image uses: it is not removed before the push has ended.
pub(crate) const RESUME_LIMIT: Duration = Duration::from_secs(7 * 3600);
/// How much the clocks of a store may differ: a store of several hosts has several.
const CLOCK_MARGIN: Duration = Duration::from_secs(8 * 3600);
const _: () =
    assert!(RESUME_LIMIT.as_secs() + PUSH_LIMIT.as_secs() + CLOCK_MARGIN.as_secs() < GRACE.as_secs());

/// The most threads that read and compress; each has a chunk of 2 MiB.
const MAX_THREADS: usize = 8;
/// Chunks of a thread that wait for others before them.
const CHUNKS_PER_THREAD: usize = 2;

/// Stores the image of a directory under a name. An image of that name is replaced at the end.
///
/// # Errors
/// The image is not sealed, or not as it was sealed; the store cannot be written; or the push takes too long.
pub async fn push(store: &ImageStore, directory: &Path, name: &str) -> Result<StorePushReport> {
    push_within(store, directory, name, PUSH_LIMIT).await
}

pub(crate) async fn push_within(
    store: &ImageStore,
    directory: &Path,
    name: &str,
    limit: Duration,
) -> Result<StorePushReport> {
    let deadline = boot_time().saturating_add(limit);
    let images = ImageDir::open(directory)?;
    let _lease = ImageLease::of(&images)?;
    refuse_partial(&images)?;
    let Some((path, file, length)) = images.file(MANIFEST_NAME)? else {
        return Err(ManifestError::NotSealed { directory: images.path().to_owned() }.into());
    };
    let sealed = ManifestBytes::of(&file, length);
    let copy = file.try_clone();
    let copy = copy.map_err(|reason| ImageStoreError::File { file: path.display().to_string(), reason })?;
    let manifest = ManifestReader::of(copy, length, &path)?;
    let id = manifest.id();
    store.begin(&images, || Ok(ManifestReader::open(&images)?), name).await?;
    // Before its packs are listed: what the name says is not yet what the store has.
    let earlier = store.find(name).await.ok().flatten().filter(|image| image.id == id);
    let listed = store.sound_packs().await?;
    let recorded = working_set::of_directory(&images);
    let signature = ImageSignature::read(&images)?.filter(|bytes| bytes.len() as u64 <= MAX_SIGNATURE);
    if let Some(image) = &earlier
        && has_image(store, image, &listed).await
    {
        let working_set = store.replace_notes(image.clone(), recorded, signature).await?;
        return Ok(StorePushReport { id, had: true, working_set, ..StorePushReport::default() });
    }
    let start = store.now().await?;
    let known = known_chunks(store, &listed).await?;
    let mut push = ImagePush {
        store,
        images: &images,
        known,
        packs: Packs::new(store, &listed, start),
        threads: Arc::new(Semaphore::new(threads())),
        jobs: VecDeque::new(),
        chunks: Vec::new(),
        seen: HashSet::new(),
        report: StorePushReport { id, ..StorePushReport::default() },
        start,
        deadline,
        limit,
    };
    push.all(manifest).await?;
    push.packs.finish().await?;
    push.report.working_set = recorded.as_ref().map_or(0, |bytes| bytes.len() as u64);
    let working_set = match recorded {
        Some(bytes) => Some(store.put_working_set(bytes).await?),
        None => earlier.as_ref().and_then(|image| image.working_set.clone()),
    };
    let signature = signature.or_else(|| earlier.and_then(|image| image.signature));
    push.finish(name, sealed, working_set, signature).await
}

/// How many threads read and compress.
fn threads() -> usize {
    thread::available_parallelism().map_or(1, NonZero::get).min(MAX_THREADS)
}

/// Whether the store has the manifest, the index and all packs of an image.
async fn has_image(store: &ImageStore, image: &StoredImage, packs: &BTreeMap<String, ListedObject>) -> bool {
    if !store.head(MANIFESTS, &image.version).await.is_ok_and(|manifest| manifest.is_some()) {
        return false;
    }
    let index = store.index(&image.version).await;
    index.is_ok_and(|index| {
        index.is_some_and(|index| index.chunks.iter().all(|(_, chunk)| is_in(chunk, packs)))
    })
}

/// Whether the store has the bytes of a chunk, as far as a listing of its packs says.
fn is_in(chunk: &ChunkLocation, packs: &BTreeMap<String, ListedObject>) -> bool {
    let end = u64::from(chunk.offset) + u64::from(chunk.stored_length());
    packs.get(&*chunk.pack).is_some_and(|pack| pack.length >= end)
}

/// Reads which chunks the images of the store have. Images that are being removed do not count.
async fn known_chunks(
    store: &ImageStore,
    packs: &BTreeMap<String, ListedObject>,
) -> Result<HashMap<Digest, ChunkLocation>> {
    // Marks first: one that is written later says that the day begins after this push has begun.
    let removed = store.list(REMOVED).await?;
    let mut versions = store.list(INDEXES).await?;
    versions.retain(|version, _| !removed.contains_key(version));
    let indexes =
        futures::stream::iter(versions.into_keys()).map(async |version| store.index(&version).await);
    let mut indexes = std::pin::pin!(indexes.buffer_unordered(MAX_INDEXES));
    let mut known = HashMap::new();
    while let Some(index) = indexes.next().await {
        match index {
            Ok(Some(index)) => {
                known.extend(index.chunks.into_iter().filter(|(_, chunk)| is_in(chunk, packs)));
            }
            // It has been removed since it was listed.
            Ok(None) => {}
            Err(error @ (ImageStoreError::Damaged { .. } | ImageStoreError::Version { .. })) => {
                warn!("{error}; its chunks are stored again");
            }
            Err(error) => return Err(error),
        }
    }
    Ok(known)
}

struct ImagePush<'a> {
    store: &'a ImageStore,
    images: &'a ImageDir,
    /// The chunks that other images have.
    known: HashMap<Digest, ChunkLocation>,
    packs: Packs,
    /// Has a permit for each thread that reads and compresses.
    threads: Arc<Semaphore>,
    /// Chunks that are being read, and those behind them, in the order of the manifest.
    jobs: VecDeque<ChunkJob>,
    chunks: Vec<(Digest, PushedChunk)>,
    seen: HashSet<Digest>,
    report: StorePushReport,
    /// When the push began, by the store's clock.
    start: SystemTime,
    /// When it must have ended, by the host's clock.
    deadline: Duration,
    limit: Duration,
}

/// A chunk of the image, in the order of the manifest.
enum ChunkJob {
    Known(Digest, ChunkLocation),
    Read(SealedChunk, JoinHandle<Result<StoredBlocks>>),
}

/// A chunk that is stored when all packs are.
enum PushedChunk {
    Known(ChunkLocation),
    Packed(PackedChunk, u32),
}

impl ImagePush<'_> {
    async fn all(&mut self, mut manifest: ManifestReader) -> Result<()> {
        let threads = threads();
        let mut file = None;
        while let Some(record) = manifest.next_record()? {
            match record {
                ManifestRecord::Parent(_) => {}
                ManifestRecord::File(sealed) => {
                    self.report.files += 1;
                    self.report.bytes += sealed.length;
                    file = self
                        .images
                        .file(&sealed.name)?
                        .map(|(path, file, _)| Arc::new((path.display().to_string(), file)));
                }
                ManifestRecord::Segment(segment) => {
                    let mut offset = segment.offset;
                    for chunk in segment.chunks {
                        self.chunk(file.as_ref(), offset, chunk);
                        offset += u64::from(chunk.length);
                        while self.jobs.len() >= threads * CHUNKS_PER_THREAD {
                            self.finish_job().await?;
                        }
                    }
                }
            }
        }
        while !self.jobs.is_empty() {
            self.finish_job().await?;
        }
        Ok(())
    }

    /// Begins with a chunk, if it is not zeros or a duplicate.
    fn chunk(&mut self, file: Option<&Arc<(String, File)>>, offset: u64, chunk: SealedChunk) {
        if chunk.is_zero() {
            return;
        }
        if !self.seen.insert(chunk.digest) {
            self.report.shared += u64::from(chunk.length);
            return;
        }
        let known = self.known.remove(&chunk.digest).filter(|known| known.length == chunk.length);
        if let Some(known) = known {
            self.report.shared += u64::from(chunk.length);
            self.jobs.push_back(ChunkJob::Known(chunk.digest, known));
            return;
        }
        let (file, threads) = (file.cloned(), Arc::clone(&self.threads));
        let read = tokio::spawn(async move {
            // Never closed.
            let _permit = threads.acquire().await;
            let read = tokio::task::spawn_blocking(move || read(file.as_deref(), offset, chunk));
            read.await.unwrap_or_else(|error| {
                let (file, reason) = ("a file of the image".to_owned(), std::io::Error::other(error));
                Err(ImageStoreError::File { file, reason })
            })
        });
        self.jobs.push_back(ChunkJob::Read(chunk, read));
    }

    /// Packs the oldest chunk.
    async fn finish_job(&mut self) -> Result<()> {
        let (digest, chunk) = match self.jobs.pop_front() {
            None => return Ok(()),
            Some(ChunkJob::Known(digest, known)) => (digest, PushedChunk::Known(known)),
            Some(ChunkJob::Read(chunk, read)) => {
                let ended = |error| self.store.setup(&format!("reading a chunk ended early: {error}"));
                let blocks = read.await.map_err(ended)??;
                self.check_time()?;
                (chunk.digest, PushedChunk::Packed(self.packs.add(blocks).await?, chunk.length))
            }
        };
        self.chunks.push((digest, chunk));
        Ok(())
    }

    /// Writes what makes the packs an image.
    async fn finish(
        mut self,
        name: &str,
        mut manifest: ManifestBytes<'_>,
        working_set: Option<String>,
        signature: Option<Vec<u8>>,
    ) -> Result<StorePushReport> {
        let random = random().map_err(|error| self.store.setup(&format!("/dev/urandom: {error}")))?;
        let version = format!("{}-{random}", hash_part(self.report.id));
        let manifest_length = manifest.length();
        let StorePushReport { id, files, bytes, .. } = self.report;
        let named = name.to_owned();
        let image = StoredImage {
            name: named,
            version,
            id,
            manifest_length,
            files,
            bytes,
            working_set: None,
            signature: None,
        };
        let chunks = std::mem::take(&mut self.chunks).into_iter().map(|(digest, chunk)| match chunk {
            PushedChunk::Known(known) => (digest, known),
            PushedChunk::Packed(packed, length) => (digest, self.packs.location(&packed, length)),
        });
        let index = ImageIndex { chunks: chunks.collect(), image };
        let encoded = index.encode();
        let ImageIndex { image, chunks } = index;
        let length = encoded.len() as u64;
        if length > MAX_INDEX {
            let image = self.store.image_url(name);
            return Err(ImageStoreError::TooManyChunks { image, length, most: MAX_INDEX });
        }
        self.store.put_from(MANIFESTS, &image.version, &mut manifest).await?;
        if !manifest.is_of(id) {
            let file = self.images.path().join(MANIFEST_NAME).display().to_string();
            let length = u32::try_from(manifest_length).unwrap_or(u32::MAX);
            return Err(ImageStoreError::NotAsSealed { file, offset: 0, length });
        }
        self.check_time()?;
        self.store.put_from(INDEXES, &image.version, &*encoded).await?;
        // From now on the index protects its packs.
        self.check_packs(&chunks).await?;
        self.store.publish(StoredImage { working_set, signature, ..image }, &chunks).await?;
        self.report.kept = self.packs.kept;
        self.report.written =
            self.packs.written + manifest_length + encoded.len() as u64 + self.report.working_set;
        Ok(self.report)
    }

    /// Refuses an image whose packs were removed, and one that took too long by the clock of the host or of
    /// the store: that of a virtual machine stands while it is paused.
    async fn check_packs(&self, chunks: &[(Digest, ChunkLocation)]) -> Result<()> {
        let packs = self.store.sound_packs().await?;
        if let Some((_, lost)) = chunks.iter().find(|(_, chunk)| !is_in(chunk, &packs)) {
            return Err(ImageStoreError::LostPack { object: self.store.object(PACKS, &lost.pack) });
        }
        let took = self.store.now().await?.duration_since(self.start).unwrap_or_default();
        if took >= self.limit {
            return Err(ImageStoreError::TooLong { limit: self.limit });
        }
        self.check_time()
    }

    fn check_time(&self) -> Result<()> {
        if boot_time() < self.deadline { Ok(()) } else { Err(ImageStoreError::TooLong { limit: self.limit }) }
    }
}

/// Reads a chunk of a file, compares it with its hash, and compresses it.
fn read(file: Option<&(String, File)>, offset: u64, chunk: SealedChunk) -> Result<StoredBlocks> {
    let not_sealed =
        |file: &str| ImageStoreError::NotAsSealed { file: file.to_owned(), offset, length: chunk.length };
    let Some((name, file)) = file else { return Err(not_sealed("a file of the image that was removed")) };
    let mut bytes = vec![0; chunk.length as usize];
    match file.read_exact_at(&mut bytes, offset) {
        Ok(()) if blake3::hash(&bytes).as_bytes() == &chunk.digest.0 => {}
        Ok(()) => return Err(not_sealed(name)),
        Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => return Err(not_sealed(name)),
        Err(reason) => return Err(ImageStoreError::File { file: name.clone(), reason }),
    }
    blocks::store(&bytes).map_err(|reason| ImageStoreError::File { file: name.clone(), reason })
}

/// The time since the host was booted, also while it was suspended.
fn boot_time() -> Duration {
    // The kernel has this clock.
    clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(Duration::MAX, Duration::from)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use rewake_manifest::seal;

    use crate::collect_garbage;
    use crate::names::CLOCK;
    use crate::pack::FULL;
    use crate::testing::{TestImage, TestObjects, random_bytes, run};
    use crate::verify;

    const CHUNK: usize = 2 << 20;

    async fn check(store: &ImageStore, name: &str) {
        let report = verify(store, name, |wrong| panic!("{wrong}")).await.unwrap();
        assert_eq!(report.wrong, 0);
    }

    fn names(images: &[(String, Result<StoredImage>)]) -> Vec<&str> {
        images.iter().map(|(name, _)| name.as_str()).collect()
    }

    #[test]
    fn chunks_are_stored_once_and_zeros_not_at_all() {
        run(async {
            let (objects, store) = TestObjects::new();
            let (first, second) = (random_bytes("1", CHUNK), random_bytes("2", CHUNK));
            let zeros = vec![0; CHUNK];
            let image = TestImage::new(&[&*first, &zeros, &second, &first].concat());
            let report = push(&store, &image.path(), "a").await.unwrap();
            assert_eq!((report.files, report.shared, report.kept), (2, CHUNK as u64, 0));
            // Another image, which has the second chunk and a new one.
            let third = random_bytes("3", CHUNK);
            let other = TestImage::new(&[&*third, &second].concat());
            let before = report.written;
            let report = push(&store, &other.path(), "b").await.unwrap();
            assert_eq!(report.shared, CHUNK as u64);
            assert!(report.written < before - CHUNK as u64, "{report:?}");
            assert_eq!(objects.names(PACKS).await.len(), 2);
            check(&store, "a").await;
            check(&store, "b").await;
            assert_eq!(names(&store.images().await.unwrap()), ["a", "b"]);
        });
    }

    #[test]
    fn a_push_killed_at_any_write_leaves_no_image() {
        let memory = random_bytes("memory", 2 * FULL + CHUNK);
        let image = TestImage::new(&memory);
        run(async {
            let mut kept = Vec::new();
            for writes in 0.. {
                let (objects, store) = TestObjects::new();
                objects.kill_after(writes);
                let pushed = push(&store, &image.path(), "a").await;
                objects.revive();
                if pushed.is_ok() {
                    // The marker, the clock, three packs, the manifest, the index, the clock and the name.
                    assert_eq!(writes, 9);
                    check(&store, "a").await;
                    break;
                }
                assert!(matches!(pushed, Err(ImageStoreError::Request { act: "write", .. })), "{pushed:?}");
                if writes > 0 {
                    assert_eq!(names(&store.images().await.unwrap()), [""; 0]);
                }
                assert!(matches!(store.image("a").await, Err(ImageStoreError::NoImage { .. })));
                kept.push(push(&store, &image.path(), "a").await.unwrap().kept);
                check(&store, "a").await;
            }
            // Packs were not written again, whichever push came first. With an index they belong to an image.
            let all = memory.len() as u64;
            assert_eq!(kept[..3], [0, 0, 0]);
            assert!(kept[3] > 0 && kept[4] > kept[3] && all > kept[4], "{kept:?}");
            assert!(kept[5] >= all && kept[6] == kept[5] && kept[7..] == [0, 0], "{kept:?}");
        });
    }

    #[test]
    fn two_pushes_at_once_give_two_images() {
        let common = random_bytes("common", FULL);
        let [one, two] =
            ["one", "two"].map(|name| TestImage::new(&[&*common, &random_bytes(name, CHUNK)].concat()));
        run(async {
            let (objects, store) = TestObjects::new();
            let [path_one, path_two] = [one.path(), two.path()];
            let (first, second) =
                tokio::join!(push(&store, &path_one, "one"), push(&store, &path_two, "two"));
            assert!(first.is_ok() && second.is_ok(), "{first:?} {second:?}");
            check(&store, "one").await;
            check(&store, "two").await;
            // The same image under one name: the last one has it, and both can be read.
            let (first, second) =
                tokio::join!(push(&store, &path_one, "same"), push(&store, &path_two, "same"));
            assert!(first.is_ok() && second.is_ok(), "{first:?} {second:?}");
            check(&store, "same").await;
            assert_eq!(objects.names(INDEXES).await.len(), 4);
            objects.pass(25);
            collect_garbage(&store, GRACE).await.unwrap();
            objects.pass(25);
            assert_eq!(collect_garbage(&store, GRACE).await.unwrap().removed_images, 1);
            check(&store, "same").await;
        });
    }

    #[test]
    fn an_image_that_is_not_as_sealed_is_not_stored() {
        let image = TestImage::new(&random_bytes("memory", CHUNK + 4096));
        let pages = image.path().join("pages-1.img");
        let mut bytes = fs::read(&pages).unwrap();
        bytes[CHUNK + 5] ^= 1;
        fs::write(&pages, &bytes).unwrap();
        run(async {
            let (_, store) = TestObjects::new();
            let error = push(&store, &image.path(), "a").await.unwrap_err();
            assert!(
                matches!(
                    &error,
                    ImageStoreError::NotAsSealed { offset, length: 4096, .. } if *offset == CHUNK as u64
                ),
                "{error}"
            );
            fs::write(&pages, &bytes[..CHUNK]).unwrap();
            let error = push(&store, &image.path(), "a").await.unwrap_err();
            assert!(matches!(error, ImageStoreError::NotAsSealed { .. }), "{error}");
            assert_eq!(names(&store.images().await.unwrap()), [""; 0]);
        });
    }

    #[test]
    fn a_push_that_takes_too_long_ends_without_an_image() {
        let image = TestImage::new(&random_bytes("memory", CHUNK));
        run(async {
            let (_, store) = TestObjects::new();
            let error = push_within(&store, &image.path(), "a", Duration::ZERO).await.unwrap_err();
            assert!(matches!(error, ImageStoreError::TooLong { .. }), "{error}");
            assert_eq!(names(&store.images().await.unwrap()), [""; 0]);
        });
    }

    #[test]
    fn a_lost_or_cut_pack_is_stored_again() {
        let image = TestImage::new(&random_bytes("memory", CHUNK));
        run(async {
            let (objects, store) = TestObjects::new();
            push(&store, &image.path(), "a").await.unwrap();
            assert!(push(&store, &image.path(), "a").await.unwrap().had);
            let pack = objects.names(PACKS).await.remove(0);
            let bytes = objects.read(PACKS, &pack).await;
            objects.replace(PACKS, &pack, bytes[..bytes.len() - 1].to_vec()).await;
            assert!(!push(&store, &image.path(), "a").await.unwrap().had);
            check(&store, "a").await;
            for pack in objects.names(PACKS).await {
                objects.remove(PACKS, &pack).await;
            }
            assert!(!push(&store, &image.path(), "a").await.unwrap().had);
            check(&store, "a").await;
        });
    }

    #[test]
    fn a_push_whose_pack_is_removed_meanwhile_ends_without_an_image() {
        let image = TestImage::new(&random_bytes("memory", CHUNK));
        run(async {
            let (objects, store) = TestObjects::new();
            let beside = objects.clone();
            objects.before(INDEXES, async move {
                let pack = beside.names(PACKS).await.remove(0);
                beside.remove(PACKS, &pack).await;
            });
            let error = push(&store, &image.path(), "a").await.unwrap_err();
            assert!(matches!(error, ImageStoreError::LostPack { .. }), "{error}");
            assert_eq!(names(&store.images().await.unwrap()), [""; 0]);
        });
    }

    #[test]
    fn a_push_whose_host_was_paused_ends_without_an_image() {
        let image = TestImage::new(&random_bytes("memory", CHUNK));
        run(async {
            let (objects, store) = TestObjects::new();
            // The host's clock does not count this time.
            let during = objects.clone();
            objects.before(INDEXES, async move { during.pass(8) });
            let error = push(&store, &image.path(), "a").await.unwrap_err();
            assert!(matches!(error, ImageStoreError::TooLong { .. }), "{error}");
            assert_eq!(names(&store.images().await.unwrap()), [""; 0]);
        });
    }

    #[test]
    fn the_url_of_a_store_is_no_image_of_one_above_it() {
        let image = TestImage::new(&random_bytes("memory", CHUNK));
        run(async {
            let (objects, above) = TestObjects::new();
            objects.replace("store", "rewake-store", b"rewake-store 1\n".to_vec()).await;
            let refused = |error: ImageStoreError| {
                assert!(matches!(&error, ImageStoreError::NoName { url } if url == "test:/store"), "{error}");
            };
            refused(push(&above, &image.path(), "store").await.unwrap_err());
            refused(above.image("store").await.unwrap_err());
            refused(above.remove("store").await.unwrap_err());
            assert!(
                matches!(above.images().await, Err(ImageStoreError::NoStore { .. })),
                "no second store is made"
            );
            push(&above, &image.path(), "web").await.unwrap();
        });
    }

    #[test]
    fn a_manifest_that_changes_during_a_push_is_not_stored() {
        let image = TestImage::new(&random_bytes("memory", CHUNK));
        let other = TestImage::new(&random_bytes("other", CHUNK));
        run(async {
            let (objects, store) = TestObjects::new();
            let [path, from] = [&image, &other].map(|image| image.path().join(MANIFEST_NAME));
            // Another one in its place changes nothing: the open file is stored.
            let (place, another) = (path.clone(), path.with_extension("other"));
            fs::copy(&from, &another).unwrap();
            objects.before(PACKS, async move { fs::rename(another, place).unwrap() });
            let report = push(&store, &image.path(), "a").await.unwrap();
            assert_eq!(store.image("a").await.unwrap().id, report.id);
            check(&store, "a").await;
            // Other bytes in the same file are noticed.
            fs::remove_file(&path).unwrap();
            seal(&image.path()).unwrap();
            let bytes = fs::read(&from).unwrap();
            objects.before(CLOCK, async move { fs::write(path, bytes).unwrap() });
            let error = push(&store, &image.path(), "b").await.unwrap_err();
            assert!(
                matches!(&error, ImageStoreError::NotAsSealed { file, .. } if file.ends_with(MANIFEST_NAME)),
                "{error}"
            );
            assert_eq!(names(&store.images().await.unwrap()), ["a"]);
        });
    }

    #[test]
    fn a_cut_pack_that_a_killed_push_has_left_is_not_used() {
        let image = TestImage::new(&random_bytes("memory", CHUNK));
        run(async {
            let (objects, store) = TestObjects::new();
            // The marker, the clock and the pack.
            objects.kill_after(3);
            push(&store, &image.path(), "a").await.unwrap_err();
            objects.revive();
            let pack = objects.names(PACKS).await.remove(0);
            let bytes = objects.read(PACKS, &pack).await;
            objects.replace(PACKS, &pack, bytes[..bytes.len() - 1].to_vec()).await;
            assert_eq!(push(&store, &image.path(), "a").await.unwrap().kept, 0);
            check(&store, "a").await;
        });
    }

    #[test]
    fn a_damaged_index_of_another_image_does_not_stop_a_push() {
        let image = TestImage::new(&random_bytes("memory", CHUNK));
        run(async {
            let (objects, store) = TestObjects::new();
            push(&store, &image.path(), "a").await.unwrap();
            let index = objects.names(INDEXES).await.remove(0);
            objects.replace(INDEXES, &index, b"x".to_vec()).await;
            objects.pass(12);
            assert_eq!(push(&store, &image.path(), "b").await.unwrap().shared, 0);
            check(&store, "b").await;
        });
    }
}
