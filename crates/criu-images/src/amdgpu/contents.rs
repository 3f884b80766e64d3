// SPDX-License-Identifier: MIT OR Apache-2.0
//! The frame of the files: the length of the contents as a little-endian `u64`, then the contents.

use std::io::Read;
use std::path::Path;

use crate::dir::io_error;
use crate::error::{ImageError, Result};

/// Bytes of the length.
pub(super) const HEADER: u64 = 8;
/// The longest contents that are accepted, in bytes: about 320 per buffer, and some KiB per queue.
pub const CONTENTS_LIMIT: u64 = 512 << 20;

/// Reads the contents of a file of `len` bytes. Bytes after the contents are ignored: CRIU's plugin does not
/// truncate a longer file.
pub(crate) fn contents(file: &Path, mut input: impl Read, len: u64) -> Result<Vec<u8>> {
    if len < HEADER {
        return Err(damaged(file, 0, "the length of the contents in 8 bytes", format!("{len} bytes in all")));
    }
    let mut header = [0; size_of::<u64>()];
    input.read_exact(&mut header).map_err(|error| io_error("read", file, error))?;
    let size = u64::from_le_bytes(header);
    if size > CONTENTS_LIMIT {
        return Err(ImageError::TooMany {
            file: file.to_path_buf(),
            offset: 0,
            what: "bytes of contents",
            found: size,
            limit_name: "CONTENTS_LIMIT",
            limit: CONTENTS_LIMIT,
        });
    }
    let left = len - HEADER;
    if size > left {
        return Err(damaged(
            file,
            0,
            format!("contents of {size} bytes"),
            format!("{left} bytes to the end"),
        ));
    }
    // Both limits are below the size of an address space.
    let mut contents = vec![0; usize::try_from(size).unwrap_or(usize::MAX)];
    input.read_exact(&mut contents).map_err(|error| io_error("read", file, error))?;
    Ok(contents)
}

/// Makes a whole file with these contents.
pub(crate) fn file_of(contents: &[u8]) -> Vec<u8> {
    [&(contents.len() as u64).to_le_bytes(), contents].concat()
}

pub(super) fn damaged(
    file: &Path,
    offset: u64,
    expected: impl Into<String>,
    found: impl Into<String>,
) -> ImageError {
    ImageError::Damaged { file: file.to_path_buf(), offset, expected: expected.into(), found: found.into() }
}
