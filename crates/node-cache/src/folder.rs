// SPDX-License-Identifier: MIT OR Apache-2.0
//! The cache's directory: `ID` for each image, and next to it `ID.json`, which records where the image came
//! from. The time of that file is the time of the image's last use. `ID.doubt` exists if a restore has found
//! a wrong block.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, ensure};
use nix::sys::statvfs::statvfs;
use nix::unistd::geteuid;
use rewake_criu_images::{Digest, ImageLease};
use rewake_image_store::ImageUrl;
use rewake_manifest::{MANIFEST_NAME, PARTIAL_NAME};
use rewake_process::file_lock::DirectoryLock;
use serde::{Deserialize, Serialize};

/// The prefix of directories that are being removed.
const REMOVED: &str = ".removed-";
/// The ends of the names of an image's files next to its directory.
const ORIGIN: &str = ".json";
const DOUBT: &str = ".doubt";
/// The end of the name of a file that is being written.
const PART: &str = ".part";
/// The socket of the image server.
const SOCKET: &str = ".images";
/// Digits of an image id.
const DIGITS: usize = 64;

/// A directory for the images of a node, which this process alone uses.
#[derive(Debug)]
pub struct CacheFolder {
    path: PathBuf,
    /// Bytes that the images may have.
    size: u64,
    _lock: DirectoryLock,
}

/// Where an image came from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct ImageOrigin {
    url: String,
}

impl CacheFolder {
    /// Opens the directory, or makes it. Without a size it is half of what is free, and what the images have.
    ///
    /// # Errors
    /// It cannot be made, other users may access it, or another agent uses it.
    pub fn open(path: &Path, size: Option<u64>) -> anyhow::Result<Self> {
        let open = || -> anyhow::Result<Self> {
            DirBuilder::new().recursive(true).mode(0o700).create(path)?;
            let path = path.canonicalize()?;
            let found = path.metadata()?;
            ensure!(
                found.uid() == geteuid().as_raw() && found.mode() & 0o077 == 0,
                "expected a directory that only this user may access (`chmod 700`): images have memory of \
                 programs"
            );
            let lock = DirectoryLock::take(&path)?.context("another `rewake serve` uses it")?;
            let mut folder = Self { path, size: 0, _lock: lock };
            folder.remove_leftovers()?;
            let used: u64 = folder.images()?.into_iter().map(|id| folder.allocated(id)).sum();
            folder.size = match size {
                Some(size) => size,
                None => (used + folder.free()?) / 2,
            };
            Ok(folder)
        };
        open().with_context(|| format!("--cache {}", path.display()))
    }

    /// Returns the bytes that the images may have together.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Returns the path, for messages.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the path of the image server's socket.
    pub(crate) fn socket(&self) -> PathBuf {
        self.path.join(SOCKET)
    }

    /// Returns the directory of an image.
    pub(crate) fn image(&self, id: Digest) -> PathBuf {
        self.path.join(id.to_string())
    }

    /// Returns the image that a path is the directory of.
    pub(crate) fn image_at(&self, path: &Path) -> Option<Digest> {
        let name = path.strip_prefix(&self.path).ok()?.to_str()?;
        digest(name)
    }

    /// Returns the images, complete or not.
    pub(crate) fn images(&self) -> io::Result<Vec<Digest>> {
        let names = fs::read_dir(&self.path)?.flatten().map(|entry| entry.file_name());
        Ok(names.filter_map(|name| digest(name.to_str()?)).collect())
    }

    pub(crate) fn is_complete(&self, id: Digest) -> bool {
        let image = self.image(id);
        image.join(MANIFEST_NAME).exists() && !image.join(PARTIAL_NAME).exists()
    }

    /// Makes a complete image a partial copy, whose bytes are compared again. Returns false while it is
    /// leased.
    pub(crate) fn make_partial(&self, id: Digest) -> io::Result<bool> {
        let image = self.image(id);
        if !self.is_complete(id) {
            return Ok(true);
        }
        let Some(_lease) = self.sole_lease(id)? else { return Ok(false) };
        fs::rename(image.join(MANIFEST_NAME), image.join(PARTIAL_NAME)).map(|()| true)
    }

    /// Leases an image for its removal, so that no other process reads it. None: one does.
    fn sole_lease(&self, id: Digest) -> io::Result<Option<Option<ImageLease>>> {
        match ImageLease::shared(&self.image(id)) {
            // Its inventory has not arrived.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Some(None)),
            Err(error) => Err(error),
            Ok(None) => Ok(None),
            Ok(Some(lease)) => Ok(lease.make_exclusive()?.then_some(Some(lease))),
        }
    }

    /// Returns whether a process leases an image.
    pub(crate) fn is_leased(&self, id: Digest) -> bool {
        self.sole_lease(id).is_ok_and(|lease| lease.is_none())
    }

    /// Removes an image. Returns false while a process leases it.
    pub(crate) fn remove(&self, id: Digest) -> anyhow::Result<bool> {
        let image = self.image(id);
        let context = || format!("removing {}", image.display());
        let Some(_lease) = self.sole_lease(id).with_context(context)? else { return Ok(false) };
        let removed = self.path.join(format!("{REMOVED}{id}"));
        match fs::rename(&image, &removed) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            renamed => {
                renamed.and_then(|()| fs::remove_dir_all(&removed)).with_context(context)?;
            }
        }
        // It has no origin if it was never begun.
        let _ = fs::remove_file(self.origin_path(id));
        self.end_doubt(id).map(|()| true)
    }

    /// Removes what an agent that was killed has left. Files with other names than the cache's own stay.
    fn remove_leftovers(&self) -> io::Result<()> {
        for entry in fs::read_dir(&self.path)?.flatten() {
            match leftover(&entry.file_name().to_string_lossy()) {
                Some(Leftover::Image) => fs::remove_dir_all(entry.path())?,
                Some(Leftover::File) => fs::remove_file(entry.path())?,
                Some(Leftover::Of(id)) if !self.image(id).exists() => fs::remove_file(entry.path())?,
                Some(Leftover::Of(_)) | None => {}
            }
        }
        Ok(())
    }

    fn origin_path(&self, id: Digest) -> PathBuf {
        self.path.join(format!("{id}{ORIGIN}"))
    }

    /// Notes where an image comes from. One thread at a time brings an image.
    pub(crate) fn note_origin(&self, id: Digest, url: &ImageUrl) -> anyhow::Result<()> {
        let path = self.origin_path(id);
        let part = path.with_added_extension(&PART[1..]);
        let origin = serde_json::to_vec(&ImageOrigin { url: url.to_string() })?;
        let written = fs::write(&part, origin).and_then(|()| fs::rename(&part, &path));
        written.with_context(|| format!("writing {}", path.display()))
    }

    fn doubt_path(&self, id: Digest) -> PathBuf {
        self.path.join(format!("{id}{DOUBT}"))
    }

    /// Notes that an image has a wrong block.
    pub(crate) fn note_doubt(&self, id: Digest) -> anyhow::Result<()> {
        let path = self.doubt_path(id);
        File::create(&path).map(drop).with_context(|| format!("writing {}", path.display()))
    }

    /// Returns whether an image has a wrong block, and was not compared since.
    pub(crate) fn is_doubted(&self, id: Digest) -> bool {
        self.doubt_path(id).exists()
    }

    /// Notes that an image was compared.
    pub(crate) fn end_doubt(&self, id: Digest) -> anyhow::Result<()> {
        let path = self.doubt_path(id);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(error).with_context(|| format!("removing {}", path.display()))
            }
            _ => Ok(()),
        }
    }

    /// Notes that an image is used now.
    pub(crate) fn note_use(&self, id: Digest) -> anyhow::Result<()> {
        let path = self.origin_path(id);
        let touch = || File::options().write(true).open(&path)?.set_modified(SystemTime::now());
        touch().with_context(|| path.display().to_string())
    }

    /// Returns where an image came from, or `None` if that is not known.
    pub(crate) fn origin(&self, id: Digest) -> Option<ImageUrl> {
        let bytes = fs::read(self.origin_path(id)).ok()?;
        serde_json::from_slice::<ImageOrigin>(&bytes).ok()?.url.parse().ok()
    }

    /// Returns the time since an image was used; the longest where that is not known.
    pub(crate) fn unused(&self, id: Digest) -> Duration {
        let used = fs::metadata(self.origin_path(id)).and_then(|found| found.modified());
        used.map_or(Duration::MAX, |used| SystemTime::now().duration_since(used).unwrap_or_default())
    }

    /// Returns the bytes of an image on the disk.
    pub(crate) fn allocated(&self, id: Digest) -> u64 {
        /// The unit of `st_blocks` (stat(2)).
        const SECTOR: u64 = 512;
        let entries = fs::read_dir(self.image(id)).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.metadata().ok()).map(|found| found.blocks() * SECTOR).sum()
    }

    /// Returns the bytes that are free on the file system.
    pub(crate) fn free(&self) -> io::Result<u64> {
        let found = statvfs(&self.path)?;
        Ok(found.blocks_available() * found.fragment_size())
    }
}

/// What a killed agent may have left.
enum Leftover {
    /// The directory of an image that was being removed.
    Image,
    /// A file that was being written.
    File,
    /// A file of an image, whose directory may have been removed.
    Of(Digest),
}

/// Returns what a name of the cache's directory may be a leftover of; none: it is none.
fn leftover(name: &str) -> Option<Leftover> {
    if let Some(id) = name.strip_prefix(REMOVED) {
        return digest(id).map(|_| Leftover::Image);
    }
    if let Some(stem) = name.strip_suffix(PART) {
        return digest(stem.strip_suffix(ORIGIN)?).map(|_| Leftover::File);
    }
    let stem = name.strip_suffix(ORIGIN).or_else(|| name.strip_suffix(DOUBT))?;
    digest(stem).map(Leftover::Of)
}

fn digest(name: &str) -> Option<Digest> {
    let is_id = name.len() == DIGITS && name.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'));
    if !is_id {
        return None;
    }
    let mut bytes = [0; DIGITS / 2];
    for (byte, at) in bytes.iter_mut().zip((0..DIGITS).step_by(2)) {
        *byte = u8::from_str_radix(&name[at..at + 2], 16).ok()?;
    }
    Some(Digest(bytes))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    /// A cache in a new directory.
    pub(crate) fn folder(size: u64) -> (tempfile::TempDir, CacheFolder) {
        let dir = tempfile::tempdir().unwrap();
        let folder = CacheFolder::open(&dir.path().join("cache"), Some(size)).unwrap();
        (dir, folder)
    }

    pub(crate) fn url(name: &str) -> ImageUrl {
        format!("file:///store/{name}").parse().unwrap()
    }

    /// Puts a complete image of `bytes` bytes into a cache.
    pub(crate) fn image(folder: &CacheFolder, number: u8, bytes: usize) -> Digest {
        let id = Digest([number; 32]);
        fs::create_dir(folder.image(id)).unwrap();
        for (name, bytes) in [("inventory.img", 0), (MANIFEST_NAME, 0), ("pages-1.img", bytes)] {
            fs::write(folder.image(id).join(name), vec![1; bytes]).unwrap();
        }
        folder.note_origin(id, &url("web")).unwrap();
        id
    }

    /// Makes the last use of an image so long ago.
    pub(crate) fn set_unused(folder: &CacheFolder, id: Digest, time: Duration) {
        let file = File::options().write(true).open(folder.origin_path(id)).unwrap();
        file.set_modified(SystemTime::now() - time).unwrap();
    }

    #[test]
    fn the_next_agent_finds_the_images_of_the_last_one() {
        let (dir, folder) = folder(1 << 20);
        let id = image(&folder, 0xa7, 5000);
        fs::create_dir(folder.path().join(format!("{REMOVED}{id}"))).unwrap();
        fs::write(folder.path().join("other"), "").unwrap();
        let path = folder.path().to_owned();
        let taken = CacheFolder::open(&path, None).unwrap_err();
        assert!(format!("{taken:#}").contains("another `rewake serve` uses it"), "{taken:#}");
        drop(folder);
        let folder = CacheFolder::open(&path, None).unwrap();
        assert_eq!(folder.images().unwrap(), [id]);
        assert_eq!(folder.origin(id), Some(url("web")));
        assert!(folder.is_complete(id) && folder.allocated(id) >= 5000 && folder.size() > 0);
        assert_eq!(fs::read_dir(&path).unwrap().count(), 3, "leftovers are removed");
        assert_eq!(folder.image_at(&folder.image(id)), Some(id));
        assert_eq!(folder.image_at(dir.path()), None);
    }

    #[test]
    fn only_files_with_names_of_the_cache_are_removed() {
        let (_dir, folder) = folder(1 << 20);
        let (id, removed) = (image(&folder, 7, 100), Digest([8; 32]));
        folder.note_doubt(id).unwrap();
        folder.note_doubt(removed).unwrap();
        folder.note_origin(removed, &url("web")).unwrap();
        let path = folder.path().to_owned();
        let kept = ["film.mkv.part", "a7.json.part", ".removed-film", "notes.json", "my.doubt"];
        let part = format!("{id}.json.part");
        for name in kept.iter().chain([&part.as_str()]) {
            fs::write(path.join(name), "").unwrap();
        }
        fs::create_dir(path.join("directory.part")).unwrap();
        drop(folder);
        let folder = CacheFolder::open(&path, None).unwrap();
        assert!(kept.iter().all(|name| path.join(name).exists()) && path.join("directory.part").is_dir());
        assert!(folder.is_doubted(id) && folder.origin(id).is_some() && !path.join(part).exists());
        assert!(!folder.is_doubted(removed) && folder.origin(removed).is_none());
    }

    #[test]
    fn a_directory_that_others_may_enter_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o750)).unwrap();
        let refused = CacheFolder::open(dir.path(), None).unwrap_err();
        assert!(format!("{refused:#}").contains("chmod 700"), "{refused:#}");
    }

    #[test]
    fn an_origin_is_replaced_as_a_whole() {
        let (_dir, folder) = folder(1 << 20);
        let id = image(&folder, 7, 100);
        let earlier = File::open(folder.origin_path(id)).unwrap();
        folder.note_origin(id, &url("other")).unwrap();
        assert_eq!(folder.origin(id), Some(url("other")));
        let earlier: ImageOrigin = serde_json::from_reader(earlier).unwrap();
        assert_eq!(earlier.url, url("web").to_string(), "it was not written in place");
    }

    #[test]
    fn a_leased_image_is_neither_removed_nor_compared_again() {
        let (_dir, folder) = folder(1 << 20);
        let id = image(&folder, 7, 100);
        let lease = ImageLease::shared(&folder.image(id)).unwrap().unwrap();
        assert!(folder.is_leased(id) && !folder.remove(id).unwrap() && !folder.make_partial(id).unwrap());
        drop(lease);
        assert!(!folder.is_leased(id) && folder.make_partial(id).unwrap() && !folder.is_complete(id));
        assert!(folder.remove(id).unwrap() && folder.images().unwrap().is_empty());
        assert_eq!((folder.origin(id), folder.unused(id)), (None, Duration::MAX));
    }
}
