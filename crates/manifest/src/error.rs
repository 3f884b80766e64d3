// SPDX-License-Identifier: MIT OR Apache-2.0
//! Errors of manifests.

use std::io;
use std::path::{Path, PathBuf};

use rewake_criu_images::{ARRIVING_NAME, Digest, ImageError};

use crate::difference::ImageDifference;
use crate::names::{MANIFEST_NAME, PARTIAL_NAME};

/// Why an image was not sealed, or not verified. Every message has the file, and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ManifestError {
    /// The directory has no manifest.
    #[error(
        "{}: not sealed: it has no {MANIFEST_NAME}, so its bytes cannot be checked; if you trust it as it \
         is, run `rewake seal` on it, else dump or copy it again",
        directory.display()
    )]
    NotSealed {
        /// The image directory.
        directory: PathBuf,
    },
    /// The directory has the manifest of a partial copy: some of its bytes may be zeros that are not the
    /// image's.
    #[error(
        "{}: a copy of an image that is not complete ({PARTIAL_NAME}): `rewake pull` or `rewake restore \
         --from` completes it",
        directory.display()
    )]
    Partial {
        /// The image directory.
        directory: PathBuf,
    },
    /// GPU memory of the image arrives from another host: files have zeros in the place of what has not
    /// arrived.
    #[error(
        "{}: the image of a migration, whose GPU memory was not copied ({ARRIVING_NAME}): only the migration \
         can restore it",
        directory.display()
    )]
    Arriving {
        /// The image directory.
        directory: PathBuf,
    },
    /// The directory has a manifest.
    #[error(
        "{}: already sealed: `rewake verify` checks it; if it was changed on purpose, remove {MANIFEST_NAME} \
         first",
        directory.display()
    )]
    AlreadySealed {
        /// The image directory.
        directory: PathBuf,
    },
    /// A byte of the manifest is wrong, or it is cut.
    #[error(
        "{}: damaged: at offset {offset}, expected {expected}, found {found}; copy the image again, or seal \
         it again if you trust its files",
        file.display()
    )]
    Damaged {
        /// The manifest.
        file: PathBuf,
        /// Where, in bytes.
        offset: u64,
        /// What must be there.
        expected: String,
        /// What was found.
        found: String,
    },
    /// The manifest is of another version.
    #[error(
        "{}: a manifest of version {found}, and this program reads version {expected}: use the release that \
         wrote it",
        file.display()
    )]
    Version {
        /// The manifest.
        file: PathBuf,
        /// The version of this program.
        expected: u32,
        /// The version of the manifest.
        found: u32,
    },
    /// A file of the image was written, replaced, added or removed while it was read.
    #[error(
        "{}: changed while it was read: {what}; seal an image when nothing writes to it",
        file.display()
    )]
    Changed {
        /// The file or directory.
        file: PathBuf,
        /// What changed.
        what: String,
    },
    /// The image is not what was sealed.
    #[error(
        "{}/{difference}: nothing is restored from an image that is not as it was sealed; `rewake verify` \
         lists all that differs; copy the image again, or remove {MANIFEST_NAME} if it was changed on \
         purpose",
        directory.display()
    )]
    Differs {
        /// The image directory.
        directory: PathBuf,
        /// What differs.
        difference: ImageDifference,
    },
    /// The parent is another image than the one that a child was sealed with.
    #[error(
        "{}: its parent is another image than when it was sealed: expected {sealed}, found {found}; a \
         dump into the parent's directory replaces what this image needs: restore with a copy of the old \
         parent; if the parent is the right one and was sealed anew, remove {MANIFEST_NAME} here and run \
         `rewake seal`",
        child.display()
    )]
    AnotherParent {
        /// The directory of the child.
        child: PathBuf,
        /// The parent's id when the child was sealed.
        sealed: Digest,
        /// The id of the parent now, or that it has none.
        found: String,
    },
    /// A file has a name that CRIU does not give.
    #[error("{}: the name is not UTF-8, so it is no file of CRIU's: remove it", file.display())]
    Name {
        /// The file.
        file: PathBuf,
    },
    /// A file is longer than any memory.
    #[error(
        "{}: {length} bytes, at most {limit}: it is no file of an image",
        file.display()
    )]
    TooLong {
        /// The file.
        file: PathBuf,
        /// Its length in bytes.
        length: u64,
        /// [`crate::segment::MAX_FILE`]
        limit: u64,
    },
    /// The directory has more files than an image may have.
    #[error(
        "{}: {files} files whose names end in .img, and an image has at most {limit}: remove what is not of \
         the image",
        directory.display()
    )]
    TooManyFiles {
        /// The image directory.
        directory: PathBuf,
        /// How many it has.
        files: u64,
        /// [`crate::segment::MAX_FILES`]
        limit: u64,
    },
    /// CRIU's files cannot be read.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The operating system refused an act on a file.
    #[error("{}: cannot {act} it: {source}", file.display())]
    Io {
        /// The failed act, as a verb.
        act: &'static str,
        /// The file.
        file: PathBuf,
        /// The operating system's answer.
        r#source: io::Error,
    },
}

/// The result of this crate's functions.
pub type Result<T, E = ManifestError> = std::result::Result<T, E>;

/// Returns a closure for `map_err` that adds the act and the file.
pub(crate) fn io(act: &'static str, file: &Path) -> impl FnOnce(io::Error) -> ManifestError {
    let file = file.to_path_buf();
    move |source| ManifestError::Io { act, file, source }
}
