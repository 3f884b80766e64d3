// SPDX-License-Identifier: MIT OR Apache-2.0
//! Records the working set of GPU buffers in a file of the image directory, in the order of first accesses.
//! A later restore loads those first.

use std::collections::BTreeSet;
use std::os::fd::{AsFd as _, OwnedFd};

use anyhow::{Context as _, ensure};
use serde::{Deserialize, Serialize};

use crate::gpu::sidecar_file;

/// The file's name in the image directory.
pub(super) const NAME: &str = "rewake-working-set.json";
/// Its name in earlier releases.
const EARLIER_NAME: &str = "rewake-order.json";
const VERSION: u32 = 1;
/// The most buffers of all processes together. Later ones gain nothing by their place, and the file is read
/// while processes run.
const MOST: usize = 1 << 14;
/// The most bytes of a file with [`MOST`] buffers.
const MOST_BYTES: u64 = 1 << 20;

/// The file's contents.
#[derive(Debug, Serialize, Deserialize)]
struct WorkingSetFile {
    version: u32,
    touched: Vec<BufferId>,
}

/// A buffer, by its names in the image, which are the same in each restore.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct BufferId {
    /// N of its process's `amdgpu-kfd-N.img`.
    pub(super) kfd: u32,
    /// The buffer's number there.
    pub(super) buffer: usize,
}

/// Writes the file completely or not at all, and replaces an earlier one. Keeps the first [`MOST`] buffers,
/// and returns how many.
///
/// # Errors
/// The directory cannot be written to.
pub(super) fn write(images: &OwnedFd, mut touched: Vec<BufferId>) -> anyhow::Result<usize> {
    touched.truncate(MOST);
    let count = touched.len();
    let mut text = serde_json::to_vec(&WorkingSetFile { version: VERSION, touched })?;
    text.push(b'\n');
    sidecar_file::write(images.as_fd(), NAME, &text)?;
    Ok(count)
}

/// Returns the recorded buffers, each once; none if the file does not exist. `is_there` says whether the
/// image has such a buffer.
///
/// # Errors
/// The file cannot be read, or was not written for this image.
pub(super) fn read(images: &OwnedFd, is_there: impl Fn(BufferId) -> bool) -> anyhow::Result<Vec<BufferId>> {
    let names = (NAME, EARLIER_NAME);
    let parse = |text: &[u8]| parse(text, &is_there);
    Ok(sidecar_file::read_renamed(images.as_fd(), names, MOST_BYTES, parse)?.unwrap_or_default())
}

fn parse(text: &[u8], is_there: impl Fn(BufferId) -> bool) -> anyhow::Result<Vec<BufferId>> {
    let WorkingSetFile { version, mut touched } = serde_json::from_slice(text).context("it is damaged")?;
    ensure!(version == VERSION, "it is of version {version}, this program knows {VERSION}");
    ensure!(touched.len() <= MOST, "it has {} buffers, where {MOST} are the most", touched.len());
    if let Some(BufferId { kfd, buffer }) = touched.iter().find(|of| !is_there(**of)) {
        anyhow::bail!("the image has no buffer {buffer} of process {kfd}: is it of another dump?");
    }
    let mut seen = BTreeSet::new();
    touched.retain(|of| seen.insert(*of));
    Ok(touched)
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    fn images() -> (tempfile::TempDir, OwnedFd) {
        let folder = tempfile::tempdir().unwrap();
        let open = File::open(folder.path()).unwrap().into();
        (folder, open)
    }

    fn of(kfd: u32, buffer: usize) -> BufferId {
        BufferId { kfd, buffer }
    }

    /// The image has processes 3 and 4 with a hundred buffers each.
    fn is_there(of: BufferId) -> bool {
        [3, 4].contains(&of.kfd) && of.buffer < 100
    }

    #[test]
    fn a_working_set_is_read_in_order_and_a_later_one_replaces_it() {
        let (folder, images) = images();
        assert_eq!(read(&images, is_there).unwrap(), []);
        let touched = vec![of(4, 7), of(3, 99), of(4, 0)];
        assert_eq!(write(&images, touched.clone()).unwrap(), 3);
        assert_eq!(read(&images, is_there).unwrap(), touched);
        write(&images, vec![of(3, 1)]).unwrap();
        assert_eq!(read(&images, is_there).unwrap(), [of(3, 1)]);
        assert_eq!(folder.path().read_dir().unwrap().count(), 1, "nothing else is left there");
    }

    #[test]
    fn a_file_of_an_earlier_release_is_read_until_a_new_one_is_written() {
        let (folder, images) = images();
        write(&images, vec![of(4, 7), of(3, 99)]).unwrap();
        std::fs::rename(folder.path().join(NAME), folder.path().join("rewake-order.json")).unwrap();
        assert_eq!(read(&images, is_there).unwrap(), [of(4, 7), of(3, 99)]);
        let error = format!("{:#}", read(&images, |_| false).unwrap_err());
        assert!(error.starts_with("rewake-order.json, "), "the error names the file: {error}");
        write(&images, vec![of(3, 1)]).unwrap();
        assert_eq!(read(&images, is_there).unwrap(), [of(3, 1)]);
    }

    #[test]
    fn as_many_as_can_be_written_can_be_read() {
        let (_folder, images) = images();
        let most = (0..=MOST).map(|buffer| of(u32::MAX, usize::MAX - buffer)).collect();
        assert_eq!(write(&images, most).unwrap(), MOST);
        assert_eq!(read(&images, |_| true).unwrap().len(), MOST);
    }

    #[test]
    fn a_file_that_makes_no_sense_is_refused() {
        let (folder, images) = images();
        let error = |text: &[u8]| {
            std::fs::write(folder.path().join(NAME), text).unwrap();
            format!("{:#}", read(&images, is_there).unwrap_err())
        };
        for text in ["", "[]", r#"{"version":1,"touched":[{"kfd":3,"buffer":-1}]}"#, r#"{"version":1,"#] {
            assert!(error(text.as_bytes()).starts_with("it is damaged: "), "{text}");
        }
        assert!(error(br#"{"version":2,"touched":[]}"#).contains("version 2"));
        assert!(
            error(br#"{"version":1,"touched":[{"kfd":3,"buffer":100}]}"#)
                .contains("no buffer 100 of process 3")
        );
        assert!(error(br#"{"version":1,"touched":[{"kfd":5,"buffer":0}]}"#).contains("of process 5"));
        assert!(error(&vec![b' '; usize::try_from(MOST_BYTES).unwrap() + 1]).contains("bytes"));
        let many = vec![r#"{"kfd":3,"buffer":1}"#; MOST + 1].join(",");
        assert!(error(format!(r#"{{"version":1,"touched":[{many}]}}"#).as_bytes()).contains("the most"));
        std::fs::remove_file(folder.path().join(NAME)).unwrap();
        std::fs::create_dir(folder.path().join(NAME)).unwrap();
        assert!(read(&images, is_there).is_err(), "a folder of that name");
    }

    #[test]
    fn a_buffer_that_is_listed_twice_has_its_first_place() {
        let (folder, images) = images();
        let twice = [of(3, 5), of(4, 5), of(3, 5)];
        let text = serde_json::to_vec(&WorkingSetFile { version: VERSION, touched: twice.to_vec() }).unwrap();
        std::fs::write(folder.path().join(NAME), text).unwrap();
        assert_eq!(read(&images, is_there).unwrap(), [of(3, 5), of(4, 5)]);
    }
}
