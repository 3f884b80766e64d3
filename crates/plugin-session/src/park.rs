// SPDX-License-Identifier: MIT OR Apache-2.0
//! A restored task gets a descriptor of its session's fd store, in CRIU's main thread, before it runs.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rewake_criu_plugin::Host;
use rewake_handover::{FileId, Phase, SESSIONS, SessionNote};
use rewake_tracer::with_tracee;

use crate::proc;

/// What follows when a store was not parked.
const LATER: &str = "its session parks the store when CRIU has let the task go";
/// What it waits for before it parks a store.
const WAITS: &str = "waiting until it has received the userfaultfds of all tasks";
/// For the session to receive what the tasks sent it: CRIU does not wait for that.
const RECEIVE: Duration = Duration::from_secs(60);
/// Between two looks whether it has.
const LOOK: Duration = Duration::from_millis(2);

/// The tasks of one `criu restore`.
#[derive(Debug)]
pub struct Parking {
    /// Where sessions' notes are.
    sessions: PathBuf,
    /// The session that serves CRIU's work directory when CRIU loads its plugins; none where no session does. CRIU is in
    /// its work directory then, however it was started, and later perhaps not.
    session: Result<Option<SessionNote>, Error>,
    /// Tasks that were looked at.
    seen: BTreeSet<i32>,
}

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("find the session of CRIU's work directory: {0}")]
    Find(#[source] io::Error),
    #[error("take the store of session {0} from process {1}: {2}")]
    Store(u64, i32, #[source] io::Error),
    #[error("look at its descriptors: {0}")]
    Look(#[source] io::Error),
    #[error("session {0} has not received all userfaultfds after {limit} s", limit = RECEIVE.as_secs())]
    Slow(u64),
    #[error(transparent)]
    Give(#[from] rewake_tracer::Error),
}

/// What is to be done with the tasks of a restore.
enum Way {
    /// No session serves them.
    Leave,
    /// They get the store of the session.
    Park(SessionNote, OwnedFd),
    /// The streamer was killed before the tasks ran: their missing memory would be zeros.
    Kill(u64),
}

impl Parking {
    /// To be made in the plugin's `init`.
    #[must_use]
    pub fn new() -> Self {
        Self::of(PathBuf::from(SESSIONS), Path::new("."))
    }

    fn of(sessions: PathBuf, work: &Path) -> Self {
        let session = FileId::of(work).and_then(|work| SessionNote::of_work_dir(&sessions, work));
        Self { sessions, session: session.map_err(Error::Find), seen: BTreeSet::new() }
    }

    /// Parks the store in a task and its descendants that have not been seen yet, from CRIU's main thread in
    /// `RESUME_DEVICES_LATE`. Nothing is done where no session serves this restore. What goes wrong is a warning. Where
    /// every process of the streamer was killed meanwhile, the tasks are killed.
    pub fn task(&mut self, host: &Host, pid: i32) {
        if !self.seen.contains(&pid) {
            let tasks = proc::tree(pid);
            self.park(host, &tasks);
            self.seen.extend(tasks);
        }
    }

    fn park(&self, host: &Host, tasks: &[i32]) {
        let (note, store) = match self.way(host) {
            Ok(Way::Leave) => return,
            Ok(Way::Park(note, store)) => (note, store),
            Ok(Way::Kill(session)) => {
                host.error(format_args!(
                    "every process that serves session {session} was killed: the tasks are killed, as they would read \
                     zeros; restore them again"
                ));
                for pid in tasks {
                    // CRIU traces it and has not waited for it, so the number is its own. It may have ended.
                    let _ = kill(Pid::from_raw(*pid), Signal::SIGKILL);
                }
                return;
            }
            Err(error) => return host.warn(format_args!("{error}; {LATER}")),
        };
        for pid in tasks.iter().filter(|pid| !self.seen.contains(pid)) {
            match park(&note, &store, *pid) {
                Ok(Some(number)) => host.info(format_args!(
                    "task {pid}: the store of session {} is parked, as descriptor {number}",
                    note.number
                )),
                Ok(None) => {}
                Err(error) => host.warn(format_args!("task {pid}: {error}; {LATER}")),
            }
        }
    }

    /// Waits until the session has received what the tasks sent.
    fn way(&self, host: &Host) -> Result<Way, Error> {
        let first = match &self.session {
            Ok(Some(note)) => note,
            Ok(None) => return Ok(Way::Leave),
            Err(error) => return Err(Error::Find(io::Error::other(error.to_string()))),
        };
        let start = Instant::now();
        let mut waits = false;
        loop {
            // A session that has ended has killed what it could not serve.
            let Some(note) = first.again(&self.sessions).map_err(Error::Find)? else { return Ok(Way::Leave) };
            let orphaned = note.is_orphaned(&self.sessions).map_err(Error::Find)?;
            match note.phase {
                Phase::Listening => return Ok(Way::Leave),
                _ if orphaned => return Ok(Way::Kill(note.number)),
                Phase::Running => match note.store() {
                    Ok(store) => return Ok(Way::Park(note, store)),
                    // Its last process has ended since the look: the next look says so.
                    Err(error)
                        if error.raw_os_error() == Some(nix::libc::ESRCH) && start.elapsed() <= RECEIVE =>
                    {
                        sleep(LOOK);
                    }
                    Err(error) => return Err(Error::Store(note.number, note.starter.pid, error)),
                },
                Phase::Restoring if start.elapsed() > RECEIVE => return Err(Error::Slow(note.number)),
                Phase::Restoring => {
                    if !waits {
                        host.info(format_args!("session {}: {WAITS}", note.number));
                    }
                    waits = true;
                    sleep(LOOK);
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

/// Parks the store in a task; its number there. None where the task has it.
fn park(note: &SessionNote, store: &OwnedFd, pid: i32) -> Result<Option<i32>, Error> {
    if note.held_by(pid).map_err(Error::Look)?.is_some() {
        return Ok(None);
    }
    Ok(Some(with_tracee(pid, |task| task.give(store.as_fd()))??))
}
