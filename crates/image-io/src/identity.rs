// SPDX-License-Identifier: MIT OR Apache-2.0
//! Identifies a file and its contents, and finds out whether a file still has the same contents.

use std::ffi::OsString;
use std::fs::{File, Metadata};
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::MetadataExt as _;

/// Identifies one content of a file: two opens of an unchanged file have equal keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FileKey {
    /// Device of the file system.
    pub dev: u64,
    /// Inode number.
    pub ino: u64,
    /// Length in bytes.
    pub len: u64,
    /// Time of last change of the contents: seconds and nanoseconds. A program may set it to any value.
    pub mtime: (i64, i64),
    /// Time of last change of contents or attributes: seconds and nanoseconds. Only the kernel sets it.
    pub ctime: (i64, i64),
}

impl FileKey {
    pub(crate) fn of(meta: &Metadata) -> Self {
        Self {
            dev: meta.dev(),
            ino: meta.ino(),
            len: meta.len(),
            mtime: (meta.mtime(), meta.mtime_nsec()),
            ctime: (meta.ctime(), meta.ctime_nsec()),
        }
    }
}

/// A file's key, and the attributes whose change explains a new change time without new contents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileState {
    /// The content's identity.
    pub key: FileKey,
    /// Number of names (`st_nlink`).
    pub links: u64,
    /// Type and permissions (`st_mode`).
    pub mode: u32,
    /// User and group.
    pub owner: (u32, u32),
    /// The last component of the name that `/proc/self/fd` shows; empty where it shows none.
    pub name: OsString,
}

impl FileState {
    /// Reads the state of an open file.
    ///
    /// # Errors
    /// The kernel refuses to give the file's attributes.
    pub fn of(file: &File) -> io::Result<Self> {
        Ok(Self::with(&file.metadata()?, file))
    }

    fn with(meta: &Metadata, file: &File) -> Self {
        let link = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap_or_default();
        Self {
            key: FileKey::of(meta),
            links: meta.nlink(),
            mode: meta.mode(),
            owner: (meta.uid(), meta.gid()),
            name: link.file_name().unwrap_or_default().to_owned(),
        }
    }

    /// Compares the open file with this state. Returns None where nothing changed. Returns the new state
    /// where only the change time differs and the name, link count, owner or mode explains it: the file was
    /// removed, renamed, linked, or given other permissions.
    ///
    /// # Errors
    /// What else changed: the contents may have changed.
    pub fn follow(&self, file: &File) -> Result<Option<Self>, String> {
        let meta = file.metadata().map_err(|error| format!("its state cannot be read ({error})"))?;
        let (before, now) = (self.key, FileKey::of(&meta));
        if before == now {
            return Ok(None);
        }
        if (before.dev, before.ino) != (now.dev, now.ino) {
            return Err("it is another file".into());
        }
        if before.len != now.len {
            return Err(format!("it had {} bytes and has {}", before.len, now.len));
        }
        if before.mtime != now.mtime {
            return Err("it was written to, by its modification time".into());
        }
        let now = Self::with(&meta, file);
        let explained = |state: &Self| (state.links, state.mode, state.owner, state.name.clone());
        if explained(self) == explained(&now) {
            return Err(
                "its change time is another, while length, modification time, name, links, owner and mode \
                        are the same: it was written to, or an attribute was changed"
                    .into(),
            );
        }
        Ok(Some(now))
    }
}
