// SPDX-License-Identifier: MIT OR Apache-2.0
//! A digest of the parsed image files: of the bytes that the parser read, not of a second read.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Read};
use std::sync::{Arc, Mutex, PoisonError};

/// A BLAKE3 hash that identifies an image: see [`crate::ImageDir::digest`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Digest(pub [u8; 32]);

/// Writes 64 lower-case hexadecimal digits; a precision (`{:.12}`) limits them.
impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits: String = self.0.iter().map(|byte| format!("{byte:02x}")).collect();
        f.pad(&digits)
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({self})")
    }
}

/// Hashes of the files that an image directory and its parents have parsed, by their paths in the image.
#[derive(Debug, Clone, Default)]
pub(crate) struct ParsedFiles(Arc<Mutex<BTreeMap<String, blake3::Hash>>>);

impl ParsedFiles {
    /// Makes a reader that hashes the bytes it reads, and notes the hash under `name` when it is dropped.
    pub(crate) fn reader<R: Read>(&self, name: String, input: R) -> HashingReader<R> {
        HashingReader { input, hasher: Box::new(blake3::Hasher::new()), name, parsed: self.clone() }
    }

    /// Returns one hash of all names and their files' hashes.
    pub(crate) fn digest(&self) -> Digest {
        let mut hasher = blake3::Hasher::new();
        for (name, hash) in &*self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            hasher.update(&(name.len() as u64).to_le_bytes()).update(name.as_bytes()).update(hash.as_bytes());
        }
        Digest(*hasher.finalize().as_bytes())
    }
}

/// A reader that hashes its bytes as they are read.
#[derive(Debug)]
pub(crate) struct HashingReader<R> {
    input: R,
    hasher: Box<blake3::Hasher>,
    name: String,
    parsed: ParsedFiles,
}

impl<R: Read> Read for HashingReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.input.read(buffer)?;
        self.hasher.update(&buffer[..count]);
        Ok(count)
    }
}

impl<R> Drop for HashingReader<R> {
    fn drop(&mut self) {
        let mut files = self.parsed.0.lock().unwrap_or_else(PoisonError::into_inner);
        files.insert(std::mem::take(&mut self.name), self.hasher.finalize());
    }
}
