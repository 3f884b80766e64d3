// SPDX-License-Identifier: MIT OR Apache-2.0
//! The work directory that is made for one restore. It is removed by the one of its users that ends last: the
//! command that made it, which locks it, or else the agent that follows the session, or the streamer where no
//! agent does.

use std::ffi::OsStr;
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::Context as _;
use rewake_plugin_protocol::{FileId, SessionNote};
use rewake_process::file_lock::{DirectoryLock, Leftover};
use tempfile::TempDir;
use tracing::warn;

use super::client::ClientError;
use super::streamer;
use crate::ledger;
use crate::record::files;
use crate::record::model::State;

/// The log of a streamer that an agent has started, in the work directory.
pub const LOG: &str = "rewake-streamer.log";
/// A directory inside, whose lock the command has. The streamer locks the work directory itself while it
/// binds its socket there.
const IN_USE: &str = "command";
/// How the names of such directories begin.
const PREFIX: &str = "restore-";
/// Directories of restores that failed, or whose streamer was killed, that an agent keeps for their logs.
const KEPT: usize = 16;

/// A work directory of a command that runs. Dropping this removes it.
#[derive(Debug)]
pub struct WorkFolder {
    directory: TempDir,
    lock: DirectoryLock,
}

impl WorkFolder {
    /// Makes a private one in this folder.
    ///
    /// # Errors
    /// The folder cannot be written to.
    pub fn make(parent: &Path) -> anyhow::Result<Self> {
        let make = || -> io::Result<Self> {
            let mut builder = tempfile::Builder::new();
            let private = Permissions::from_mode(0o700);
            let directory = builder.prefix(PREFIX).permissions(private).tempdir_in(parent)?;
            let inside = directory.path().join(IN_USE);
            fs::create_dir(&inside)?;
            let lock = DirectoryLock::take(&inside)?.ok_or(io::ErrorKind::WouldBlock)?;
            Ok(Self { directory, lock })
        };
        make().with_context(|| format!("making a work directory in {}", parent.display()))
    }

    /// The directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Leaves it to the streamer and the agent, which use it longer than this command.
    pub async fn leave(self) {
        let Self { directory, lock } = self;
        let work = directory.keep();
        drop(lock);
        // They may have ended while it was locked.
        if has_ended_well(&work) && matches!(streamer::connect(&work).await, Err(ClientError::NotServed(_))) {
            remove_unused(&work);
        }
    }
}

/// Whether a directory was made for a restore whose streamer an agent with a socket in `folder` has started.
#[must_use]
pub fn is_of_agent(work: &Path, folder: &Path) -> bool {
    work.parent() == Some(folder) && work.file_name().is_some_and(is_one) && work.join(LOG).exists()
}

/// Removes the directory of a restore that has ended, unless its command still uses it: then the command does
/// that.
pub fn remove_unused(work: &Path) {
    let removed = DirectoryLock::take(&work.join(IN_USE)).and_then(|lock| match lock {
        Some(_lock) => fs::remove_dir_all(work),
        None => Ok(()),
    });
    match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            warn!(%error, "removing {}", work.display());
        }
        _ => {}
    }
}

/// Removes the directories in an agent's folder whose restores have ended, but not those that are `live`, nor
/// the latest of those that failed. `sessions` has the notes of sessions that are served, or wait for a
/// streamer.
///
/// # Errors
/// The folder or the notes cannot be read: nothing is removed.
pub fn sweep(folder: &Path, sessions: &Path, live: &[PathBuf]) -> anyhow::Result<()> {
    let notes = SessionNote::all(sessions).with_context(|| sessions.display().to_string())?;
    let is_noted = |work: &Path| {
        !notes.skipped.is_empty()
            || FileId::of(work).map_or(true, |id| notes.notes.iter().any(|note| note.work == id))
    };
    let found = Leftover::all(folder, is_one).with_context(|| folder.display().to_string())?.into_iter();
    let is_used = |work: &Path| matches!(DirectoryLock::take(&work.join(IN_USE)), Ok(None));
    let found = found.filter(|of| {
        is_of_agent(&of.path, folder) && !live.contains(&of.path) && !is_noted(&of.path) && !is_used(&of.path)
    });
    let (well, mut failed): (Vec<Leftover>, Vec<Leftover>) = found.partition(|of| has_ended_well(&of.path));
    failed
        .sort_by_key(|of| of.path.metadata().and_then(|of| of.modified()).unwrap_or(SystemTime::UNIX_EPOCH));
    let too_many = failed.len().saturating_sub(KEPT);
    for leftover in well.into_iter().chain(failed.drain(..too_many)) {
        let path = leftover.path.clone();
        if let Err(error) = leftover.remove() {
            warn!(%error, "removing {}", path.display());
        }
    }
    Ok(())
}

/// [`sweep`] with this user's sessions. A failure is logged: the next agent tries again.
pub fn sweep_own(folder: &Path, live: &[PathBuf]) {
    let swept = ledger::root().and_then(|sessions| sweep(folder, &sessions, live));
    if let Err(error) = swept {
        warn!("work directories of ended restores are not removed: {error:#}");
    }
}

fn is_one(name: &OsStr) -> bool {
    name.as_bytes().starts_with(PREFIX.as_bytes())
}

/// Whether the record says that no memory was lost.
fn has_ended_well(work: &Path) -> bool {
    let record = files::read(work).ok().flatten();
    record.is_some_and(|record| matches!(record.state, State::Complete | State::Ended))
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;
    use crate::record::model::Record;

    fn ended(work: &Path, state: State) {
        File::create(work.join(LOG)).unwrap();
        files::write(&Record { state, ..Record::default() }, work).unwrap();
    }

    fn made(folder: &Path, state: State) -> PathBuf {
        let WorkFolder { directory, .. } = WorkFolder::make(folder).unwrap();
        let work = directory.keep();
        ended(&work, state);
        work
    }

    #[test]
    fn a_directory_stays_as_long_as_its_command_and_no_longer() {
        let folder = tempfile::tempdir().unwrap();
        let command = WorkFolder::make(folder.path()).unwrap();
        let work = command.path().to_owned();
        remove_unused(&work);
        assert!(work.is_dir());
        drop(command);
        assert!(!work.exists());
        remove_unused(&work);
    }

    #[tokio::test]
    async fn a_command_that_leaves_first_leaves_the_directory_and_one_that_leaves_last_removes_it() {
        let folder = tempfile::tempdir().unwrap();
        let first = WorkFolder::make(folder.path()).unwrap();
        let work = first.path().to_owned();
        first.leave().await;
        assert!(work.is_dir(), "the streamer has not left its record");
        ended(&work, State::Complete);
        remove_unused(&work);
        assert!(!work.exists());
        let last = WorkFolder::make(folder.path()).unwrap();
        let work = last.path().to_owned();
        ended(&work, State::Complete);
        remove_unused(&work);
        last.leave().await;
        assert!(!work.exists());
    }

    #[test]
    fn an_agent_removes_what_has_ended_and_keeps_some_that_failed() {
        let (folder, sessions) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let folder = folder.path();
        let well = [State::Complete, State::Ended].map(|state| made(folder, state));
        let (live, running) = (made(folder, State::Complete), WorkFolder::make(folder).unwrap());
        ended(running.path(), State::Complete);
        let other = folder.join("restore-by-another-program");
        fs::create_dir(&other).unwrap();
        let failed: Vec<PathBuf> = (0..KEPT + 2).map(|_| made(folder, State::Failed)).collect();
        sweep(folder, sessions.path(), std::slice::from_ref(&live)).unwrap();
        assert!(well.iter().all(|work| !work.exists()));
        assert!(live.is_dir() && running.path().is_dir() && other.is_dir());
        assert_eq!(failed.iter().filter(|work| work.is_dir()).count(), KEPT);
    }
}
