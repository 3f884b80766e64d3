// SPDX-License-Identifier: MIT OR Apache-2.0
//! The files of an image, sent and received: all but the lazy pages, which it has not.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use rewake_criu_images::ImageDir;
use rewake_page_protocol::PageRun;

use crate::frame::{FILE_PIECE, Frame, FrameWriter};

/// Sends all files of a folder.
pub(crate) fn send(images: &Path, link: &FrameWriter) -> anyhow::Result<()> {
    for entry in fs::read_dir(images).with_context(|| format!("listing {}", images.display()))? {
        let path = entry?.path();
        if !path.is_file() {
            continue;
        }
        let name = path.file_name().and_then(|name| name.to_str()).context("the name of a file")?;
        let reading = || format!("reading {}", path.display());
        let file = File::open(&path).with_context(reading)?;
        let mut offset = 0;
        loop {
            let mut bytes = vec![0; FILE_PIECE];
            let len = file.read_at(&mut bytes, offset).with_context(reading)?;
            bytes.truncate(len);
            if len > 0 || offset == 0 {
                link.send(&Frame::File { name: name.to_owned(), offset, bytes })?;
            }
            if len == 0 {
                break;
            }
            offset += len as u64;
        }
    }
    Ok(())
}

/// Writes a part of a file that was received.
pub(crate) fn store(images: &Path, name: &str, offset: u64, bytes: &[u8]) -> anyhow::Result<()> {
    let path = place(images, name)?;
    let file = File::options().create(true).write(true).truncate(offset == 0).mode(0o600).open(&path);
    let file = file.with_context(|| format!("making {}", path.display()))?;
    file.write_all_at(bytes, offset).with_context(|| format!("writing {}", path.display()))
}

/// The lazy pages of all tasks of an image.
pub(crate) fn lazy_runs(images: &Path) -> anyhow::Result<Vec<(u32, PageRun)>> {
    let images = ImageDir::open(images)?;
    let mut runs = Vec::new();
    for task in images.tasks()?.iter().filter(|task| task.state.has_memory()) {
        for extent in images.remote_plan(task.pid)?.extents {
            runs.push((task.pid, PageRun::new(extent.vaddr, extent.pages)?));
        }
    }
    Ok(runs)
}

/// Where a file belongs: the name is the peer's.
fn place(images: &Path, name: &str) -> anyhow::Result<PathBuf> {
    let is_plain = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
    ensure!(
        is_plain && !name.is_empty() && !name.starts_with('.'),
        "a file named {name:?}: expected the name of an image's file"
    );
    Ok(images.join(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_stored_in_its_folder_only() {
        let folder = tempfile::tempdir().unwrap();
        store(folder.path(), "pages-1.img", 0, b"abc").unwrap();
        store(folder.path(), "pages-1.img", 3, b"de").unwrap();
        assert_eq!(fs::read(folder.path().join("pages-1.img")).unwrap(), b"abcde");
        store(folder.path(), "pages-1.img", 0, b"x").unwrap();
        assert_eq!(fs::read(folder.path().join("pages-1.img")).unwrap(), b"x");
        for name in ["", ".", "..", "../x", "/etc/x", "a/b", ".hidden", "a\0"] {
            assert!(store(folder.path(), name, 0, b"").is_err(), "{name:?}");
        }
    }
}
