// SPDX-License-Identifier: MIT OR Apache-2.0
//! Seals an image: reads every byte, and writes the manifest last.

use std::collections::{BTreeSet, HashSet};
use std::fs::File;
use std::os::fd::AsFd as _;
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;

use nix::errno::Errno;
use nix::fcntl::{OFlag, openat, renameat};
use nix::sys::stat::Mode;
use nix::unistd::{UnlinkatFlags, unlinkat};
use rewake_criu_images::{Digest, INVENTORY_NAME, ImageDir, MemoryFiles};
use rewake_image_io::FileState;

use crate::directory::{covered_files, open, parent_place, sync, sync_files};
use crate::error::{ManifestError, Result, io};
use crate::format::{ManifestReader, ManifestWriter, SealedFile, SealedParent};
use crate::names::{MANIFEST_NAME, PARTIAL_NAME};
use crate::parallel::Workers;
use crate::segment::{Cutter, MAX_FILE, MAX_FILES, SealedChunk, SealedSegment, SegmentExtent};

/// The manifest's name while it is written.
const UNFINISHED: &str = "rewake-manifest.new";
/// The number of chunk hashes that are remembered to count duplicates: the hashes of 2 TiB, in 32 MiB of
/// memory.
const MAX_REMEMBERED: usize = 1 << 20;

/// What was sealed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SealReport {
    /// The image's id.
    pub id: Digest,
    /// Files.
    pub files: u64,
    /// The sum of their lengths.
    pub bytes: u64,
    /// Bytes of chunks of zeros.
    pub zero_bytes: u64,
    /// Bytes of chunks that the image has already, in an earlier chunk.
    pub duplicate_bytes: u64,
    /// The manifest's length.
    pub manifest_bytes: u64,
    /// The image has a parent that is not sealed.
    pub has_unsealed_parent: bool,
}

/// Seals an image directory. Files and manifest are on the disk when it returns.
///
/// # Errors
/// The directory is no image, a partial copy, or sealed already; a file changes meanwhile, or cannot be read
/// or written. It has no manifest then.
pub fn seal(directory: &Path) -> Result<SealReport> {
    let images = ImageDir::open(directory)?;
    images.inventory()?;
    refuse_partial(&images)?;
    if open(&images, MANIFEST_NAME)?.is_some() {
        return Err(ManifestError::AlreadySealed { directory: images.path().to_owned() });
    }
    let names = covered_files(&images)?;
    check_number(images.path(), names.len() as u64)?;
    let sealed = write(&images, &names);
    if sealed.is_err() {
        // The first error is the one to report.
        let _ = unlinkat(images.as_fd(), UNFINISHED, UnlinkatFlags::NoRemoveDir);
    }
    sealed
}

/// Refuses more files than a reader of the manifest takes.
fn check_number(directory: &Path, files: u64) -> Result<()> {
    if files <= MAX_FILES {
        return Ok(());
    }
    Err(ManifestError::TooManyFiles { directory: directory.to_owned(), files, limit: MAX_FILES })
}

/// Refuses a directory that an image is being copied into, also by a migration.
///
/// # Errors
/// It is one: [`ManifestError::Partial`], [`ManifestError::Arriving`]. Or it cannot be read.
pub fn refuse_partial(images: &ImageDir) -> Result<()> {
    if open(images, PARTIAL_NAME)?.is_some() {
        return Err(ManifestError::Partial { directory: images.path().to_owned() });
    }
    match images.arriving_files()?.is_empty() {
        true => Ok(()),
        false => Err(ManifestError::Arriving { directory: images.path().to_owned() }),
    }
}

fn write(images: &ImageDir, names: &BTreeSet<String>) -> Result<SealReport> {
    let parent = parent(images)?;
    let unfinished = images.path().join(UNFINISHED);
    let mut writer = ManifestWriter::new(create(images)?).map_err(io("write", &unfinished))?;
    if let Some(parent) = &parent {
        writer.parent(parent).map_err(io("write", &unfinished))?;
    }
    let mut seal = Seal {
        images,
        memory: images.memory_files(names)?,
        writer,
        states: Vec::new(),
        sums: Sums::default(),
    };
    // First: on a remote file system, written files get their last times only now.
    sync_files(images, names)?;
    seal.files(names)?;
    seal.check_unchanged(names)?;
    let Seal { writer, sums, states, .. } = seal;
    let (file, id, manifest_bytes) = writer.finish().map_err(io("write", &unfinished))?;
    file.sync_all().map_err(io("sync", &unfinished))?;
    let renamed = renameat(images.as_fd(), UNFINISHED, images.as_fd(), MANIFEST_NAME);
    renamed.map_err(|errno| io("rename", &unfinished)(errno.into()))?;
    sync(images)?;
    Ok(SealReport {
        id,
        files: states.len() as u64,
        bytes: states.iter().map(|(_, state)| state.key.len).sum(),
        zero_bytes: sums.zero_bytes,
        duplicate_bytes: sums.duplicate_bytes,
        manifest_bytes,
        has_unsealed_parent: parent.is_some_and(|parent| parent.id.is_none()),
    })
}

/// Makes the file that becomes the manifest. Who may read the image may read it.
fn create(images: &ImageDir) -> Result<File> {
    let path = images.path().join(UNFINISHED);
    // A killed seal has left it, or it is another file, which stays as it is.
    match unlinkat(images.as_fd(), UNFINISHED, UnlinkatFlags::NoRemoveDir) {
        Ok(()) | Err(Errno::ENOENT) => {}
        Err(errno) => return Err(io("remove", &path)(errno.into())),
    }
    let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_CLOEXEC | OFlag::O_NOFOLLOW;
    let file = openat(images.as_fd(), UNFINISHED, flags, Mode::S_IRUSR | Mode::S_IWUSR);
    let file = file.map(File::from).map_err(|errno| io("create", &path)(errno.into()))?;
    if let Some((inventory, _)) = open(images, INVENTORY_NAME)? {
        let mode = inventory
            .metadata()
            .map_err(io("stat", &images.path().join(INVENTORY_NAME)))?
            .permissions()
            .mode();
        let mode = std::fs::Permissions::from_mode(mode & 0o666);
        file.set_permissions(mode).map_err(io("set the mode of", &path))?;
    }
    Ok(file)
}

fn parent(images: &ImageDir) -> Result<Option<SealedParent>> {
    let Some(target) = parent_place(images)? else { return Ok(None) };
    let id = match images.parent()?.map(|parent| ManifestReader::open(&parent)) {
        Some(Ok(manifest)) => Some(manifest.id()),
        None | Some(Err(ManifestError::NotSealed { .. })) => None,
        Some(Err(error)) => return Err(error),
    };
    Ok(Some(SealedParent { target: target.into_vec(), id }))
}

struct Seal<'a> {
    images: &'a ImageDir,
    memory: MemoryFiles,
    writer: ManifestWriter,
    /// The state of each file when it was opened.
    states: Vec<(String, FileState)>,
    sums: Sums,
}

/// The head of a file, or a part of it to read.
enum SealJob {
    File(SealedFile, FileState),
    Segment(Arc<(String, File)>, SegmentExtent),
}

impl Seal<'_> {
    fn files(&mut self, names: &BTreeSet<String>) -> Result<()> {
        let Self { images, memory, writer, states, sums } = self;
        let path = images.path();
        let jobs = names.iter().flat_map(|name| -> Box<dyn Iterator<Item = Result<SealJob>> + '_> {
            match jobs(images, memory, name) {
                Ok((head, segments)) => Box::new([head].into_iter().chain(segments).map(Ok)),
                Err(error) => Box::new([Err(error)].into_iter()),
            }
        });
        let work = |job: &SealJob, buffer: &mut Vec<u8>| match job {
            SealJob::File(..) => Ok(SealedSegment::default()),
            SealJob::Segment(file, extent) => extent.measure(&file.1, buffer),
        };
        let unfinished = path.join(UNFINISHED);
        Workers::new().run(jobs, work, |job, segment| match job {
            SealJob::File(file, state) => {
                writer.file(&file).map_err(io("write", &unfinished))?;
                states.push((file.name, state));
                Ok(())
            }
            SealJob::Segment(file, _) => {
                let segment = segment.map_err(io("read", &path.join(&file.0)))?;
                sums.add(&segment);
                writer.segment(&segment).map_err(io("write", &unfinished))
            }
        })
    }

    /// Checks that all files are those that were read, with the same contents.
    fn check_unchanged(&self, names: &BTreeSet<String>) -> Result<()> {
        let path = self.images.path();
        let changed = |file: &str, what: String| ManifestError::Changed { file: path.join(file), what };
        for (name, state) in &self.states {
            let Some((file, _)) = open(self.images, name)? else {
                return Err(changed(name, "it was removed".to_owned()));
            };
            state.follow(&file).map_err(|what| changed(name, what))?;
        }
        let now = covered_files(self.images)?;
        match now.symmetric_difference(names).next() {
            Some(name) => Err(changed(name, "it was added or removed".to_owned())),
            None => Ok(()),
        }
    }
}

/// Opens a file, and cuts it into segments.
fn jobs<'a>(
    images: &ImageDir,
    memory: &'a MemoryFiles,
    name: &str,
) -> Result<(SealJob, impl Iterator<Item = SealJob> + use<'a>)> {
    let path = images.path().join(name);
    let Some((file, length)) = open(images, name)? else {
        return Err(ManifestError::Changed { file: path, what: "it was removed".to_owned() });
    };
    if length > MAX_FILE {
        return Err(ManifestError::TooLong { file: path, length, limit: MAX_FILE });
    }
    let state = FileState::of(&file).map_err(io("stat", &path))?;
    let sealed = SealedFile { name: name.to_owned(), length, memory: memory.has(name) };
    let segments = Cutter::new(length, sealed.memory, memory.starts(name));
    let file = Arc::new((name.to_owned(), file));
    let segments = segments.map(move |extent| {
        extent.prefetch(&file.1);
        SealJob::Segment(Arc::clone(&file), extent)
    });
    Ok((SealJob::File(sealed, state), segments))
}

/// What chunks have in common.
#[derive(Debug, Default)]
struct Sums {
    zero_bytes: u64,
    duplicate_bytes: u64,
    /// The first half of each hash.
    seen: HashSet<[u8; 16]>,
}

impl Sums {
    fn add(&mut self, segment: &SealedSegment) {
        if segment.chunks.is_empty() {
            self.zero_bytes += u64::from(segment.length);
        }
        for chunk in &segment.chunks {
            if chunk.is_zero() {
                self.zero_bytes += u64::from(chunk.length);
            } else if self.is_duplicate(chunk) {
                self.duplicate_bytes += u64::from(chunk.length);
            }
        }
    }

    fn is_duplicate(&mut self, chunk: &SealedChunk) -> bool {
        let half = *chunk.digest.0.first_chunk().unwrap_or(&[0; 16]);
        if self.seen.len() == MAX_REMEMBERED { self.seen.contains(&half) } else { !self.seen.insert(half) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_that_no_reader_would_take_is_not_sealed() {
        let check = |files| check_number(Path::new("/image"), files);
        check(MAX_FILES).unwrap();
        let refused = check(MAX_FILES + 1).unwrap_err();
        assert!(matches!(refused, ManifestError::TooManyFiles { files: 1_048_577, .. }), "{refused}");
    }
}
