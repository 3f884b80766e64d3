// SPDX-License-Identifier: MIT OR Apache-2.0
//! The copy: requests run ahead of the bytes that arrive, and steps are done in the order of the manifest.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::path::Path;

use crate::protocol::MAX_READ;
use anyhow::{Context as _, bail, ensure};
use rewake_criu_images::{Digest, GPU_HEADER, ImageDir, is_gpu_pages_file};
use rewake_image_signature::Signers;
use rewake_manifest::{ManifestReader, ManifestRecord, SealedChunk};

use crate::pull::chunks::{ChunkPlace, Chunks, Step};
use crate::pull::source::ChunkSource;
use crate::pull::target::{Target, is_complete, is_right, keep_signature};

/// The fewest digits of an image id that identify an image: 128 bits, since the author of two images may
/// search for a pair whose ids begin alike.
pub const ID_DIGITS: usize = 32;

/// The longest manifest, in bytes: that of an image of some 25 TiB.
pub const MAX_MANIFEST: u64 = 4 << 30;
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
    /// Bytes that the source has sent, with the manifest.
    pub sent: u64,
    /// Bytes that an earlier copy had brought.
    pub kept: u64,
    /// Bytes that are left to a restore: without them the directory is no image.
    pub left: u64,
}

/// Copies an image into a directory. A directory that has the image already stays as it is; one in which an
/// earlier copy was cut is completed. `expected` is the beginning of an image id. Each of `signers` must
/// accept the image's signature, before anything is written.
///
/// # Errors
/// The server is lost for long, or sends bytes that the manifest does not prove. The manifest is damaged or
/// of another image than `expected`, or not signed as `signers` require. The directory has another image, or
/// cannot be written, or the parent image is missing.
pub fn pull(
    source: &mut dyn ChunkSource,
    directory: &Path,
    expected: Option<&str>,
    signers: &[Signers],
) -> anyhow::Result<PullReport> {
    copy(source, directory, expected, signers, CopyExtent::All)
}

/// Copies what `criu restore --lazy-pages` reads itself: all files, but only those chunks of pages files that
/// have pages which are not lazy, and the headers of files with GPU memory. Space for the others is reserved.
/// If none is left, the directory has the image then.
///
/// # Errors
/// As for [`pull`]. Or the image is incremental.
pub fn pull_eager(
    source: &mut dyn ChunkSource,
    directory: &Path,
    expected: Option<&str>,
    signers: &[Signers],
) -> anyhow::Result<PullReport> {
    copy(source, directory, expected, signers, CopyExtent::Eager)
}

/// [`pull_eager`], for a caller that finds what an earlier copy has brought by its checksums. Chunks that are
/// left to a restore are not read, so all of them count as left.
///
/// # Errors
/// As for [`pull_eager`].
pub fn pull_eager_unread(
    source: &mut dyn ChunkSource,
    directory: &Path,
    expected: Option<&str>,
    signers: &[Signers],
) -> anyhow::Result<PullReport> {
    copy(source, directory, expected, signers, CopyExtent::EagerUnread)
}

/// Which chunks are copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CopyExtent {
    All,
    /// What CRIU reads itself. Others that are here are found by their hashes.
    Eager,
    /// What CRIU reads itself.
    EagerUnread,
}

/// Returns the id of a directory's complete image; none without one. `expected` is the beginning of the id.
///
/// # Errors
/// The directory has another image than `expected`, or its manifest is damaged.
pub fn complete_image(directory: &Path, expected: Option<&str>) -> anyhow::Result<Option<Digest>> {
    if !is_complete(directory) {
        return Ok(None);
    }
    let id = ManifestReader::open(&ImageDir::open(directory)?)?.id();
    check_id(id, expected, &directory.display())?;
    Ok(Some(id))
}

/// Puts the manifest of a copy in place whose last chunks a restore has brought. It checks each chunk first.
///
/// # Errors
/// A chunk is missing or wrong, or the directory has no such copy, or cannot be written.
pub fn complete(directory: &Path) -> anyhow::Result<Digest> {
    let (mut target, manifest) = Target::resume(directory)?;
    let (id, mut chunks, mut buffer) = (manifest.id(), Chunks::new(manifest), Vec::new());
    while let Some(step) = chunks.next()? {
        match step {
            Step::File(_, file) => target.make(&file).with_context(|| format!("file {}", file.name))?,
            Step::Fetch(place, chunk) | Step::Copy(place, chunk, _) | Step::Leave(place, chunk) => {
                let is_here = target.has(place, &chunk, &mut buffer);
                check_present(is_here, &target, place, chunk.length)?;
            }
            Step::Zero(place, length) => {
                let is_here = target.is_zero(place, length, &mut buffer)?;
                check_present(is_here, &target, place, length)?;
            }
        }
    }
    target.finish()?;
    Ok(id)
}

fn check_present(is_here: bool, target: &Target, place: ChunkPlace, length: u32) -> anyhow::Result<()> {
    ensure!(
        is_here,
        "{}: the {length} bytes from offset {} are not those that the manifest proves: `rewake pull` brings \
         them",
        target.name(place.file),
        place.offset
    );
    Ok(())
}

fn copy(
    source: &mut dyn ChunkSource,
    directory: &Path,
    expected: Option<&str>,
    signers: &[Signers],
    extent: CopyExtent,
) -> anyhow::Result<PullReport> {
    let id = source.image_id();
    check_id(id, expected, &"the source")?;
    let report = PullReport { id, files: 0, bytes: 0, sent: 0, kept: 0, left: 0 };
    let signature = source.signature().map(<[u8]>::to_vec);
    for signers in signers {
        signers.check(id, signature.as_deref())?;
    }
    let Some(target) = Target::open(directory, id)? else {
        keep_signature(directory, id, signature.as_deref())?;
        return Ok(report);
    };
    target.write_signature(signature.as_deref())?;
    let made = target.make_manifest()?;
    let length = source.manifest_length();
    ensure!(
        length <= MAX_MANIFEST,
        "the source has a manifest of {length} bytes, {MAX_MANIFEST} expected at most"
    );
    let (steps, buffer) = (VecDeque::new(), Vec::new());
    let mut copy = ImageCopy { source, target, report, extent, ranges: None, steps, buffer };
    if let Some(file) = made {
        copy.manifest(&file, length)?;
    }
    copy.working_set()?;
    let manifest = |target: &Target| -> anyhow::Result<_> {
        let reader = target.manifest(length)?;
        ensure!(reader.id() == id, "the source sent the manifest of image {}, not of {id}", reader.id());
        Ok(reader)
    };
    if let Some(claimed) = copy.source.claimed_bytes()
        && let Err(error) = check_bytes(manifest(&copy.target)?, claimed)
    {
        copy.target.abandon();
        return Err(error);
    }
    let mut first = manifest(&copy.target)?;
    match first.next_record()? {
        Some(ManifestRecord::Parent(_)) if extent != CopyExtent::All => {
            copy.target.abandon();
            bail!(
                "the image is incremental: copy its parent, and then the image itself, with `rewake pull`, \
                 and restore the copy with `rewake restore -D`"
            )
        }
        Some(ManifestRecord::Parent(parent)) => copy.target.link_parent(&parent)?,
        // Read again from its start.
        _ => {
            copy.target.expect_no_parent()?;
            first = manifest(&copy.target)?;
        }
    }
    copy.all(Chunks::new(first))?;
    if copy.report.left == 0 {
        copy.target.finish()?;
    }
    Ok(copy.report)
}

fn check_id(id: Digest, expected: Option<&str>, place: &dyn std::fmt::Display) -> anyhow::Result<()> {
    let is_it = expected.is_none_or(|digits| id.to_string().starts_with(digits) && digits.len() >= ID_DIGITS);
    let digits = expected.unwrap_or_default();
    ensure!(
        is_it,
        "{place} has image {id}, expected {digits:?}, of which at least {ID_DIGITS} digits are compared"
    );
    Ok(())
}

/// Checks, before the first file is made, that the files have as many bytes as the source says: space may
/// have been reserved for these.
fn check_bytes(mut manifest: ManifestReader, claimed: u64) -> anyhow::Result<()> {
    let mut bytes = 0_u64;
    while let Some(record) = manifest.next_record()? {
        if let ManifestRecord::File(file) = record {
            bytes = bytes.saturating_add(file.length);
        }
    }
    ensure!(
        bytes == claimed,
        "the source says that the image has {claimed} bytes, and the files of its manifest have {bytes}: \
         push the image again, or do not trust who writes into the store"
    );
    Ok(())
}

struct ImageCopy<'a> {
    source: &'a mut dyn ChunkSource,
    target: Target,
    report: PullReport,
    extent: CopyExtent,
    /// What CRIU reads itself, when the pagemaps have arrived.
    ranges: Option<BTreeMap<String, Vec<Range<u64>>>>,
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
            self.source.request_manifest(offset, part)?;
            self.report.sent += self.source.next_data(&mut self.buffer).context("the manifest")?;
            file.write_all_at(&self.buffer, offset).context("writing the manifest")?;
            offset += u64::from(part);
        }
        Ok(())
    }

    /// Copies the recorded working set, which no manifest proves: a wrong one only makes a restore slower.
    fn working_set(&mut self) -> anyhow::Result<()> {
        if let Some(sent) = self.source.working_set(&mut self.buffer) {
            self.report.sent += sent;
            self.target.write_working_set(&self.buffer)?;
        }
        Ok(())
    }

    fn all(&mut self, mut chunks: Chunks) -> anyhow::Result<()> {
        while let Some(step) = chunks.next()? {
            match step {
                Step::File(_, file) => {
                    self.target.make(&file).with_context(|| format!("file {}", file.name))?;
                    self.report.files += 1;
                    self.report.bytes += file.length;
                    if let Some(ranges) = self.needed(&file.name)? {
                        chunks.need_only(&ranges);
                    }
                }
                Step::Leave(place, chunk) => self.leave(place, &chunk)?,
                Step::Zero(place, length) => {
                    if !self.target.is_zero(place, length, &mut self.buffer)? {
                        self.buffer.fill(0);
                        self.target.write(place, &self.buffer)?;
                    }
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
        self.finish_steps()
    }

    fn finish_steps(&mut self) -> anyhow::Result<()> {
        while !self.steps.is_empty() {
            self.finish_step()?;
        }
        Ok(())
    }

    /// Returns which parts of a file a restore needs at its start; none: all of it.
    fn needed(&mut self, name: &str) -> anyhow::Result<Option<Vec<Range<u64>>>> {
        if self.extent == CopyExtent::All {
            return Ok(None);
        }
        if is_pages_file(name) {
            return Ok(self.eager_ranges()?.remove(name));
        }
        // CRIU's plugin compares the header when it opens the file.
        let header = Range { start: 0, end: GPU_HEADER };
        Ok(is_gpu_pages_file(name).then(|| vec![header]))
    }

    /// Returns what CRIU reads itself, by pages file.
    fn eager_ranges(&mut self) -> anyhow::Result<&mut BTreeMap<String, Vec<Range<u64>>>> {
        if self.ranges.is_none() {
            // The names of all pagemaps are before that of the first pages file: their bytes were requested.
            self.finish_steps()?;
            self.ranges = Some(self.target.eager_ranges()?);
        }
        Ok(self.ranges.get_or_insert_default())
    }

    /// Leaves a chunk to the restore, unless an earlier copy has brought it.
    fn leave(&mut self, place: ChunkPlace, chunk: &SealedChunk) -> anyhow::Result<()> {
        // Where the file system has no bytes there are none to compare: that is most of a copy that was cut
        // early.
        let is_read = self.extent == CopyExtent::Eager && !self.target.is_hole(place, chunk.length)?;
        if is_read && self.target.has(place, chunk, &mut self.buffer) {
            self.report.kept += u64::from(chunk.length);
            return Ok(());
        }
        self.report.left += u64::from(chunk.length);
        self.target.reserve(place, chunk)
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
        self.source.request_chunk(place, &chunk)?;
        self.steps.push_back(PendingChunk::Fetched(place, chunk));
        Ok(())
    }

    /// Writes the oldest chunk that is not written yet.
    fn finish_step(&mut self) -> anyhow::Result<()> {
        let (place, chunk) = match self.steps.pop_front() {
            None => bail!("more reads are outstanding than chunks"),
            Some(PendingChunk::Fetched(place, chunk)) => {
                self.report.sent += self.source.next_data(&mut self.buffer)?;
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
            "{}: the {} bytes from offset {} are not those that the manifest proves: the image on the server \
             is damaged (`rewake verify`), or the server lies",
            self.target.name(place.file),
            chunk.length,
            place.offset
        );
        self.target.write(place, &self.buffer)
    }
}

/// Whether a file has pages of tasks or of shared memory. Files of GPU memory are not among them.
fn is_pages_file(name: &str) -> bool {
    name.starts_with("pages-")
}
