// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads the plugin's files in an image directory.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;

use nix::dir::Dir;
use nix::fcntl::{AtFlags, OFlag, openat};
use nix::sys::stat::{Mode, fstatat};
use rewake_criu_images::ImageDir;
use rewake_criu_images::amdgpu::{KfdImage, RenderImage};

/// The name of CRIU's image directory in messages: a plugin gets a descriptor and not a path.
pub(crate) const FOLDER: &str = "the image directory";

/// Sockets of criu-image-streamer. With `criu --stream` an image's files go through them once, in one
/// direction.
const STREAM_SOCKETS: [&str; 2] = ["streamer-capture.sock", "streamer-serve.sock"];

#[derive(Debug, thiserror::Error)]
#[error("GPU state cannot be streamed ({0} is in the image directory): run CRIU without --stream")]
struct StreamedImage(&'static str);

/// Refuses an image that is streamed: files that are written into the directory would be lost.
pub(crate) fn refuse_stream(folder: BorrowedFd<'_>) -> Answer<()> {
    match STREAM_SOCKETS.into_iter().find(|name| fstatat(folder, *name, AtFlags::empty()).is_ok()) {
        Some(name) => Err(StreamedImage(name).into()),
        None => Ok(()),
    }
}

/// The state of all GPU files of an image.
#[derive(Debug)]
pub(crate) struct Images {
    /// Processes by the id of their open `/dev/kfd`.
    pub(crate) kfd: Vec<(u32, KfdImage)>,
    /// Open render nodes by their file id.
    pub(crate) render: BTreeMap<u32, RenderImage>,
}

impl Images {
    /// Reads and checks all GPU files. Returns `None` if the image has no GPU files.
    pub(crate) fn read(folder: BorrowedFd<'_>) -> Answer<Option<Self>> {
        let (mut kfd, mut render) = (BTreeMap::new(), BTreeMap::new());
        let images = ImageDir::of(reopen(folder)?, Path::new(FOLDER))?;
        for name in names(folder)? {
            if let Some(id) = id_in(&name, "amdgpu-kfd-") {
                kfd.extend(images.kfd(id)?.map(|image| (id, image)));
            } else if let Some(id) = id_in(&name, "amdgpu-renderD-") {
                render.extend(images.render_node(id)?.map(|image| (id, image)));
            }
        }
        let none = kfd.is_empty() && render.is_empty();
        Ok((!none).then(|| Self { kfd: kfd.into_iter().collect(), render }))
    }
}

type Answer<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Returns N of `amdgpu-…-N.img`.
fn id_in(name: &str, start: &str) -> Option<u32> {
    let number = name.strip_prefix(start)?.strip_suffix(".img")?;
    // Only as the plugin writes it: no sign, no leading zeros.
    number.parse().ok().filter(|id: &u32| id.to_string() == number)
}

fn names(folder: BorrowedFd<'_>) -> Answer<Vec<String>> {
    let mut names = Vec::new();
    for entry in Dir::from_fd(reopen(folder)?)?.into_iter() {
        names.extend(entry?.file_name().to_str().ok().map(str::to_owned));
    }
    Ok(names)
}

/// Opens the folder again: a copy of a descriptor would share its position in the directory.
pub(crate) fn reopen(folder: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    Ok(openat(folder, ".", OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty())?)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::os::fd::AsFd as _;

    use super::*;

    fn images(folder: &Path) -> Answer<Option<Images>> {
        Images::read(File::open(folder).unwrap().as_fd())
    }

    #[test]
    fn an_image_without_gpu_state_has_none() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("amdgpu-pages-6-0000.img"), "").unwrap();
        fs::write(folder.path().join("amdgpu-kfd-007.img"), "").unwrap();
        assert!(images(folder.path()).unwrap().is_none());
    }

    #[test]
    fn files_are_found_by_their_names_and_ids() {
        let folder = tempfile::tempdir().unwrap();
        let put = |name: &str, bytes: Vec<u8>| fs::write(folder.path().join(name), bytes).unwrap();
        put("amdgpu-kfd-12.img", KfdImage { pid: 5, ..KfdImage::default() }.to_bytes());
        put("amdgpu-renderD-13.img", RenderImage { gpu_id: 9, contents: None }.to_bytes());
        let images = images(folder.path()).unwrap().unwrap();
        assert_eq!((images.kfd[0].0, images.kfd[0].1.pid), (12, 5));
        assert_eq!(images.render[&13].gpu_id, 9);
    }

    #[test]
    fn a_streamed_image_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let open = File::open(folder.path()).unwrap();
        refuse_stream(open.as_fd()).unwrap();
        for name in STREAM_SOCKETS {
            fs::write(folder.path().join(name), "").unwrap();
            let error = refuse_stream(open.as_fd()).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains("--stream"), "{error}");
            fs::remove_file(folder.path().join(name)).unwrap();
        }
    }

    #[test]
    fn a_damaged_file_is_named() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("amdgpu-kfd-12.img"), [1, 2]).unwrap();
        let error = images(folder.path()).unwrap_err().to_string();
        assert!(error.contains("amdgpu-kfd-12.img"), "{error}");
    }
}
