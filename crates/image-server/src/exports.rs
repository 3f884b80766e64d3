// SPDX-License-Identifier: MIT OR Apache-2.0
//! The images that clients may open: directories with a manifest below one directory.

use std::fs::File;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context as _, ensure};
use rewake_criu_images::{Digest, ImageDir};
use rewake_manifest::{MANIFEST_NAME, ManifestReader, ManifestRecord};

/// The longest name of an image, in bytes.
const MAX_NAME: usize = 4096;
/// Files that a connection keeps open. A client reads few files at a time: those that hold memory.
const OPEN_FILES: usize = 16;

/// The directory whose images are served.
#[derive(Debug)]
pub struct Exports {
    root: PathBuf,
}

impl Exports {
    /// Serves the images below a directory.
    ///
    /// # Errors
    /// It is no directory.
    pub fn new(root: &Path) -> anyhow::Result<Self> {
        let root = root.canonicalize().with_context(|| root.display().to_string())?;
        ensure!(root.is_dir(), "{}: expected a directory with images", root.display());
        Ok(Self { root })
    }

    /// Opens an image by its name, a path below the directory, or the `ancestor`-th of its parents.
    ///
    /// # Errors
    /// There is no such image, it is not sealed, or its manifest is damaged.
    pub fn open(&self, name: &str, ancestor: u32) -> anyhow::Result<ExportedImage> {
        let path = Path::new(name);
        let is_below = path.components().all(|part| matches!(part, Component::Normal(_)));
        ensure!(
            is_below && !name.is_empty() && name.len() <= MAX_NAME,
            "{name:.80?}: expected the name of an image, a path without `..`"
        );
        let mut directory = ImageDir::open(self.root.join(path)).with_context(|| format!("image {name}"))?;
        for _ in 0..ancestor {
            let parent = directory.parent()?;
            directory = parent.with_context(|| format!("image {name}: it has no {ancestor} ancestors"))?;
        }
        ExportedImage::open(directory)
    }
}

/// An open image. It stays the same when another image takes its directory's place.
#[derive(Debug)]
pub struct ExportedImage {
    directory: ImageDir,
    id: Digest,
    manifest_length: u64,
    /// Names in the order of the manifest.
    names: Vec<String>,
    /// The files that were read last, the newest first.
    open: Vec<(u32, File)>,
}

impl ExportedImage {
    fn open(directory: ImageDir) -> anyhow::Result<Self> {
        let mut manifest = ManifestReader::open(&directory)?;
        let mut names = Vec::new();
        while let Some(record) = manifest.next_record()? {
            if let ManifestRecord::File(file) = record {
                names.push(file.name);
            }
        }
        let (_, _, manifest_length) = directory.file(MANIFEST_NAME)?.context("the manifest was removed")?;
        Ok(Self { directory, id: manifest.id(), manifest_length, names, open: Vec::new() })
    }

    /// Returns the image's id.
    #[must_use]
    pub fn id(&self) -> Digest {
        self.id
    }

    /// Returns the length of the manifest in bytes.
    #[must_use]
    pub fn manifest_length(&self) -> u64 {
        self.manifest_length
    }

    /// Returns a file: 0 is the manifest, 1 the first file that it names.
    ///
    /// # Errors
    /// The image has no such file, or it cannot be opened.
    pub fn file(&mut self, number: u32) -> anyhow::Result<&File> {
        if let Some(place) = self.open.iter().position(|(open, _)| *open == number) {
            self.open[..=place].rotate_right(1);
        } else {
            let name = match number.checked_sub(1) {
                None => MANIFEST_NAME,
                Some(index) => {
                    let name = usize::try_from(index).ok().and_then(|index| self.names.get(index));
                    name.with_context(|| format!("file {number}: the image has {}", self.names.len()))?
                }
            };
            let opened = self.directory.file(name)?;
            let (_, file, _) = opened.with_context(|| format!("{name}: it was removed"))?;
            self.open.truncate(OPEN_FILES - 1);
            self.open.insert(0, (number, file));
        }
        Ok(&self.open[0].1)
    }
}
