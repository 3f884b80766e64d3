// SPDX-License-Identifier: MIT OR Apache-2.0
//! Packs of a push: chunks are collected, and full packs are written while the next ones are filled.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::SystemTime;

use rewake_criu_images::Digest;
use tokio::task::JoinSet;

use crate::blocks::StoredBlocks;
use crate::error::Result;
use crate::format::ChunkLocation;
use crate::names::{PACKS, hash_of, hash_part, random};
use crate::push::RESUME_LIMIT;
use crate::store::{ImageStore, ListedObject};

/// Bytes after which a pack is full.
pub(crate) const FULL: usize = 16 << 20;
/// Packs that are being written: with the one that is filled, 80 MiB of memory.
const MAX_WRITES: usize = 4;

/// The packs of a push.
#[derive(Debug)]
pub(crate) struct Packs {
    store: ImageStore,
    /// Packs that an earlier push has left, by the hash of their bytes and their length: one may have been
    /// cut.
    left: HashMap<(String, u64), String>,
    pack: Vec<u8>,
    /// The names of the packs so far, in the order in which they were filled.
    names: Vec<Arc<str>>,
    writes: JoinSet<Result<()>>,
    pub(crate) written: u64,
    pub(crate) kept: u64,
}

/// Where a chunk is in the packs of a push.
#[derive(Debug)]
pub(crate) struct PackedChunk {
    pack: usize,
    offset: u32,
    lengths: Box<[u16]>,
}

impl Packs {
    /// `listed` has the sound packs of the store, and `now` is its time.
    pub(crate) fn new(store: &ImageStore, listed: &BTreeMap<String, ListedObject>, now: SystemTime) -> Self {
        let left = listed.iter().filter(|(_, object)| {
            let age = now.duration_since(object.written).unwrap_or_default();
            age < RESUME_LIMIT
        });
        let left = left.filter_map(|(name, object)| {
            let hash = hash_of(name)?.to_owned();
            Some(((hash, object.length), name.clone()))
        });
        Self {
            store: store.clone(),
            left: left.collect(),
            pack: Vec::with_capacity(FULL),
            names: Vec::new(),
            writes: JoinSet::new(),
            written: 0,
            kept: 0,
        }
    }

    /// Adds a chunk to the pack that is being filled.
    pub(crate) async fn add(&mut self, chunk: StoredBlocks) -> Result<PackedChunk> {
        if self.pack.len() + chunk.bytes.len() > FULL {
            self.write().await?;
        }
        // At most FULL.
        let offset = u32::try_from(self.pack.len()).unwrap_or(u32::MAX);
        self.pack.extend(&chunk.bytes);
        Ok(PackedChunk { pack: self.names.len(), offset, lengths: chunk.lengths })
    }

    /// Waits until all packs are in the store.
    pub(crate) async fn finish(&mut self) -> Result<()> {
        if !self.pack.is_empty() {
            self.write().await?;
        }
        while self
            .writes
            .join_next()
            .await
            .transpose()
            .map_err(|error| self.ended(&error))?
            .transpose()?
            .is_some()
        {}
        Ok(())
    }

    /// Returns where a chunk is. Its pack must be in the store.
    pub(crate) fn location(&self, chunk: &PackedChunk, length: u32) -> ChunkLocation {
        let pack = Arc::clone(&self.names[chunk.pack]);
        ChunkLocation { pack, offset: chunk.offset, length, blocks: chunk.lengths.clone() }
    }

    async fn write(&mut self) -> Result<()> {
        let pack = std::mem::replace(&mut self.pack, Vec::with_capacity(FULL));
        let hash = hash_part(Digest(*blake3::hash(&pack).as_bytes()));
        let key = (hash, pack.len() as u64);
        if let Some(name) = self.left.get(&key) {
            self.kept += pack.len() as u64;
            self.names.push(name.as_str().into());
            return Ok(());
        }
        let (hash, _) = key;
        let random = random().map_err(|error| self.store.setup(&format!("/dev/urandom: {error}")))?;
        let name = format!("{hash}-{random}");
        self.names.push(name.as_str().into());
        self.written += pack.len() as u64;
        while self.writes.len() >= MAX_WRITES {
            let ended = self.writes.join_next().await.transpose();
            ended.map_err(|error| self.ended(&error))?.transpose()?;
        }
        let store = self.store.clone();
        self.writes.spawn(async move { store.put(PACKS, &name, pack).await });
        Ok(())
    }

    fn ended(&self, error: &tokio::task::JoinError) -> crate::error::ImageStoreError {
        self.store.setup(&format!("writing a pack ended early: {error}"))
    }
}
