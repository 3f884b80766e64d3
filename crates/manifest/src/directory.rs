// SPDX-License-Identifier: MIT OR Apache-2.0
//! The files of an image directory that a manifest covers.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::ffi::OsStrExt as _;

use nix::errno::Errno;
use nix::fcntl::readlinkat;
use nix::unistd::fsync;
use rewake_criu_images::ImageDir;

use crate::error::{ManifestError, Result, io};
use crate::names::PARENT;

/// Returns the names of the files that are the image, which are the files that a restore reads. Logs,
/// statistics, sockets and files that users added are no part of it.
pub(crate) fn covered_files(images: &ImageDir) -> Result<BTreeSet<String>> {
    // By the descriptor: the path may name another directory by now.
    let entries = fs::read_dir(format!("/proc/self/fd/{}", images.as_fd().as_raw_fd()));
    let mut names = BTreeSet::new();
    for entry in entries.map_err(io("list", images.path()))? {
        let name = entry.map_err(io("list", images.path()))?.file_name();
        if !is_covered(name.as_bytes()) {
            continue;
        }
        let name =
            name.into_string().map_err(|name| ManifestError::Name { file: images.path().join(name) })?;
        names.insert(name);
    }
    Ok(names)
}

/// Whether a manifest covers files of this name.
#[must_use]
pub fn is_covered(name: &[u8]) -> bool {
    name.ends_with(b".img")
}

/// Opens a covered file; `None` where it does not exist.
pub(crate) fn open(images: &ImageDir, name: &str) -> Result<Option<(File, u64)>> {
    Ok(images.file(name)?.map(|(_, file, length)| (file, length)))
}

/// Returns where the parent image is, relative to this one: what the link says, or `parent` itself where that
/// is a directory, as a copy that follows links makes it. `None` without one.
pub(crate) fn parent_place(images: &ImageDir) -> Result<Option<OsString>> {
    match readlinkat(images.as_fd(), PARENT) {
        Ok(target) => Ok(Some(target)),
        // It is no link. A link could not say `parent`: it would lead to itself.
        Err(Errno::EINVAL) => Ok(Some(PARENT.into())),
        Err(Errno::ENOENT) => Ok(None),
        Err(errno) => Err(io("read", &images.path().join(PARENT))(errno.into())),
    }
}

/// Returns why the parent image is not where it was when its child was sealed; `None` where it is. A copy
/// that follows links has the parent as a directory, which is as good: a sealed parent is known by its id.
pub(crate) fn moved_parent(sealed: Option<&[u8]>, found: Option<&OsStr>) -> Option<&'static str> {
    match (sealed, found) {
        (None, None) => None,
        (None, Some(_)) => Some("not sealed: it was added later"),
        (Some(_), None) => Some("missing"),
        (Some(sealed), Some(found)) => {
            let is_there = found.as_bytes() == sealed || found == PARENT;
            (!is_there).then_some("leads elsewhere than when it was sealed")
        }
    }
}

/// Writes these files and the directory itself to the disk.
pub(crate) fn sync_files(images: &ImageDir, names: &BTreeSet<String>) -> Result<()> {
    for name in names {
        if let Some((file, _)) = open(images, name)? {
            file.sync_all().map_err(io("sync", &images.path().join(name)))?;
        }
    }
    sync(images)
}

/// Writes the entries of the directory to the disk.
pub(crate) fn sync(images: &ImageDir) -> Result<()> {
    fsync(images.as_fd()).map_err(|errno| io("sync", images.path())(errno.into()))
}
