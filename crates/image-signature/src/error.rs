// SPDX-License-Identifier: MIT OR Apache-2.0
//! Why an image was not signed, or its signature is not accepted.

use std::io;
use std::path::PathBuf;

use rewake_criu_images::{Digest, ImageError};

use crate::signature::{NAMESPACE, SIGNATURE_NAME};

/// Each message is one line, with what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SignatureError {
    /// The image has no signature.
    #[error(
        "image {id} is not signed, and {} requires a signature: sign it with `rewake seal --sign KEY`",
        signers.display()
    )]
    Unsigned {
        /// The image.
        id: Digest,
        /// The file of signers.
        signers: PathBuf,
    },
    /// The image has no manifest, so it has no id that could be signed.
    #[error(
        "{} requires a signature, and the image is not sealed: run `rewake seal --sign KEY`",
        signers.display()
    )]
    Unsealed {
        /// The file of signers.
        signers: PathBuf,
    },
    /// The parent has no id in the manifest, so no signature covers it.
    #[error(
        "image {id} is signed, but its parent was not sealed before it, so the signature does not cover the \
         parent: seal the parent, then this image again"
    )]
    UnsealedParent {
        /// The image.
        id: Digest,
    },
    /// The bytes are no signature.
    #[error("the signature of image {id} ({SIGNATURE_NAME}) is damaged: {what}; sign the image again")]
    Damaged {
        /// The image.
        id: Digest,
        /// What is wrong.
        what: String,
    },
    /// The signature is of something else than images.
    #[error(
        "the signature of image {id} is for the namespace {found:?}, expected {NAMESPACE:?}: sign the image \
         id with `ssh-keygen -Y sign -n {NAMESPACE}`"
    )]
    Namespace {
        /// The image.
        id: Digest,
        /// The namespace of the signature.
        found: String,
    },
    /// The signature is of another image.
    #[error(
        "the signature of {signer} is not one of image {id}: the manifest or the signature was replaced; \
         copy the image again, or sign it again"
    )]
    AnotherImage {
        /// The image.
        id: Digest,
        /// The key.
        signer: String,
    },
    /// No line of the file has the key.
    #[error("image {id} is signed by {signer}, and {} has no line with this key", signers.display())]
    Stranger {
        /// The image.
        id: Digest,
        /// The key.
        signer: String,
        /// The file of signers.
        signers: PathBuf,
    },
    /// The line with the key does not permit this signature.
    #[error(
        "image {id} is signed by {signer}, which {} line {line} does not permit: {what}",
        signers.display()
    )]
    NotPermitted {
        /// The image.
        id: Digest,
        /// The principals of the line.
        signer: String,
        /// The file of signers.
        signers: PathBuf,
        /// The line, from 1.
        line: usize,
        /// Why not.
        what: String,
    },
    /// A line of the file cannot be used.
    #[error("{} line {line}: {what}", signers.display())]
    Signers {
        /// The file.
        signers: PathBuf,
        /// The line, from 1.
        line: usize,
        /// What is wrong, and what to do.
        what: String,
    },
    /// The key cannot sign.
    #[error("{}: {what}", key.display())]
    Key {
        /// The file of the key.
        key: PathBuf,
        /// Why, and what to do.
        what: String,
    },
    /// The image directory cannot be read.
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
pub type Result<T, E = SignatureError> = std::result::Result<T, E>;
