// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs the supervisor: a small process that outlives the worker and holds every descriptor it had.
//!
//! It only waits. When the worker dies it starts another, which takes over from the ledger. When that does
//! not help it kills the restored processes, so that none reads a page that was never loaded.

use std::collections::BTreeSet;
use std::os::fd::{AsRawFd as _, IntoRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use nix::sys::signal::{SigSet, SigmaskHow, Signal, kill, sigprocmask};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use rewake_process::oom_score;
use rewake_process::ready::Ready;
use tracing::{error, info, warn};

use crate::ledger::{Folder, Ledger, NO_FD, Starter};
use crate::supervise::processes;
use crate::supervise::{leftover_stores, parking};
use crate::sys::{self, Fork};
use crate::watched;

/// How many workers may die within [`WINDOW`] before the supervisor gives up: another worker does not help if
/// each fails at once.
const MAX_DEATHS: usize = 8;
/// The time in which deaths are counted. It is longer than [`MAX_DEATHS`] pauses of [`FORK_INTERVAL`], so
/// that refused forks end the supervisor, too.
const WINDOW: Duration = Duration::from_secs(10);
/// The pause before the next try when the kernel refused a fork: with [`MAX_DEATHS`], two seconds in all.
const FORK_INTERVAL: Duration = Duration::from_millis(250);
const _: () = assert!(FORK_INTERVAL.as_millis() * (MAX_DEATHS as u128) < WINDOW.as_millis());
/// The exit code of a worker that panicked before its reactors ran.
const PANICKED: i32 = 101;

/// The exit code when SIGTERM reached a worker before it had anything to do, as a shell reports it.
pub const STOPPED: u8 = 128 + 15;

/// Turns [`STOPPED`] into 0, for a command that succeeds if SIGTERM ends it.
#[must_use]
pub fn asked_to_stop_is_well(code: u8) -> u8 {
    if code == STOPPED { 0 } else { code }
}

/// What a worker is started with.
#[derive(Debug)]
pub struct Start {
    /// The ledger.
    pub ledger: Ledger,
    /// True when an earlier worker died.
    pub successor: bool,
    /// The supervisor.
    pub supervisor: Arc<Supervisor>,
    /// The supervisor's identity, as in sessions' notes.
    pub starter: Starter,
    /// Descriptors that a worker must not close: they were open before the first worker started.
    inherited: BTreeSet<i32>,
    /// The descriptors of the [`Ready`] that is reported, and closed, when the first worker serves.
    waiting: Vec<RawFd>,
    standard_error: Option<RawFd>,
}

/// The process that starts workers. Each of them has its pidfd: they share a descriptor table.
#[derive(Debug)]
pub struct Supervisor {
    /// Its pid.
    pub pid: i32,
    pidfd: Arc<OwnedFd>,
}

impl Supervisor {
    /// Opens a descriptor of this process.
    fn own() -> anyhow::Result<Self> {
        let pid = nix::unistd::getpid().as_raw();
        let pidfd = sys::pidfd_open(pid).context("opening a pidfd of the supervisor")?;
        Ok(Self { pid, pidfd: Arc::new(pidfd) })
    }

    /// Ends the worker that calls this, when no target depends on it. The supervisor forwards the signal, so
    /// that it starts no successor. Without a supervisor the worker signals itself.
    pub(crate) fn stop_worker(&self) {
        if sys::pidfd_signal(self.pidfd.as_raw_fd(), libc::SIGTERM).is_err() {
            // It has ended. A worker may always send itself a signal.
            let _ = kill(nix::unistd::getpid(), Signal::SIGTERM);
        }
    }

    /// Returns when it has ended.
    pub(crate) async fn ended(&self) -> anyhow::Result<()> {
        let watched = watched::watch_shared(Arc::clone(&self.pidfd)).context("watching the supervisor")?;
        while !sys::has_ended(self.pidfd.as_raw_fd()) {
            watched.readable().await?.clear_ready();
        }
        Ok(())
    }
}

/// Runs `worker` in a child until it exits by itself, and returns its exit code.
///
/// `ready` is reported once, when a worker is ready.
///
/// # Errors
/// The ledger or the first worker cannot be made.
pub fn supervise(ready: Ready, worker: impl Fn(&Start) -> u8) -> anyhow::Result<u8> {
    let (folder, ledger) = Folder::create()?;
    supervise_ledger(folder, ledger, false, ready, worker)
}

/// Runs workers as [`supervise`] does, for a ledger that may have sessions. The first worker is a `successor`
/// then.
///
/// # Errors
/// The first worker cannot be made.
pub fn supervise_ledger(
    folder: Folder,
    ledger: Ledger,
    successor: bool,
    ready: Ready,
    worker: impl Fn(&Start) -> u8,
) -> anyhow::Result<u8> {
    // A terminal, a service manager or a script sends signals to whole groups: SIGHUP, SIGQUIT, SIGUSR1.
    // Unblocked, they would end the supervisor. The signals of its own faults are delivered all the same.
    sigprocmask(SigmaskHow::SIG_BLOCK, Some(&SigSet::all()), None).context("blocking signals")?;
    raise_descriptor_limit();
    // Restored programs wait for this process and its workers, and would be killed with them.
    oom_score::be_killed_late();
    // Before descriptors are listed: a worker does not close it.
    let supervisor = Arc::new(Supervisor::own()?);
    let inherited: BTreeSet<i32> = open_descriptors().context("listing descriptors")?;
    // A recovered ledger names some of them: the worker may close those.
    let inherited = inherited.into_iter().filter(|number| !ledger.descriptors().any(|own| own == *number));
    let inherited = inherited.collect();
    // The worker closes them in the table that both share, so they are plain numbers from here on.
    let waiting = ready.waiting.into_iter().map(IntoRawFd::into_raw_fd).collect();
    let standard_error = ready.standard_error.map(IntoRawFd::into_raw_fd);
    let starter = folder.starter()?;
    let first = Start { ledger, successor, supervisor, starter, inherited, waiting, standard_error };
    let code = run_workers(first, worker);
    // No process serves what is left, even if the reason is an error of the supervisor.
    end_all(ledger);
    if let Err(error) = parking::unpark_slot(ledger.session()) {
        warn!("{error:#}");
    }
    leftover_stores::leave(folder, ledger.session());
    code
}

/// Starts a worker, and a successor for each that dies, up to [`MAX_DEATHS`]. Returns the exit code.
fn run_workers(mut start: Start, worker: impl Fn(&Start) -> u8) -> anyhow::Result<u8> {
    let mut deaths = Deaths::default();
    loop {
        // SAFETY: this process has one thread, so the child may do anything.
        let died = match unsafe { sys::fork_sharing_files() } {
            Ok(Fork::Child) => {
                // Unwinding out of here would run the supervisor's code in the worker.
                let code = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| worker(&start)));
                std::process::exit(code.map_or(PANICKED, i32::from));
            }
            Ok(Fork::Parent(pid)) => match wait_for(Pid::from_raw(pid))? {
                WorkerExit::Exited(code) if code != PANICKED => return Ok(u8::try_from(code).unwrap_or(1)),
                // SIGTERM ended it. A worker that targets depend on handles the signal, except while it
                // starts.
                WorkerExit::Stopped if !start.ledger.is_depended_on() => return Ok(STOPPED),
                exit => format!("worker {pid} {exit}"),
            },
            Err(error) if !start.successor => return Err(error).context("starting a worker"),
            Err(error) => {
                std::thread::sleep(FORK_INTERVAL);
                format!("starting a worker: {error}")
            }
        };
        if deaths.too_many() {
            error!("{MAX_DEATHS} workers died within {} s, the last: {died}", WINDOW.as_secs());
            return Ok(1);
        }
        // A successor cannot finish a load of GPU memory that had begun: see `docs/streaming.md`.
        let killed = start.ledger.gates().end_all();
        if killed > 0 {
            error!("{died}: killed {killed} restored processes whose GPUs were not resumed yet");
        }
        warn!("{died}: starting a successor");
        start.successor = true;
    }
}

/// When workers died within the last [`WINDOW`].
#[derive(Debug, Default)]
struct Deaths(Vec<Instant>);

impl Deaths {
    /// Adds a death now. Returns true if another worker would not help.
    fn too_many(&mut self) -> bool {
        self.0.push(Instant::now());
        self.0.retain(|death| death.elapsed() < WINDOW);
        self.0.len() >= MAX_DEATHS
    }
}

/// Raises the limit of open files to the hard limit.
///
/// Every forked child needs two descriptors, and a process dies if the streamer cannot get one.
pub fn raise_descriptor_limit() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(error) = raised {
        warn!(%error, "raising the limit of open files");
    }
}

/// Kills the processes that still have missing pages, before the last descriptor closes. Usually none has.
fn end_all(ledger: Ledger) {
    for (_, slot) in ledger.live_spaces() {
        processes::kill_descendants(
            slot.host_pid.load(Ordering::Acquire),
            slot.pidfd.load(Ordering::Acquire),
        );
    }
    let unknown =
        ledger.live_spaces().filter(|(_, slot)| slot.pidfd.load(Ordering::Acquire) == NO_FD).count();
    if unknown > 0 {
        warn!("waiting for the end of {unknown} forked processes whose missing memory cannot be loaded");
    }
    let killed = ledger.end_all();
    if killed > 0 {
        error!("killed {killed} restored processes whose missing memory cannot be loaded");
    }
}

enum WorkerExit {
    /// SIGTERM from the supervisor ended it.
    Stopped,
    Exited(i32),
    Killed(Signal),
}

impl std::fmt::Display for WorkerExit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Stopped => write!(f, "was stopped by SIGTERM"),
            Self::Exited(code) => write!(f, "exited with {code}"),
            Self::Killed(signal) => write!(f, "was killed by {signal}"),
        }
    }
}

/// Waits for the worker's end, and forwards SIGTERM and SIGINT to it as SIGTERM.
fn wait_for(worker: Pid) -> anyhow::Result<WorkerExit> {
    let signals: SigSet = [Signal::SIGCHLD, Signal::SIGTERM, Signal::SIGINT].into_iter().collect();
    let mut stop_requested = false;
    loop {
        match signals.wait().context("waiting for signals")? {
            Signal::SIGCHLD => {}
            signal => {
                info!("{signal}: sending SIGTERM to the worker");
                stop_requested = true;
                // The worker may have ended already: SIGCHLD follows.
                let _ = kill(worker, Signal::SIGTERM);
            }
        }
        match waitpid(worker, Some(WaitPidFlag::WNOHANG)).context("waiting for the worker")? {
            WaitStatus::Exited(_, code) => return Ok(WorkerExit::Exited(code)),
            WaitStatus::Signaled(_, Signal::SIGTERM, _) if stop_requested => return Ok(WorkerExit::Stopped),
            WaitStatus::Signaled(_, signal, _) => return Ok(WorkerExit::Killed(signal)),
            _ => {}
        }
    }
}

fn open_descriptors() -> std::io::Result<BTreeSet<i32>> {
    let entries = std::fs::read_dir("/proc/self/fd")?;
    Ok(entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect())
}

impl Start {
    /// Closes what a dead worker left open and no process needs: its rings, files and event descriptors.
    ///
    /// # Errors
    /// The descriptors cannot be listed.
    pub fn close_leftovers(&self) -> std::io::Result<()> {
        // A descriptor that got its byte is closed, and another file may have its number by now: a
        // userfaultfd, too.
        let until_ready =
            |number: &i32| self.waiting.contains(number) || self.standard_error == Some(*number);
        let is_closed = |number: &i32| self.ledger.is_ready() && until_ready(number);
        let inherited = self.inherited.iter().copied().filter(|number| !is_closed(number));
        let needed: BTreeSet<i32> = self.ledger.descriptors().chain(inherited).collect();
        for number in open_descriptors()?.difference(&needed) {
            // One of them is the listing's own descriptor, which is closed already: EBADF is harmless.
            // SAFETY: it belonged to the dead worker; nothing in this process owns it.
            let _ = unsafe { libc::close(*number) };
        }
        Ok(())
    }

    /// Reports that the daemon is ready. Only the first worker that is ready does it.
    pub fn ready(&self) {
        if self.ledger.is_ready() {
            return;
        }
        // SAFETY: open until a worker sets the ledger's flag, and nothing owns them.
        let own = |number: &RawFd| unsafe { sys::take_over(*number) };
        let ready = Ready {
            waiting: self.waiting.iter().map(|number| own(number).into()).collect(),
            standard_error: self.standard_error.as_ref().map(own),
        };
        if let Err(error) = ready.report() {
            warn!(%error, "reporting that the daemon is ready");
        }
        // Before they are closed: a successor must not mistake other files for them that have their numbers
        // by then.
        self.ledger.set_ready();
        drop(ready);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::{Child, Command};

    use super::*;

    /// A supervisor that waits.
    fn supervisor() -> (Child, Supervisor) {
        let child = Command::new("sleep").arg("60").spawn().unwrap();
        let pid = child.id().cast_signed();
        (child, Supervisor { pid, pidfd: Arc::new(sys::pidfd_open(pid).unwrap()) })
    }

    #[test]
    fn the_end_of_a_worker_is_the_supervisor_s_decision() {
        let (mut child, supervisor) = supervisor();
        // It needs no descriptor: this process may have as many as it may.
        supervisor.stop_worker();
        assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGTERM));
    }

    #[tokio::test]
    async fn a_worker_sees_the_end_of_its_supervisor() {
        let (mut child, supervisor) = supervisor();
        let early = tokio::time::timeout(Duration::from_millis(50), supervisor.ended()).await;
        assert!(early.is_err(), "it lives");
        child.kill().unwrap();
        let ended = tokio::time::timeout(Duration::from_secs(60), supervisor.ended()).await;
        ended.unwrap().unwrap();
        child.wait().unwrap();
    }
}
