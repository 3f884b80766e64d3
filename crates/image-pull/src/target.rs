// SPDX-License-Identifier: MIT OR Apache-2.0
//! The directory that an image is copied into. Without its manifest it is no image.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _, symlink};
use std::path::{Path, PathBuf};

use crate::chunks::ChunkPlace;
use anyhow::{Context as _, bail, ensure};
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, OFlag, fallocate};
use nix::unistd::{Whence, lseek};
use rewake_criu_images::{Digest, FILE_MODE, ImageDir, ImageLease};
use rewake_image_protocol::open_files::OpenFiles;
use rewake_manifest::{
    MANIFEST_NAME, ManifestReader, PARENT, PARTIAL_NAME, SealedChunk, SealedFile, SealedParent,
    WORKING_SET_NAME, is_covered,
};
use rewake_process::file_lock::DirectoryLock;

/// The directory.
#[derive(Debug)]
pub(crate) struct Target {
    path: PathBuf,
    /// The names of the files that were made so far, the first one first.
    names: Vec<String>,
    /// Those of them that are open: a chunk may be a duplicate of one in any earlier file.
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
        let images = ImageDir::open(path)?;
        if is_complete(path) {
            let found = ManifestReader::open(&images)?.id();
            ensure!(
                found == id,
                "{}: it has image {found:.16}, and {id:.16} was to be copied into it: choose another directory",
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
            remove_other(path, is_partial)?;
        }
        Ok(Some(Self {
            path: path.to_owned(),
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
            let [partial, working_set] = [PARTIAL_NAME, WORKING_SET_NAME].map(|name| self.path.join(name));
            // There may be none.
            let _ = fs::remove_file(working_set);
            // Other files in the directory keep it.
            let _ = fs::remove_file(partial).and_then(|()| fs::remove_dir(&self.path));
        }
    }

    /// Reads which parts of pages files CRIU reads itself: the pagemaps have arrived.
    pub(crate) fn eager_ranges(&self) -> anyhow::Result<BTreeMap<String, Vec<Range<u64>>>> {
        let names = self.names.iter().map(String::as_str);
        Ok(ImageDir::open(&self.path)?.eager_ranges(names)?)
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

    /// Makes the file of the manifest, empty. None: an earlier copy has brought it. Restores may read that one.
    pub(crate) fn make_manifest(&self) -> anyhow::Result<Option<File>> {
        if self.is_cut {
            return Ok(None);
        }
        let path = self.manifest_path();
        options().truncate(true).open(&path).map(Some).with_context(|| path.display().to_string())
    }

    /// Writes the recorded working set, completely or not at all. One that the directory has stays.
    pub(crate) fn write_working_set(&self, bytes: &[u8]) -> anyhow::Result<()> {
        let path = self.path.join(WORKING_SET_NAME);
        if path.symlink_metadata().is_ok() {
            return Ok(());
        }
        let part = self.path.join(format!("{WORKING_SET_NAME}.part"));
        let written = options().truncate(true).open(&part).and_then(|file| file.write_all_at(bytes, 0));
        written.and_then(|()| fs::rename(&part, &path)).with_context(|| path.display().to_string())
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

    /// Makes the link to the parent image, which must be in its place.
    pub(crate) fn link_parent(&self, parent: &SealedParent) -> anyhow::Result<()> {
        let link = self.path.join(PARENT);
        let target = Path::new(std::ffi::OsStr::from_bytes(&parent.target));
        match fs::read_link(&link) {
            Ok(found) if found == target => {}
            // The parent image is in this directory.
            _ if link.is_dir() && !link.is_symlink() || target.as_os_str() == PARENT => {}
            Ok(found) => {
                bail!("{}: a link to {}, expected {}", link.display(), found.display(), target.display())
            }
            Err(_) => symlink(target, &link).with_context(|| link.display().to_string())?,
        }
        let found = ImageDir::open(&self.path)?.parent()?.map(|parent| ManifestReader::open(&parent));
        let found = found.and_then(Result::ok).map(|manifest| manifest.id());
        let expected = parent.id.map_or_else(|| "that is sealed".to_owned(), |id| format!("{id:.16}"));
        ensure!(
            found.is_some() && (parent.id.is_none() || found == parent.id),
            "{}: expected image {expected}: copy the parent image to {} first",
            link.display(),
            self.path.join(target).display()
        );
        Ok(())
    }

    /// Makes the next file. What an earlier copy has written to it stays.
    pub(crate) fn make(&mut self, file: &SealedFile) -> anyhow::Result<()> {
        let made = options().open(self.path.join(&file.name))?;
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
        let Self { path, names, open, .. } = self;
        open.get(number, || {
            let path = path.join(&names[number as usize - 1]);
            options().open(&path).with_context(|| path.display().to_string())
        })
    }

    /// Writes all files to the disk, and puts the manifest in place.
    pub(crate) fn finish(&self) -> anyhow::Result<()> {
        let context = || self.path.display().to_string();
        for name in &self.names {
            let synced = File::open(self.path.join(name)).and_then(|file| file.sync_all());
            synced.with_context(|| self.path.join(name).display().to_string())?;
        }
        File::open(self.path.join(PARTIAL_NAME)).and_then(|file| file.sync_all()).with_context(context)?;
        let directory = File::open(&self.path).with_context(context)?;
        directory.sync_all().with_context(context)?;
        fs::rename(self.path.join(PARTIAL_NAME), self.path.join(MANIFEST_NAME)).with_context(context)?;
        directory.sync_all().with_context(context)
    }
}

/// Whether a directory has a complete image. With both manifests it has not: an incomplete copy was sealed.
pub(crate) fn is_complete(path: &Path) -> bool {
    path.join(MANIFEST_NAME).exists() && !path.join(PARTIAL_NAME).exists()
}

/// Removes what a cut copy of another image has left: its bytes must not be taken for those of this image.
///
/// # Errors
/// There are files of an image, and no copy has left them; or a restore reads them.
fn remove_other(path: &Path, is_partial: bool) -> anyhow::Result<()> {
    let _lease = if is_partial { sole_lease(path)? } else { None };
    for entry in fs::read_dir(path)?.flatten() {
        let name = entry.file_name();
        // A parent image in this directory is an image of its own, and stays.
        let is_parent = || name == PARENT && entry.file_type().is_ok_and(|kind| !kind.is_dir());
        if is_covered(name.as_bytes()) || is_parent() {
            ensure!(
                is_partial,
                "{}: it has files of an image without a manifest: choose an empty directory",
                path.display()
            );
            fs::remove_file(entry.path()).with_context(|| entry.path().display().to_string())?;
        }
    }
    if is_partial {
        // There may be none.
        let _ = fs::remove_file(path.join(WORKING_SET_NAME));
    }
    Ok(())
}

/// Leases an image that is removed; none if its inventory has not arrived.
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
        "{}: its manifest is damaged or of another image, and a restore reads its files: try again when that has ended",
        path.display()
    );
    Ok(lease)
}

fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
    options.read(true).write(true).create(true).mode(FILE_MODE).custom_flags(flags.bits());
    options
}

/// Whether a chunk has the bytes that its hash proves.
pub(crate) fn is_right(bytes: &[u8], chunk: &SealedChunk) -> bool {
    blake3::hash(bytes).as_bytes() == &chunk.digest.0
}
