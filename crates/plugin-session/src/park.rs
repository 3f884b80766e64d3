// SPDX-License-Identifier: MIT OR Apache-2.0
//! Gives a restored task a descriptor of its fd store, in CRIU's main thread, before the task runs.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rewake_criu_plugin::Host;
use rewake_plugin_protocol::{FileId, Phase, SESSIONS, SessionNote};
use rewake_ptrace_inject::with_tracee;

use crate::proc;

/// What follows when a store was not parked.
const LATER: &str = "its session parks the store when CRIU has detached from the task";
/// Logged while the session has not received all userfaultfds.
const WAITS: &str = "waiting until it has received the userfaultfds of all tasks";
/// Time limit for the session to receive what the tasks sent: CRIU does not wait for that.
const RECEIVE_LIMIT: Duration = Duration::from_secs(60);
/// Time between two checks whether it has.
const CHECK_INTERVAL: Duration = Duration::from_millis(2);

/// The tasks of one `criu restore`.
#[derive(Debug)]
pub struct Parking {
    /// The folder of the sessions' notes.
    sessions: PathBuf,
    /// The session that serves CRIU's work directory when CRIU loads its plugins; None where no session does.
    /// At that time CRIU always runs in its work directory, later perhaps not.
    session: Result<Option<SessionNote>, ParkError>,
    /// Tasks that were handled.
    parked: BTreeSet<i32>,
}

#[derive(Debug, thiserror::Error)]
enum ParkError {
    #[error("find the session of CRIU's work directory: {0}")]
    Find(#[source] io::Error),
    #[error("take an fd store of streamer {0}: {1}")]
    Store(i32, #[source] io::Error),
    #[error("streamer {0} has no fd store for a task with pid {1} in its namespace")]
    NoStore(i32, i32),
    #[error("list its descriptors: {0}")]
    Descriptors(#[source] io::Error),
    #[error(
        "streamer {0} has not received all userfaultfds after {limit} s",
        limit = RECEIVE_LIMIT.as_secs()
    )]
    Slow(i32),
    #[error(transparent)]
    Give(#[from] rewake_ptrace_inject::Error),
}

/// How to treat the tasks of a restore.
#[derive(Debug)]
enum Treatment {
    /// No session serves them.
    Leave,
    /// Run them: no process of this streamer is visible in CRIU's pid namespace.
    Later(i32),
    /// Give each its store.
    Park(SessionNote),
    /// Kill them: the streamer was killed before the tasks ran, and their missing memory would be zeros.
    Kill(i32),
}

impl Parking {
    /// Must be called in the plugin's `init`.
    #[must_use]
    pub fn new() -> Self {
        Self::of(PathBuf::from(SESSIONS), Path::new("."))
    }

    fn of(sessions: PathBuf, work: &Path) -> Self {
        let session = FileId::of(work).and_then(|work| SessionNote::of_work_dir(&sessions, work));
        Self { sessions, session: session.map_err(ParkError::Find), parked: BTreeSet::new() }
    }

    /// Parks the stores in a task and its descendants, unless that is done. It must be called from CRIU's
    /// main thread in `RESUME_DEVICES_LATE`. Without a session that serves this restore it does nothing.
    /// Errors are warnings. If every process of the streamer has been killed by then, it kills the tasks.
    pub fn task(&mut self, host: &Host, pid: i32) {
        if !self.parked.contains(&pid) {
            let tasks = proc::tree(pid);
            self.park(host, &tasks);
            self.parked.extend(tasks);
        }
    }

    fn park(&self, host: &Host, tasks: &[i32]) {
        let note = match self.plan(|line| host.info(line)) {
            Ok(Treatment::Leave) => return,
            Ok(Treatment::Later(streamer)) => {
                return host.info(format_args!("streamer {streamer} runs in another pid namespace: {LATER}"));
            }
            Ok(Treatment::Park(note)) => note,
            Ok(Treatment::Kill(streamer)) => {
                host.error(format_args!(
                    "every process of streamer {streamer} was killed: the tasks are killed, because they \
                     would read zeros; restore them again"
                ));
                for pid in tasks {
                    // CRIU traces it and has not reaped it, so the pid is not reused. It may have ended:
                    // then the call fails.
                    let _ = kill(Pid::from_raw(*pid), Signal::SIGKILL);
                }
                return;
            }
            Err(error) => return host.warn(format_args!("{error}; {LATER}")),
        };
        for pid in tasks.iter().filter(|pid| !self.parked.contains(pid)) {
            match park(&note, *pid) {
                Ok(Some(number)) => host.info(format_args!(
                    "task {pid}: its store of streamer {} is parked, as descriptor {number}",
                    note.starter.pid
                )),
                Ok(None) => {}
                Err(error) => host.warn(format_args!("task {pid}: {error}; {LATER}")),
            }
        }
    }

    /// Waits until the session has received what the tasks sent, and decides how to treat the tasks. `log`
    /// gets a line when it waits.
    fn plan(&self, log: impl Fn(&str)) -> Result<Treatment, ParkError> {
        let first = match &self.session {
            Ok(Some(note)) => note,
            Ok(None) => return Ok(Treatment::Leave),
            Err(error) => return Err(ParkError::Find(io::Error::other(error.to_string()))),
        };
        let start = Instant::now();
        let (mut waits, mut was_looked_for) = (false, false);
        loop {
            // A session that has ended has killed the targets that it could not serve.
            let Some(note) = first.reread(&self.sessions).map_err(ParkError::Find)? else {
                return Ok(Treatment::Leave);
            };
            let orphaned = note.is_orphaned(&self.sessions).map_err(ParkError::Find)?;
            match note.phase {
                Phase::Listening => return Ok(Treatment::Leave),
                _ if orphaned => return Ok(Treatment::Kill(note.starter.pid)),
                Phase::Running => match any_store(&note) {
                    Ok(_) => return Ok(Treatment::Park(note)),
                    // No process that is visible here has it. The last one may have ended since the ledger
                    // was read, in which case the next round finds that.
                    Err(error)
                        if error.raw_os_error() == Some(nix::libc::ESRCH)
                            && start.elapsed() <= RECEIVE_LIMIT =>
                    {
                        if was_looked_for && note.is_in_another_pid_namespace().map_err(ParkError::Find)? {
                            return Ok(Treatment::Later(note.starter.pid));
                        }
                        was_looked_for = true;
                        sleep(CHECK_INTERVAL);
                    }
                    Err(error) => return Err(ParkError::Store(note.starter.pid, error)),
                },
                Phase::Restoring if start.elapsed() > RECEIVE_LIMIT => {
                    return Err(ParkError::Slow(note.starter.pid));
                }
                Phase::Restoring => {
                    if !waits {
                        log(&format!("streamer {}: {WAITS}", note.starter.pid));
                    }
                    waits = true;
                    sleep(CHECK_INTERVAL);
                }
            }
        }
    }
}

impl Default for Parking {
    fn default() -> Self {
        Self::new()
    }
}

/// Takes a store, as only a process of the streamer can be asked for it that this one can see.
fn any_store(note: &SessionNote) -> io::Result<OwnedFd> {
    let (_, store) = note.stores.first().ok_or_else(|| io::Error::from_raw_os_error(nix::libc::ESRCH))?;
    note.take(*store)
}

/// Parks its store in a task. Returns the store's number there, or None where the task has it already.
fn park(note: &SessionNote, pid: i32) -> Result<Option<i32>, ParkError> {
    if note.held_by(pid).map_err(ParkError::Descriptors)?.is_some() {
        return Ok(None);
    }
    let streamer = note.starter.pid;
    let task = rewake_process::proc::status(pid).and_then(|status| status.own_number).unwrap_or(pid);
    let store = note.store_of(task).ok_or(ParkError::NoStore(streamer, task))?;
    let store = note.take(store).map_err(|error| ParkError::Store(streamer, error))?;
    Ok(Some(with_tracee(pid, |task| task.give(store.as_fd()))??))
}

#[cfg(test)]
mod tests;
