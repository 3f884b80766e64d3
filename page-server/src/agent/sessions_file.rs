// SPDX-License-Identifier: MIT OR Apache-2.0
//! Keeps the list of sessions in a file beside the control socket, for an agent that is started later.

use std::ffi::OsString;
use std::io::{self, Write as _};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use serde::{Deserialize, Serialize};
use tempfile::NamedTempFile;

/// A session that is being served.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SessionEntry {
    /// Its number.
    pub(super) session: u64,
    /// The images directory: paths need not be UTF-8.
    images_dir: Vec<u8>,
    /// CRIU's work directory.
    work_dir: Vec<u8>,
}

impl SessionEntry {
    pub(super) fn new(session: u64, images: &Path, work: &Path) -> Self {
        let bytes = |path: &Path| path.as_os_str().as_bytes().to_vec();
        Self { session, images_dir: bytes(images), work_dir: bytes(work) }
    }

    pub(super) fn images(&self) -> PathBuf {
        OsString::from_vec(self.images_dir.clone()).into()
    }

    pub(super) fn work(&self) -> PathBuf {
        OsString::from_vec(self.work_dir.clone()).into()
    }
}

/// The file's contents.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Sessions {
    /// The number of the last session that was opened.
    pub(super) last: u64,
    pub(super) sessions: Vec<SessionEntry>,
}

/// Returns the file's path.
pub(super) fn path(socket: &Path) -> PathBuf {
    let mut path = socket.as_os_str().to_owned();
    path.push(".sessions");
    path.into()
}

/// Reads the file. Without one, or with one that cannot be read, no session is known.
///
/// # Errors
/// The file exists and cannot be read.
pub(super) fn read(path: &Path) -> anyhow::Result<Sessions> {
    let bytes = match std::fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Sessions::default()),
        bytes => bytes.with_context(|| format!("reading {}", path.display()))?,
    };
    serde_json::from_slice(&bytes).with_context(|| format!("reading {}", path.display()))
}

/// Writes the file, whole or not at all.
///
/// # Errors
/// The folder cannot be written to.
pub(super) fn write(path: &Path, sessions: &Sessions) -> anyhow::Result<()> {
    let folder = path.parent().unwrap_or_else(|| Path::new("/"));
    let written = || -> io::Result<()> {
        let mut file = NamedTempFile::new_in(folder)?;
        file.write_all(&serde_json::to_vec(sessions)?)?;
        file.persist(path)?;
        Ok(())
    };
    written().with_context(|| format!("writing {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_agent_reads_what_this_one_wrote() {
        let folder = tempfile::tempdir().unwrap();
        let path = path(&folder.path().join("rewake.sock"));
        assert_eq!(read(&path).unwrap(), Sessions::default());
        let odd = Path::new(std::ffi::OsStr::from_bytes(b"/images/\xff"));
        let sessions = Sessions { last: 7, sessions: vec![SessionEntry::new(7, odd, Path::new("/work"))] };
        write(&path, &sessions).unwrap();
        assert_eq!(read(&path).unwrap(), sessions);
        assert_eq!(
            (sessions.sessions[0].images(), sessions.sessions[0].work()),
            (odd.into(), "/work".into())
        );
    }

    #[test]
    fn a_file_that_is_no_list_is_an_error_that_names_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = path(&folder.path().join("socket"));
        std::fs::write(&path, "{").unwrap();
        assert!(read(&path).unwrap_err().to_string().contains("socket.sessions"));
    }
}
