// SPDX-License-Identifier: MIT OR Apache-2.0
//! Opens files of an image directory. The directory is a descriptor, because CRIU gives its plugins no path.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::BorrowedFd;

use nix::errno::Errno;
use nix::fcntl::{OFlag, openat};
use nix::sys::stat::Mode;
use nix::unistd::{UnlinkatFlags, unlinkat};
use rewake_criu_images::open::{self, OpenError};

/// A file of the image could not be read or written.
#[derive(Debug, thiserror::Error)]
#[error("{act} {name} in the image directory")]
pub struct FileError {
    act: &'static str,
    name: String,
    #[source]
    source: io::Error,
}

impl FileError {
    /// Returns a closure for `map_err` that adds the act and the file's name.
    pub fn of(act: &'static str, name: &str) -> impl FnOnce(io::Error) -> Self {
        let name = name.to_owned();
        move |source| Self { act, name, source }
    }

    /// Returns whether the file does not exist.
    pub fn is_missing(&self) -> bool {
        self.source.kind() == io::ErrorKind::NotFound
    }
}

/// Creates a file in the image directory that only its owner can read. An existing file is emptied.
pub fn create(folder: BorrowedFd<'_>, name: &str) -> Result<File, FileError> {
    let flags = OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_TRUNC | OFlag::O_CLOEXEC | OFlag::O_NOFOLLOW;
    let file = openat(folder, name, flags, Mode::S_IRUSR | Mode::S_IWUSR);
    file.map(File::from).map_err(|errno| FileError::of("create", name)(errno.into()))
}

/// Removes a file, if it exists.
pub fn remove(folder: BorrowedFd<'_>, name: &str) -> Result<(), FileError> {
    match unlinkat(folder, name, UnlinkatFlags::NoRemoveDir) {
        Ok(()) | Err(Errno::ENOENT) => Ok(()),
        Err(errno) => Err(FileError::of("remove", name)(errno.into())),
    }
}

/// Opens a file of the image directory for reading ([`rewake_criu_images::open`]).
pub fn open(folder: BorrowedFd<'_>, name: &str) -> Result<File, FileError> {
    let opened = open::open(folder, OsStr::new(name)).map_err(|error| match error {
        OpenError::Io(error) => error,
        refused => io::Error::other(refused),
    });
    let file = opened.and_then(|file| file.ok_or_else(|| Errno::ENOENT.into()));
    file.map_err(FileError::of("open", name))
}

/// Writes a whole small file.
pub fn write(folder: BorrowedFd<'_>, name: &str, bytes: &[u8]) -> Result<(), FileError> {
    create(folder, name)?.write_all(bytes).map_err(FileError::of("write", name))
}
