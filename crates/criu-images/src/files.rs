// SPDX-License-Identifier: MIT OR Apache-2.0
//! `files.img`: the files that tasks had open or mapped.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::Read;
use std::os::unix::ffi::OsStringExt as _;
use std::path::PathBuf;

use crate::error::{ImageError, Result};
use crate::frame::Records;
use crate::generated::FileEntry;

/// The most files that one image may have: four times the kernel's default limit for one process
/// (`fs.nr_open`).
pub const MAX_FILES: usize = 1 << 22;

/// Parses paths by file id.
pub(crate) fn parse<R: Read>(mut records: Records<R>) -> Result<BTreeMap<u32, Option<PathBuf>>> {
    let mut files: BTreeMap<u32, Option<PathBuf>> = BTreeMap::new();
    while let Some((offset, entry)) = records.message::<FileEntry>()? {
        let Some(id) = entry.id else {
            return Err(records.damaged(offset, "a file with an id", "one without"));
        };
        let path = match entry.reg {
            Some(reg) => match reg.name {
                Some(name) => Some(PathBuf::from(OsString::from_vec(name))),
                None => {
                    return Err(records.damaged(
                        offset,
                        "a file with its path",
                        format!("{id:#x} without a path"),
                    ));
                }
            },
            None => None,
        };
        if files.len() == MAX_FILES {
            return Err(ImageError::TooMany {
                file: records.file().to_path_buf(),
                offset,
                what: "files and more",
                found: MAX_FILES as u64,
                limit_name: "MAX_FILES",
                limit: MAX_FILES as u64,
            });
        }
        // CRIU finds a file by id and kind: only files with paths must have different ids.
        let known = files.entry(id).or_default();
        if known.is_some() && path.is_some() {
            return Err(records.damaged(offset, "every path once", format!("another path of {id:#x}")));
        }
        *known = known.take().or(path);
    }
    Ok(files)
}
