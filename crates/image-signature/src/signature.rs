// SPDX-License-Identifier: MIT OR Apache-2.0
//! One signature of an image.

use std::fs;
use std::io::Read as _;
use std::path::Path;

use rewake_criu_images::{Digest, ImageDir};
use ssh_key::{Algorithm, HashAlg, LineEnding, PrivateKey, PublicKey, SshSig};

use crate::error::{Result, SignatureError};

/// The namespace of signatures of images: a signature that the same key has made of a file or of a commit is
/// none of an image.
pub const NAMESPACE: &str = "rewake-image";
/// The name of the signature in an image directory, beside the manifest.
pub const SIGNATURE_NAME: &str = "rewake-signature";
/// The most bytes of a signature. One with an Ed25519 key has 300, and the object of a store that it is in
/// has 4 KiB at most.
pub const MAX_SIGNATURE: u64 = 2 << 10;

/// The signature of an image id.
#[derive(Debug, Clone)]
pub struct ImageSignature {
    pub(crate) sealed: SshSig,
    id: Digest,
}

/// What is signed: a line, so that `ssh-keygen` can sign what `echo` prints.
fn message(id: Digest) -> String {
    format!("{id}\n")
}

impl ImageSignature {
    /// Reads the signature of an image.
    ///
    /// # Errors
    /// The bytes are no signature in OpenSSH's format, or one of another namespace.
    pub fn parse(id: Digest, bytes: &[u8]) -> Result<Self> {
        let damaged = |what: String| SignatureError::Damaged { id, what };
        if bytes.len() as u64 > MAX_SIGNATURE {
            return Err(damaged(format!("{} bytes, at most {MAX_SIGNATURE}", bytes.len())));
        }
        let sealed = SshSig::from_pem(bytes).map_err(|error| damaged(error.to_string()))?;
        if sealed.namespace() != NAMESPACE {
            return Err(SignatureError::Namespace { id, found: sealed.namespace().to_owned() });
        }
        Ok(Self { sealed, id })
    }

    /// Reads the bytes of the signature in an image directory; `None` without one.
    ///
    /// # Errors
    /// The file cannot be read, or is too long for a signature.
    pub fn read(images: &ImageDir) -> Result<Option<Vec<u8>>> {
        let Some((file, opened, _)) = images.file(SIGNATURE_NAME)? else { return Ok(None) };
        let mut bytes = Vec::new();
        let read = opened.take(MAX_SIGNATURE + 1).read_to_end(&mut bytes);
        read.map_err(|source| SignatureError::Io { act: "read", file, source })?;
        Ok(Some(bytes))
    }

    /// Signs an image with a private key of OpenSSH. Returns the text of the signature.
    ///
    /// # Errors
    /// The key cannot be read, is encrypted, or is no Ed25519 key.
    pub fn sign(id: Digest, key: &Path) -> Result<String> {
        let refused = |what: String| SignatureError::Key { key: key.to_owned(), what };
        let text =
            fs::read(key).map_err(|source| SignatureError::Io { act: "read", file: key.into(), source })?;
        let by_hand = format!(
            "sign with ssh-keygen itself: `echo {id} | ssh-keygen -Y sign -n {NAMESPACE} -f KEY > \
             IMG/{SIGNATURE_NAME}`"
        );
        if PublicKey::from_openssh(&String::from_utf8_lossy(&text)).is_ok() {
            return Err(refused(format!(
                "a public key: give the private one, or, for a key of an agent, {by_hand}"
            )));
        }
        let private = PrivateKey::from_openssh(&text)
            .map_err(|error| refused(format!("no private key of OpenSSH: {error}; {by_hand}")))?;
        if private.is_encrypted() {
            return Err(refused(format!("the key has a passphrase; {by_hand}")));
        }
        if private.algorithm() != Algorithm::Ed25519 {
            let found = private.algorithm();
            return Err(refused(format!("a key of {found}, expected one of `ssh-keygen -t ed25519`")));
        }
        let signed = private.sign(NAMESPACE, HashAlg::Sha512, message(id).as_bytes());
        let text = signed.and_then(|signed| signed.to_pem(LineEnding::LF));
        text.map_err(|error| refused(error.to_string()))
    }

    /// The fingerprint of the key, as `ssh-keygen -l` shows it.
    #[must_use]
    pub fn fingerprint(&self) -> String {
        self.sealed.public_key().fingerprint(HashAlg::Sha256).to_string()
    }

    /// Checks that the key of the signature has made it, of this image.
    ///
    /// # Errors
    /// It has not.
    pub fn check(&self) -> Result<()> {
        let key = PublicKey::from(self.sealed.public_key().clone());
        key.verify(NAMESPACE, message(self.id).as_bytes(), &self.sealed).map_err(|error| match error {
            ssh_key::Error::AlgorithmUnknown | ssh_key::Error::AlgorithmUnsupported { .. } => {
                let what = format!("a key of {}, and only Ed25519 keys are checked", key.algorithm());
                SignatureError::Damaged { id: self.id, what }
            }
            _ => SignatureError::AnotherImage { id: self.id, signer: self.fingerprint() },
        })
    }

    /// The image.
    #[must_use]
    pub fn id(&self) -> Digest {
        self.id
    }
}
