// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads and writes Rewake's own files in an image directory. A file is written completely or not at all,
//! and read up to a bound.

use std::fs::File;
use std::io::Read as _;
use std::os::fd::BorrowedFd;

use anyhow::{Context as _, ensure};
use nix::fcntl::renameat;
use rewake_bo_contents::folder;

/// Writes the file and replaces an earlier one.
///
/// # Errors
/// The directory cannot be written to.
pub(crate) fn write(images: BorrowedFd<'_>, name: &str, bytes: &[u8]) -> anyhow::Result<()> {
    // The name until the file is complete; another restore's temporary file has another process id.
    let part = format!("{name}.{}", std::process::id());
    folder::write(images, &part, bytes)?;
    renameat(images, part.as_str(), images, name).with_context(|| format!("rename {part} to {name}"))
}

/// Returns the file's bytes, or `None` if the file does not exist.
///
/// # Errors
/// It cannot be read, or has more than `most` bytes.
pub(crate) fn read(images: BorrowedFd<'_>, name: &str, most: u64) -> anyhow::Result<Option<Vec<u8>>> {
    match folder::open(images, name) {
        Err(error) if error.is_missing() => Ok(None),
        file => bounded(file?, most).map(Some),
    }
}

/// Returns what `parse` makes of the file, or `None` if the file does not exist. A file of an earlier release,
/// which has `earlier_name`, is read if no other exists.
///
/// # Errors
/// As [`read`], and those of `parse`.
pub(crate) fn read_renamed<T>(
    images: BorrowedFd<'_>,
    (name, earlier_name): (&str, &str),
    most: u64,
    parse: impl Fn(&[u8]) -> anyhow::Result<T>,
) -> anyhow::Result<Option<T>> {
    if let Some(bytes) = read(images, name, most)? {
        return parse(&bytes).map(Some);
    }
    let earlier = read(images, earlier_name, most).and_then(|bytes| bytes.as_deref().map(&parse).transpose());
    earlier.with_context(|| format!("{earlier_name}, its name in earlier releases"))
}

fn bounded(file: File, most: u64) -> anyhow::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(most + 1).read_to_end(&mut bytes)?;
    ensure!(bytes.len() as u64 <= most, "it has more than {most} bytes");
    Ok(bytes)
}
