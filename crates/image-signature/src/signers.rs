// SPDX-License-Identifier: MIT OR Apache-2.0
//! The signers that are accepted: a file as `ssh-keygen -Y verify -f` reads it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rewake_criu_images::{Digest, ImageDir};
use ssh_key::public::KeyData;
use ssh_key::{Algorithm, PublicKey};

use crate::error::{Result, SignatureError};
use crate::options::SignerOptions;
use crate::signature::ImageSignature;

/// The policy of a node: where this file exists, every image that is restored, pulled or cached needs a
/// signature of one of its signers.
pub const NODE_SIGNERS: &str = "/etc/rewake/signers";

/// The most bytes of a file of signers.
const MAX_SIGNERS: u64 = 1 << 20;

/// A file of allowed signers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Signers {
    path: PathBuf,
    lines: Vec<SignerLine>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct SignerLine {
    number: usize,
    principals: String,
    options: SignerOptions,
    key: KeyData,
}

impl Signers {
    /// Reads a file of allowed signers.
    ///
    /// # Errors
    /// It cannot be read, or has a line that cannot be honoured.
    pub fn read(path: &Path) -> Result<Self> {
        let io = |source| SignatureError::Io { act: "read", file: path.to_owned(), source };
        let length = fs::metadata(path).map_err(io)?.len();
        if length > MAX_SIGNERS {
            let what = format!("the file has {length} bytes, at most {MAX_SIGNERS} are read");
            return Err(SignatureError::Signers { signers: path.to_owned(), line: 1, what });
        }
        Self::parse(path, &fs::read_to_string(path).map_err(io)?)
    }

    /// Reads the policy of this node; `None` if it has none.
    ///
    /// # Errors
    /// As for [`Signers::read`]. A file that cannot be read is no absent one.
    pub fn of_node() -> Result<Option<Self>> {
        match Self::read(Path::new(NODE_SIGNERS)) {
            Err(SignatureError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(None),
            read => read.map(Some),
        }
    }

    /// Reads the files that were given, and the policy of this node. An image needs a signature that each of
    /// them accepts.
    ///
    /// # Errors
    /// As for [`Signers::read`].
    pub fn all(given: &[PathBuf]) -> Result<Vec<Self>> {
        let mut all: Vec<Self> = given.iter().map(|path| Self::read(path)).collect::<Result<_>>()?;
        all.extend(Self::of_node()?);
        Ok(all)
    }

    /// Checks the image in a directory, whose manifest has this id; `None` if it has no manifest. `covered`:
    /// the manifest names the id of each parent.
    ///
    /// # Errors
    /// As for [`Signers::check`], or the image or a parent is not sealed. Without signers there is none.
    pub fn check_image(all: &[Self], images: &ImageDir, id: Option<Digest>, covered: bool) -> Result<()> {
        let Some(first) = all.first() else { return Ok(()) };
        let id = id.ok_or_else(|| SignatureError::Unsealed { signers: first.path.clone() })?;
        let signature = ImageSignature::read(images)?;
        for signers in all {
            signers.check(id, signature.as_deref())?;
        }
        if covered { Ok(()) } else { Err(SignatureError::UnsealedParent { id }) }
    }

    fn parse(path: &Path, text: &str) -> Result<Self> {
        let mut lines = Vec::new();
        for (at, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let number = at + 1;
            let parsed = SignerLine::parse(number, line);
            let refused = |what| SignatureError::Signers { signers: path.to_owned(), line: number, what };
            lines.extend(parsed.map_err(refused)?);
        }
        Ok(Self { path: path.to_owned(), lines })
    }

    /// The path of the file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Checks the signature of an image. Returns the principals of the signer's line.
    ///
    /// # Errors
    /// The image has no signature, a damaged one, or one of another image or namespace; no line has its key,
    /// or the lines with the key do not permit it now.
    pub fn check(&self, id: Digest, signature: Option<&[u8]>) -> Result<&str> {
        self.check_at(id, signature, SystemTime::now())
    }

    fn check_at(&self, id: Digest, signature: Option<&[u8]>, now: SystemTime) -> Result<&str> {
        let Some(bytes) = signature else {
            return Err(SignatureError::Unsigned { id, signers: self.path.clone() });
        };
        let signature = ImageSignature::parse(id, bytes)?;
        signature.check()?;
        let mut refused = None;
        for line in self.lines.iter().filter(|line| line.key == *signature.sealed.public_key()) {
            match line.options.refusal(now) {
                None => return Ok(&line.principals),
                Some(what) => refused = Some((line, what)),
            }
        }
        let signers = self.path.clone();
        Err(match refused {
            None => SignatureError::Stranger { id, signer: signature.fingerprint(), signers },
            Some((line, what)) => {
                let signer = line.principals.clone();
                SignatureError::NotPermitted { id, signer, signers, line: line.number, what }
            }
        })
    }
}

impl SignerLine {
    /// Reads a line: principals, options if there are some, type and text of the key, and a comment. `None`
    /// for a key of another kind than signatures are checked with.
    fn parse(number: usize, line: &str) -> std::result::Result<Option<Self>, String> {
        const EXPECTED: &str = "expected principals, options, and a public key";
        let (principals, rest) = field(line).ok_or(EXPECTED)?;
        let principals = principals.trim_matches('"').to_owned();
        let (options, key) = match PublicKey::from_openssh(rest) {
            Ok(key) => (SignerOptions::default(), key),
            Err(_) => {
                let (options, rest) = field(rest).ok_or(EXPECTED)?;
                // A key that is damaged is none of the options.
                if options.starts_with("ssh-") || options.starts_with("ecdsa-") || options.starts_with("sk-")
                {
                    return Err(format!("{EXPECTED}: the key is damaged"));
                }
                let options = SignerOptions::parse(options)?;
                let key = PublicKey::from_openssh(rest).map_err(|error| format!("{EXPECTED}: {error}"))?;
                (options, key)
            }
        };
        let is_checked = matches!(key.algorithm(), Algorithm::Ed25519 | Algorithm::SkEd25519);
        Ok(is_checked.then(|| Self { number, principals, options, key: key.key_data().clone() }))
    }
}

/// Splits a line at the first blank that is in no quotes.
fn field(line: &str) -> Option<(&str, &str)> {
    let mut is_quoted = false;
    let end = line.find(|char: char| {
        is_quoted ^= char == '"';
        char.is_ascii_whitespace() && !is_quoted
    })?;
    Some((&line[..end], line[end..].trim_start()))
}

#[cfg(test)]
mod tests;
