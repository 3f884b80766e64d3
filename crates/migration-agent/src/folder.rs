// SPDX-License-Identifier: MIT OR Apache-2.0
//! The folder of one migration on one host, below `/run/rewake/migrations`: its record, the image, and the
//! socket of CRIU's action script. It lives as long as the host runs, as the tree does.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail};
use nix::fcntl::{Flock, FlockArg};
use rewake_migration::record::{DestinationRecord, SourceRecord};
use rewake_process::proc;
use serde::{Deserialize, Serialize};

use crate::cgroup::TreeCgroup;
use crate::frame::MigrationId;
use crate::page_client::ClientProcess;
use crate::peer::CertificateDigest;

/// Where a destination's CRIU works: on a disk, because it has the candidates and the cache file of all lazy
/// pages.
pub(crate) const WORK: &str = "/var/tmp";
const MIGRATIONS: &str = "/run/rewake/migrations";
/// How the names of folders of destinations begin.
pub(crate) const DESTINATION: &str = "destination";
const RECORD: &str = "record";
const LOCK: &str = "lock";
/// Times that a new folder may be removed before it is locked.
const MAX_TRIES: u32 = 10;

/// What is written in a folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum WrittenRecord {
    Source(SourceEntry),
    Destination(DestinationEntry),
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

/// What a later agent of this host needs to continue a migration, or to end it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DestinationEntry {
    pub(crate) record: DestinationRecord,
    /// None before a source has connected.
    pub(crate) id: Option<MigrationId>,
    /// The certificate of the source, which has TLS.
    pub(crate) peer: Option<CertificateDigest>,
    /// The process that serves page faults, once it listens.
    pub(crate) client: Option<ClientProcess>,
    /// CRIU's restore, once it is started.
    pub(crate) restore: Option<ClientProcess>,
    /// The program does not run here, and nothing of it is left: its source may ask for it.
    pub(crate) has_ended: bool,
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
        let path = path(name);
        let images = path.join("images");
        for _ in 0..MAX_TRIES {
            // Other users do not get as far as the image, which a task in a user namespace reads itself.
            let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(&path);
            let made = made.and_then(|()| fs::DirBuilder::new().recursive(true).create(&images));
            made.with_context(|| format!("making {}", images.display()))?;
            let locking = || format!("locking {}", path.display());
            let file = File::create(path.join(LOCK)).with_context(locking)?;
            match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(lock) if lock.metadata().with_context(locking)?.nlink() > 0 => {
                    return Ok(Self { path, _lock: lock });
                }
                // Another process has removed the folder, which had no record.
                Ok(_) => {}
                Err((_, error)) => bail!("{}: another process runs this migration ({error})", path.display()),
            }
        }
        bail!("{}: removed by other processes, {MAX_TRIES} times", path.display())
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

    /// How long ago the record was written.
    pub(crate) fn record_age(&self) -> Duration {
        let written = fs::metadata(self.path.join(RECORD)).and_then(|record| record.modified());
        written.ok().and_then(|written| written.elapsed().ok()).unwrap_or_default()
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

    /// Removes the image: the program does not run here.
    pub(crate) fn remove_images(&self) {
        // What cannot be removed is found again.
        let _ = fs::remove_dir_all(self.images());
    }

    /// Removes the folder: the migration has ended.
    pub(crate) fn remove(self) {
        if let Err(error) = fs::remove_dir_all(&self.path) {
            tracing::warn!(%error, "removing {}", self.path.display());
        }
    }
}

/// The work directory of a destination.
pub(crate) fn work(name: &str) -> PathBuf {
    Path::new(WORK).join(format!("rewake-{name}"))
}

/// Removes what agents that were killed have left: of sources whose trees do not exist any more, and of
/// agents that had no record yet.
pub(crate) fn remove_leftovers() {
    remove_leftovers_in(Path::new(MIGRATIONS));
}

fn remove_leftovers_in(migrations: &Path) {
    for entry in fs::read_dir(migrations).into_iter().flatten().flatten() {
        let (name, path) = (entry.file_name().to_string_lossy().into_owned(), entry.path());
        if is_over(&name, &path)
            && let Ok(file) = File::open(path.join(LOCK))
            && let Ok(_lock) = Flock::lock(file, FlockArg::LockExclusiveNonblock)
            // The agent that had the lock may have written a record.
            && is_over(&name, &path)
        {
            // What cannot be removed is found again.
            let _ = fs::remove_dir_all(work(&name));
            let _ = fs::remove_dir_all(&path);
        }
    }
}

/// Whether a folder that no agent uses is of no use to a later one.
fn is_over(name: &str, path: &Path) -> bool {
    match read_record(path) {
        Ok(Some(WrittenRecord::Source(entry))) => !has_root(name) && !entry.cgroup.has_processes(),
        // `rewake receive` ends them.
        Ok(Some(WrittenRecord::Destination(_))) | Err(_) => false,
        Ok(None) => true,
    }
}

/// The folder of a migration.
pub(crate) fn path(name: &str) -> PathBuf {
    Path::new(MIGRATIONS).join(name)
}

/// The names of the folders of destinations.
pub(crate) fn destinations() -> Vec<String> {
    let entries = fs::read_dir(MIGRATIONS).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.starts_with(DESTINATION)).collect()
}

/// Takes the folder of a destination whose agent was killed, or `None` if it has an agent.
pub(crate) fn left_destination(name: &str) -> Option<(MigrationFolder, DestinationEntry)> {
    let path = path(name);
    // An agent writes its first record when it has the lock.
    let Ok(Some(WrittenRecord::Destination(_))) = read_record(&path) else { return None };
    let file = File::open(path.join(LOCK)).ok()?;
    let lock = Flock::lock(file, FlockArg::LockExclusiveNonblock).ok()?;
    // The agent that had the lock may have written another one.
    let Ok(Some(WrittenRecord::Destination(entry))) = read_record(&path) else { return None };
    Some((MigrationFolder { path, _lock: lock }, entry))
}

/// The name of a source's folder.
pub(crate) fn source_name(root: i32, start: &str) -> String {
    format!("source-{root}-{start}")
}

/// Whether the root of a source's tree exists.
fn has_root(name: &str) -> bool {
    let root = name.split('-').nth(1).and_then(|pid| pid.parse().ok());
    let start = |pid| proc::stat(pid).ok()?.get(19).cloned();
    root.is_some_and(|pid| start(pid).is_some_and(|start| source_name(pid, &start) == name))
}

/// The socket of CRIU's action scripts.
pub(crate) fn socket(folder: &Path) -> PathBuf {
    folder.join("agent.sock")
}

/// Reads the record of a folder, or `None` if no record was written, or the migration has ended.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leftovers_are_removed_and_nothing_in_use() {
        let migrations = tempfile::tempdir().unwrap();
        let add = |name: &str, record: &str| {
            let path = migrations.path().join(name);
            fs::create_dir(&path).unwrap();
            fs::write(path.join(LOCK), "").unwrap();
            if !record.is_empty() {
                fs::write(path.join(RECORD), record).unwrap();
            }
            path
        };
        let destination = r#"{"destination":{"record":"released","id":null,"peer":null,"client":null,"cgroup":{"path":"/g","is_made":true}}}"#;
        let source = |group: &str| {
            let id = [0; 16];
            format!(
                r#"{{"source":{{"record":"granted","id":{id:?},"to":"","cgroup":{{"path":"{group}","is_made":true}}}}}}"#
            )
        };
        let left = add("destination-1", destination);
        let new = add("destination-2", "");
        let _lock = Flock::lock(File::open(new.join(LOCK)).unwrap(), FlockArg::LockExclusive).unwrap();
        let unwritten = add("destination-3", "");
        // Its group's file system is not mounted, which says nothing.
        let unknown = add("source-999999999-1", &source("/no/such/group"));
        let pid = std::process::id().cast_signed();
        let start = proc::stat(pid).unwrap()[19].clone();
        let lives = add(&source_name(pid, &start), &source("/no/such/group"));
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("cgroup.procs"), "").unwrap();
        let ended = add("source-999999999-2", &source(&folder.path().join("group").display().to_string()));
        remove_leftovers_in(migrations.path());
        let exist = [&left, &new, &unknown, &lives, &ended, &unwritten].map(|path| path.exists());
        assert_eq!(exist, [true, true, true, true, false, false]);
    }
}
