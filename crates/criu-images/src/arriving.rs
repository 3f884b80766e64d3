// SPDX-License-Identifier: MIT OR Apache-2.0
//! The list of files with GPU memory that arrive while an image is restored: `rewake-arriving`, a name a
//! line.
//!
//! A migration's destination writes it before the restore begins. These files have their length, and zeros in
//! the place of what has not arrived. A number names each file to the other host: that of its line.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use crate::dir::{ImageDir, io_error};
use crate::error::{ImageError, Result};
use crate::memory_files::is_gpu_pages_file;

/// The name of the list.
pub const ARRIVING_NAME: &str = "rewake-arriving";
/// The most bytes of a list: enough for 8192 files of GPUs.
const MAX_LIST: u64 = 1 << 20;

impl ImageDir {
    /// Reads the names of the files that arrive, in the order of their numbers: the first is 0. Empty: all
    /// files are whole.
    ///
    /// # Errors
    /// The list cannot be read, is too long, or names a file that has no GPU memory.
    pub fn arriving_files(&self) -> Result<Vec<String>> {
        let Some((path, file, _)) = self.file(ARRIVING_NAME)? else { return Ok(Vec::new()) };
        let mut text = String::new();
        file.take(MAX_LIST + 1).read_to_string(&mut text).map_err(|error| io_error("read", &path, error))?;
        let damaged = |expected: &str, found: String| ImageError::Damaged {
            file: path.clone(),
            offset: 0,
            expected: expected.into(),
            found,
        };
        if text.len() as u64 > MAX_LIST {
            return Err(damaged("a list of 1 MiB at most", "a longer one".into()));
        }
        let names: Vec<String> = text.lines().map(str::to_owned).collect();
        for (at, name) in names.iter().enumerate() {
            if !is_gpu_pages_file(name) || name.contains('/') || names[..at].contains(name) {
                return Err(damaged("names of files with GPU memory, each once", format!("{name:?}")));
            }
        }
        Ok(names)
    }
}

/// Adds a file to the list of an image directory.
///
/// # Errors
/// It cannot be written.
pub fn add_arriving_file(images: &Path, name: &str) -> Result<()> {
    let path = images.join(ARRIVING_NAME);
    let list = File::options().append(true).create(true).mode(0o600).open(&path);
    let written = list.and_then(|mut list| list.write_all(format!("{name}\n").as_bytes()));
    written.map_err(|error| io_error("write", &path, error))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn files_are_listed_in_the_order_in_which_they_were_added() {
        let folder = tempfile::tempdir().unwrap();
        let images = ImageDir::open(folder.path()).unwrap();
        assert!(images.arriving_files().unwrap().is_empty());
        let names = ["amdgpu-pages-2-00ab.img", "amdgpu-pages-10-00ab.img"];
        names.iter().for_each(|name| add_arriving_file(folder.path(), name).unwrap());
        assert_eq!(images.arriving_files().unwrap(), names);
    }

    #[test]
    fn a_list_with_another_name_or_one_twice_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let images = ImageDir::open(folder.path()).unwrap();
        let good = "amdgpu-pages-1-1.img\n";
        let long = "x".repeat((1 << 20) + 1);
        for bad in ["pages-1.img\n", "amdgpu-pages-/../x.img\n", &good.repeat(2), "\n", &long] {
            fs::write(folder.path().join(ARRIVING_NAME), bad).unwrap();
            assert!(images.arriving_files().is_err(), "{bad:.40}");
        }
    }
}
