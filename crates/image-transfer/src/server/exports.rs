// SPDX-License-Identifier: MIT OR Apache-2.0
//! The images that clients may open, and their files. [`ImageFolder`] is where they are: [`ImageDirectory`]
//! has those below a directory; a store of images is another one.

use std::fmt::Debug;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Component, Path};
use std::sync::Arc;

use crate::protocol::WORKING_SET_NUMBER;
use crate::protocol::open_files::OpenFiles;
use anyhow::{Context as _, anyhow, bail, ensure};
use nix::errno::Errno;
use nix::fcntl::OFlag;
use rewake_criu_images::{Digest, ImageDir, ImageLease};
use rewake_image_signature::{ImageSignature, MAX_SIGNATURE, SIGNATURE_NAME};
use rewake_manifest::{
    MANIFEST_NAME, MAX_WORKING_SET, ManifestReader, ManifestRecord, PARENT, WORKING_SET_NAME,
};
pub use rewake_peer_stream::PeerRights;
use rewake_process::beneath::Beneath;
use tracing::info;

/// The longest name of an image, in bytes.
const MAX_NAME: usize = 4096;
/// Bytes of a wrong name that are shown.
const SHOWN: usize = 80;

/// Where images are that a server serves.
pub trait ImageFolder: Debug + Send + Sync {
    /// Opens an image by its name, a path without `..`, or the `ancestor`-th of its parents. The client may
    /// read images of this name. A folder that follows links checks the rights of what they lead to.
    ///
    /// # Errors
    /// There is no such image, or it is damaged, or the client may not read what a link leads to.
    fn open(&self, name: &Path, ancestor: u32, rights: &PeerRights) -> anyhow::Result<Box<dyn OpenImage>>;
}

/// An open image. It stays the same when another one takes its place.
pub trait OpenImage {
    /// Returns the image's id.
    fn id(&self) -> Digest;

    /// Returns the length of the manifest in bytes.
    fn manifest_length(&self) -> u64;

    /// Returns the length of the recorded working set in bytes; 0 if there is none.
    fn working_set_length(&self) -> u64 {
        0
    }

    /// Returns the signature of the image's id; `None` if it is not signed.
    fn signature(&self) -> Option<Vec<u8>> {
        None
    }

    /// Prepares for a range that will be read after those before: a slow source is asked for it at once.
    /// Returns false if there is no room for it now.
    fn expect(&mut self, _file: u32, _range: Range<u64>) -> bool {
        true
    }

    /// Begins to read a range of a file: 0 is the manifest, 1 the first file that it names,
    /// [`WORKING_SET_NUMBER`] the working set.
    ///
    /// # Errors
    /// The image has no such file, or the range is beyond its end.
    fn begin(&mut self, file: u32, range: Range<u64>) -> anyhow::Result<()>;

    /// Whether [`OpenImage::next_stored`] gives ranges.
    fn is_stored(&self) -> bool {
        false
    }

    /// Appends the next part of the range, as its store has it: `room` bytes at most. Returns how many it
    /// has.
    ///
    /// # Errors
    /// They cannot be read, or the range has no more.
    fn next_stored(&mut self, _room: usize, _into: &mut Vec<u8>) -> anyhow::Result<usize> {
        bail!("the image is in no store")
    }

    /// Reads the next bytes of the range.
    ///
    /// # Errors
    /// They cannot be read, or are more than is left of the range.
    fn next(&mut self, into: &mut [u8]) -> anyhow::Result<()>;
}

/// The images that are served, and which of them a client may read.
#[derive(Debug)]
pub struct Exports {
    folder: Arc<dyn ImageFolder>,
    rights: PeerRights,
}

impl Exports {
    /// Serves the images of a folder.
    #[must_use]
    pub fn new(folder: Arc<dyn ImageFolder>) -> Self {
        Self { folder, rights: PeerRights::All }
    }

    /// Returns the images that a client with these rights may read.
    #[must_use]
    pub fn permitted(&self, rights: PeerRights) -> Self {
        Self { folder: Arc::clone(&self.folder), rights }
    }

    /// Opens an image by its name, or the `ancestor`-th of its parents. A client needs the right to read the
    /// place of each of them.
    ///
    /// # Errors
    /// The client may not read it, there is no such image, it is not sealed, or its manifest is damaged.
    pub fn open(&self, name: impl AsRef<Path>, ancestor: u32) -> anyhow::Result<Box<dyn OpenImage>> {
        let path = name.as_ref();
        let name = path.as_os_str().as_bytes();
        let is_below = path.components().all(|part| matches!(part, Component::Normal(_)));
        ensure!(
            is_below && !name.is_empty() && name.len() <= MAX_NAME,
            "\"{}\": expected the name of an image, a path without `..`",
            name[..name.len().min(SHOWN)].escape_ascii()
        );
        self.rights.check_image(path)?;
        self.folder.open(path, ancestor, &self.rights).with_context(|| format!("image {}", path.display()))
    }
}

/// A directory: each image is a directory below it. An image's author may have made links in it, so no link
/// leads out of the directory, and a client needs the right to the place that was reached.
#[derive(Debug)]
pub struct ImageDirectory(Arc<Beneath>);

impl ImageDirectory {
    /// Serves the images below a directory.
    ///
    /// # Errors
    /// It is no directory.
    pub fn new(root: &Path) -> anyhow::Result<Self> {
        let opened = Beneath::open(root);
        let opened = opened.with_context(|| format!("{}: a directory with images", root.display()))?;
        Ok(Self(Arc::new(opened)))
    }

    /// Opens the directory of an image.
    fn directory(&self, name: &Path, rights: &PeerRights) -> anyhow::Result<ImageDir> {
        let opened = ImageDir::open_beneath(&self.0, name);
        // What a link leads to is not found: whether it exists is nothing to a client of other folders.
        let is_linked = || self.0.unlinked(name, OFlag::O_PATH).is_err_and(|error| is_link(&error));
        if opened.is_err() && is_linked() {
            rights.check_place(name, |_| false)?;
        }
        let directory = opened?;
        check_place(&self.0, &directory, name, rights)?;
        Ok(directory)
    }

    /// Opens the directory of a parent, and returns the parent's id in the child's manifest. The link is the
    /// author's, and counts only if it leads to the image of this id.
    fn parent(
        &self,
        child: &ImageDir,
        expected: Option<Digest>,
        rights: &PeerRights,
    ) -> anyhow::Result<(ImageDir, Digest)> {
        let mut manifest = ManifestReader::open(child)?;
        check_parent(manifest.id(), expected)?;
        let Some(ManifestRecord::Parent(sealed)) = manifest.next_record()? else {
            bail!("it has fewer ancestors")
        };
        let id = sealed.id.context("its parent was not sealed, so no id names that image")?;
        let parent = child.parent()?.context("its parent is missing")?;
        check_place(&self.0, &parent, Path::new(PARENT), rights)?;
        Ok((parent, id))
    }
}

impl ImageFolder for ImageDirectory {
    fn open(&self, name: &Path, ancestor: u32, rights: &PeerRights) -> anyhow::Result<Box<dyn OpenImage>> {
        let (mut directory, mut expected) = (self.directory(name, rights)?, None);
        let hidden = |error: anyhow::Error| {
            // The author of a link must not learn what else there is, by where it leads.
            if rights.check_place(name, |_| false).is_ok() {
                return error;
            }
            info!("ancestor {ancestor} of image {}: {error:#}", name.display());
            anyhow!("it has no ancestor {ancestor} that this client may read")
        };
        for _ in 0..ancestor {
            let (parent, id) = self.parent(&directory, expected, rights).map_err(hidden)?;
            (directory, expected) = (parent, Some(id));
        }
        let opened = ExportedImage::open(directory, Arc::clone(&self.0), rights.clone());
        let opened = opened.and_then(|image| check_parent(image.id, expected).map(|()| image));
        Ok(Box::new(if ancestor == 0 { opened } else { opened.map_err(hidden) }?))
    }
}

/// Checks that a parent is the image that its child names.
fn check_parent(found: Digest, expected: Option<Digest>) -> anyhow::Result<()> {
    match expected.filter(|expected| *expected != found) {
        None => Ok(()),
        Some(expected) => bail!("its parent is image {found}, expected {expected}"),
    }
}

/// Checks that a client may read an open file or directory, where that is by now.
fn check_place(root: &Beneath, of: impl AsFd, name: &Path, rights: &PeerRights) -> anyhow::Result<()> {
    let place = root.place(of)?.context("it was moved out of the directory with the images")?;
    // The folder of a right may be a link, which is the operator's.
    let is_in = |folder: &Path| {
        let folder = root.at(folder, OFlag::O_PATH).and_then(|folder| root.place(folder)).ok().flatten();
        folder.is_some_and(|folder| place.starts_with(folder))
    };
    rights.check_place(name, is_in)
}

/// Reads the signature of an image that is served.
fn signature(images: &ImageDir, root: &Beneath, rights: &PeerRights) -> anyhow::Result<Option<Vec<u8>>> {
    if let Some((_, file, _)) = images.file(SIGNATURE_NAME)? {
        check_place(root, file, Path::new(SIGNATURE_NAME), rights)?;
    }
    // A longer one is no signature, and a message has bounds.
    let is_one = |bytes: &Vec<u8>| bytes.len() as u64 <= MAX_SIGNATURE;
    Ok(ImageSignature::read(images)?.filter(is_one))
}

/// Whether a lookup failed because a link is on the way.
fn is_link(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::ELOOP as i32)
}

/// An image in a directory. It is leased.
#[derive(Debug)]
struct ExportedImage {
    directory: ImageDir,
    /// Where the client may read. Files of an image may be links, too.
    root: Arc<Beneath>,
    rights: PeerRights,
    id: Digest,
    manifest_length: u64,
    /// Names in the order of the manifest.
    names: Vec<String>,
    open: OpenFiles,
    /// The recorded working set, with its length.
    working_set: Option<(File, u64)>,
    signature: Option<Vec<u8>>,
    /// The file that is read, and what is left of the range.
    reading: (u32, Range<u64>),
    /// None where the file system has no locks.
    _lease: Option<ImageLease>,
}

impl ExportedImage {
    fn open(directory: ImageDir, root: Arc<Beneath>, rights: PeerRights) -> anyhow::Result<Self> {
        let lease = ImageLease::of(&directory)?;
        let mut manifest = ManifestReader::open(&directory)?;
        let mut names = Vec::new();
        while let Some(record) = manifest.next_record()? {
            if let ManifestRecord::File(file) = record {
                names.push(file.name);
            }
        }
        let (_, sealed, manifest_length) =
            directory.file(MANIFEST_NAME)?.context("the manifest was removed")?;
        check_place(&root, sealed, Path::new(MANIFEST_NAME), &rights)?;
        let signature = signature(&directory, &root, &rights)?;
        // A restore is right without it.
        let working_set = directory.file(WORKING_SET_NAME).ok().flatten();
        let working_set = working_set.map(|(_, file, length)| (file, length)).filter(|(file, length)| {
            let place = check_place(&root, file, Path::new(WORKING_SET_NAME), &rights);
            *length <= MAX_WORKING_SET && place.is_ok()
        });
        Ok(Self {
            id: manifest.id(),
            directory,
            manifest_length,
            names,
            open: OpenFiles::default(),
            working_set,
            signature,
            root,
            rights,
            reading: (0, 0..0),
            _lease: lease,
        })
    }

    fn file(&mut self, number: u32) -> anyhow::Result<&File> {
        let Self { directory, root, rights, names, open, working_set, .. } = self;
        if number == WORKING_SET_NUMBER {
            let found = working_set.as_ref().map(|(file, _)| file);
            return found.context("the image has no working set");
        }
        open.get(number, || {
            let name = match number.checked_sub(1) {
                None => MANIFEST_NAME,
                Some(index) => {
                    let name = usize::try_from(index).ok().and_then(|index| names.get(index));
                    name.with_context(|| format!("file {number}: the image has {}", names.len()))?
                }
            };
            let (_, file, _) = directory.file(name)?.with_context(|| format!("{name}: it was removed"))?;
            check_place(root, &file, Path::new(name), rights)?;
            Ok(file)
        })
    }
}

impl OpenImage for ExportedImage {
    fn id(&self) -> Digest {
        self.id
    }

    fn manifest_length(&self) -> u64 {
        self.manifest_length
    }

    fn working_set_length(&self) -> u64 {
        self.working_set.as_ref().map_or(0, |(_, length)| *length)
    }

    fn signature(&self) -> Option<Vec<u8>> {
        self.signature.clone()
    }

    fn begin(&mut self, file: u32, range: Range<u64>) -> anyhow::Result<()> {
        let size = self.file(file)?.metadata()?.len();
        ensure!(range.end <= size, "the file has {size}");
        self.reading = (file, range);
        Ok(())
    }

    fn next(&mut self, into: &mut [u8]) -> anyhow::Result<()> {
        let (number, range) = self.reading.clone();
        let end = range.start + into.len() as u64;
        ensure!(end <= range.end, "more bytes than are left of the range");
        self.file(number)?.read_exact_at(into, range.start)?;
        self.reading.1.start = end;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::fs;

    use rewake_criu_images::{Inventory, write};
    use rewake_manifest::seal;

    use super::*;

    fn sealed(image: &Path) {
        fs::create_dir_all(image).unwrap();
        write::inventory(image, &Inventory { version: 2, plugins: Vec::new(), run_id: None }).unwrap();
        seal(image).unwrap();
    }

    fn exports(root: &Path) -> Exports {
        Exports::new(Arc::new(ImageDirectory::new(root).unwrap()))
    }

    #[test]
    fn an_open_image_is_leased_and_survives_one_in_its_place() {
        let root = tempfile::tempdir().unwrap();
        let (image, old) = (root.path().join("web"), root.path().join("old"));
        sealed(&image);
        let exports = exports(root.path());
        let mut open = exports.open("web", 0).unwrap();
        // What a dump does: it exchanges the directories, and removes the old one if it has no reader.
        fs::rename(&image, &old).unwrap();
        let is_removable = || ImageLease::shared(&old).unwrap().unwrap().make_exclusive().unwrap();
        assert!(!is_removable());
        open.begin(1, 0..8).unwrap();
        open.next(&mut [0; 8]).unwrap();
        open.next(&mut [0; 1]).unwrap_err();
        open.begin(1, 0..1 << 40).unwrap_err();
        drop(open);
        assert!(is_removable());
    }

    #[test]
    fn a_working_set_is_served_as_it_was_when_the_image_was_opened() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("web").join(WORKING_SET_NAME);
        sealed(&root.path().join("web"));
        let exports = exports(root.path());
        assert_eq!(exports.open("web", 0).unwrap().working_set_length(), 0);
        exports.open("web", 0).unwrap().begin(WORKING_SET_NUMBER, 0..1).unwrap_err();
        fs::write(&path, "recorded").unwrap();
        let mut open = exports.open("web", 0).unwrap();
        // A restore that records writes another file.
        fs::remove_file(&path).unwrap();
        assert_eq!(open.working_set_length(), 8);
        let mut bytes = [0; 8];
        open.begin(WORKING_SET_NUMBER, 0..8).unwrap();
        open.next(&mut bytes).unwrap();
        assert_eq!(&bytes, b"recorded");
        // One that no restore can have recorded.
        File::create(&path).unwrap().set_len(MAX_WORKING_SET + 1).unwrap();
        assert_eq!(exports.open("web", 0).unwrap().working_set_length(), 0);
    }

    #[test]
    fn a_client_opens_what_its_rights_permit_and_learns_of_nothing_else() {
        let root = tempfile::tempdir().unwrap();
        sealed(&root.path().join("web/1"));
        sealed(&root.path().join("db/1"));
        let exports = exports(root.path()).permitted(PeerRights::Folders(vec!["web".into()]));
        exports.open("web/1", 0).unwrap();
        let odd = OsStr::from_bytes(b"web/caf\xe9");
        sealed(&root.path().join(odd));
        exports.open(odd, 0).unwrap();
        let refused = |name| exports.open(name, 0).err().unwrap().to_string().replace(name, "NAME");
        assert_eq!(refused("db/1"), refused("db/none"));
        assert!(refused("db/1").contains("to read web only"), "{}", refused("db/1"));
        assert!(refused("web/../db/1").contains("a path without `..`"));
    }
}
