// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compares an image with its manifest, to the last byte.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

use rewake_criu_images::{Digest, ImageDir};

use crate::difference::ImageDifference;
use crate::directory::{covered_files, moved_parent, open, parent_place};
use crate::error::{ManifestError, Result};
use crate::format::{ManifestReader, ManifestRecord, SealedFile, SealedParent};
use crate::parallel::Workers;
use crate::seal::refuse_partial;
use crate::segment::{SealedSegment, SegmentExtent};

/// Differences whose place in memory is searched for: each search reads the pagemaps.
const MAX_PLACES: u64 = 50;

/// What was compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct VerifyReport {
    /// The image's id.
    pub id: Digest,
    /// Files in the manifest.
    pub files: u64,
    /// The sum of their sealed lengths.
    pub bytes: u64,
    /// Number of differences: 0 if the image is as it was sealed.
    pub differences: u64,
}

/// Compares an image directory with its manifest, and gives each difference to `report`. A parent image is
/// not read: only that it is the one that was sealed.
///
/// # Errors
/// The image is not sealed, or a partial copy; the manifest is damaged, or the directory cannot be read.
pub fn verify(directory: &Path, report: impl FnMut(&ImageDifference)) -> Result<VerifyReport> {
    compare(directory, true, report)
}

/// Compares the files of an image directory with its manifest by their names and lengths, and its link to a
/// parent: no file but the manifest is read.
///
/// # Errors
/// As for [`verify`].
pub fn verify_files(directory: &Path, report: impl FnMut(&ImageDifference)) -> Result<VerifyReport> {
    compare(directory, false, report)
}

fn compare(
    directory: &Path,
    reads_files: bool,
    report: impl FnMut(&ImageDifference),
) -> Result<VerifyReport> {
    let images = ImageDir::open(directory)?;
    refuse_partial(&images)?;
    let manifest = ManifestReader::open(&images)?;
    let names = covered_files(&images)?;
    let id = manifest.id();
    let mut differences =
        DifferenceReport { images: &images, names: &names, report, pending: None, count: 0 };
    let mut jobs = VerifyJobs::new(&images, manifest, reads_files);
    let (mut files, mut bytes) = (0, 0);
    let work = |job: &VerifyJob, buffer: &mut Vec<u8>| match job {
        VerifyJob::Segment(part) => part.compare(buffer),
        _ => Vec::new(),
    };
    Workers::new().run(jobs.by_ref(), work, |job, found| {
        match job {
            VerifyJob::File(file) => {
                files += 1;
                bytes += file.length;
            }
            VerifyJob::Found(difference) => differences.add(difference),
            VerifyJob::Segment(_) => found.into_iter().for_each(|difference| differences.add(difference)),
        }
        Ok::<_, ManifestError>(())
    })?;
    for file in names.difference(&jobs.sealed) {
        differences.add(ImageDifference::Added { file: file.clone() });
    }
    if !jobs.has_parent
        && let Some(what) = moved_parent(None, parent_place(&images)?.as_deref())
    {
        differences.add(ImageDifference::Parent { what: what.to_owned() });
    }
    differences.flush();
    Ok(VerifyReport { id, files, bytes, differences: differences.count })
}

enum VerifyJob {
    File(SealedFile),
    Found(ImageDifference),
    Segment(Part),
}

/// A segment of an open file.
struct Part {
    file: Arc<(String, File)>,
    extent: SegmentExtent,
    sealed: SealedSegment,
}

impl Part {
    fn compare(&self, buffer: &mut Vec<u8>) -> Vec<ImageDifference> {
        match self.extent.measure(&self.file.1, buffer) {
            Ok(found) if found == self.sealed => Vec::new(),
            Ok(_) => self.wrong_ranges(buffer).unwrap_or_else(|error| vec![self.unreadable(&error)]),
            Err(error) => vec![self.unreadable(&error)],
        }
    }

    fn unreadable(&self, error: &io::Error) -> ImageDifference {
        let reason = format!("cannot be read at offset {}: {error}", self.extent.offset);
        ImageDifference::Unreadable { file: self.file.0.clone(), reason }
    }

    /// Finds the blocks that differ. Without one, as in files that have no blocks, finds the chunks.
    fn wrong_ranges(&self, buffer: &mut Vec<u8>) -> io::Result<Vec<ImageDifference>> {
        let found = self.extent.sums(self.extent.read(&self.file.1, buffer)?);
        let sealed = self.extent.sums_of(&self.sealed);
        let blocks = self.extent.blocks().zip(sealed.1.iter().zip(&found.1));
        let wrong = blocks.filter(|(_, (sealed, found))| sealed != found);
        let mut wrong: Vec<(u64, u64)> = wrong
            .map(|(block, _)| {
                let range = self.extent.block(block);
                (range.start, range.end - range.start)
            })
            .collect();
        if wrong.is_empty() {
            let mut end = self.extent.offset;
            for (sealed, found) in sealed.0.iter().zip(&found.0) {
                let (offset, length) = (end, u64::from(found.length));
                end += length;
                if sealed != found {
                    wrong.push((offset, length));
                }
            }
        }
        let file = || self.file.0.clone();
        let bytes = |(offset, length)| ImageDifference::Bytes { file: file(), offset, length, place: None };
        Ok(wrong.into_iter().map(bytes).collect())
    }
}

/// The work of a verification, in the order of the manifest.
struct VerifyJobs<'a> {
    images: &'a ImageDir,
    manifest: ManifestReader,
    /// Files are read, and compared by their bytes.
    reads_files: bool,
    /// The names of all files so far.
    sealed: BTreeSet<String>,
    has_parent: bool,
    /// The file of the next segments, or `None` if it cannot be read.
    file: Option<Arc<(String, File)>>,
    /// Its sealed length.
    length: u64,
    /// Its length now.
    found: u64,
    memory: bool,
    /// Found while the file was opened.
    next: Option<ImageDifference>,
}

impl<'a> VerifyJobs<'a> {
    fn new(images: &'a ImageDir, manifest: ManifestReader, reads_files: bool) -> Self {
        Self {
            images,
            manifest,
            reads_files,
            sealed: BTreeSet::new(),
            has_parent: false,
            file: None,
            length: 0,
            found: 0,
            memory: false,
            next: None,
        }
    }

    /// Opens a file. What is wrong with it is the next job.
    fn open(&mut self, sealed: &SealedFile) {
        let file = sealed.name.clone();
        self.sealed.insert(file.clone());
        (self.file, self.length, self.memory) = (None, sealed.length, sealed.memory);
        match open(self.images, &sealed.name) {
            Ok(Some((opened, found))) => {
                self.file = Some(Arc::new((file.clone(), opened)));
                self.found = found;
                let differs = found != sealed.length;
                self.next = differs.then_some(ImageDifference::Length { file, sealed: sealed.length, found });
            }
            Ok(None) => self.next = Some(ImageDifference::Missing { file }),
            Err(error) => self.next = Some(ImageDifference::Unreadable { file, reason: error.to_string() }),
        }
    }

    /// The part of the file that a segment is about, or `None` if the file ends before it, or is not read.
    fn part(&self, sealed: SealedSegment) -> Option<Part> {
        let extent = sealed.extent(self.length, self.memory);
        let file = self.file.clone().filter(|_| self.reads_files && extent.read_end() <= self.found)?;
        extent.prefetch(&file.1);
        Some(Part { file, extent, sealed })
    }

    fn parent(&mut self, sealed: &SealedParent) -> Result<Option<ImageDifference>> {
        self.has_parent = true;
        let found = parent_place(self.images)?;
        let wrong = |what: &str| Ok(Some(ImageDifference::Parent { what: what.to_owned() }));
        if let Some(what) = moved_parent(Some(&sealed.target), found.as_deref()) {
            return wrong(what);
        }
        let Some(parent) = self.images.parent()? else {
            return wrong("the image that it leads to is missing");
        };
        let Some(id) = sealed.id else { return Ok(None) };
        match ManifestReader::open(&parent) {
            Ok(manifest) if manifest.id() == id => Ok(None),
            Ok(_) => wrong("another image than when it was sealed, or sealed anew"),
            Err(error) => wrong(&error.to_string()),
        }
    }
}

impl Iterator for VerifyJobs<'_> {
    type Item = Result<VerifyJob>;

    fn next(&mut self) -> Option<Self::Item> {
        if let Some(difference) = self.next.take() {
            return Some(Ok(VerifyJob::Found(difference)));
        }
        loop {
            let job = match self.manifest.next_record() {
                Ok(None) => return None,
                Err(error) => return Some(Err(error)),
                Ok(Some(ManifestRecord::File(file))) => {
                    self.open(&file);
                    Some(VerifyJob::File(file))
                }
                Ok(Some(ManifestRecord::Segment(segment))) => self.part(segment).map(VerifyJob::Segment),
                Ok(Some(ManifestRecord::Parent(parent))) => match self.parent(&parent) {
                    Ok(found) => found.map(VerifyJob::Found),
                    Err(error) => return Some(Err(error)),
                },
            };
            if let Some(job) = job {
                return Some(Ok(job));
            }
        }
    }
}

/// Joins ranges that follow each other, and reports.
struct DifferenceReport<'a, F> {
    images: &'a ImageDir,
    names: &'a BTreeSet<String>,
    report: F,
    pending: Option<(String, u64, u64)>,
    count: u64,
}

impl<F: FnMut(&ImageDifference)> DifferenceReport<'_, F> {
    fn add(&mut self, difference: ImageDifference) {
        let ImageDifference::Bytes { file, offset, length, .. } = difference else {
            self.flush();
            return self.report(&difference);
        };
        match &mut self.pending {
            Some((name, start, so_far)) if *name == file && *start + *so_far == offset => *so_far += length,
            _ => {
                self.flush();
                self.pending = Some((file, offset, length));
            }
        }
    }

    fn flush(&mut self) {
        let Some((file, offset, length)) = self.pending.take() else { return };
        // The image may be too damaged to say.
        let is_searched = self.count < MAX_PLACES;
        let place = is_searched.then(|| self.images.memory_at(self.names, &file, offset));
        let place = place.and_then(Result::ok).flatten();
        self.report(&ImageDifference::Bytes { file, offset, length, place });
    }

    fn report(&mut self, difference: &ImageDifference) {
        self.count += 1;
        (self.report)(difference);
    }
}
