// SPDX-License-Identifier: MIT OR Apache-2.0
//! The files of an image, sent and received: all but the lazy pages, which it has not.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use rewake_criu_images::{FILE_MODE, ImageDir, is_gpu_pages_file};
use rewake_page_protocol::PageRun;

use crate::frame::{FILE_PIECE, Frame, FrameWriter};

/// Why files were not sent.
#[derive(Debug)]
pub(crate) enum SendFailure {
    /// They cannot be read on this host.
    Unreadable(anyhow::Error),
    /// The connection is lost, and another one may follow.
    Disconnected(anyhow::Error),
}

impl From<anyhow::Error> for SendFailure {
    fn from(error: anyhow::Error) -> Self {
        Self::Unreadable(error)
    }
}

/// Sends all files of a folder. With `arriving`, files with GPU memory are not sent, and these frames name
/// them.
pub(crate) fn send(images: &Path, link: &FrameWriter, arriving: Option<&[Frame]>) -> Result<(), SendFailure> {
    for frame in arriving.unwrap_or_default() {
        link.send(frame).map_err(SendFailure::Disconnected)?;
    }
    let listing = || format!("listing {}", images.display());
    for entry in fs::read_dir(images).with_context(listing)? {
        let path = entry.with_context(listing)?.path();
        if !path.is_file() {
            continue;
        }
        let name = text_name(&path)?;
        if arriving.is_some() && is_gpu_pages_file(name) {
            continue;
        }
        let reading = || format!("reading {}", path.display());
        let file = File::open(&path).with_context(reading)?;
        let mut offset = 0;
        loop {
            let mut bytes = vec![0; FILE_PIECE];
            let len = file.read_at(&mut bytes, offset).with_context(reading)?;
            bytes.truncate(len);
            if len > 0 || offset == 0 {
                let frame = Frame::File { name: name.to_owned(), offset, bytes };
                link.send(&frame).map_err(SendFailure::Disconnected)?;
            }
            if len == 0 {
                break;
            }
            offset += len as u64;
        }
    }
    Ok(())
}

/// The name of a file of an image, which is text: CRIU and its plugins give no other one.
pub(crate) fn text_name(file: &Path) -> anyhow::Result<&str> {
    let name = file.file_name().and_then(|name| name.to_str());
    name.with_context(|| format!("{}: its name is not UTF-8, so it is no file of an image", file.display()))
}

/// The bytes of all files of a folder; without GPU memory if that arrives later.
pub(crate) fn size(images: &Path, gpu_on_demand: bool) -> anyhow::Result<u64> {
    let listing = || format!("listing {}", images.display());
    let mut size = 0;
    for entry in fs::read_dir(images).with_context(listing)? {
        let entry = entry.with_context(listing)?;
        if !gpu_on_demand || !entry.file_name().to_str().is_some_and(is_gpu_pages_file) {
            size += entry.metadata().with_context(listing)?.len();
        }
    }
    Ok(size)
}

/// Writes a part of a file that was received.
pub(crate) fn store(images: &Path, name: &str, offset: u64, bytes: &[u8]) -> anyhow::Result<()> {
    let path = place(images, name)?;
    let file = File::options().create(true).write(true).truncate(offset == 0).mode(FILE_MODE).open(&path);
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
pub(crate) fn place(images: &Path, name: &str) -> anyhow::Result<PathBuf> {
    let is_plain = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
    ensure!(
        is_plain && !name.is_empty() && !name.starts_with('.'),
        "a file named {name:?}: expected the name of an image's file"
    );
    Ok(images.join(name))
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::ffi::OsStrExt as _;

    use super::*;
    use crate::arriving_files::ArrivingFiles;

    #[test]
    fn files_that_cannot_be_read_are_no_lost_connection() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let link = FrameWriter::new(TcpStream::connect(listener.local_addr().unwrap()).unwrap().into());
        let unreadable = send(Path::new("/no/such/folder"), &link, None).unwrap_err();
        assert!(matches!(unreadable, SendFailure::Unreadable(_)), "{unreadable:?}");
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("core-1.img"), "x").unwrap();
        assert_eq!(size(folder.path(), false).unwrap(), 1);
        send(folder.path(), &link, None).unwrap();
        link.close();
        let lost = send(folder.path(), &link, None).unwrap_err();
        assert!(matches!(lost, SendFailure::Disconnected(_)), "{lost:?}");
    }

    #[test]
    fn gpu_memory_that_arrives_later_is_named_and_not_sent() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let folder = tempfile::tempdir().unwrap();
        let name = "amdgpu-pages-1-00ab.img";
        fs::write(folder.path().join("core-1.img"), "x").unwrap();
        fs::write(folder.path().join(name), [3; 8200]).unwrap();
        assert_eq!([false, true].map(|later| size(folder.path(), later).unwrap()), [8201, 1]);
        let files = ArrivingFiles::open(folder.path()).unwrap().frames().unwrap();
        for arriving in [None, Some(files.as_slice())] {
            let link = FrameWriter::new(TcpStream::connect(listener.local_addr().unwrap()).unwrap().into());
            send(folder.path(), &link, arriving).unwrap();
            drop(link);
            let (mut stream, _) = listener.accept().unwrap();
            let frames: Vec<Frame> = std::iter::from_fn(|| Frame::read(&mut stream).unwrap()).collect();
            let sent = |frame: &Frame| matches!(frame, Frame::File { name: sent, .. } if sent == name);
            let named = |frame: &Frame| matches!(frame, Frame::ArrivingFile { number: 0, len: 8200, .. });
            let found = (frames.iter().any(sent), frames.iter().any(named));
            assert_eq!(found, (arriving.is_none(), arriving.is_some()), "{frames:?}");
        }
    }

    #[test]
    fn a_file_whose_name_is_not_utf_8_is_named_in_the_refusal() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let link = FrameWriter::new(TcpStream::connect(listener.local_addr().unwrap()).unwrap().into());
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(OsStr::from_bytes(b"caf\xe9.img")), "x").unwrap();
        let SendFailure::Unreadable(error) = send(folder.path(), &link, None).unwrap_err() else { panic!() };
        assert!(error.to_string().contains("caf\u{fffd}.img: its name is not UTF-8"), "{error:#}");
    }

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
