// SPDX-License-Identifier: MIT OR Apache-2.0
//! The files of an image that one side keeps open. Reads use few of them at a time: those that hold memory.

use std::fs::File;

/// Files that are kept open.
const OPEN_FILES: usize = 16;

/// The files that were used last, by their numbers in the manifest, the newest first.
#[derive(Debug, Default)]
pub struct OpenFiles(Vec<(u32, File)>);

impl OpenFiles {
    /// Returns a file, which `open` opens if it is not open. The one that was not used for longest may be
    /// closed.
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn get(&mut self, number: u32, open: impl FnOnce() -> anyhow::Result<File>) -> anyhow::Result<&File> {
        if let Some(place) = self.0.iter().position(|(open, _)| *open == number) {
            self.0[..=place].rotate_right(1);
        } else {
            let file = open()?;
            self.0.truncate(OPEN_FILES - 1);
            self.0.insert(0, (number, file));
        }
        Ok(&self.0[0].1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_that_was_not_used_for_longest_is_closed() {
        let (mut files, mut opened) = (OpenFiles::default(), Vec::new());
        let limit = u32::try_from(OPEN_FILES).unwrap();
        for number in (0..limit).chain([0, limit, 0, 1, 2]) {
            let open = || {
                opened.push(number);
                Ok(File::open("/dev/null")?)
            };
            files.get(number, open).unwrap();
        }
        // 1 was closed for `limit`, and 2 for 1.
        assert_eq!(opened, (0..=limit).chain([1, 2]).collect::<Vec<_>>());
        assert!(files.get(99, || anyhow::bail!("no file")).is_err());
    }
}
