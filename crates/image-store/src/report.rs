// SPDX-License-Identifier: MIT OR Apache-2.0
//! What is known of an image in a store, and what the acts on a store report.

use std::fmt;
use std::time::Duration;

use rewake_criu_images::Digest;

use crate::error::ImageStoreError;

/// The age from which what no image uses is removed: a push and the packs that it may reuse are younger.
pub const GRACE: Duration = Duration::from_secs(24 * 3600);

/// An image in a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredImage {
    /// Its name in the store.
    pub name: String,
    /// The name of its index and manifest: other for each push.
    pub version: String,
    /// The image id.
    pub id: Digest,
    /// The length of its manifest in bytes.
    pub manifest_length: u64,
    /// Its files.
    pub files: u64,
    /// The sum of their lengths.
    pub bytes: u64,
    /// The object with its recorded working set; none in an index, as a later push may bring another one.
    pub working_set: Option<String>,
    /// The signature of its id; none in an index, as the image may be signed later.
    pub signature: Option<Vec<u8>>,
}

/// What was stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StorePushReport {
    /// The image id.
    pub id: Digest,
    /// The files of the image.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Bytes of chunks that the store had, of this image and of others.
    pub shared: u64,
    /// Bytes that were written: packs, manifest and index.
    pub written: u64,
    /// Bytes of packs that an earlier push had written before it ended.
    pub kept: u64,
    /// Bytes of the recorded working set, if it was written.
    pub working_set: u64,
    /// The store had this image under this name: at most its working set was written.
    pub had: bool,
}

/// What was compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StoreVerifyReport {
    /// The image id.
    pub id: Digest,
    /// Files in the manifest.
    pub files: u64,
    /// The sum of their lengths.
    pub bytes: u64,
    /// Bytes of the chunks that were read: each once.
    pub read: u64,
    /// Number of wrong chunks: 0 if the image is as it was sealed.
    pub wrong: u64,
}

/// A chunk that the store does not have, or that is not as it was sealed.
#[derive(Debug)]
pub struct WrongChunk {
    /// The first file that has the chunk.
    pub file: String,
    /// Where the chunk is in it, in bytes.
    pub offset: u64,
    /// The length of the chunk in bytes.
    pub length: u32,
    /// What is wrong, and with which object.
    pub error: ImageStoreError,
}

impl fmt::Display for WrongChunk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { file, offset, length, error } = self;
        write!(f, "{file}: wrong bytes in the {length} from offset {offset}: {error}")
    }
}

/// What was removed, and what is left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GarbageReport {
    /// Indexes that were removed.
    pub removed_images: u64,
    /// Packs that were removed.
    pub removed_packs: u64,
    /// Their bytes.
    pub removed_bytes: u64,
    /// Packs that are left.
    pub packs: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Bytes of them that no image uses: in packs of which images use other bytes.
    pub unused: u64,
    /// Bytes of packs that no image uses, and that are too young to be removed.
    pub waiting: u64,
}
