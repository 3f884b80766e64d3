// SPDX-License-Identifier: MIT OR Apache-2.0
//! A restored task gets a descriptor of its session's fd store, in CRIU's main thread, before it runs.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;

use rewake_criu_plugin::Host;
use rewake_handover::{FileId, SESSIONS, SessionNote};
use rewake_tracer::with_tracee;

use crate::proc;

/// What follows when a store was not parked.
const LATER: &str = "its session parks the store when CRIU has let the task go";

/// The tasks of one `criu restore`.
#[derive(Debug)]
pub struct Parking {
    /// CRIU's work directory. CRIU is in it when it loads its plugins, however it was started, and later perhaps not.
    work: io::Result<FileId>,
    /// Tasks that were looked at.
    seen: BTreeSet<i32>,
}

/// A session of this restore.
struct Session {
    note: SessionNote,
    store: OwnedFd,
}

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("find the session of CRIU's work directory: {0}")]
    Find(#[source] io::Error),
    #[error("take the store of session {0} from process {1}: {2}")]
    Store(u64, i32, #[source] io::Error),
    #[error("look at its descriptors: {0}")]
    Look(#[source] io::Error),
    #[error(transparent)]
    Give(#[from] rewake_tracer::Error),
}

impl Parking {
    /// To be made in the plugin's `init`.
    #[must_use]
    pub fn new() -> Self {
        Self { work: FileId::of(Path::new(".")), seen: BTreeSet::new() }
    }

    /// Parks the store in a task and its descendants that have not been seen yet, from CRIU's main thread in
    /// `RESUME_DEVICES_LATE`. Nothing is done for tasks without watched memory, or where no session serves this restore.
    /// What goes wrong is a warning.
    pub fn task(&mut self, host: &Host, pid: i32) {
        if !self.seen.contains(&pid) {
            let tasks = proc::tree(pid);
            self.park(host, &tasks);
            self.seen.extend(tasks);
        }
    }

    fn park(&self, host: &Host, tasks: &[i32]) {
        let session = match self.session() {
            Ok(Some(session)) => session,
            Ok(None) => return,
            Err(error) => return host.warn(format_args!("{error}; {LATER}")),
        };
        for pid in tasks.iter().filter(|pid| !self.seen.contains(pid)) {
            match session.park(*pid) {
                Ok(Some(number)) => host.info(format_args!(
                    "task {pid}: the store of session {} is parked, as descriptor {number}",
                    session.note.number
                )),
                Ok(None) => {}
                Err(error) => host.warn(format_args!("task {pid}: {error}; {LATER}")),
            }
        }
    }

    fn session(&self) -> Result<Option<Session>, Error> {
        let work = match &self.work {
            Ok(work) => *work,
            Err(error) => return Err(Error::Find(io::Error::new(error.kind(), error.to_string()))),
        };
        let Some(note) = SessionNote::of_work_dir(Path::new(SESSIONS), work).map_err(Error::Find)? else {
            return Ok(None);
        };
        let store = note.store().map_err(|error| Error::Store(note.number, note.starter.pid, error))?;
        Ok(Some(Session { note, store }))
    }
}

impl Default for Parking {
    fn default() -> Self {
        Self::new()
    }
}

impl Session {
    /// Parks the store in a task; its number there. None where the task needs none, or has it.
    fn park(&self, pid: i32) -> Result<Option<i32>, Error> {
        if !proc::has_watched_memory(pid) || self.note.held_by(pid).map_err(Error::Look)?.is_some() {
            return Ok(None);
        }
        Ok(Some(with_tracee(pid, |task| task.give(self.store.as_fd()))??))
    }
}
