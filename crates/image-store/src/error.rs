// SPDX-License-Identifier: MIT OR Apache-2.0
//! Errors of stores.

use std::time::Duration;

use rewake_criu_images::ImageError;
use rewake_image_signature::SignatureError;
use rewake_manifest::ManifestError;

/// The folder of a store's packs: what helps against damage in it helps nowhere else.
pub(crate) const PACKS: &str = "packs";

/// Why something could not be done with a store. Every message has the object, and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImageStoreError {
    /// The text is no URL of a store.
    #[error(
        "{url:?}: {what}: expected s3://BUCKET/..., file:///DIRECTORY/... or oci://REGISTRY/REPOSITORY:TAG"
    )]
    Url {
        /// The text.
        url: String,
        /// What is wrong.
        what: &'static str,
    },
    /// The store cannot be reached as it is configured.
    #[error("{url}: {what}")]
    Setup {
        /// The store.
        url: String,
        /// What is wrong, and what to do.
        what: String,
    },
    /// This program cannot use stores.
    #[error(
        "{what}: this rewake was built without stores: `cargo build --release -p rewake` builds one that has \
         them"
    )]
    NotBuilt {
        /// What needs a store.
        what: String,
    },
    /// The place has no store. So nothing in it is read as one, or removed.
    #[error(
        "{url}: no store of images: it lacks the object `rewake-store`, which the first `rewake push` writes"
    )]
    NoStore {
        /// The place.
        url: String,
    },
    /// The URL of an image is that of a store.
    #[error("{url} is a store: add the image's name: {url}/NAME")]
    NoName {
        /// The store.
        url: String,
    },
    /// The store has no image of this name.
    #[error("{url}: no image of this name: `rewake ls` lists the images of the store")]
    NoImage {
        /// The image.
        url: String,
    },
    /// A tag of a registry names something that is no image of Rewake's.
    #[error("{url}: no image that `rewake push` has stored: its type is {found}; use another tag")]
    OtherArtifact {
        /// The tag.
        url: String,
        /// What it names.
        found: String,
    },
    /// A push has given the name another image while this one was to be removed.
    #[error(
        "{url}: another command has replaced or removed the image meanwhile, so this one has not changed it: \
         repeat it for what has the name now"
    )]
    Replaced {
        /// The image.
        url: String,
    },
    /// A pack that the image needs was lost while the push ran.
    #[error(
        "{object}: lost or cut while the push ran, so no image was stored: push again; `rewake gc --now` may \
         not run during a push"
    )]
    LostPack {
        /// The pack.
        object: String,
    },
    /// An image has too many chunks for an index.
    #[error("{image}: its index has {length} bytes, expected at most {most}: no image was stored")]
    TooManyChunks {
        /// The image.
        image: String,
        /// The length of its index in bytes.
        length: u64,
        /// The limit.
        most: u64,
    },
    /// Bytes of an object are not those that were written.
    #[error("{object}: damaged: {what}; {}", advice(object))]
    Damaged {
        /// The object.
        object: String,
        /// What was expected, and what was found.
        what: String,
    },
    /// An object is of another version of the format.
    #[error(
        "{object}: of version {found}, and this program reads version {expected}: use the release that wrote \
         it"
    )]
    Version {
        /// The object.
        object: String,
        /// The version of this program.
        expected: u32,
        /// The version of the object.
        found: u32,
    },
    /// The store refused a request, or did not answer.
    #[error("{object}: cannot {act} it: {reason}")]
    Request {
        /// What was to be done, as a verb.
        act: &'static str,
        /// The object.
        object: String,
        /// The answer, without secrets.
        reason: String,
    },
    /// A file of the image is not as it was sealed.
    #[error(
        "{file}: the {length} bytes from offset {offset} are not those that were sealed: nothing is pushed \
         from such an image; `rewake verify` lists all that differs"
    )]
    NotAsSealed {
        /// The file.
        file: String,
        /// Where, in bytes.
        offset: u64,
        /// The bytes that were read.
        length: u32,
    },
    /// A file of the image cannot be read.
    #[error("{file}: cannot read it: {reason}")]
    File {
        /// The file.
        file: String,
        /// The operating system's answer.
        reason: std::io::Error,
    },
    /// A push took so long that `rewake gc` may remove what it uses.
    #[error(
        "the push has taken more than {} hours, and `rewake gc` may remove what it has stored: push again, \
         which stores only what is missing",
        limit.as_secs() / 3600
    )]
    TooLong {
        /// The longest time that a push may take.
        limit: Duration,
    },
    /// The image directory cannot be read.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The manifest is missing or damaged.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    /// The signature in the image directory cannot be read.
    #[error(transparent)]
    Signature(#[from] SignatureError),
}

/// What to do about a damaged object.
fn advice(object: &str) -> &'static str {
    if object.starts_with("oci://") {
        "the registry has to remove the blob and the tag before `rewake push` can store the image again"
    } else if object.rsplit('/').nth(1) == Some(PACKS) {
        "`rewake verify` marks it, and then `rewake push` of the image stores its chunks again"
    } else {
        "remove the image with `rewake rm`, and push it again"
    }
}

/// The result of this crate's functions.
pub type Result<T, E = ImageStoreError> = std::result::Result<T, E>;
