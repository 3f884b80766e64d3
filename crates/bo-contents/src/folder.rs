// SPDX-License-Identifier: MIT OR Apache-2.0
//! Opens files of an image directory. The directory is a descriptor, because CRIU gives its plugins no path.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::BorrowedFd;

use nix::errno::Errno;
use nix::fcntl::{OFlag, openat};
use nix::sys::stat::Mode;
use nix::unistd::{UnlinkatFlags, unlinkat};

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

/// Opens a file of the image directory for reading. A symbolic link is refused, because its target may be any
/// file that root can read.
pub fn open(folder: BorrowedFd<'_>, name: &str) -> Result<File, FileError> {
    let flags = OFlag::O_RDONLY | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK | OFlag::O_NOFOLLOW;
    let file = openat(folder, name, flags, Mode::empty()).map(File::from).map_err(|errno| {
        FileError::of("open", name)(match errno {
            Errno::ELOOP => io::Error::other("is a symbolic link: expected a file of the image"),
            errno => errno.into(),
        })
    })?;
    let kind = file.metadata().map_err(FileError::of("stat", name))?;
    if !kind.is_file() {
        return Err(FileError::of("open", name)(io::Error::other("not a regular file")));
    }
    Ok(file)
}

/// Writes a whole small file.
pub fn write(folder: BorrowedFd<'_>, name: &str, bytes: &[u8]) -> Result<(), FileError> {
    create(folder, name)?.write_all(bytes).map_err(FileError::of("write", name))
}
