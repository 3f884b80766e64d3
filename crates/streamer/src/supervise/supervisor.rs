// SPDX-License-Identifier: MIT OR Apache-2.0
//! The supervisor: a small process that outlives the worker and holds every descriptor it had.
//!
//! It does nothing but wait. When the worker dies it starts another, which takes over from the ledger. When
//! that does not help it kills the restored processes, so that none reads a page that was never brought back.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::os::fd::{IntoRawFd, OwnedFd, RawFd};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use nix::sys::signal::{SigSet, SigmaskHow, Signal, kill, sigprocmask};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use rewake_plugin_protocol::ProcessId;
use tracing::{error, info, warn};

use crate::ledger::{Folder, Ledger, NO_FD};
use crate::supervise::parking;
use crate::supervise::processes;
use crate::sys::{self, Fork};

/// Workers that may die within [`WINDOW`] before the supervisor gives up: a fault that every worker meets at
/// once is not cured by another.
const MAX_DEATHS: usize = 8;
const WINDOW: Duration = Duration::from_secs(10);
/// Before the next try after the kernel refused a fork: with [`MAX_DEATHS`], two seconds in all.
const FORK_PAUSE: Duration = Duration::from_millis(250);
/// Exit code of a worker that panicked before its reactors ran.
const PANICKED: i32 = 101;

/// Exit code when a worker was asked to stop before it had anything to do: as a shell tells it.
pub const STOPPED: u8 = 128 + 15;

/// The exit code of a command for which that is as good an end as any.
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
    /// The supervisor's pid.
    pub supervisor: i32,
    /// The supervisor, as notes name it.
    pub starter: ProcessId,
    /// Descriptors that are not the worker's to close: those open before the first worker was.
    inherited: BTreeSet<i32>,
    /// Descriptors to write a zero byte to, and to close, when the daemon is ready.
    notify: Vec<RawFd>,
}

/// Runs `worker` in a child until it exits by itself; gives its exit code. `notify` are descriptors to be
/// told once, when a worker is ready.
///
/// # Errors
/// The ledger or the first worker cannot be made.
pub fn supervise(notify: Vec<OwnedFd>, worker: impl Fn(&Start) -> u8) -> anyhow::Result<u8> {
    let (folder, ledger) = Folder::create()?;
    supervise_ledger(folder, ledger, false, notify, worker)
}

/// As [`supervise`], for a ledger that may have sessions already: its first worker is a `successor` then.
///
/// # Errors
/// The first worker cannot be made.
pub fn supervise_ledger(
    folder: Folder,
    ledger: Ledger,
    successor: bool,
    notify: Vec<OwnedFd>,
    worker: impl Fn(&Start) -> u8,
) -> anyhow::Result<u8> {
    // A signal that no process of ours uses would end it by default, and a terminal, a service manager or a
    // script sends such ones to whole groups: SIGHUP, SIGQUIT, SIGUSR1. Faults are delivered all the same.
    sigprocmask(SigmaskHow::SIG_BLOCK, Some(&SigSet::all()), None).context("blocking signals")?;
    raise_descriptor_limit();
    let inherited: BTreeSet<i32> = open_descriptors().context("listing descriptors")?;
    // A ledger that is recovered names some of them: they are the worker's.
    let inherited = inherited.into_iter().filter(|number| !ledger.descriptors().any(|own| own == *number));
    let inherited = inherited.collect();
    // Plain numbers from here on: the worker closes them in the table that both share.
    let notify: Vec<RawFd> = notify.into_iter().map(IntoRawFd::into_raw_fd).collect();
    let supervisor = nix::unistd::getpid().as_raw();
    let starter = ProcessId::of(supervisor).context("looking at this process")?;
    let starter = starter.context("this process has ended")?;
    let first = Start { ledger, successor, supervisor, starter, inherited, notify };
    let code = keep_a_worker(first, worker);
    // Whatever the reason, an error of ours included: nothing serves the rest any more.
    end_all(ledger);
    parking::unpark_all(ledger);
    folder.remove();
    code
}

/// Starts a worker and, as long as that helps, a successor for each that dies. Gives the exit code.
fn keep_a_worker(mut start: Start, worker: impl Fn(&Start) -> u8) -> anyhow::Result<u8> {
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
                Ended::Exited(code) if code != PANICKED => return Ok(u8::try_from(code).unwrap_or(1)),
                // As it was asked to. One that is depended on sees to that itself, but for its first moment.
                Ended::Stopped if !start.ledger.is_depended_on() => return Ok(STOPPED),
                how => format!("worker {pid} {how}"),
            },
            Err(error) if !start.successor => return Err(error).context("starting a worker"),
            Err(error) => {
                std::thread::sleep(FORK_PAUSE);
                format!("starting a worker: {error}")
            }
        };
        if deaths.too_many() {
            error!("{MAX_DEATHS} workers died within {} s, the last: {died}", WINDOW.as_secs());
            return Ok(1);
        }
        // Nothing of theirs was half loaded that a successor could finish: see `docs/streaming.md`.
        let killed = start.ledger.gates().end_all();
        if killed > 0 {
            error!("{died}: killed {killed} restored processes whose GPUs were not resumed yet");
        }
        warn!("{died}: starting a successor");
        start.successor = true;
    }
}

/// When workers died lately.
#[derive(Debug, Default)]
struct Deaths(Vec<Instant>);

impl Deaths {
    /// One more; true when another worker would not help.
    fn too_many(&mut self) -> bool {
        self.0.push(Instant::now());
        self.0.retain(|death| death.elapsed() < WINDOW);
        self.0.len() >= MAX_DEATHS
    }
}

/// Every forked child takes two descriptors, and one that cannot be had costs a process: the hard limit, then.
pub fn raise_descriptor_limit() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(error) = raised {
        warn!(%error, "raising the limit of open files");
    }
}

/// Before the last descriptor closes: ends the processes that still have missing pages. None, when all is well.
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
        warn!("waiting for the end of {unknown} forked processes whose memory cannot be brought back");
    }
    let killed = ledger.end_all();
    if killed > 0 {
        error!("killed {killed} restored processes whose memory cannot be brought back");
    }
}

enum Ended {
    /// By the request to stop that was passed on.
    Stopped,
    Exited(i32),
    Killed(Signal),
}

impl std::fmt::Display for Ended {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Stopped => write!(f, "stopped when asked to"),
            Self::Exited(code) => write!(f, "exited with {code}"),
            Self::Killed(signal) => write!(f, "was killed by {signal}"),
        }
    }
}

/// Waits for the worker's end, passing requests to stop on to it.
fn wait_for(worker: Pid) -> anyhow::Result<Ended> {
    let signals: SigSet = [Signal::SIGCHLD, Signal::SIGTERM, Signal::SIGINT].into_iter().collect();
    let mut asked = false;
    loop {
        match signals.wait().context("waiting for signals")? {
            Signal::SIGCHLD => {}
            signal => {
                info!("{signal}: asking the worker to stop");
                asked = true;
                // Gone already: the SIGCHLD is on its way.
                let _ = kill(worker, Signal::SIGTERM);
            }
        }
        match waitpid(worker, Some(WaitPidFlag::WNOHANG)).context("waiting for the worker")? {
            WaitStatus::Exited(_, code) => return Ok(Ended::Exited(code)),
            WaitStatus::Signaled(_, Signal::SIGTERM, _) if asked => return Ok(Ended::Stopped),
            WaitStatus::Signaled(_, signal, _) => return Ok(Ended::Killed(signal)),
            _ => {}
        }
    }
}

fn open_descriptors() -> std::io::Result<BTreeSet<i32>> {
    let entries = std::fs::read_dir("/proc/self/fd")?;
    Ok(entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect())
}

impl Start {
    /// Closes what a dead worker left open and nobody needs: its rings, files and event descriptors.
    ///
    /// # Errors
    /// The descriptors cannot be listed.
    pub fn close_leftovers(&self) -> std::io::Result<()> {
        // A notified descriptor is closed, and its number may be anything's by now: a userfaultfd's, too.
        let notified = |number: &i32| self.ledger.is_ready() && self.notify.contains(number);
        let inherited = self.inherited.iter().copied().filter(|number| !notified(number));
        let needed: BTreeSet<i32> = self.ledger.descriptors().chain(inherited).collect();
        for number in open_descriptors()?.difference(&needed) {
            // The listing's own descriptor is among them, closed already: EBADF is harmless.
            // SAFETY: it belonged to the dead worker; nothing in this process owns it.
            let _ = unsafe { libc::close(*number) };
        }
        Ok(())
    }

    /// Tells whoever waits that the daemon is ready; once, whichever worker gets there.
    pub fn ready(&self) {
        if self.ledger.is_ready() {
            return;
        }
        // SAFETY: open until a worker set the ledger's flag, and owned by nobody.
        let own = |number: &RawFd| std::fs::File::from(unsafe { sys::take_over(*number) });
        let mut files: Vec<std::fs::File> = self.notify.iter().map(own).collect();
        for file in &mut files {
            if let Err(error) = file.write_all(&[0]) {
                warn!(%error, "telling that the daemon is ready");
            }
        }
        // Before they are closed: a successor must not take what has their numbers by then for them.
        self.ledger.set_ready();
        drop(files);
    }
}
