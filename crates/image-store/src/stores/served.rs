// SPDX-License-Identifier: MIT OR Apache-2.0
//! The images of a store, served as an image server's: ranges of files are read from packs, by block.
//!
//! Bytes that are a part of a chunk are not checked here. The client does that, by the manifest.

use std::collections::{HashSet, VecDeque};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use anyhow::{Context as _, ensure};
use bytes::Bytes;
use futures::FutureExt as _;
use futures::future::try_join_all;
use rewake_criu_images::Digest;
use rewake_image_io::BLOCK;
use rewake_image_signature::MAX_SIGNATURE;
use rewake_image_transfer::protocol::WORKING_SET_NUMBER;
use rewake_image_transfer::server::exports::{ImageFolder, OpenImage, PeerRights};
use rewake_manifest::{ManifestRecord, SealedChunk};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use crate::blocks;
use crate::error::Result;
use crate::format::ChunkLocation;
use crate::pack_run::{self, PackRun};
use crate::pinned::PinnedImage;
use crate::read_ahead::{PIECE, ReadAhead};
use crate::reader::ChunkReader;
use crate::report::StoredImage;
use crate::shared_reads::SharedReads;
use crate::store::{ImageStore, MAX_REQUESTS};
use crate::stored_chunk::StoredChunk;
use crate::stored_range::{BlockLoader, ChunkPart, RangePart, StoredRange};
use crate::verify::manifest;

/// Stored bytes of a connection that were read last, or are read ahead of it.
const KEPT: usize = 8 << 20;
/// The same of an image, for all of its connections.
const KEPT_SHARED: usize = 32 << 20;

/// Bytes of ranges that a connection reads at once, if they are more than [`ALWAYS_AHEAD`]: 200 MB/s over 5
/// ms. All share the link, so more would keep the first one, which a program may wait for, back.
const AHEAD: u64 = 1 << 20;
/// Ranges that a connection reads at once, however long they are: 2 MiB each.
const ALWAYS_AHEAD: usize = 2;

/// A store whose images are served. Its requests run in a runtime that must have threads of its own.
#[derive(Debug)]
pub struct StoreFolder {
    store: ImageStore,
    runtime: Handle,
}

impl StoreFolder {
    /// Serves the images of a store.
    #[must_use]
    pub fn new(store: ImageStore, runtime: Handle) -> Self {
        Self { store, runtime }
    }
}

impl ImageFolder for StoreFolder {
    fn open(&self, name: &Path, ancestor: u32, _: &PeerRights) -> anyhow::Result<Box<dyn OpenImage>> {
        ensure!(ancestor == 0, "a store has no parents of images: pull each image of the chain by its name");
        let name = name.to_str().context("expected a name of UTF-8")?;
        let open = async || StoredFiles::open(&PinnedImage::open(&self.store, name).await?, KEPT).await;
        let files = self.runtime.block_on(open())?;
        Ok(Box::new(OpenStoredImage::new(Arc::new(files), self.runtime.clone())?))
    }
}

impl PinnedImage {
    /// Opens its files for an image server. `runtime` must have threads of its own.
    ///
    /// # Errors
    /// Its manifest is damaged, or the store cannot be read.
    pub fn open_files(&self, runtime: &Handle) -> anyhow::Result<Box<dyn OpenImage>> {
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        let files = match &*files {
            Some(files) => {
                files.forget();
                Arc::clone(files)
            }
            None => {
                Arc::clone(files.insert(Arc::new(runtime.block_on(StoredFiles::open(self, KEPT_SHARED))?)))
            }
        };
        Ok(Box::new(OpenStoredImage::new(files, runtime.clone())?))
    }
}

/// A file in an image of a store.
#[derive(Debug)]
struct StoredFile {
    length: u64,
    /// Its chunks, in ascending order of their offsets.
    chunks: Vec<StoredChunk>,
}

/// The files of an image of a store.
#[derive(Debug)]
pub(crate) struct StoredFiles {
    image: StoredImage,
    manifest: File,
    files: Vec<StoredFile>,
    reader: Arc<ChunkReader>,
    working_set: Option<Arc<[u8]>>,
    reads: SharedReads,
    ahead: ReadAhead,
    /// Held from the look at what was requested until the request is noted, because two clients that look at
    /// one moment would both request it.
    planning: Mutex<()>,
}

impl StoredFiles {
    /// `kept`: stored bytes that were read last or ahead, and stay in memory.
    async fn open(pinned: &PinnedImage, kept: usize) -> Result<Self> {
        let (image, reader) = (pinned.image.clone(), Arc::clone(&pinned.reader));
        let (mut records, manifest) = manifest(&pinned.store, &image).await?;
        let mut files: Vec<StoredFile> = Vec::new();
        while let Some(record) = records.next_record()? {
            match (record, files.last_mut()) {
                (ManifestRecord::File(file), _) => {
                    files.push(StoredFile { length: file.length, chunks: Vec::new() });
                }
                (ManifestRecord::Segment(segment), Some(file)) => {
                    let mut offset = segment.offset;
                    for chunk in segment.chunks {
                        file.chunks.push(StoredChunk::new(offset, chunk));
                        offset += u64::from(chunk.length);
                    }
                }
                (ManifestRecord::Segment(_) | ManifestRecord::Parent(_), _) => {}
            }
        }
        let reads = SharedReads::new(kept);
        let (working_set, ahead) = (pinned.working_set.clone(), ReadAhead::new(kept, reader.compression()));
        let planning = Mutex::default();
        Ok(Self { image, manifest, files, reader, working_set, reads, ahead, planning })
    }

    /// Returns the length of a file.
    fn length(&self, file: u32) -> anyhow::Result<u64> {
        if file == WORKING_SET_NUMBER {
            let found = self.working_set.as_ref().map(|bytes| bytes.len() as u64);
            return found.context("the image has no working set");
        }
        let Some(index) = file.checked_sub(1) else { return Ok(self.image.manifest_length) };
        let found = self.files.get(index as usize).map(|file| file.length);
        found.with_context(|| format!("the image has {} files", self.files.len()))
    }

    /// Reads a range, which is in the file.
    async fn read(&self, file: u32, range: Range<u64>) -> anyhow::Result<StoredRange> {
        let mut parts = StoredRange::default();
        if let Some(working_set) = self.working_set.as_deref().filter(|_| file == WORKING_SET_NUMBER) {
            let (start, end) = (usize::try_from(range.start)?, usize::try_from(range.end)?);
            let bytes = working_set.get(start..end).context("the working set is shorter")?;
            parts.push(RangePart::Plain(bytes.to_vec(), 0));
            return Ok(parts);
        }
        let Some(index) = file.checked_sub(1) else {
            let mut bytes = vec![0; usize::try_from(range.end - range.start)?];
            self.manifest.read_exact_at(&mut bytes, range.start)?;
            parts.push(RangePart::Plain(bytes, 0));
            return Ok(parts);
        };
        let chunks = &self.files[index as usize].chunks;
        let first = chunks.partition_point(|chunk| chunk.end() <= range.start);
        let these = chunks[first..].iter().take_while(|chunk| chunk.offset < range.end);
        // What lies in the range of each chunk that is no zeros.
        let stored = these.filter(|chunk| !chunk.chunk.is_zero()).map(async |chunk| {
            let (from, to) = (range.start.max(chunk.offset), range.end.min(chunk.end()));
            let [start, end] = [from - chunk.offset, to - chunk.offset].map(usize::try_from);
            anyhow::Ok((from, self.part(chunk, start?..end?).await?, to))
        });
        let mut at = range.start;
        for (from, of_chunk, to) in try_join_all(stored).await? {
            parts.push(RangePart::Zeros(usize::try_from(from - at)?));
            of_chunk.into_iter().for_each(|part| parts.push(RangePart::Chunk(part)));
            at = to;
        }
        parts.push(RangePart::Zeros(usize::try_from(range.end - at)?));
        Ok(parts)
    }

    /// Requests what follows a range, if its file is read in order. Returns whether the read is elsewhere.
    fn read_ahead(self: &Arc<Self>, file: u32, range: &Range<u64>, runtime: &Handle) -> bool {
        let Some(found) = file.checked_sub(1).and_then(|index| self.files.get(index as usize)) else {
            return false;
        };
        let (wanted, elsewhere) = self.ahead.note(file, range, found.length);
        if wanted.is_empty() {
            return elsewhere;
        }
        let mut ahead = self.stored_bytes(found, &(range.end..wanted.start));
        let _planning = self.planning();
        for run in self.runs(found, &wanted) {
            ahead += run.len();
            let start = run.parts.first().map_or(wanted.start, |(chunk, blocks)| {
                wanted.start.max(found.chunks[*chunk].offset + (blocks.start * BLOCK) as u64)
            });
            if ahead > self.ahead.stored_window || !self.request_ahead(file, found, run, runtime) {
                self.ahead.stop_at(file, &wanted, start);
                break;
            }
        }
        elsewhere
    }

    /// The chunks of a range that have bytes in the store, by index, and which blocks of each are in the
    /// range.
    fn blocks_in<'a>(
        &'a self,
        file: &'a StoredFile,
        range: &'a Range<u64>,
    ) -> impl Iterator<Item = (usize, &'a ChunkLocation, Range<usize>)> {
        let first = file.chunks.partition_point(|chunk| chunk.end() <= range.start);
        let these =
            file.chunks.iter().enumerate().skip(first).take_while(|(_, chunk)| chunk.offset < range.end);
        these.filter(|(_, chunk)| !chunk.chunk.is_zero()).filter_map(|(index, chunk)| {
            // An index that lacks the chunk is an error of its reads.
            let at = self.reader.locate_whole(chunk.chunk.digest, chunk.chunk.length).ok()?;
            let [start, end] = [range.start.max(chunk.offset), range.end.min(chunk.end())];
            let block = |at: u64| usize::try_from((at - chunk.offset) / BLOCK as u64).unwrap_or(usize::MAX);
            (start < end).then(|| (index, at, block(start)..block(end - 1) + 1))
        })
    }

    /// The stored bytes of a range.
    fn stored_bytes(&self, file: &StoredFile, range: &Range<u64>) -> u64 {
        self.blocks_in(file, range).map(|(_, at, blocks)| blocks::stored(at, blocks) as u64).sum()
    }

    /// Returns what was not requested before of a range, in requests: their chunks by index.
    fn runs(&self, file: &StoredFile, range: &Range<u64>) -> Vec<PackRun<usize>> {
        let (mut runs, mut digests) = (Vec::new(), HashSet::new());
        for (index, at, blocks) in self.blocks_in(file, range) {
            let chunk = &file.chunks[index];
            // Equal chunks are read once.
            if !digests.insert(chunk.chunk.digest) {
                continue;
            }
            for block in chunk.new_blocks(blocks).filter(|block| !self.reads.has(chunk.chunk.digest, *block))
            {
                pack_run::add(&mut runs, index, at, block..block + 1, PIECE);
            }
        }
        runs
    }

    /// Requests a run. Returns false if too much is in flight.
    fn request_ahead(
        self: &Arc<Self>,
        number: u32,
        file: &StoredFile,
        run: PackRun<usize>,
        runtime: &Handle,
    ) -> bool {
        let length = run.len();
        if !self.ahead.begin(length) {
            return false;
        }
        let flight = AheadRequest { files: Arc::clone(self), length, began: Instant::now() };
        let (reader, pack, range) = (Arc::clone(&self.reader), run.pack, run.range);
        let bytes = async move { reader.stored_run(&pack, range).await.map_err(Arc::new) }.boxed().shared();
        let mut start = 0;
        for (chunk, blocks) in run.parts.clone() {
            let stored = &file.chunks[chunk];
            let Ok(at) = self.reader.locate(stored.chunk.digest) else { continue };
            stored.request(&blocks);
            let end = start + blocks::stored(at, blocks.clone());
            let result = bytes.clone().map(move |bytes| bytes.map(|bytes| bytes.slice(start..end)));
            self.reads.add(stored.chunk.digest, at, blocks, result);
            start = end;
        }
        runtime.spawn(async move {
            // Who needs these bytes gets the error.
            if bytes.await.is_err() {
                flight.files.forget_requested(number, &run.parts);
            }
            drop(flight);
        });
        true
    }

    /// Forgets that blocks of a file were requested.
    fn forget_requested(&self, file: u32, parts: &[(usize, Range<usize>)]) {
        let Some(file) = file.checked_sub(1).and_then(|index| self.files.get(index as usize)) else { return };
        for (chunk, blocks) in parts {
            file.chunks[*chunk].forget(blocks);
        }
    }

    fn planning(&self) -> MutexGuard<'_, ()> {
        self.planning.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets what was read and what was requested: a client has found a damaged block, or was lost.
    fn forget(&self) {
        self.reads.forget();
        for chunk in self.files.iter().flat_map(|file| &file.chunks) {
            chunk.forget_all();
        }
    }

    /// Reads blocks of a chunk from the store.
    fn stored(
        &self,
        chunk: SealedChunk,
        blocks: Range<usize>,
    ) -> impl Future<Output = Result<Bytes>> + Send + use<> {
        let reader = Arc::clone(&self.reader);
        async move { reader.stored(chunk, blocks).await }
    }

    /// Reads a part of a chunk. It is not compared with the chunk's hash: a manifest has checksums of blocks.
    async fn part(&self, stored: &StoredChunk, part: Range<usize>) -> anyhow::Result<Vec<ChunkPart>> {
        let chunk = stored.chunk;
        let at = self.reader.locate_whole(chunk.digest, chunk.length)?;
        let blocks = part.start / BLOCK..part.end.div_ceil(BLOCK);
        let reads = {
            let _planning = self.planning();
            let more = stored.neighbours(at, &blocks);
            let reads =
                self.reads.begin(chunk.digest, at, blocks.clone(), more, |blocks| self.stored(chunk, blocks));
            let end = reads.last().map_or(blocks.end, |(read, _)| read.blocks.end);
            stored.request(&(blocks.start..end));
            reads
        };
        let parts = reads.into_iter().map(async |(read, blocks)| {
            let bytes = part.start.max(blocks.start * BLOCK)..part.end.min(blocks.end * BLOCK);
            let (first, stored) = (read.blocks.start, read.wait().await?);
            anyhow::Ok(ChunkPart { chunk, stored, first, bytes })
        });
        try_join_all(parts).await
    }
}

/// A request ahead in flight, however its task ends.
struct AheadRequest {
    files: Arc<StoredFiles>,
    /// Its stored bytes.
    length: u64,
    began: Instant,
}

impl Drop for AheadRequest {
    fn drop(&mut self) {
        self.files.ahead.end(self.length, self.began.elapsed());
    }
}

/// A range that is being read.
type RangeRead = (u32, Range<u64>, JoinHandle<anyhow::Result<StoredRange>>);

/// An image of a store that a client has open.
struct OpenStoredImage {
    files: Arc<StoredFiles>,
    runtime: Handle,
    loader: BlockLoader,
    /// What is left of the range that is read.
    left: StoredRange,
    /// Ranges that the client has requested, in their order.
    expected: VecDeque<RangeRead>,
}

impl OpenStoredImage {
    fn new(files: Arc<StoredFiles>, runtime: Handle) -> anyhow::Result<Self> {
        let loader = BlockLoader::new(Arc::clone(&files.reader), runtime.clone())?;
        Ok(Self { files, runtime, loader, left: StoredRange::default(), expected: VecDeque::new() })
    }

    /// Where a range is among those that the client has requested.
    fn place(&self, file: u32, range: &Range<u64>) -> Option<usize> {
        self.expected.iter().position(|(number, of, _)| (*number, of) == (file, range))
    }

    fn start(&self, file: u32, range: Range<u64>) -> RangeRead {
        let (files, read) = (Arc::clone(&self.files), range.clone());
        (file, range, self.runtime.spawn(async move { files.read(file, read).await }))
    }
}

impl OpenImage for OpenStoredImage {
    fn id(&self) -> Digest {
        self.files.image.id
    }

    fn manifest_length(&self) -> u64 {
        self.files.image.manifest_length
    }

    fn signature(&self) -> Option<Vec<u8>> {
        let signature = self.files.image.signature.clone();
        signature.filter(|bytes| bytes.len() as u64 <= MAX_SIGNATURE)
    }

    fn working_set_length(&self) -> u64 {
        self.files.working_set.as_ref().map_or(0, |bytes| bytes.len() as u64)
    }

    fn expect(&mut self, file: u32, range: Range<u64>) -> bool {
        let exists = self.files.length(file).is_ok_and(|length| range.end <= length);
        if !exists || self.place(file, &range).is_some() {
            // What does not exist is refused when it is read.
            return true;
        }
        let bytes: u64 = self.expected.iter().map(|(_, of, _)| of.end - of.start).sum();
        let is_near = bytes + (range.end - range.start) <= AHEAD && self.expected.len() < MAX_REQUESTS;
        let has_room = is_near || self.expected.len() < ALWAYS_AHEAD;
        if has_room {
            self.expected.push_back(self.start(file, range));
        }
        has_room
    }

    fn begin(&mut self, file: u32, range: Range<u64>) -> anyhow::Result<()> {
        let length = self.files.length(file)?;
        ensure!(range.end <= length, "the file has {length}");
        let place = self.place(file, &range);
        // Those before it were not requested after all.
        let expected =
            self.expected.drain(..place.map_or(self.expected.len(), |place| place + 1)).next_back();
        let expected = expected.filter(|_| place.is_some());
        let (_, _, read) = expected.unwrap_or_else(|| self.start(file, range.clone()));
        let elsewhere = self.files.read_ahead(file, &range, &self.runtime);
        self.left = self.runtime.block_on(read).context("a read ended early")??;
        if elsewhere {
            self.files.ahead.answered_elsewhere();
        }
        Ok(())
    }

    fn is_stored(&self) -> bool {
        true
    }

    fn next_stored(&mut self, room: usize, into: &mut Vec<u8>) -> anyhow::Result<usize> {
        self.left.next_stored(room, into, &mut self.loader)
    }

    fn next(&mut self, into: &mut [u8]) -> anyhow::Result<()> {
        self.left.next(into, &mut self.loader)
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use object_store::throttle::{ThrottleConfig, ThrottledStore};
    use rewake_manifest::WORKING_SET_NAME;

    use super::*;
    use crate::push;
    use crate::testing::{TestImage, TestObjects, random_bytes};

    const CHUNK: usize = 2 << 20;

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_time().build().unwrap()
    }

    /// Reads a range in pieces.
    fn read(image: &mut dyn OpenImage, file: u32, range: Range<u64>) -> anyhow::Result<Vec<u8>> {
        image.begin(file, range.clone())?;
        let mut bytes = vec![0; usize::try_from(range.end - range.start)?];
        bytes.chunks_mut(1000).try_for_each(|piece| image.next(piece))?;
        Ok(bytes)
    }

    #[test]
    fn what_a_client_has_is_not_read_ahead() {
        const BLOCKS: u64 = 384;
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
        let (_objects, store) = TestObjects::new();
        let image = TestImage::new(&random_bytes("1", 384 * BLOCK));
        runtime.block_on(push(&store, &image.path(), "web")).unwrap();
        let pinned = runtime.block_on(PinnedImage::open(&store, "web")).unwrap();
        let files = Arc::new(runtime.block_on(StoredFiles::open(&pinned, KEPT)).unwrap());
        let length = BLOCKS * BLOCK as u64;
        let pages = (1..=2).find(|file| files.length(*file).is_ok_and(|found| found == length)).unwrap();
        let mut open = OpenStoredImage::new(files, runtime.handle().clone()).unwrap();
        let mut block = |number: u64| {
            let start = number * BLOCK as u64;
            read(&mut open, pages, start..start + BLOCK as u64).unwrap();
        };
        // Page faults far from each other, then the rest in order.
        let faults = |number: &u64| number % 2 == 1;
        (0..BLOCKS).map(|number| number * 151 % BLOCKS).filter(faults).for_each(&mut block);
        (0..BLOCKS).filter(|number| !faults(number)).for_each(&mut block);
        let read = pinned.bytes_read();
        assert!(read >= length && read <= length * 11 / 10, "{read} bytes for {length}");
    }

    #[test]
    fn ranges_of_files_are_those_of_the_image() {
        let runtime = runtime();
        let (_objects, store) = TestObjects::new();
        // Chunks of bytes, of zeros, of the same bytes, and a short one.
        let bytes = random_bytes("1", CHUNK);
        let memory = [&*bytes, &vec![0; CHUNK], &bytes, &random_bytes("2", 5000)].concat();
        let image = TestImage::new(&memory);
        runtime.block_on(push(&store, &image.path(), "web")).unwrap();
        let folder = StoreFolder::new(store, runtime.handle().clone());
        assert!(
            folder.open(Path::new("none"), 0, &PeerRights::All).is_err()
                && folder.open(Path::new("web"), 1, &PeerRights::All).is_err()
        );
        let mut open = folder.open(Path::new("web"), 0, &PeerRights::All).unwrap();
        let length = open.manifest_length();
        let manifest = read(&mut *open, 0, 0..length).unwrap();
        assert_eq!(manifest, std::fs::read(image.path().join("rewake-manifest")).unwrap());
        let length = memory.len() as u64;
        let pages = (1..=2).find(|file| open.begin(*file, 0..length).is_ok()).unwrap();
        let at = |range: &Range<u64>| {
            let [start, end] = [range.start, range.end].map(|at| usize::try_from(at).unwrap());
            &memory[start..end]
        };
        let (block, chunk) = (64 << 10, CHUNK as u64);
        let mut ranges = vec![0..length, 1..2, chunk - 1..2 * chunk + 1, 3 * chunk + 7..length];
        // In order: the next one is read ahead.
        ranges.extend((0..8).map(|n| n * block..(n + 1) * block));
        for range in ranges {
            assert!(read(&mut *open, pages, range.clone()).unwrap() == at(&range), "{range:?}");
        }
        for (file, range) in [(9, 0..1), (pages, 0..length + 1)] {
            assert!(open.begin(file, range).is_err());
        }
        open.begin(pages, 0..10).unwrap();
        assert!(open.next(&mut [0; 11]).is_err());
    }

    /// Blocks of memory, each of a chunk of its own, of a store that takes this long for each answer. Returns
    /// the image, the number of its file, and where the blocks are.
    fn far_blocks(
        runtime: &tokio::runtime::Runtime,
        delay: Duration,
    ) -> (Box<dyn OpenImage>, u32, Vec<Range<u64>>) {
        let (objects, store) = TestObjects::new();
        let image = TestImage::new(&random_bytes("memory", 2 * MAX_REQUESTS * CHUNK));
        runtime.block_on(push(&store, &image.path(), "web")).unwrap();
        let config = ThrottleConfig { wait_get_per_call: delay, ..ThrottleConfig::default() };
        let far = ImageStore::of(Arc::new(ThrottledStore::new(objects, config)));
        let folder = StoreFolder::new(far, runtime.handle().clone());
        let mut open = folder.open(Path::new("web"), 0, &PeerRights::All).unwrap();
        let block = |chunk: usize| {
            let start = (chunk * CHUNK + 5 * BLOCK) as u64;
            start..start + BLOCK as u64
        };
        let blocks: Vec<_> = (0..2 * MAX_REQUESTS).map(block).collect();
        let last = blocks[blocks.len() - 1].clone();
        let pages = (1..=2).find(|file| open.begin(*file, last.clone()).is_ok()).unwrap();
        (open, pages, blocks)
    }

    #[test]
    fn ranges_that_were_requested_are_read_at_once() {
        let runtime = runtime();
        // A store in the same region.
        let [one_by_one, together] = [false, true].map(|is_expected| {
            let (mut open, pages, blocks) = far_blocks(&runtime, Duration::from_millis(5));
            let (began, mut expected) = (Instant::now(), 0);
            for (at, block) in blocks.iter().enumerate() {
                let next = blocks[expected.max(at)..].iter().filter(|_| is_expected);
                expected =
                    expected.max(at) + next.take_while(|block| open.expect(pages, (*block).clone())).count();
                assert!(expected <= at + MAX_REQUESTS, "{expected} reads at once");
                read(&mut *open, pages, block.clone()).unwrap();
            }
            began.elapsed()
        });
        eprintln!(
            "blocks of a store that is 5 ms away, 32: {one_by_one:?} one by one, {together:?} together"
        );
        assert!(together < one_by_one / 2, "{one_by_one:?} {together:?}");
    }

    #[test]
    fn ranges_that_were_expected_in_vain_cost_no_byte() {
        let runtime = runtime();
        let (mut open, pages, blocks) = far_blocks(&runtime, Duration::ZERO);
        let wanted = |open: &mut dyn OpenImage, at: usize| read(open, pages, blocks[at].clone()).unwrap();
        let alone: Vec<Vec<u8>> = (0..4).map(|at| wanted(&mut *open, at)).collect();
        for at in [3, 1, 2] {
            assert!(open.expect(pages, blocks[at].clone()));
        }
        assert!(open.expect(pages, 0..u64::MAX) && open.expect(99, 0..1), "refused when they are read");
        for at in [1, 0, 3, 2] {
            assert!(wanted(&mut *open, at) == alone[at]);
        }
        assert!(open.begin(pages, 0..u64::MAX).is_err() && open.begin(99, 0..1).is_err());
        let large = |at: u64| at * AHEAD..(at + 1) * AHEAD;
        let expected = (0..3).map(|at| open.expect(pages, large(at))).collect::<Vec<_>>();
        assert_eq!(expected, [true, true, false]);
    }

    #[test]
    fn the_working_set_of_a_stored_image_is_served() {
        let runtime = runtime();
        let (_objects, store) = TestObjects::new();
        let image = TestImage::new(&random_bytes("memory", CHUNK));
        std::fs::write(image.path().join(WORKING_SET_NAME), "recorded").unwrap();
        runtime.block_on(push(&store, &image.path(), "web")).unwrap();
        let mut open = StoreFolder::new(store, runtime.handle().clone())
            .open(Path::new("web"), 0, &PeerRights::All)
            .unwrap();
        assert_eq!(open.working_set_length(), 8);
        assert_eq!(read(&mut *open, WORKING_SET_NUMBER, 0..8).unwrap(), b"recorded");
        assert!(open.begin(WORKING_SET_NUMBER, 0..9).is_err());
    }
}
