// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compares an image of a store with its manifest, to the last byte.

use std::collections::{HashSet, VecDeque};
use std::fs::File;
use std::io::{Seek as _, SeekFrom, Write as _};
use std::sync::Arc;

use rewake_criu_images::Digest;
use rewake_image_transfer::pull::MAX_MANIFEST;
use rewake_manifest::{ManifestReader, ManifestRecord, SealedChunk};
use tokio::task::JoinHandle;
use tracing::warn;

use crate::error::{ImageStoreError, Result};
use crate::names::MANIFESTS;
use crate::reader::ChunkReader;
use crate::report::{StoreVerifyReport, StoredImage, WrongChunk};
use crate::store::{ImageStore, MAX_REQUESTS, limited};

/// Bytes of the manifest that are read at once.
const MANIFEST_PART: u64 = 2 << 20;

/// Compares each chunk of an image with its hash, and gives each wrong one to `report`. Its pack is marked:
/// the next push of any image stores the pack's chunks again instead of using it.
///
/// # Errors
/// There is no such image, its index or manifest is damaged, or the store cannot be read.
pub async fn verify(
    store: &ImageStore,
    name: &str,
    report: impl FnMut(&WrongChunk),
) -> Result<StoreVerifyReport> {
    let image = store.image(name).await?;
    let reader = Arc::new(ChunkReader::open(store, &image).await?);
    let (mut manifest, _) = manifest(store, &image).await?;
    let sums = StoreVerifyReport { id: image.id, ..StoreVerifyReport::default() };
    let mut verification = Verification {
        reader,
        report,
        sums,
        reads: VecDeque::new(),
        seen: HashSet::new(),
        marked: HashSet::new(),
        file: String::new(),
    };
    while let Some(record) = manifest.next_record()? {
        match record {
            ManifestRecord::Parent(_) => {}
            ManifestRecord::File(file) => {
                verification.sums.files += 1;
                verification.sums.bytes += file.length;
                verification.file = file.name;
            }
            ManifestRecord::Segment(segment) => {
                let mut offset = segment.offset;
                for chunk in segment.chunks {
                    verification.chunk(offset, chunk).await?;
                    offset += u64::from(chunk.length);
                }
            }
        }
    }
    while !verification.reads.is_empty() {
        verification.finish_read().await?;
    }
    Ok(verification.sums)
}

/// Copies the manifest of an image, and checks that it is the image's. Returns its records, and the file that
/// it is in.
pub(crate) async fn manifest(store: &ImageStore, image: &StoredImage) -> Result<(ManifestReader, File)> {
    let object = store.object(MANIFESTS, &image.version);
    let failed = |reason| ImageStoreError::File { file: "a temporary file".to_owned(), reason };
    let mut file = tempfile::tempfile().map_err(failed)?;
    let length = image.manifest_length;
    // It is copied to the disk.
    limited(&object, length, MAX_MANIFEST)?;
    let mut offset = 0;
    while offset < length {
        let end = length.min(offset + MANIFEST_PART);
        let bytes = store.get_range(MANIFESTS, &image.version, offset..end).await?;
        file.write_all(&bytes).map_err(failed)?;
        offset = end;
    }
    file.seek(SeekFrom::Start(0)).map_err(failed)?;
    let copy = file.try_clone().map_err(failed)?;
    let reader = ManifestReader::of(copy, length, object.as_ref())?;
    if reader.id() == image.id {
        return Ok((reader, file));
    }
    let what = format!("it is of image {}, expected {}", reader.id(), image.id);
    Err(ImageStoreError::Damaged { object, what })
}

/// A chunk that is being read, and the first file that has it, and where.
type ChunkRead = (String, u64, SealedChunk, JoinHandle<Result<Vec<u8>>>);

struct Verification<F> {
    reader: Arc<ChunkReader>,
    report: F,
    sums: StoreVerifyReport,
    reads: VecDeque<ChunkRead>,
    seen: HashSet<Digest>,
    /// The packs with wrong bytes.
    marked: HashSet<Arc<str>>,
    /// The name of the file of the next chunks.
    file: String,
}

impl<F: FnMut(&WrongChunk)> Verification<F> {
    async fn chunk(&mut self, offset: u64, chunk: SealedChunk) -> Result<()> {
        if chunk.is_zero() || !self.seen.insert(chunk.digest) {
            return Ok(());
        }
        let reader = Arc::clone(&self.reader);
        let read = tokio::spawn(async move { reader.chunk(chunk.digest, chunk.length).await });
        self.reads.push_back((self.file.clone(), offset, chunk, read));
        while self.reads.len() >= MAX_REQUESTS {
            self.finish_read().await?;
        }
        Ok(())
    }

    /// Marks the pack of a chunk, once.
    async fn mark_damaged(&mut self, digest: Digest) -> Result<()> {
        match self.reader.locate(digest) {
            Ok(at) if self.marked.insert(Arc::clone(&at.pack)) => self.reader.mark_damaged(digest).await,
            // The index lacks the chunk: a push stores it again without a mark.
            _ => Ok(()),
        }
    }

    async fn finish_read(&mut self) -> Result<()> {
        let Some((file, offset, SealedChunk { length, digest }, read)) = self.reads.pop_front() else {
            return Ok(());
        };
        self.sums.read += u64::from(length);
        let ended = |error: tokio::task::JoinError| ImageStoreError::File {
            file: file.clone(),
            reason: std::io::Error::other(error),
        };
        match read.await.map_err(ended)? {
            Ok(_) => Ok(()),
            Err(error @ ImageStoreError::Damaged { .. }) => {
                self.sums.wrong += 1;
                if let Err(error) = self.mark_damaged(digest).await {
                    warn!("{error}: the next push of the image does not store these bytes again");
                }
                (self.report)(&WrongChunk { file, offset, length, error });
                Ok(())
            }
            Err(error) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use rewake_manifest::ManifestError;

    use super::*;
    use crate::names::{DAMAGED, INDEXES, NAMES, PACKS};
    use crate::testing::{TestImage, TestObjects, random_bytes, run};
    use crate::{ImageStore, collect_garbage, push};

    /// What is wrong with the image `one`: the objects that errors name.
    async fn wrong(store: &ImageStore) -> Vec<String> {
        let mut objects = Vec::new();
        let object = |error: &ImageStoreError| match error {
            ImageStoreError::Damaged { object, .. } | ImageStoreError::Version { object, .. } => {
                object.clone()
            }
            ImageStoreError::Manifest(ManifestError::Damaged { file, .. }) => file.display().to_string(),
            other => panic!("{other}"),
        };
        match verify(store, "one", |wrong| objects.push(object(&wrong.error))).await {
            Ok(report) => assert_eq!(report.wrong, objects.len() as u64),
            Err(error) => objects.push(object(&error)),
        }
        objects
    }

    /// A store with one image of a few hundred bytes in a pack.
    async fn small() -> (std::sync::Arc<TestObjects>, ImageStore) {
        let image = TestImage::new(&b"some words of memory ".repeat(500));
        let (objects, store) = TestObjects::new();
        push(&store, &image.path(), "one").await.unwrap();
        (objects, store)
    }

    #[test]
    fn each_wrong_byte_of_each_object_is_found_and_named() {
        run(async {
            let (objects, store) = small().await;
            assert_eq!(wrong(&store).await, [""; 0]);
            for folder in [NAMES, INDEXES, MANIFESTS, PACKS] {
                let name = objects.names(folder).await.remove(0);
                let bytes = objects.read(folder, &name).await;
                let (object, mut ignored) = (format!("test:/{folder}/{name}"), 0);
                for at in 0..bytes.len() {
                    let mut other = bytes.clone();
                    other[at] ^= 1 << (at % 8);
                    objects.replace(folder, &name, other).await;
                    match &*wrong(&store).await {
                        [] => ignored += 1,
                        found => assert_eq!(found, [object.as_str()], "byte {at}"),
                    }
                }
                // zstd ignores a bit of a frame's header: no byte of a chunk changes with it.
                assert!(
                    ignored <= if folder == PACKS { 2 } else { 0 },
                    "{folder}: {ignored} of {}",
                    bytes.len()
                );
                objects.replace(folder, &name, bytes).await;
            }
            assert_eq!(wrong(&store).await, [""; 0]);
        });
    }

    #[test]
    fn a_cut_or_missing_object_is_named() {
        run(async {
            let (objects, store) = small().await;
            for folder in [NAMES, INDEXES, MANIFESTS, PACKS] {
                let name = objects.names(folder).await.remove(0);
                let bytes = objects.read(folder, &name).await;
                let object = format!("test:/{folder}/{name}");
                for length in [0, 7, bytes.len() / 2, bytes.len() - 1] {
                    objects.replace(folder, &name, bytes[..length].to_vec()).await;
                    let found = wrong_or_failed(&store).await;
                    assert!(
                        found.iter().all(|found| found.contains(&object)) && !found.is_empty(),
                        "{found:?}"
                    );
                    if folder == PACKS {
                        // Each wrong chunk is listed; the first does not end it.
                        let count = if length < bytes.len() / 2 { 2 } else { 1 };
                        assert!(found.len() >= count, "{length}: {found:?}");
                        assert!(
                            found.iter().all(|found| found.contains(": wrong bytes in the ")),
                            "{found:?}"
                        );
                    }
                }
                objects.remove(folder, &name).await;
                let found = wrong_or_failed(&store).await;
                let named = if folder == NAMES { "test:/one: no image" } else { object.as_str() };
                assert!(found.iter().all(|found| found.contains(named)) && !found.is_empty(), "{found:?}");
                objects.replace(folder, &name, bytes).await;
            }
        });
    }

    async fn wrong_or_failed(store: &ImageStore) -> Vec<String> {
        let mut lines = Vec::new();
        if let Err(error) = verify(store, "one", |wrong| lines.push(wrong.to_string())).await {
            lines.push(error.to_string());
        }
        lines
    }

    #[test]
    fn a_push_after_verify_repairs_an_image_with_a_damaged_pack() {
        let shared = random_bytes("shared", 2 << 20);
        let images = ["one", "two"]
            .map(|name| (name, TestImage::new(&[&*shared, &random_bytes(name, 1 << 20)].concat())));
        run(async {
            let (objects, store) = TestObjects::new();
            for (name, image) in &images {
                push(&store, &image.path(), name).await.unwrap();
            }
            let pack = {
                let version = store.image("two").await.unwrap().version;
                let index = store.index(&version).await.unwrap().unwrap();
                let digest = Digest(*blake3::hash(&shared).as_bytes());
                index.chunks.iter().find(|(found, _)| *found == digest).unwrap().1.pack.to_string()
            };
            let mut bytes = objects.read(PACKS, &pack).await;
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
            objects.replace(PACKS, &pack, bytes).await;
            for (name, image) in &images {
                let wrong = async || verify(&store, name, |_| {}).await.unwrap().wrong;
                assert_eq!(wrong().await, 1, "{name}");
                assert!(!push(&store, &image.path(), name).await.unwrap().had);
                assert_eq!(wrong().await, 0, "{name}");
            }
            // The old indexes have no name: with them the pack goes, and its mark.
            collect_garbage(&store, std::time::Duration::ZERO).await.unwrap();
            assert!(!objects.names(PACKS).await.contains(&pack));
            assert_eq!(objects.names(DAMAGED).await, [""; 0]);
            for (name, _) in &images {
                assert_eq!(verify(&store, name, |_| {}).await.unwrap().wrong, 0);
            }
        });
    }

    #[test]
    fn a_manifest_of_any_length_is_not_copied() {
        run(async {
            let (objects, store) = small().await;
            let mut image = store.image("one").await.unwrap();
            image.manifest_length = MAX_MANIFEST + 1;
            objects.replace(NAMES, "one", image.encode()).await;
            let error = verify(&store, "one", |_| {}).await.unwrap_err().to_string();
            assert!(error.contains(&format!("expected at most {MAX_MANIFEST}")), "{error}");
        });
    }

    #[test]
    fn an_object_of_a_name_is_short() {
        run(async {
            let (objects, store) = small().await;
            let mut bytes = objects.read(NAMES, "one").await;
            bytes.resize((4 << 10) + 1, 0);
            objects.replace(NAMES, "one", bytes).await;
            let error = store.image("one").await.unwrap_err().to_string();
            assert!(error.contains("it has 4097 bytes, expected at most 4096"), "{error}");
        });
    }

    #[test]
    fn objects_in_each_other_s_place_are_named() {
        run(async {
            let (objects, store) = small().await;
            let other = TestImage::new(&b"another memory ".repeat(700));
            push(&store, &other.path(), "two").await.unwrap();
            for folder in [NAMES, INDEXES, MANIFESTS, PACKS] {
                let names = objects.names(folder).await;
                let own = store.image("one").await.unwrap().version;
                let first = match folder {
                    NAMES => "one".to_owned(),
                    PACKS => store.index(&own).await.unwrap().unwrap().chunks[1].1.pack.to_string(),
                    _ => own,
                };
                let second = names.iter().find(|name| **name != first).unwrap();
                let (bytes, others) =
                    (objects.read(folder, &first).await, objects.read(folder, second).await);
                objects.replace(folder, &first, others).await;
                let (found, object) = (wrong_or_failed(&store).await, format!("test:/{folder}/{first}"));
                assert!(found.iter().all(|found| found.contains(&object)) && !found.is_empty(), "{found:?}");
                objects.replace(folder, &first, bytes).await;
            }
            assert_eq!(wrong(&store).await, [""; 0]);
        });
    }

    #[test]
    fn a_wrong_answer_is_requested_again_and_a_lasting_one_is_an_error() {
        let image = TestImage::new(&random_bytes("one", 3 << 20));
        run(async {
            let (objects, store) = TestObjects::new();
            push(&store, &image.path(), "one").await.unwrap();
            let image = store.image("one").await.unwrap();
            let reader = ChunkReader::open(&store, &image).await.unwrap();
            let index = store.index(&image.version).await.unwrap().unwrap();
            let (digest, at) = &index.chunks[2];
            for set in [TestObjects::short_reads, TestObjects::other_reads] {
                set(&objects, 2);
                assert_eq!(reader.chunk(*digest, at.length).await.unwrap().len(), 1 << 20);
                set(&objects, 3);
                let error = reader.chunk(*digest, at.length).await.unwrap_err().to_string();
                assert!(error.starts_with(&format!("test:/packs/{}: damaged: ", at.pack)), "{error}");
            }
        });
    }

    #[test]
    fn single_blocks_of_a_chunk_are_read() {
        let memory = [&random_bytes("one", 1 << 20)[..], &b"some words ".repeat(96_000)].concat();
        let image = TestImage::new(&memory);
        run(async {
            let (_, store) = TestObjects::new();
            push(&store, &image.path(), "one").await.unwrap();
            let image = store.image("one").await.unwrap();
            let reader = ChunkReader::open(&store, &image).await.unwrap();
            let digest = Digest(*blake3::hash(&memory[..2 << 20]).as_bytes());
            let at = reader.locate(digest).unwrap();
            for block in [0, 15, 16, 31] {
                let found = reader.blocks(at, block..block + 1).await.unwrap();
                assert!(found == memory[block << 16..(block + 1) << 16], "block {block}");
            }
        });
    }
}
