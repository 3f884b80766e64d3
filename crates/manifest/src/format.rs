// SPDX-License-Identifier: MIT OR Apache-2.0
//! The file `rewake-manifest`: written and read record by record. `proto/manifest.proto` has the format.
//!
//! A manifest is hostile input, as images are. The hash at its end proves that nothing was lost, not who
//! wrote it. So each length is checked before it is used.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use prost::Message as _;
use rewake_criu_images::{CHUNK, Digest, ImageDir};

use crate::directory::{is_covered, open};
use crate::error::{ManifestError, Result, io};
use crate::generated as raw;
use crate::generated::{Record, record::What};
use crate::names::MANIFEST_NAME;
use crate::segment::{MAX_FILE, MAX_FILES, SEGMENT, SealedChunk, SealedSegment, SegmentExtent, most_pieces};

const MAGIC: [u8; 8] = *b"RWKIMAGE";
pub(crate) const VERSION: u32 = 1;
/// Bytes of the hash at the end.
const HASH: u64 = 32;
/// The longest record. A segment of the shortest chunks has some 1030 of them, and with the checksums of its
/// blocks less than 40 KiB.
const MAX_RECORD: u32 = 64 << 10;

/// The head of a file's segments.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SealedFile {
    /// Its name in the image directory: one component.
    pub name: String,
    /// Its length in bytes.
    pub length: u64,
    /// It holds memory, and its blocks have checksums.
    pub memory: bool,
}

/// The parent image of an incremental one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SealedParent {
    /// Where it is, relative to this image: what the link `parent` says, or `parent` where that is a
    /// directory.
    pub target: Vec<u8>,
    /// The parent image's id; `None` if it was not sealed.
    pub id: Option<Digest>,
}

/// A record of a manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ManifestRecord {
    /// The parent image: the first record, if the image has one.
    Parent(SealedParent),
    /// A file; its segments follow.
    File(SealedFile),
    /// The next segment of the file.
    Segment(SealedSegment),
}

/// Writes a manifest.
#[derive(Debug)]
pub(crate) struct ManifestWriter {
    out: BufWriter<File>,
    hasher: Box<blake3::Hasher>,
    written: u64,
    files: u64,
    bytes: u64,
}

impl ManifestWriter {
    pub(crate) fn new(out: File) -> io::Result<Self> {
        let (out, hasher) = (BufWriter::new(out), Box::new(blake3::Hasher::new()));
        let mut writer = Self { out, hasher, written: 0, files: 0, bytes: 0 };
        writer.put(&MAGIC)?;
        writer.record(What::Start(raw::Start { version: VERSION }))?;
        Ok(writer)
    }

    pub(crate) fn parent(&mut self, parent: &SealedParent) -> io::Result<()> {
        let image_id = parent.id.map_or_else(Vec::new, |id| id.0.to_vec());
        self.record(What::Parent(raw::Parent { target: parent.target.clone(), image_id }))
    }

    pub(crate) fn file(&mut self, file: &SealedFile) -> io::Result<()> {
        self.files += 1;
        self.bytes += file.length;
        let SealedFile { name, length, memory } = file.clone();
        self.record(What::File(raw::File { name, length, memory }))
    }

    pub(crate) fn segment(&mut self, segment: &SealedSegment) -> io::Result<()> {
        self.record(What::Segment(raw::Segment {
            length: segment.length,
            chunks: segment.chunks.iter().map(|chunk| chunk.length).collect(),
            digests: segment.chunks.iter().flat_map(|chunk| chunk.digest.0).collect(),
            checksums: segment.checksums.iter().flat_map(|sum| sum.to_le_bytes()).collect(),
        }))
    }

    /// Writes the end. Returns the file, the image's id, and the manifest's length in bytes.
    pub(crate) fn finish(mut self) -> io::Result<(File, Digest, u64)> {
        self.record(What::End(raw::End { files: self.files, bytes: self.bytes }))?;
        let id = self.hasher.finalize();
        self.out.write_all(id.as_bytes())?;
        Ok((self.out.into_inner()?, Digest(*id.as_bytes()), self.written + HASH))
    }

    fn record(&mut self, what: What) -> io::Result<()> {
        let record = Record { what: Some(what) }.encode_to_vec();
        // At most MAX_RECORD.
        self.put(&u32::try_from(record.len()).unwrap_or(u32::MAX).to_le_bytes())?;
        self.put(&record)
    }

    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.hasher.update(bytes);
        self.written += bytes.len() as u64;
        self.out.write_all(bytes)
    }
}

/// Reads a manifest record by record.
#[derive(Debug)]
pub struct ManifestReader {
    input: BufReader<File>,
    path: PathBuf,
    id: Digest,
    /// The bytes that were read so far. At the end they must be those whose hash the id is: another program
    /// may write to the file after they were hashed.
    read: Box<blake3::Hasher>,
    offset: u64,
    /// Where the hash begins.
    end: u64,
    file: SealedFile,
    /// Bytes of the file that have had their segments.
    covered: u64,
    /// Chunks, and segments without chunks, of these bytes.
    pieces: u64,
    files: u64,
    bytes: u64,
    is_first: bool,
}

impl ManifestReader {
    /// Opens the manifest of an image, and checks its hash: it is read once.
    ///
    /// # Errors
    /// The image is not sealed, or the manifest is damaged, of another version, or cannot be read.
    pub fn open(images: &ImageDir) -> Result<Self> {
        let Some((file, length)) = open(images, MANIFEST_NAME)? else {
            return Err(ManifestError::NotSealed { directory: images.path().to_owned() });
        };
        Self::of(file, length, &images.path().join(MANIFEST_NAME))
    }

    /// Reads a manifest of this length that is not in its image's directory yet; `path` is for messages.
    ///
    /// # Errors
    /// As for [`ManifestReader::open`].
    pub fn of(file: File, length: u64, path: &Path) -> Result<Self> {
        let end = length.saturating_sub(HASH);
        let id = hash_at(&file, end).and_then(|hash| Ok((hash, hash_of(&file, end)?)));
        let (claimed, id) = id.map_err(io("read", path))?;
        let mut reader = Self {
            input: BufReader::new(file),
            path: path.to_owned(),
            id,
            read: Box::default(),
            offset: 0,
            end,
            file: SealedFile::default(),
            covered: 0,
            pieces: 0,
            files: 0,
            bytes: 0,
            is_first: true,
        };
        if claimed != id {
            return Err(reader.damaged(
                end,
                format!("the hash of all bytes before, {id:.12}"),
                format!("{claimed:.12}"),
            ));
        }
        let mut magic = [0; MAGIC.len()];
        reader.take(&mut magic)?;
        if magic != MAGIC {
            return Err(reader.damaged(
                0,
                format!("{:?}", MAGIC.escape_ascii().to_string()),
                format!("{magic:02x?}"),
            ));
        }
        match reader.record()? {
            What::Start(raw::Start { version: VERSION }) => Ok(reader),
            What::Start(raw::Start { version }) => {
                Err(ManifestError::Version { file: reader.path, expected: VERSION, found: version })
            }
            other => Err(reader.unexpected("the version", &other)),
        }
    }

    /// Returns the image's id: the hash of the manifest, which has the hash of every byte of the image. A
    /// caller that gets the last record has read the manifest of this id.
    #[must_use]
    pub fn id(&self) -> Digest {
        self.id
    }

    /// Reads the next record; `None` after the last.
    ///
    /// # Errors
    /// The manifest is damaged or cannot be read.
    pub fn next_record(&mut self) -> Result<Option<ManifestRecord>> {
        let start = self.offset;
        let what = self.record()?;
        let is_first = std::mem::take(&mut self.is_first);
        if self.covered < self.file.length && !matches!(what, What::Segment(_)) {
            let expected = format!("a segment at {} of {}", self.covered, self.file.name);
            return Err(self.unexpected(&expected, &what));
        }
        match what {
            What::Parent(parent) if is_first => self.parent(start, parent).map(Some),
            What::File(file) => self.sealed_file(start, file).map(Some),
            What::Segment(segment) => {
                let segment = self.segment(&segment);
                let segment = segment.map_err(|found| self.damaged(start, "a segment of the file", found))?;
                self.covered += u64::from(segment.length);
                self.pieces += segment.chunks.len().max(1) as u64;
                Ok(Some(ManifestRecord::Segment(segment)))
            }
            What::End(end) => self.conclude(start, &end),
            other => Err(self.unexpected("a file or the end", &other)),
        }
    }

    fn parent(&self, start: u64, raw: raw::Parent) -> Result<ManifestRecord> {
        let id = match raw.image_id.try_into() {
            Ok(id) => Some(Digest(id)),
            Err(id) if id.is_empty() => None,
            Err(id) => return Err(self.damaged(start, "an image's id", format!("{} bytes", id.len()))),
        };
        Ok(ManifestRecord::Parent(SealedParent { target: raw.target, id }))
    }

    fn sealed_file(&mut self, start: u64, raw: raw::File) -> Result<ManifestRecord> {
        let raw::File { name, length, memory } = raw;
        if !is_covered(name.as_bytes()) || name.contains('/') || name <= self.file.name {
            let expected = format!("the name of an image's file after {:?}", self.file.name);
            return Err(self.damaged(start, expected, format!("{name:?}")));
        }
        if length > MAX_FILE {
            return Err(self.damaged(start, format!("a length of at most {MAX_FILE}"), length.to_string()));
        }
        if self.files == MAX_FILES {
            return Err(self.damaged(start, format!("at most {MAX_FILES} files"), format!("{name:?}")));
        }
        self.files += 1;
        self.bytes = self.bytes.saturating_add(length);
        (self.covered, self.pieces) = (0, 0);
        self.file = SealedFile { name, length, memory };
        Ok(ManifestRecord::File(self.file.clone()))
    }

    fn segment(&self, raw: &raw::Segment) -> Result<SealedSegment, String> {
        let offset = self.covered;
        let left = self.file.length - offset;
        let length = u64::from(raw.length);
        if length == 0 || length > left.min(SEGMENT) {
            return Err(format!("{length} bytes, where {left} are left and {SEGMENT} are the most"));
        }
        let lengths = || raw.chunks.iter().copied().map(u64::from);
        let fits = lengths().all(|chunk| (1..=CHUNK).contains(&chunk));
        if !raw.chunks.is_empty() && (!fits || lengths().sum::<u64>() != length) {
            return Err(format!("{} chunks that are not its {length} bytes", raw.chunks.len()));
        }
        let (pieces, most) = (self.pieces + raw.chunks.len().max(1) as u64, most_pieces(offset + length));
        if pieces > most {
            let bytes = offset + length;
            return Err(format!("{pieces} chunks of the first {bytes} bytes, where {most} are the most"));
        }
        let (digests, rest) = raw.digests.as_chunks();
        if digests.len() != raw.chunks.len() || !rest.is_empty() {
            return Err(format!("{} bytes of hashes for {} chunks", raw.digests.len(), raw.chunks.len()));
        }
        let blocks = SegmentExtent {
            offset,
            chunks: raw.chunks.clone(),
            file_length: self.file.length,
            memory: self.file.memory,
        };
        let blocks = if raw.chunks.is_empty() { 0..0 } else { blocks.blocks() };
        let (checksums, rest) = raw.checksums.as_chunks();
        if checksums.len() as u64 != blocks.end - blocks.start || !rest.is_empty() {
            return Err(format!("{} bytes of checksums for the blocks {blocks:?}", raw.checksums.len()));
        }
        let chunk =
            |(length, digest): (&u32, &[u8; 32])| SealedChunk { length: *length, digest: Digest(*digest) };
        Ok(SealedSegment {
            offset,
            length: raw.length,
            chunks: raw.chunks.iter().zip(digests).map(chunk).collect(),
            checksums: checksums.iter().map(|sum| u64::from_le_bytes(*sum)).collect(),
        })
    }

    fn conclude(&self, start: u64, end: &raw::End) -> Result<Option<ManifestRecord>> {
        let found = raw::End { files: self.files, bytes: self.bytes };
        if *end != found || self.offset != self.end {
            let expected = format!("{} files of {} bytes and the end", end.files, end.bytes);
            let left = self.end - self.offset;
            let found =
                format!("{} files of {} bytes, {left} bytes before the end", found.files, found.bytes);
            return Err(self.damaged(start, expected, found));
        }
        let read = Digest(*self.read.finalize().as_bytes());
        if read != self.id {
            let expected = format!("the bytes whose hash is {}, as when it was opened", self.id);
            return Err(self.damaged(0, expected, "other bytes, written meanwhile"));
        }
        Ok(None)
    }

    fn record(&mut self) -> Result<What> {
        let start = self.offset;
        let mut length = [0; 4];
        self.take(&mut length)?;
        let length = u32::from_le_bytes(length);
        let left = self.end - self.offset;
        if length > MAX_RECORD || u64::from(length) > left {
            let expected = format!("a record of at most {MAX_RECORD} bytes, in the {left} that are left");
            return Err(self.damaged(start, expected, format!("{length} bytes")));
        }
        let mut bytes = vec![0; length as usize];
        self.take(&mut bytes)?;
        match Record::decode(&*bytes) {
            Ok(Record { what: Some(what) }) => Ok(what),
            Ok(_) => Err(self.damaged(start, "a record of this version", "one without contents")),
            Err(error) => Err(self.damaged(start, "a record", error.to_string())),
        }
    }

    fn take(&mut self, into: &mut [u8]) -> Result<()> {
        if self.end - self.offset < into.len() as u64 {
            return Err(self.damaged(self.offset, format!("{} bytes more", into.len()), "the end"));
        }
        self.input.read_exact(into).map_err(io("read", &self.path))?;
        self.read.update(into);
        self.offset += into.len() as u64;
        Ok(())
    }

    fn unexpected(&self, expected: &str, found: &What) -> ManifestError {
        let found = match found {
            What::Start(_) => "a version",
            What::Parent(_) => "a parent",
            What::File(_) => "a file",
            What::Segment(_) => "a segment",
            What::End(_) => "the end",
        };
        self.damaged(self.offset, expected, found)
    }

    fn damaged(&self, offset: u64, expected: impl Into<String>, found: impl Into<String>) -> ManifestError {
        let (expected, found) = (expected.into(), found.into());
        ManifestError::Damaged { file: self.path.clone(), offset, expected, found }
    }
}

/// Reads the hash at the end; of a shorter file, zeros.
fn hash_at(file: &File, end: u64) -> io::Result<Digest> {
    let mut hash = [0; 32];
    match file.read_exact_at(&mut hash, end) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(Digest::default()),
        read => read.map(|()| Digest(hash)),
    }
}

/// Hashes the first `length` bytes.
fn hash_of(file: &File, length: u64) -> io::Result<Digest> {
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; 64 << 10];
    let mut offset = 0;
    while offset < length {
        let most = buffer.len().min(usize::try_from(length - offset).unwrap_or(usize::MAX));
        let read = file.read_at(&mut buffer[..most], offset)?;
        if read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        hasher.update(&buffer[..read]);
        offset += read as u64;
    }
    Ok(Digest(*hasher.finalize().as_bytes()))
}

#[cfg(test)]
mod tests;
