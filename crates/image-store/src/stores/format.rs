// SPDX-License-Identifier: MIT OR Apache-2.0
//! Names and indexes of images: `proto/store.proto` has the format.
//!
//! An object is hostile input. The hash at its end proves that nothing was lost, not who wrote it. So each
//! length is checked before it is used.

use std::collections::HashMap;
use std::sync::Arc;

use prost::Message as _;
use rewake_criu_images::{CHUNK, Digest};
use rewake_image_io::BLOCK;

use crate::answer::bounded;
use crate::error::{ImageStoreError, Result};
use crate::generated as raw;
use crate::generated::{Kind, Record, record::What};
use crate::names::{is_pack, is_version, is_working_set};
use crate::report::StoredImage;

const MAGIC: [u8; 8] = *b"RWKSTORE";
const VERSION: u32 = 1;
/// Bytes of the hash at the end.
const HASH: usize = 32;
/// The longest pack, in bytes.
pub(crate) const MAX_PACK: u32 = 64 << 20;

/// Where a chunk is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ChunkLocation {
    /// The pack's name.
    pub(crate) pack: Arc<str>,
    /// Where in it the first stored block begins.
    pub(crate) offset: u32,
    /// The length of the chunk.
    pub(crate) length: u32,
    /// For each block of the chunk the length of the stored block, less 1.
    pub(crate) blocks: Box<[u16]>,
}

impl ChunkLocation {
    /// Returns the length of a stored block.
    pub(crate) fn stored(&self, block: usize) -> u32 {
        u32::from(self.blocks[block]) + 1
    }

    /// Returns the bytes that the chunk takes in its pack.
    pub(crate) fn stored_length(&self) -> u32 {
        (0..self.blocks.len()).map(|block| self.stored(block)).sum()
    }
}

/// Where all chunks of an image are stored, in the order in which its manifest names them first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ImageIndex {
    pub(crate) image: StoredImage,
    pub(crate) chunks: Vec<(Digest, ChunkLocation)>,
}

impl StoredImage {
    /// Returns the object that gives the image its name.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut writer = ObjectWriter::new(Kind::Name);
        writer.record(What::Image(self.raw()));
        writer.finish(0)
    }

    /// Reads such an object, of this name.
    pub(crate) fn decode(bytes: &[u8], name: &str, object: &str) -> Result<Self> {
        let mut reader = ObjectReader::new(bytes, Kind::Name, object)?;
        let image = reader.image()?;
        if image.name != name {
            return Err(reader.damaged(&format!("it is the object of {:?}", image.name)));
        }
        match reader.next()? {
            What::End(raw::End { chunks: 0 }) => reader.finish().map(|()| image),
            other => Err(reader.unexpected("the end", &other)),
        }
    }

    fn raw(&self) -> raw::Image {
        let Self { name, version, id, manifest_length, files, bytes, working_set, signature } = self.clone();
        let (image_id, working_set) = (id.0.to_vec(), working_set.unwrap_or_default());
        let signature = signature.unwrap_or_default();
        raw::Image { name, version, image_id, manifest_length, files, bytes, working_set, signature }
    }
}

impl ImageIndex {
    /// Returns the index as an object.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut writer = ObjectWriter::new(Kind::Index);
        writer.record(What::Image(self.image.raw()));
        let mut packs: HashMap<&str, u32> = HashMap::new();
        for (_, chunk) in &self.chunks {
            let number = u32::try_from(packs.len()).unwrap_or(u32::MAX);
            packs.entry(&chunk.pack).or_insert_with(|| {
                writer.record(What::Pack(raw::Pack { name: chunk.pack.to_string() }));
                number
            });
        }
        for (digest, chunk) in &self.chunks {
            writer.record(What::Chunk(raw::Chunk {
                digest: digest.0.to_vec(),
                length: chunk.length,
                pack: packs[&*chunk.pack],
                offset: chunk.offset,
                blocks: chunk.blocks.iter().flat_map(|length| length.to_le_bytes()).collect(),
            }));
        }
        writer.finish(self.chunks.len() as u64)
    }

    /// Reads the index of a version of an image.
    pub(crate) fn decode(bytes: &[u8], version: &str, object: &str) -> Result<Self> {
        let mut reader = ObjectReader::new(bytes, Kind::Index, object)?;
        let image = reader.image()?;
        if image.version != version {
            return Err(reader.damaged(&format!("it is the index {:?}", image.version)));
        }
        let (mut packs, mut chunks) = (Vec::<Arc<str>>::new(), Vec::new());
        loop {
            match reader.next()? {
                What::Pack(raw::Pack { name }) if chunks.is_empty() && is_pack(&name) => {
                    packs.push(name.into());
                }
                What::Chunk(chunk) => {
                    let chunk = location(chunk, &packs).map_err(|what| reader.damaged(&what))?;
                    chunks.push(chunk);
                }
                What::End(end) if end.chunks == chunks.len() as u64 => {
                    return reader.finish().map(|()| Self { image, chunks });
                }
                other => return Err(reader.unexpected("a pack, a chunk or the end", &other)),
            }
        }
    }
}

/// Checks what an index says of a chunk.
fn location(raw: raw::Chunk, packs: &[Arc<str>]) -> Result<(Digest, ChunkLocation), String> {
    let raw::Chunk { digest, length, pack, offset, blocks } = raw;
    let digest = Digest(digest.try_into().map_err(|_| "a hash that has not 32 bytes")?);
    if length == 0 || u64::from(length) > CHUNK {
        return Err(format!("a chunk of {length} bytes, expected 1 to {CHUNK}"));
    }
    let pack =
        usize::try_from(pack).ok().and_then(|pack| packs.get(pack)).ok_or("a pack that it does not name")?;
    let (lengths, rest) = blocks.as_chunks();
    if lengths.len() != (length as usize).div_ceil(BLOCK) || !rest.is_empty() {
        return Err(format!("{} bytes of blocks for a chunk of {length} bytes", blocks.len()));
    }
    let blocks: Box<[u16]> = lengths.iter().map(|length| u16::from_le_bytes(*length)).collect();
    let location = ChunkLocation { pack: Arc::clone(pack), offset, length, blocks };
    let end = u64::from(offset) + u64::from(location.stored_length());
    let fits = (0..location.blocks.len()).all(|block| {
        let left = length as usize - block * BLOCK;
        location.stored(block) as usize <= left.min(BLOCK)
    });
    if !fits || end > u64::from(MAX_PACK) {
        return Err(format!(
            "a chunk that ends at {end} of a pack, or has a stored block longer than its bytes"
        ));
    }
    Ok((digest, location))
}

struct ObjectWriter(Vec<u8>);

impl ObjectWriter {
    fn new(kind: Kind) -> Self {
        let mut writer = Self(MAGIC.to_vec());
        writer.record(What::Start(raw::Start { version: VERSION, kind: kind.into() }));
        writer
    }

    fn record(&mut self, what: What) {
        let record = Record { what: Some(what) }.encode_to_vec();
        // A record has at most some hundred bytes.
        self.0.extend(u32::try_from(record.len()).unwrap_or(u32::MAX).to_le_bytes());
        self.0.extend(record);
    }

    fn finish(mut self, chunks: u64) -> Vec<u8> {
        self.record(What::End(raw::End { chunks }));
        let hash = blake3::hash(&self.0);
        self.0.extend(hash.as_bytes());
        self.0
    }
}

struct ObjectReader<'a> {
    object: &'a str,
    /// The records that are left.
    rest: &'a [u8],
}

impl<'a> ObjectReader<'a> {
    fn new(bytes: &'a [u8], kind: Kind, object: &'a str) -> Result<Self> {
        let mut reader = Self { object, rest: &[] };
        let Some((proved, hash)) = bytes.split_last_chunk::<HASH>() else {
            return Err(reader.damaged(&format!("it has {} bytes", bytes.len())));
        };
        let found = blake3::hash(proved);
        if found.as_bytes() != hash {
            let [expected, found] = [Digest(*hash), Digest(*found.as_bytes())];
            return Err(
                reader.damaged(&format!("expected bytes with the hash {expected:.12}, found {found:.12}"))
            );
        }
        reader.rest =
            proved.strip_prefix(&MAGIC).ok_or_else(|| reader.damaged("it is no object of a store"))?;
        match reader.next()? {
            What::Start(start) if start.version != VERSION => {
                let (object, found) = (object.to_owned(), start.version);
                Err(ImageStoreError::Version { object, expected: VERSION, found })
            }
            What::Start(start) if start.kind() == kind => Ok(reader),
            other => Err(reader.unexpected(&format!("the start of {kind:?}"), &other)),
        }
    }

    fn next(&mut self) -> Result<What> {
        let record = self.rest.split_first_chunk().and_then(|(length, rest)| {
            let length = usize::try_from(u32::from_le_bytes(*length)).ok()?;
            let (record, rest) = rest.split_at_checked(length)?;
            self.rest = rest;
            Record::decode(record).ok()?.what
        });
        record.ok_or_else(|| self.damaged(&format!("no record {} bytes before its end", self.rest.len())))
    }

    fn image(&mut self) -> Result<StoredImage> {
        let raw = match self.next()? {
            What::Image(raw) => raw,
            other => return Err(self.unexpected("the image", &other)),
        };
        let raw::Image { name, version, image_id, manifest_length, files, bytes, working_set, signature } =
            raw;
        let id = image_id.try_into().map(Digest);
        let id = id.map_err(|_| self.damaged("an image id that has not 32 bytes"))?;
        if !is_version(&version) {
            return Err(self.damaged(&format!("the name of an index {version:.80?}")));
        }
        let working_set = Some(working_set).filter(|name| !name.is_empty());
        if let Some(other) = working_set.as_ref().filter(|name| !is_working_set(name)) {
            return Err(self.damaged(&format!("the name of a working set {other:.80?}")));
        }
        let signature = Some(signature).filter(|signature| !signature.is_empty());
        Ok(StoredImage { name, version, id, manifest_length, files, bytes, working_set, signature })
    }

    fn finish(&self) -> Result<()> {
        if self.rest.is_empty() {
            return Ok(());
        }
        Err(self.damaged(&format!("{} bytes after its end", self.rest.len())))
    }

    fn unexpected(&self, expected: &str, found: &What) -> ImageStoreError {
        self.damaged(&format!("expected {expected}, found {found:.80?}"))
    }

    fn damaged(&self, what: &str) -> ImageStoreError {
        ImageStoreError::Damaged { object: self.object.to_owned(), what: bounded(what) }
    }
}
