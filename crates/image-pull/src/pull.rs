// SPDX-License-Identifier: MIT OR Apache-2.0
//! The copy: requests run ahead of the bytes that arrive, and steps are done in the order of the manifest.

use std::collections::VecDeque;
use std::path::Path;

use anyhow::{Context as _, bail, ensure};
use rewake_criu_images::Digest;
use rewake_image_protocol::MAX_READ;
use rewake_manifest::{ManifestReader, ManifestRecord, SealedChunk};

use crate::chunks::{ChunkPlace, Chunks, Step};
use crate::source::ImageSource;
use crate::target::{Target, is_right};

/// The fewest digits of an image id that identify an image.
const ID_DIGITS: usize = 16;

/// The longest manifest, in bytes: that of an image of some 25 TiB.
const MAX_MANIFEST: u64 = 4 << 30;
/// Chunks that wait for others before them.
const MAX_PENDING: usize = 1024;

/// What was copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PullReport {
    /// The image's id.
    pub id: Digest,
    /// The files of the image, and their bytes.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Bytes that the server has sent, with the manifest.
    pub sent: u64,
    /// Bytes that an earlier copy had brought.
    pub kept: u64,
}

/// Copies an image into a directory. A directory that has the image already stays as it is; one in which an earlier copy
/// was cut is completed. `expected` is the beginning of an image id.
///
/// # Errors
/// The server is lost for long, or sends bytes that the manifest does not prove. The manifest is damaged or of another
/// image than `expected`. The directory has another image, or cannot be written, or the parent image is missing.
pub fn pull(
    source: &mut ImageSource,
    directory: &Path,
    expected: Option<&str>,
) -> anyhow::Result<PullReport> {
    let id = source.image_id();
    if let Some(expected) = expected {
        ensure!(
            id.to_string().starts_with(expected) && expected.len() >= ID_DIGITS,
            "the server has image {id}, expected {expected:?}, of which at least {ID_DIGITS} digits are compared"
        );
    }
    let report = PullReport { id, files: 0, bytes: 0, sent: 0, kept: 0 };
    let Some(target) = Target::open(directory, id)? else { return Ok(report) };
    let (file, path) = target.manifest()?;
    let length = source.manifest_length();
    ensure!(
        length <= MAX_MANIFEST,
        "the server has a manifest of {length} bytes, {MAX_MANIFEST} expected at most"
    );
    let mut copy = ImageCopy { source, target, report, steps: VecDeque::new(), buffer: Vec::new() };
    copy.manifest(&file, length)?;
    let manifest = || -> anyhow::Result<_> {
        let reader = ManifestReader::of(std::fs::File::open(&path)?, length, &path)?;
        ensure!(
            reader.id() == id,
            "the server sent the manifest of image {:.16}, not of {id:.16}",
            reader.id()
        );
        Ok(reader)
    };
    let mut first = manifest()?;
    match first.next_record()? {
        Some(ManifestRecord::Parent(parent)) => copy.target.link_parent(&parent)?,
        // Read again from its start.
        _ => first = manifest()?,
    }
    copy.all(Chunks::new(first))?;
    copy.target.finish(&file)?;
    Ok(copy.report)
}

struct ImageCopy<'a> {
    source: &'a mut ImageSource,
    target: Target,
    report: PullReport,
    /// Steps whose bytes were requested, and those behind them.
    steps: VecDeque<PendingChunk>,
    buffer: Vec<u8>,
}

/// A chunk that is written when the ones before it are.
enum PendingChunk {
    Fetched(ChunkPlace, SealedChunk),
    Copied(ChunkPlace, SealedChunk, ChunkPlace),
}

impl ImageCopy<'_> {
    /// Copies the manifest. Its hash is checked when it is read.
    fn manifest(&mut self, file: &std::fs::File, length: u64) -> anyhow::Result<()> {
        use std::os::unix::fs::FileExt as _;
        let mut offset = 0;
        while offset < length {
            let part = u32::try_from(length - offset).unwrap_or(MAX_READ).min(MAX_READ);
            self.source.request(0, offset, part)?;
            self.source.next_data(&mut self.buffer).context("the manifest")?;
            file.write_all_at(&self.buffer, offset).context("writing the manifest")?;
            offset += u64::from(part);
        }
        self.report.sent += length;
        Ok(())
    }

    fn all(&mut self, mut chunks: Chunks) -> anyhow::Result<()> {
        while let Some(step) = chunks.next()? {
            match step {
                Step::File(_, file) => {
                    self.target.make(&file).with_context(|| format!("file {}", file.name))?;
                    self.report.files += 1;
                    self.report.bytes += file.length;
                }
                Step::Copy(place, chunk, first) => {
                    self.steps.push_back(PendingChunk::Copied(place, chunk, first));
                    while self.steps.len() >= MAX_PENDING || self.is_copy_next() {
                        self.finish_step()?;
                    }
                }
                Step::Fetch(place, chunk) => self.fetch(place, chunk)?,
            }
        }
        while !self.steps.is_empty() {
            self.finish_step()?;
        }
        Ok(())
    }

    /// Whether the oldest chunk that is not written yet needs no byte of the server.
    fn is_copy_next(&self) -> bool {
        matches!(self.steps.front(), Some(PendingChunk::Copied(..)))
    }

    /// Requests a chunk, unless an earlier copy has brought it.
    fn fetch(&mut self, place: ChunkPlace, chunk: SealedChunk) -> anyhow::Result<()> {
        if self.target.has(place, &chunk, &mut self.buffer) {
            self.report.kept += u64::from(chunk.length);
            return Ok(());
        }
        while !self.source.has_room() {
            self.finish_step()?;
        }
        self.source.request(place.file, place.offset, chunk.length)?;
        self.steps.push_back(PendingChunk::Fetched(place, chunk));
        Ok(())
    }

    /// Writes the oldest chunk that is not written yet.
    fn finish_step(&mut self) -> anyhow::Result<()> {
        let (place, chunk) = match self.steps.pop_front() {
            None => bail!("more reads are outstanding than chunks"),
            Some(PendingChunk::Fetched(place, chunk)) => {
                self.source.next_data(&mut self.buffer)?;
                self.report.sent += u64::from(chunk.length);
                (place, chunk)
            }
            Some(PendingChunk::Copied(place, chunk, first)) => {
                self.buffer.resize(chunk.length as usize, 0);
                self.target.read(first, &mut self.buffer)?;
                (place, chunk)
            }
        };
        ensure!(
            is_right(&self.buffer, &chunk),
            "{}: the {} bytes from offset {} are not those that the manifest proves: the image on the server is damaged \
             (`rewake verify`), or the server lies",
            self.target.name(place.file),
            chunk.length,
            place.offset
        );
        self.target.write(place, &self.buffer)
    }
}
