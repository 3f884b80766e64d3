// SPDX-License-Identifier: MIT OR Apache-2.0
//! Finds processes with missing memory.

use std::fmt;
use std::io;
use std::path::Path;

use rewake_plugin_protocol::{Notes, Phase, ProcessId, SessionNote, sockets_of};
use rewake_process::names::printable;

use crate::proc;

/// A process with missing memory.
#[derive(Debug)]
pub(crate) struct Missing {
    pub(crate) pid: i32,
    pub(crate) what: What,
}

/// What a process is missing.
#[derive(Debug)]
pub(crate) enum What {
    /// Memory that the session of this streamer has to load; the flag is true if the session is served.
    Memory(i32, bool),
    /// Memory of one of the sessions that have not parked their store yet.
    Unparked,
    /// No memory, but a process of a streamer traces it, so CRIU cannot.
    Traced(i32),
    /// GPU memory: the gate is closed and the queues are evicted.
    Gate,
}

impl Missing {
    /// Whether no process loads the memory: `rewake recover` starts one.
    pub(crate) fn is_unserved(&self) -> bool {
        matches!(self.what, What::Memory(_, false))
    }
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pid, what } = self;
        write!(f, "process {pid} ({}) has ", printable(&proc::name(*pid)))?;
        match what {
            What::Memory(streamer, served) => {
                write!(f, "memory that streamer {streamer} has not loaded yet")?;
                if *served { Ok(()) } else { f.write_str(" and is not served: run `rewake recover`") }
            }
            What::Unparked => f.write_str("memory that a session has not loaded yet"),
            What::Traced(tracer) => {
                write!(f, "all its memory, but process {tracer} of rewake still traces it")
            }
            What::Gate => f.write_str("GPU queues that are stopped until memory of the GPU is resident"),
        }
    }
}

/// Reads the notes in a folder; none where this user may not read it: other users' sessions do not matter
/// here.
///
/// # Errors
/// The folder cannot be read.
pub(crate) fn notes(sessions: &Path) -> io::Result<Notes> {
    match SessionNote::all(sessions) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(Notes::default()),
        notes => notes,
    }
}

/// Returns the first process that has missing memory.
///
/// # Errors
/// A process's descriptors cannot be read: then memory may be missing.
pub(crate) fn first_missing(
    sessions: &Path,
    notes: &[SessionNote],
    processes: &[i32],
) -> io::Result<Option<Missing>> {
    for pid in processes {
        if ProcessId::of(*pid)?.map_or(Ok(false), ProcessId::is_dump_blocked)? {
            return Ok(Some(Missing { pid: *pid, what: What::Gate }));
        }
        if notes.is_empty() {
            continue;
        }
        let sockets = sockets_of(*pid)?;
        let holds = |note: &&SessionNote| sockets.iter().any(|(_, inode)| note.has_store(*inode));
        if let Some(note) = notes.iter().find(holds) {
            let served = !note.is_orphaned(sessions)?;
            return Ok(Some(Missing { pid: *pid, what: What::Memory(note.starter.pid, served) }));
        }
        if let Some(tracer) = proc::our_tracer(*pid) {
            return Ok(Some(Missing { pid: *pid, what: What::Traced(tracer) }));
        }
        // Without a plugin a session parks its store only after CRIU has detached from the process: a dump
        // may be earlier.
        let restored = |note: &SessionNote| note.phase != Phase::Listening;
        if notes.iter().any(restored) && proc::has_registered_memory(*pid) {
            return Ok(Some(Missing { pid: *pid, what: What::Unparked }));
        }
    }
    Ok(None)
}
