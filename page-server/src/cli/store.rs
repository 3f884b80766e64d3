// SPDX-License-Identifier: MIT OR Apache-2.0
//! Options of the commands for stores of images.

use std::path::PathBuf;

use clap::Args;
use rewake_image_store::{ImageStoreError, ImageUrl, StoreUrl};

use super::RemoteImage;

/// Options of `rewake push`.
#[derive(Debug, Args)]
pub struct PushArgs {
    /// Directory of the images: they must be sealed
    #[arg(value_name = "IMG")]
    pub images_dir: PathBuf,
    /// The store and, as the last part, the name that the image gets in it: s3://BUCKET/FOLDER/NAME,
    /// file:///DIRECTORY/NAME or oci://REGISTRY/REPOSITORY:TAG. An image of that name is replaced
    #[arg(value_name = "URL")]
    pub image: ImageUrl,
}

/// Options of `rewake ls`.
#[derive(Debug, Args)]
pub struct LsArgs {
    /// The store: s3://BUCKET/FOLDER, file:///DIRECTORY or oci://REGISTRY/REPOSITORY
    #[arg(value_name = "STORE")]
    pub store: StoreUrl,
}

/// Options of `rewake rm`.
#[derive(Debug, Args)]
pub struct RmArgs {
    /// The image: s3://BUCKET/FOLDER/NAME or file:///DIRECTORY/NAME
    #[arg(value_name = "URL")]
    pub image: ImageUrl,
}

/// Options of `rewake gc`.
#[derive(Debug, Args)]
pub struct GcArgs {
    /// The store: s3://BUCKET/FOLDER or file:///DIRECTORY
    #[arg(value_name = "STORE")]
    pub store: StoreUrl,
    /// Remove what no image uses at once, not after a day. No push into this store and no pull from it may
    /// run: it would lose what it has stored, or reads
    #[arg(long)]
    pub now: bool,
}

/// An image of another host or of a store, or the archive of a container engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PullSource {
    /// `HOST:IMAGE`
    Server(RemoteImage),
    /// `s3://...`, `file://...` or `oci://...`
    Store(ImageUrl),
    /// The path of an archive.
    Archive(PathBuf),
}

impl std::str::FromStr for PullSource {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if is_url(text) {
            parse(text).map(Self::Store)
        } else if is_archive(text) {
            Ok(Self::Archive(text.into()))
        } else {
            text.parse().map(Self::Server).map_err(|expected: String| {
                format!("{expected}, a URL, or an archive: a path with a / or with the ending .tar, .tar.gz or .tar.zst")
            })
        }
    }
}

/// Whether a text is the path of an archive. A host's name has no slash, and CRI-O's archives have colons in theirs.
fn is_archive(text: &str) -> bool {
    let host = text.split(':').next().unwrap_or_default();
    let endings = [".tar", ".tar.gz", ".tgz", ".tar.zst"];
    host.contains('/') || endings.iter().any(|ending| text.ends_with(ending))
}

/// A sealed image: its directory, or its URL in a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SealedPlace {
    /// Its directory.
    Directory(PathBuf),
    /// Its URL.
    Store(ImageUrl),
}

impl std::str::FromStr for SealedPlace {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if is_url(text) { parse(text).map(Self::Store) } else { Ok(Self::Directory(text.into())) }
    }
}

/// Where the images are that `rewake export` serves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExportedPlace {
    /// Directories below one directory.
    Directory(PathBuf),
    /// A store.
    Store(StoreUrl),
}

impl std::str::FromStr for ExportedPlace {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if is_url(text) { parse(text).map(Self::Store) } else { Ok(Self::Directory(text.into())) }
    }
}

fn parse<U: std::str::FromStr<Err = ImageStoreError>>(url: &str) -> Result<U, String> {
    url.parse().map_err(|error: ImageStoreError| error.to_string())
}

/// Whether a text names something in a store. A directory's path may have two slashes, and a colon, but seldom all.
fn is_url(text: &str) -> bool {
    text.contains("://")
}
