// SPDX-License-Identifier: MIT OR Apache-2.0
//! Options of the commands for stores of images.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;
use rewake_image_store::{ImageStoreError, ImageUrl, StoreUrl};
use rewake_image_transfer::pull::ID_DIGITS;

use super::RemoteImage;

/// Digits of an image id.
const MAX_ID_DIGITS: usize = 64;

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
    /// Sign the image with this private key, an Ed25519 key of OpenSSH without a passphrase
    #[arg(long, value_name = "KEY")]
    pub sign: Option<PathBuf>,
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

impl PullSource {
    pub(super) fn of(given: OsString) -> Result<Self, String> {
        if let Some(url) = url_in(&given)? {
            parse(url).map(Self::Store)
        } else if is_archive(given.as_bytes()) {
            Ok(Self::Archive(given.into()))
        } else {
            RemoteImage::of(&given).map(Self::Server).map_err(|expected| {
                format!(
                    "{expected}, a URL, or an archive: a path with a / or with the ending .tar, .tar.gz \
                    or .tar.zst"
                )
            })
        }
    }
}

/// Whether this is the path of an archive. A host's name has no slash, and CRI-O's archives have colons in
/// theirs.
fn is_archive(given: &[u8]) -> bool {
    let mut host = given.split(|byte| *byte == b':').next().unwrap_or_default().iter();
    let endings = [".tar", ".tar.gz", ".tgz", ".tar.zst"];
    host.any(|byte| *byte == b'/') || endings.iter().any(|ending| given.ends_with(ending.as_bytes()))
}

/// A directory, or a URL in a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place<U> {
    /// The directory's path.
    Directory(PathBuf),
    /// The URL.
    Store(U),
}

/// A sealed image.
pub type SealedPlace = Place<ImageUrl>;
/// Where the images are that `rewake export` serves: below one directory, or in a store.
pub type ExportedPlace = Place<StoreUrl>;

impl<U: FromStr<Err = ImageStoreError>> Place<U> {
    pub(super) fn of(given: OsString) -> Result<Self, String> {
        match url_in(&given)? {
            Some(url) => parse(url).map(Self::Store),
            None => Ok(Self::Directory(given.into())),
        }
    }
}

/// Reads an image id, or the first digits of one. Fewer digits are no identity: an author of images who
/// computes for some hours makes two images whose ids begin with the same 16 digits.
pub(super) fn image_id(given: &str) -> Result<String, String> {
    let is_one = given.bytes().all(|byte| byte.is_ascii_hexdigit())
        && (ID_DIGITS..=MAX_ID_DIGITS).contains(&given.len());
    is_one.then(|| given.to_ascii_lowercase()).ok_or_else(|| {
        format!("expected an image id: {MAX_ID_DIGITS} hexadecimal digits, or the first {ID_DIGITS} at least")
    })
}

fn parse<U: FromStr<Err = ImageStoreError>>(url: &str) -> Result<U, String> {
    url.parse().map_err(|error: ImageStoreError| error.to_string())
}

/// The argument, if it names something in a store. A directory's path may have two slashes, and a colon, but
/// seldom all.
fn url_in(given: &OsStr) -> Result<Option<&str>, String> {
    let is_url = given.as_bytes().windows(3).any(|part| part == b"://");
    is_url.then(|| given.to_str().ok_or_else(|| "a URL that is not UTF-8".to_owned())).transpose()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(bytes: &[u8]) -> OsString {
        OsStr::from_bytes(bytes).to_owned()
    }

    #[test]
    fn a_directory_or_an_archive_may_have_any_name() {
        for path in [given(b"caf\xe9"), given(b"/srv/a b:\xff")] {
            assert_eq!(SealedPlace::of(path.clone()), Ok(SealedPlace::Directory(path.clone().into())));
            assert_eq!(ExportedPlace::of(path.clone()), Ok(ExportedPlace::Directory(path.into())));
        }
        for path in [given(b"caf\xe9.tar.gz"), given(b"/srv/\xff:1")] {
            assert_eq!(PullSource::of(path.clone()), Ok(PullSource::Archive(path.into())));
        }
        assert!(matches!(PullSource::of(given(b"host:caf\xe9")), Ok(PullSource::Server(_))));
    }

    #[test]
    fn an_image_id_has_32_digits_at_least() {
        let id = "4451C6BC7724F9E8".repeat(4);
        assert_eq!(image_id(&id).unwrap(), id.to_ascii_lowercase());
        image_id(&id[..32]).unwrap();
        for wrong in ["", &id[..16], &id[..31], &format!("{id}0"), &id.replace('C', "x")] {
            image_id(wrong).unwrap_err();
        }
    }

    #[test]
    fn a_url_is_one_of_a_store_and_text() {
        let url = given(b"file:///srv/store/web");
        assert!(matches!(SealedPlace::of(url.clone()), Ok(SealedPlace::Store(_))));
        assert!(matches!(PullSource::of(url.clone()), Ok(PullSource::Store(_))));
        assert!(matches!(ExportedPlace::of(url), Ok(ExportedPlace::Store(_))));
        let refused = SealedPlace::of(given(b"file:///srv/caf\xe9/web")).unwrap_err();
        assert_eq!(refused, "a URL that is not UTF-8");
    }
}
