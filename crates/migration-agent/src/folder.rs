// SPDX-License-Identifier: MIT OR Apache-2.0
//! The folder of one migration on one host, below `/run/rewake/migrations`: its record, the image, and the socket
//! of CRIU's action script. It lives as long as the host runs, as the tree does.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use nix::fcntl::{Flock, FlockArg};
use rewake_migration::record::{DestinationRecord, SourceRecord};
use serde::{Deserialize, Serialize};

use crate::cgroup::TreeCgroup;
use crate::frame::MigrationId;

const MIGRATIONS: &str = "/run/rewake/migrations";
const RECORD: &str = "record";

/// What is written in a folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum WrittenRecord {
    Source(SourceEntry),
    Destination(DestinationRecord),
}

/// What a source needs to continue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SourceEntry {
    pub(crate) record: SourceRecord,
    pub(crate) id: MigrationId,
    /// The destination's address.
    pub(crate) to: String,
    pub(crate) cgroup: TreeCgroup,
}

/// A folder that this process alone uses. CRIU's action scripts read its record.
#[derive(Debug)]
pub(crate) struct MigrationFolder {
    path: PathBuf,
    _lock: Flock<File>,
}

impl MigrationFolder {
    /// Opens a folder, or makes it.
    ///
    /// # Errors
    /// Another process uses it.
    pub(crate) fn open(name: &str) -> anyhow::Result<Self> {
        let path = Path::new(MIGRATIONS).join(name);
        let images = path.join("images");
        let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(&images);
        made.with_context(|| format!("making {}", images.display()))?;
        let file = File::create(path.join("lock")).with_context(|| format!("locking {}", path.display()))?;
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => Ok(Self { path, _lock: lock }),
            Err((_, error)) => bail!("{}: another process runs this migration ({error})", path.display()),
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn images(&self) -> PathBuf {
        self.path.join("images")
    }

    /// Writes a record. It is as before if that fails.
    pub(crate) fn write(&self, record: &WrittenRecord) -> anyhow::Result<()> {
        let (path, new) = (self.path.join(RECORD), self.path.join("record.new"));
        let text = serde_json::to_vec(record)?;
        fs::write(&new, text).with_context(|| format!("writing {}", new.display()))?;
        fs::rename(&new, &path).with_context(|| format!("writing {}", path.display()))
    }

    /// The record that an earlier process wrote.
    pub(crate) fn read(&self) -> anyhow::Result<Option<WrittenRecord>> {
        read_record(&self.path)
    }

    /// Listens for CRIU's action scripts.
    pub(crate) fn listen(&self) -> anyhow::Result<UnixListener> {
        let path = socket(&self.path);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("removing {}", path.display()));
            }
            _ => {}
        }
        let listener = UnixListener::bind(&path).with_context(|| format!("binding {}", path.display()))?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
        Ok(listener)
    }

    /// Removes the folder: the migration has ended.
    pub(crate) fn remove(self) {
        if let Err(error) = fs::remove_dir_all(&self.path) {
            tracing::warn!(%error, "removing {}", self.path.display());
        }
    }
}

/// The socket of CRIU's action scripts.
pub(crate) fn socket(folder: &Path) -> PathBuf {
    folder.join("agent.sock")
}

/// Reads the record of a folder; none if no record was written, or the migration has ended.
pub(crate) fn read_record(folder: &Path) -> anyhow::Result<Option<WrittenRecord>> {
    let path = folder.join(RECORD);
    match fs::read(&path) {
        Ok(text) => {
            let record =
                serde_json::from_slice(&text).with_context(|| format!("reading {}", path.display()))?;
            Ok(Some(record))
        }
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("reading {}", path.display())),
    }
}
