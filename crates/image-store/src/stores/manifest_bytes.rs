// SPDX-License-Identifier: MIT OR Apache-2.0
//! The bytes of an open manifest, and their hash: what is stored must be what was read.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt as _;

use rewake_criu_images::Digest;

/// Bytes of the hash at the end of a manifest.
const HASH: u64 = 32;

/// Reads an open manifest from its beginning. Other readers of the file do not move it.
pub(crate) struct ManifestBytes<'a> {
    file: &'a File,
    offset: u64,
    length: u64,
    /// Of all bytes before the hash.
    hasher: blake3::Hasher,
    hash: Vec<u8>,
}

impl<'a> ManifestBytes<'a> {
    pub(crate) fn of(file: &'a File, length: u64) -> Self {
        Self { file, offset: 0, length, hasher: blake3::Hasher::new(), hash: Vec::new() }
    }

    pub(crate) fn length(&self) -> u64 {
        self.length
    }

    /// Whether all bytes were read, and are the manifest of the image of this id.
    pub(crate) fn is_of(&self, id: Digest) -> bool {
        self.offset == self.length && self.hash == id.0 && self.hasher.finalize().as_bytes() == &id.0
    }
}

impl Read for ManifestBytes<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let end = self.length.saturating_sub(HASH);
        let is_before = self.offset < end;
        let left = if is_before { end - self.offset } else { self.length - self.offset };
        let most = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
        let read = self.file.read_at(&mut buffer[..most], self.offset)?;
        let bytes = &buffer[..read];
        if is_before {
            self.hasher.update(bytes);
        } else {
            self.hash.extend(bytes);
        }
        self.offset += read as u64;
        Ok(read)
    }
}
