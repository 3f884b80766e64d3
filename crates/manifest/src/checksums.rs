// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a restore checks the memory of an image with: the checksums of all blocks, in 8 bytes for 64 KiB. The
//! other files are compared at once: they say where memory belongs.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::unix::fs::MetadataExt as _;
use std::sync::Arc;

use rewake_criu_images::{Digest, ImageDir, is_gpu_pages_file};
use rewake_image_io::{BLOCK, BlockChecksums, checksum_of_zeros};

use crate::difference::ImageDifference;
use crate::directory::{covered_files, moved_parent, open, parent_place};
use crate::error::{ManifestError, Result, io};
use crate::format::{ManifestReader, ManifestRecord, SealedFile, SealedParent};
use crate::names::PARTIAL_NAME;
use crate::segment::{SealedChunk, SealedSegment};

/// The longest file without memory that is compared: longer ones have contents of file systems, which CRIU
/// reads. Pagemaps are compared whatever their length is.
const MAX_COMPARED: u64 = 64 << 20;

/// The checksums of a sealed image.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ImageChecksums {
    /// The image's id.
    pub id: Digest,
    /// Whether some of the image's memory may not have arrived.
    pub is_partial: bool,
    /// The parent image that it was sealed with.
    pub parent: Option<SealedParent>,
    /// The files that hold memory, by name.
    pub memory: BTreeMap<String, MemoryFile>,
}

/// A file that holds memory.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MemoryFile {
    /// Device and inode.
    pub identity: (u64, u64),
    /// Its length in bytes.
    pub length: u64,
    /// Its number among the files of the manifest, from 1.
    pub number: u32,
    /// The checksum of each block.
    pub checksums: Vec<u64>,
    /// The chunks of a file with GPU memory, of its first byte to the last; none of other files.
    pub chunks: Vec<SealedChunk>,
}

impl ImageChecksums {
    /// Returns the checksums of a memory file, or `None` if it was not sealed with this length.
    #[must_use]
    pub fn of(&self, name: &str, length: u64) -> Option<BlockChecksums> {
        let memory = self.memory.get(name).filter(|memory| memory.length == length)?;
        let table: Vec<u8> = memory.checksums.iter().flat_map(|checksum| checksum.to_le_bytes()).collect();
        BlockChecksums::new(Arc::new(table), 0, length)
    }
}

/// Reads the checksums of an image's memory. The image may be a partial copy. Returns `None` if the image is
/// not sealed.
///
/// # Errors
/// The manifest is damaged. Or the directory has other files than were sealed, files of another length, or
/// another parent. Or a file that says where memory belongs has other bytes.
pub fn read_checksums(images: &ImageDir) -> Result<Option<ImageChecksums>> {
    match read_partial_checksums(images) {
        // The manifest of a copy that is complete by now has its name since then.
        Err(ManifestError::NotSealed { .. }) => {}
        read => return read.map(Some),
    }
    let manifest = match ManifestReader::open(images) {
        Ok(manifest) => manifest,
        Err(ManifestError::NotSealed { .. }) => return Ok(None),
        Err(error) => return Err(error),
    };
    Reading::of(images, manifest).map(Some)
}

/// Reads the checksums of an image of which some memory has not arrived: the manifest has its name of a
/// partial copy.
///
/// # Errors
/// As for [`read_checksums`]. Or the directory has no such manifest.
pub fn read_partial_checksums(images: &ImageDir) -> Result<ImageChecksums> {
    let Some((file, length)) = open(images, PARTIAL_NAME)? else {
        return Err(ManifestError::NotSealed { directory: images.path().to_owned() });
    };
    let read = Reading::of(images, ManifestReader::of(file, length, &images.path().join(PARTIAL_NAME))?)?;
    Ok(ImageChecksums { is_partial: true, ..read })
}

/// Reads the checksums of an image and of its parents: of each directory in `chain`, whose parent is the next
/// one.
///
/// # Errors
/// As for [`read_checksums`]. Or a parent is another image than the child was sealed with.
pub fn read_chain(chain: &[&ImageDir]) -> Result<Vec<Option<ImageChecksums>>> {
    let all = chain.iter().map(|images| read_checksums(images)).collect::<Result<Vec<_>>>()?;
    for (place, child) in all.iter().enumerate() {
        let sealed = child.as_ref().and_then(|child| child.parent.as_ref()?.id);
        let found = all.get(place + 1).and_then(|parent| parent.as_ref()).map(|parent| parent.id);
        if let Some(sealed) = sealed.filter(|sealed| found != Some(*sealed)) {
            return Err(ManifestError::AnotherParent {
                child: chain[place].path().to_owned(),
                sealed,
                found: found.map_or_else(|| "an image without a manifest".to_owned(), |id| format!("{id}")),
            });
        }
    }
    Ok(all)
}

/// A manifest that is being read.
struct Reading<'a> {
    images: &'a ImageDir,
    read: ImageChecksums,
    /// The names of all files so far.
    sealed: BTreeSet<String>,
    /// The file of the next segments, if it is compared.
    compared: Option<File>,
}

impl<'a> Reading<'a> {
    fn of(images: &'a ImageDir, manifest: ManifestReader) -> Result<ImageChecksums> {
        let mut reading =
            Self { images, read: ImageChecksums::default(), sealed: BTreeSet::new(), compared: None };
        reading.all(manifest)?;
        Ok(reading.read)
    }

    fn all(&mut self, mut manifest: ManifestReader) -> Result<()> {
        self.read.id = manifest.id();
        let mut file = SealedFile::default();
        while let Some(record) = manifest.next_record()? {
            match record {
                ManifestRecord::Parent(parent) => self.read.parent = Some(parent),
                ManifestRecord::File(next) => {
                    self.file(&next)?;
                    file = next;
                }
                ManifestRecord::Segment(segment) if file.memory => self.segment(&file, &segment),
                ManifestRecord::Segment(segment) => self.compare(&file, &segment)?,
            }
        }
        if let Some(added) = covered_files(self.images)?.difference(&self.sealed).next() {
            return Err(self.differs(ImageDifference::Added { file: added.clone() }));
        }
        self.check_parent()
    }

    fn file(&mut self, sealed: &SealedFile) -> Result<()> {
        let name = sealed.name.clone();
        let Some((file, found)) = open(self.images, &name)? else {
            return Err(self.differs(ImageDifference::Missing { file: name }));
        };
        if found != sealed.length {
            return Err(self.differs(ImageDifference::Length { file: name, sealed: sealed.length, found }));
        }
        self.compared = None;
        if sealed.memory {
            let of = file.metadata().map_err(io("stat", &self.images.path().join(&name)))?;
            // A file takes more than a byte of a manifest, which has 2^32 at most.
            let number = u32::try_from(self.sealed.len() + 1).unwrap_or(u32::MAX);
            let identity = (of.dev(), of.ino());
            let memory = MemoryFile { identity, length: found, number, ..MemoryFile::default() };
            self.read.memory.insert(name.clone(), memory);
        } else if found <= MAX_COMPARED || name.starts_with("pagemap-") {
            self.compared = Some(file);
        }
        self.sealed.insert(name);
        Ok(())
    }

    /// Compares a part of a file that holds no memory.
    fn compare(&self, file: &SealedFile, segment: &SealedSegment) -> Result<()> {
        let Some(open) = &self.compared else { return Ok(()) };
        let found = segment.extent(file.length, false).measure(open, &mut Vec::new());
        if found.map_err(io("read", &self.images.path().join(&file.name)))? == *segment {
            return Ok(());
        }
        let (offset, length) = (segment.offset, u64::from(segment.length));
        let file = file.name.clone();
        Err(self.differs(ImageDifference::Bytes { file, offset, length, place: None }))
    }

    fn segment(&mut self, file: &SealedFile, segment: &SealedSegment) {
        let Some(memory) = self.read.memory.get_mut(&file.name) else { return };
        if is_gpu_pages_file(&file.name) {
            memory.chunks.extend(&segment.chunks);
            let zeros = segment.chunks.is_empty().then(|| SealedChunk::zeros(segment.length));
            memory.chunks.extend(zeros);
        }
        if !segment.chunks.is_empty() {
            memory.checksums.extend(&segment.checksums);
            return;
        }
        // All blocks that begin in it are zeros; the last one of the file may be shorter.
        let block = BLOCK as u64;
        let blocks =
            segment.offset.div_ceil(block)..(segment.offset + u64::from(segment.length)).div_ceil(block);
        let zeros = |at: u64| {
            let length = usize::try_from(file.length - at * block).unwrap_or(BLOCK).min(BLOCK);
            checksum_of_zeros(length)
        };
        memory.checksums.extend(blocks.map(zeros));
    }

    /// Checks that the parent image is where it was.
    fn check_parent(&self) -> Result<()> {
        let found = parent_place(self.images)?;
        let sealed = self.read.parent.as_ref().map(|parent| &*parent.target);
        match moved_parent(sealed, found.as_deref()) {
            None => Ok(()),
            Some(what) => Err(self.differs(ImageDifference::Parent { what: what.to_owned() })),
        }
    }

    fn differs(&self, difference: ImageDifference) -> ManifestError {
        ManifestError::Differs { directory: self.images.path().to_owned(), difference }
    }
}
