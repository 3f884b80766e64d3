// SPDX-License-Identifier: MIT OR Apache-2.0
//! The names of a store's objects. Two pushes never write an object of the same name, except that of an
//! image's name.

use std::fs::File;
use std::io::{self, Read as _};

use rewake_criu_images::Digest;

pub(crate) use crate::error::PACKS;
use crate::url::is_image_name;

/// Folders of a store.
pub(crate) const NAMES: &str = "names";
pub(crate) const INDEXES: &str = "indexes";
pub(crate) const MANIFESTS: &str = "manifests";
/// Recorded working sets: an image's name says which is its own.
pub(crate) const WORKING_SETS: &str = "working-sets";
/// An index with an object of its name here is removed later.
pub(crate) const REMOVED: &str = "removed";
/// A pack with an object of its name here has wrong bytes: no push uses it.
pub(crate) const DAMAGED: &str = "damaged";
/// Empty objects that say what time it is.
pub(crate) const CLOCK: &str = "clock";

/// Digits of a hash in a name.
const HASH_DIGITS: usize = 32;
/// Bytes of a random number in a name.
const RANDOM: usize = 8;

/// Returns a random number in hexadecimal digits.
pub(crate) fn random() -> io::Result<String> {
    let mut bytes = [0; RANDOM];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes.map(|byte| format!("{byte:02x}")).concat())
}

/// Returns the first part of the name of an object with this hash.
pub(crate) fn hash_part(digest: Digest) -> String {
    format!("{digest:.HASH_DIGITS$}")
}

/// Returns the first part of a name that [`hash_part`] and [`random`] made.
pub(crate) fn hash_of(name: &str) -> Option<&str> {
    let (hash, random) = name.split_once('-')?;
    (hash.len() == HASH_DIGITS && is_hex(hash) && is_random(random)).then_some(hash)
}

/// Whether this is the name of a pack.
pub(crate) fn is_pack(name: &str) -> bool {
    hash_of(name).is_some()
}

/// Whether this is the name of an index.
pub(crate) fn is_version(name: &str) -> bool {
    hash_of(name).is_some()
}

/// Whether this is the name of a working set.
pub(crate) fn is_working_set(name: &str) -> bool {
    hash_of(name).is_some()
}

/// Whether a folder of a store may have an object of this name. Others are not the store's, and are left
/// alone.
pub(crate) fn is_object(folder: &str, name: &str) -> bool {
    match folder {
        NAMES => is_image_name(name),
        CLOCK => is_random(name),
        _ => hash_of(name).is_some(),
    }
}

fn is_random(text: &str) -> bool {
    text.len() == 2 * RANDOM && is_hex(text)
}

fn is_hex(text: &str) -> bool {
    text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}
