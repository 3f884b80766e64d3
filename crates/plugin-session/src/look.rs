// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which processes have missing memory.

use std::fmt;
use std::io;
use std::path::Path;

use rewake_handover::{Gated, Notes, Phase, SessionNote, sockets_of};

use crate::proc;

/// A process with missing memory.
#[derive(Debug)]
pub(crate) struct Missing {
    pub(crate) pid: i32,
    pub(crate) what: What,
}

/// What is missing.
#[derive(Debug)]
pub(crate) enum What {
    /// Memory that a session has to load; whether the session is served.
    Memory(SessionNote, bool),
    /// Memory that is not loaded yet, of a session that has not parked its store yet: any of these.
    Watched,
    /// None, but a process of a streamer traces it: CRIU cannot.
    Traced(i32),
    /// Memory of GPUs: the queues stand before a closed gate.
    Gate,
}

impl Missing {
    /// Whether no process loads it: `rewake recover` starts one.
    pub(crate) fn is_unserved(&self) -> bool {
        matches!(self.what, What::Memory(_, false))
    }
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pid, what } = self;
        write!(f, "process {pid} ({}) has ", proc::name(*pid))?;
        match what {
            What::Memory(note, served) => {
                let (number, starter) = (note.number, note.starter.pid);
                write!(f, "memory that session {number} of process {starter} has not loaded yet")?;
                if *served { Ok(()) } else { f.write_str(" and is not served: run `rewake recover`") }
            }
            What::Watched => f.write_str("memory that a session has not loaded yet"),
            What::Traced(tracer) => write!(f, "all its memory, and process {tracer} of rewake lets go of it"),
            What::Gate => f.write_str("GPU queues that are stopped until memory of the GPU is resident"),
        }
    }
}

/// The notes below a folder; none where this user may not look: other users' sessions are none of ours.
///
/// # Errors
/// The folder cannot be read.
pub(crate) fn notes(sessions: &Path) -> io::Result<Notes> {
    match SessionNote::all(sessions) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(Notes::default()),
        notes => notes,
    }
}

/// The first of some processes that has missing memory.
///
/// # Errors
/// A process's descriptors cannot be read: what is not known may be missing.
pub(crate) fn first_missing(
    sessions: &Path,
    notes: &[SessionNote],
    processes: &[i32],
) -> io::Result<Option<Missing>> {
    for pid in processes {
        if Gated::of(*pid)?.map_or(Ok(false), Gated::is_shut)? {
            return Ok(Some(Missing { pid: *pid, what: What::Gate }));
        }
        if notes.is_empty() {
            continue;
        }
        let sockets = sockets_of(*pid)?;
        let holds = |note: &&SessionNote| sockets.iter().any(|(_, inode)| *inode == note.store.inode);
        if let Some(note) = notes.iter().find(holds) {
            let served = !note.is_orphaned(sessions)?;
            return Ok(Some(Missing { pid: *pid, what: What::Memory(note.clone(), served) }));
        }
        if let Some(tracer) = proc::our_tracer(*pid) {
            return Ok(Some(Missing { pid: *pid, what: What::Traced(tracer) }));
        }
        // Without a plugin a session parks its store when CRIU has let the process go: a dump may come before.
        let restored = |note: &SessionNote| note.phase != Phase::Listening;
        if notes.iter().any(restored) && proc::has_watched_memory(*pid) {
            return Ok(Some(Missing { pid: *pid, what: What::Watched }));
        }
    }
    Ok(None)
}
