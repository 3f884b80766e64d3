// SPDX-License-Identifier: MIT OR Apache-2.0
//! The directory that an image is copied into. Without its manifest it is no image.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use crate::protocol::open_files::OpenFiles;
use crate::pull::chunks::ChunkPlace;
use anyhow::{Context as _, bail, ensure};
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, OFlag, fallocate, openat, readlinkat, renameat};
use nix::sys::stat::Mode;
use nix::unistd::{UnlinkatFlags, Whence, lseek, symlinkat, unlinkat};
use rewake_criu_images::open::LinkRefusal;
use rewake_criu_images::{Digest, FILE_MODE, ImageDir, ImageError, ImageLease};
use rewake_image_signature::{MAX_SIGNATURE, SIGNATURE_NAME};
use rewake_manifest::{
    MANIFEST_NAME, ManifestReader, PARENT, PARTIAL_NAME, SealedChunk, SealedFile, SealedParent,
    WORKING_SET_NAME, is_covered,
};
use rewake_process::beneath::Beneath;
use rewake_process::file_lock::DirectoryLock;

/// The directory.
#[derive(Debug)]
pub(crate) struct Target {
    /// The path for messages: files are opened from the directory, which may have another name by now.
    path: PathBuf,
    directory: Beneath,
    /// The names of the files that were made so far, the first one first.
    names: Vec<String>,
    /// The files that are open, because a chunk may be a duplicate of one in any earlier file.
    open: OpenFiles,
    /// An earlier copy of this image was cut.
    is_cut: bool,
    /// Whether the file that was made last is from an earlier copy.
    existed: bool,
    _lock: DirectoryLock,
}

impl Target {
    /// Opens a directory, or makes it. `None` if it has this image already.
    ///
    /// # Errors
    /// It has another image.
    pub(crate) fn open(path: &Path, id: Digest) -> anyhow::Result<Option<Self>> {
        fs::create_dir_all(path).with_context(|| path.display().to_string())?;
        let lock = DirectoryLock::take(path).with_context(|| format!("locking {}", path.display()))?;
        let lock = lock.with_context(|| {
            format!("{}: another program writes an image into it: wait until it has ended", path.display())
        })?;
        let directory = Beneath::from(OwnedFd::from(lock.directory().try_clone()?));
        let images = images_of(&directory, path)?;
        if is_complete(path) {
            let found = ManifestReader::open(&images)?.id();
            ensure!(
                found == id,
                "{}: it has image {found}, and {id} was to be copied into it: choose another \
                 directory",
                path.display()
            );
            return Ok(None);
        }
        let earlier = images.file(PARTIAL_NAME)?;
        let is_partial = earlier.is_some();
        let is_cut = earlier.is_some_and(|(partial, file, length)| {
            ManifestReader::of(file, length, &partial).is_ok_and(|manifest| manifest.id() == id)
        });
        if !is_cut {
            remove_other(&images, is_partial)?;
        }
        Ok(Some(Self {
            path: path.to_owned(),
            directory,
            names: Vec::new(),
            open: OpenFiles::default(),
            is_cut,
            existed: false,
            _lock: lock,
        }))
    }

    /// Opens a directory with the cut copy of an image. Returns its manifest, too.
    ///
    /// # Errors
    /// It has none.
    pub(crate) fn resume(path: &Path) -> anyhow::Result<(Self, ManifestReader)> {
        let partial = path.join(PARTIAL_NAME);
        let reader = || -> anyhow::Result<_> {
            let file = File::open(&partial).with_context(|| partial.display().to_string())?;
            let length = file.metadata()?.len();
            Ok(ManifestReader::of(file, length, &partial)?)
        };
        let target = Self::open(path, reader()?.id())?;
        let target = target.with_context(|| format!("{}: it has its manifest already", path.display()))?;
        Ok((target, reader()?))
    }

    /// Removes what was made for a copy that has not begun, and is not the rest of an earlier one.
    pub(crate) fn abandon(&self) {
        if !self.is_cut {
            // There may be none.
            let _ = remove(&self.directory, WORKING_SET_NAME);
            let _ = remove(&self.directory, SIGNATURE_NAME);
            // Other files in the directory keep it.
            let _ = remove(&self.directory, PARTIAL_NAME).and_then(|()| fs::remove_dir(&self.path));
        }
    }

    /// Reads which parts of pages files CRIU reads itself: the pagemaps have arrived.
    pub(crate) fn eager_ranges(&self) -> anyhow::Result<BTreeMap<String, Vec<Range<u64>>>> {
        let names = self.names.iter().map(String::as_str);
        Ok(images_of(&self.directory, &self.path)?.eager_ranges(names)?)
    }

    /// Reserves the space of a chunk that arrives later.
    pub(crate) fn reserve(&mut self, at: ChunkPlace, chunk: &SealedChunk) -> anyhow::Result<()> {
        let (offset, length) = (i64::try_from(at.offset)?, i64::from(chunk.length));
        match fallocate(self.file(at.file)?, FallocateFlags::empty(), offset, length) {
            // This file system cannot: a write may fail later.
            Ok(()) | Err(Errno::EOPNOTSUPP | Errno::ENOSYS) => Ok(()),
            Err(errno) => Err(errno).with_context(|| format!("{}: reserving its space", self.name(at.file))),
        }
    }

    /// Returns the path of the manifest.
    pub(crate) fn manifest_path(&self) -> PathBuf {
        self.path.join(PARTIAL_NAME)
    }

    /// Makes the file of the manifest, empty. None: an earlier copy has brought it. Restores may read that
    /// one.
    pub(crate) fn make_manifest(&self) -> anyhow::Result<Option<File>> {
        if self.is_cut {
            return Ok(None);
        }
        let made = self.directory.create(PARTIAL_NAME, OFlag::O_TRUNC, FILE_MODE);
        made.map(Some).with_context(|| self.manifest_path().display().to_string())
    }

    /// Opens the manifest, of this length.
    pub(crate) fn manifest(&self, length: u64) -> anyhow::Result<ManifestReader> {
        let file = self.directory.unlinked(PARTIAL_NAME, OFlag::O_RDONLY)?;
        Ok(ManifestReader::of(file.into(), length, &self.manifest_path())?)
    }

    /// Writes the recorded working set, completely or not at all. One that the directory has stays.
    pub(crate) fn write_working_set(&self, bytes: &[u8]) -> anyhow::Result<()> {
        match self.directory.unlinked(WORKING_SET_NAME, OFlag::O_PATH) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            // A link, too.
            _ => return Ok(()),
        }
        let written = write_whole(&self.directory, WORKING_SET_NAME, bytes);
        written.with_context(|| self.path.join(WORKING_SET_NAME).display().to_string())
    }

    /// Writes the signature that the source has, completely or not at all. It takes the place of another one,
    /// because an image may be signed again.
    pub(crate) fn write_signature(&self, signature: Option<&[u8]>) -> anyhow::Result<()> {
        write_signature(&self.directory, signature).with_context(|| self.path.display().to_string())
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        Ok(renameat(&self.directory, from, &self.directory, to)?)
    }

    /// Checks that a directory has no parent image, for an image that has none.
    pub(crate) fn expect_no_parent(&self) -> anyhow::Result<()> {
        let parent = self.path.join(PARENT);
        ensure!(
            parent.symlink_metadata().is_err(),
            "{}: the image has no parent: choose another directory, or remove this one",
            parent.display()
        );
        Ok(())
    }

    /// Makes the link to the parent image, which must be in its place. The link's text is the author's. So a
    /// parent is known by its id, and its link leads to a neighbour of this image only, because a restore as
    /// root would read any other image.
    ///
    /// # Errors
    /// The parent has no id, its place is none of a neighbour, or has another image. No link was made.
    pub(crate) fn link_parent(&self, parent: &SealedParent) -> anyhow::Result<()> {
        let link = self.path.join(PARENT);
        let id = parent.id.with_context(|| {
            format!(
                "{}: the image's parent was not sealed, so no id names that image: seal the parent \
                 where both are, remove {MANIFEST_NAME} of the image, and seal the image again",
                self.path.display()
            )
        })?;
        let target = Path::new(std::ffi::OsStr::from_bytes(&parent.target));
        let mut is_made = false;
        match readlinkat(&self.directory, PARENT) {
            Ok(found) if found == *target => {}
            Ok(found) => {
                bail!("{}: a link to {}, expected {}", link.display(), found.display(), target.display())
            }
            // The parent image is in this directory.
            Err(Errno::EINVAL) => {}
            Err(_) if target.as_os_str() == PARENT => {}
            Err(_) => {
                ensure!(
                    is_neighbour(target),
                    "{}: the image says that its parent is in {}, and only a directory beside the image \
                     itself is followed: copy image {id} to {} first",
                    link.display(),
                    target.display(),
                    link.display()
                );
                symlinkat(target, &self.directory, PARENT).with_context(|| link.display().to_string())?;
                is_made = true;
            }
        }
        let found = self.has_parent(id);
        if is_made && !matches!(found, Ok(true)) {
            // It would make an image of the directory that reads another one.
            let _ = remove(&self.directory, PARENT);
        }
        ensure!(
            found?,
            "{}: expected image {id}: copy the parent image to {} first",
            link.display(),
            self.path.join(target).display()
        );
        Ok(())
    }

    /// Whether the parent image is here. No link leads out of the directory that this one is in.
    fn has_parent(&self, id: Digest) -> anyhow::Result<bool> {
        let above = openat(&self.directory, "..", OFlag::O_PATH | OFlag::O_DIRECTORY, Mode::empty())?;
        let above = Arc::new(Beneath::from(above));
        let place = above.place(&self.directory)?;
        let place = place.with_context(|| format!("{}: it was moved", self.path.display()))?;
        let parent = match ImageDir::open_beneath(&above, place)?.parent() {
            Err(ImageError::SymbolicLink { refusal: LinkRefusal::LeadsOut, .. }) => None,
            parent => parent?,
        };
        let found = parent.map(|parent| ManifestReader::open(&parent)).and_then(Result::ok);
        Ok(found.is_some_and(|manifest| manifest.id() == id))
    }

    /// Makes the next file. What an earlier copy has written to it stays.
    pub(crate) fn make(&mut self, file: &SealedFile) -> anyhow::Result<()> {
        let made = self.directory.create(&*file.name, OFlag::empty(), FILE_MODE)?;
        let found = made.metadata()?;
        ensure!(found.is_file(), "expected a regular file");
        self.existed = self.is_cut && found.len() == file.length;
        if !self.existed {
            // Bytes that are left from another file must not be taken for zeros.
            made.set_len(0)?;
        }
        made.set_len(file.length)?;
        self.names.push(file.name.clone());
        Ok(())
    }

    /// Whether a file has this chunk already, from an earlier copy. It must be the file that was made last.
    pub(crate) fn has(&mut self, at: ChunkPlace, chunk: &SealedChunk, into: &mut Vec<u8>) -> bool {
        into.resize(chunk.length as usize, 0);
        self.existed && self.read(at, into).is_ok() && is_right(into, chunk)
    }

    /// Whether these bytes are zeros. They are, where no earlier copy or restore has written to the file. It
    /// must be the file that was made last.
    ///
    /// # Errors
    /// They cannot be read.
    pub(crate) fn is_zero(
        &mut self,
        at: ChunkPlace,
        length: u32,
        into: &mut Vec<u8>,
    ) -> anyhow::Result<bool> {
        into.resize(length as usize, 0);
        if !self.existed || self.is_hole(at, length)? {
            return Ok(true);
        }
        self.read(at, into)?;
        Ok(into.iter().all(|byte| *byte == 0))
    }

    /// Whether the file system has no bytes there.
    pub(crate) fn is_hole(&mut self, at: ChunkPlace, length: u32) -> anyhow::Result<bool> {
        let end = at.offset + u64::from(length);
        match lseek(self.file(at.file)?, i64::try_from(at.offset)?, Whence::SeekData) {
            Ok(data) => Ok(data.cast_unsigned() >= end),
            Err(Errno::ENXIO) => Ok(true),
            // This file system cannot say.
            Err(Errno::EINVAL | Errno::EOPNOTSUPP) => Ok(false),
            Err(errno) => Err(errno).with_context(|| self.name(at.file)),
        }
    }

    /// Writes bytes to a file.
    pub(crate) fn write(&mut self, at: ChunkPlace, bytes: &[u8]) -> anyhow::Result<()> {
        let written = self.file(at.file)?.write_all_at(bytes, at.offset);
        written.with_context(|| self.name(at.file))
    }

    /// Reads bytes that were written.
    pub(crate) fn read(&mut self, at: ChunkPlace, into: &mut [u8]) -> anyhow::Result<()> {
        let read = self.file(at.file)?.read_exact_at(into, at.offset);
        read.with_context(|| self.name(at.file))
    }

    /// Returns the path of a file, for messages.
    pub(crate) fn name(&self, number: u32) -> String {
        self.path.join(&self.names[number as usize - 1]).display().to_string()
    }

    fn file(&mut self, number: u32) -> anyhow::Result<&File> {
        let Self { path, directory, names, open, .. } = self;
        open.get(number, || {
            let name = &*names[number as usize - 1];
            let opened = directory.create(name, OFlag::empty(), FILE_MODE);
            opened.with_context(|| path.join(name).display().to_string())
        })
    }

    /// Writes all files to the disk, and puts the manifest in place.
    pub(crate) fn finish(&self) -> anyhow::Result<()> {
        let context = || self.path.display().to_string();
        let sync = |name: &str| File::from(self.directory.unlinked(name, OFlag::O_RDONLY)?).sync_all();
        for name in &self.names {
            sync(name).with_context(|| self.path.join(name).display().to_string())?;
        }
        sync(PARTIAL_NAME).and_then(|()| sync(".")).with_context(context)?;
        self.rename(PARTIAL_NAME, MANIFEST_NAME).with_context(context)?;
        sync(".").with_context(context)
    }
}

/// Keeps the signature that a source has of the image in a directory, which is complete.
///
/// # Errors
/// The directory has another image by now, or cannot be written.
pub fn keep_signature(path: &Path, id: Digest, signature: Option<&[u8]>) -> anyhow::Result<()> {
    let directory = Beneath::open(path).with_context(|| path.display().to_string())?;
    let found = ManifestReader::open(&images_of(&directory, path)?)?.id();
    ensure!(found == id, "{}: it has image {found} by now, expected {id}", path.display());
    write_signature(&directory, signature).with_context(|| path.display().to_string())
}

fn write_signature(directory: &Beneath, signature: Option<&[u8]>) -> io::Result<()> {
    let Some(bytes) = signature.filter(|bytes| bytes.len() as u64 <= MAX_SIGNATURE) else { return Ok(()) };
    let found = directory.unlinked(SIGNATURE_NAME, OFlag::O_RDONLY | OFlag::O_NONBLOCK).map(File::from);
    let mut had = Vec::new();
    let read = found.and_then(|file| file.take(MAX_SIGNATURE + 1).read_to_end(&mut had));
    if read.is_ok() && had == bytes { Ok(()) } else { write_whole(directory, SIGNATURE_NAME, bytes) }
}

/// Writes a small file, completely or not at all.
fn write_whole(directory: &Beneath, name: &str, bytes: &[u8]) -> io::Result<()> {
    let part = format!("{name}.part");
    directory.create(&*part, OFlag::O_TRUNC, FILE_MODE)?.write_all_at(bytes, 0)?;
    Ok(renameat(directory, &*part, directory, name)?)
}

/// The image directory that is open.
fn images_of(directory: &Beneath, path: &Path) -> anyhow::Result<ImageDir> {
    Ok(ImageDir::of(directory.as_fd().try_clone_to_owned()?, path)?)
}

/// Whether the target of a link in an image directory is beside that directory, or in it.
fn is_neighbour(target: &Path) -> bool {
    // How far below the directory of both the path is. The image itself is the first step.
    let mut depth = 1usize;
    target.components().all(|part| match part {
        Component::ParentDir => depth.checked_sub(1).map(|less| depth = less).is_some(),
        Component::Normal(_) => {
            depth += 1;
            true
        }
        Component::CurDir => true,
        Component::RootDir | Component::Prefix(_) => false,
    }) && depth > 0
}

/// Removes a file or a link of a directory.
fn remove(directory: impl AsFd, name: &str) -> io::Result<()> {
    Ok(unlinkat(directory, name, UnlinkatFlags::NoRemoveDir)?)
}

/// Whether a directory has a complete image. With both manifests it has not: an incomplete copy was sealed.
pub(crate) fn is_complete(path: &Path) -> bool {
    path.join(MANIFEST_NAME).exists() && !path.join(PARTIAL_NAME).exists()
}

/// Removes what a cut copy of another image has left, so that its bytes are not taken for bytes of this
/// image.
///
/// # Errors
/// There are files of an image, and no copy has left them; or a restore reads them.
fn remove_other(images: &ImageDir, is_partial: bool) -> anyhow::Result<()> {
    let path = images.path();
    let _lease = if is_partial { sole_lease(path)? } else { None };
    for entry in fs::read_dir(format!("/proc/self/fd/{}", images.as_fd().as_raw_fd()))?.flatten() {
        let name = entry.file_name();
        // A parent image in this directory is an image of its own, and stays.
        let is_parent = || name == PARENT && entry.file_type().is_ok_and(|kind| !kind.is_dir());
        if is_covered(name.as_bytes()) || is_parent() {
            ensure!(
                is_partial,
                "{}: it has files of an image without a manifest: choose an empty directory",
                path.display()
            );
            let removed = unlinkat(images, &*name, UnlinkatFlags::NoRemoveDir);
            removed.with_context(|| path.join(&name).display().to_string())?;
        }
    }
    if is_partial {
        // There may be none.
        let _ = remove(images, WORKING_SET_NAME);
        let _ = remove(images, SIGNATURE_NAME);
    }
    Ok(())
}

/// Leases an image that is removed, or `None` if its inventory has not arrived.
///
/// # Errors
/// A restore reads it.
fn sole_lease(path: &Path) -> anyhow::Result<Option<ImageLease>> {
    let context = || format!("leasing {}", path.display());
    let lease = match ImageLease::shared(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        lease => lease.with_context(context)?,
    };
    let is_free = lease.as_ref().map_or(Ok(false), ImageLease::make_exclusive).with_context(context)?;
    ensure!(
        is_free,
        "{}: its manifest is damaged or of another image, and a restore reads its files: try again when that \
         has ended",
        path.display()
    );
    Ok(lease)
}

/// Whether a chunk has the bytes that its hash proves.
pub(crate) fn is_right(bytes: &[u8], chunk: &SealedChunk) -> bool {
    blake3::hash(bytes).as_bytes() == &chunk.digest.0
}
