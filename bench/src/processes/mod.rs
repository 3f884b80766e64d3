// SPDX-License-Identifier: MIT OR Apache-2.0
//! Processes that end with the bench, waits with a limit, CPU time and memory.

mod tree;

use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, kill, sigaction};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use rewake_process::pidfd::{ends_within, pidfd_open};

pub(crate) use tree::{
    Watch, anonymous_and_shared, descendants, high_water_mark, page_faults, read_bytes, share_of_rewake,
};

/// Time in which a killed process must have ended.
const KILL_WAIT: Duration = Duration::from_secs(10);
/// The longest time until an interruption is noticed.
const SLICE: Duration = Duration::from_millis(200);
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

extern "C" fn on_interrupt(_: libc::c_int) {
    INTERRUPTED.store(true, Ordering::Relaxed);
}

/// From here on SIGINT and SIGTERM make waits fail, so that callers clean up.
pub(crate) fn catch_interrupts() -> anyhow::Result<()> {
    let action = SigAction::new(SigHandler::Handler(on_interrupt), SaFlags::SA_RESTART, SigSet::empty());
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        // SAFETY: the handler does one atomic store.
        unsafe { sigaction(signal, &action) }.context("sigaction")?;
    }
    Ok(())
}

/// # Errors
/// Whether SIGINT or SIGTERM was received.
pub(crate) fn check_interrupted() -> anyhow::Result<()> {
    if INTERRUPTED.load(Ordering::Relaxed) {
        bail!("interrupted");
    }
    Ok(())
}

/// A child of this process; killed with its descendants when dropped.
#[derive(Debug)]
pub(crate) struct Process {
    name: String,
    pid: Pid,
    pidfd: OwnedFd,
    reaped: bool,
}

/// How a process ended.
#[derive(Debug)]
pub(crate) struct Exit {
    pub(crate) status: ExitStatus,
    /// User and system time of the process and of those descendants that it reaped, in seconds.
    pub(crate) cpu_seconds: f64,
    /// When the wait returned.
    pub(crate) at: Instant,
}

impl Exit {
    /// # Errors
    /// The process failed; with what it said.
    pub(crate) fn check(&self, what: &str, said: impl FnOnce() -> String) -> anyhow::Result<()> {
        ensure!(self.status.success(), "{what}: {}\n{}", self.status, said());
        Ok(())
    }
}

impl Process {
    /// Starts a command.
    pub(crate) fn spawn(command: &mut Command) -> anyhow::Result<Self> {
        let name = command.get_program().to_string_lossy().into_owned();
        let child = command.spawn().with_context(|| format!("starting {name}"))?;
        Self::adopt(Pid::from_raw(i32::try_from(child.id())?), &name)
    }

    /// Takes charge of a process that is, or has become, a child of this one.
    pub(crate) fn adopt(pid: Pid, name: &str) -> anyhow::Result<Self> {
        let pidfd = pidfd_open(pid.as_raw()).with_context(|| format!("pidfd_open of {name}, pid {pid}"))?;
        Ok(Self { name: name.to_owned(), pid, pidfd, reaped: false })
    }

    pub(crate) fn pid(&self) -> Pid {
        self.pid
    }

    /// Sends a signal. The pid cannot be another's: only `wait` reaps it.
    pub(crate) fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        if self.reaped {
            bail!("{signal} for {}: it has ended already", self.name);
        }
        kill(self.pid, signal).with_context(|| format!("{signal} for {}, pid {}", self.name, self.pid))
    }

    /// Waits for the end.
    ///
    /// # Errors
    /// Still running after `limit`, or interrupted.
    pub(crate) fn wait(&mut self, limit: Duration) -> anyhow::Result<Exit> {
        let deadline = Instant::now() + limit;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if ends_within(self.pidfd.as_raw_fd(), left.min(SLICE)) {
                return self.reap();
            }
            check_interrupted()?;
            if Instant::now() >= deadline {
                bail!("{}, pid {}, still runs after {limit:?}", self.name, self.pid);
            }
        }
    }

    /// Takes the status of a process that has ended.
    fn reap(&mut self) -> anyhow::Result<Exit> {
        let at = Instant::now();
        let mut status = 0;
        // SAFETY: rusage is plain integers, for which zeros are valid.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        // SAFETY: both pointers are live exclusive references for the call's duration.
        let waited = unsafe { libc::wait4(self.pid.as_raw(), &raw mut status, 0, &raw mut usage) };
        if waited < 0 {
            let error = std::io::Error::last_os_error();
            return Err(error).with_context(|| format!("wait4 of {}, pid {}", self.name, self.pid));
        }
        self.reaped = true;
        let status = ExitStatus::from_raw(status);
        Ok(Exit { status, cpu_seconds: cpu_seconds(&usage), at })
    }
}

/// User and system time together.
fn cpu_seconds(usage: &libc::rusage) -> f64 {
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 * 1e-6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}

/// User and system seconds of this process, or of all children that it has reaped so far, with the children
/// that those had reaped.
pub(crate) fn cpu_seconds_of(who: UsageWho) -> anyhow::Result<f64> {
    Ok(cpu_seconds(getrusage(who).context("getrusage")?.as_ref()))
}

/// No terminal: the dumped process must not hold ours, and logs go to files.
pub(crate) fn quiet(command: &mut Command) -> &mut Command {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null())
}

/// Waits for ended processes that have become children of this one, as their parent has ended. Until then
/// their pids are in use, and a restore needs them.
pub(crate) fn reap_adopted(pids: &[Pid]) {
    let deadline = Instant::now() + KILL_WAIT;
    for pid in pids {
        // Another answer than this means that it is no child of this process any more.
        while waitpid(*pid, Some(WaitPidFlag::WNOHANG)) == Ok(WaitStatus::StillAlive)
            && Instant::now() < deadline
        {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.reaped {
            return;
        }
        // Reads the descendants first, then kills them: their parents' death would hide them. A failure means
        // that a process has ended already.
        let descendants = tree::descendants(self.pid);
        for pid in descendants.iter().chain([&self.pid]) {
            let _ = kill(*pid, Signal::SIGKILL);
        }
        let deadline = Instant::now() + KILL_WAIT;
        while Instant::now() < deadline {
            if ends_within(self.pidfd.as_raw_fd(), SLICE) {
                let _ = self.reap();
                break;
            }
        }
        reap_adopted(&descendants);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Process {
        Process::spawn(Command::new("sh").args(["-c", script])).unwrap()
    }

    #[test]
    fn cpu_time_includes_children_that_were_waited_for() {
        let spin = "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done";
        let exit = shell(&format!("({spin}); exit 3")).wait(Duration::from_secs(60)).unwrap();
        assert_eq!(exit.status.code(), Some(3));
        exit.check("spin", String::new).unwrap_err();
        assert!(exit.cpu_seconds > 0.02, "{} s", exit.cpu_seconds);
    }

    #[test]
    fn a_wait_ends_at_its_limit() {
        let mut process = shell("sleep 60");
        let error = process.wait(Duration::from_millis(50)).unwrap_err();
        assert!(error.to_string().contains("still runs"), "{error}");
    }

    #[test]
    fn dropping_a_process_ends_its_descendants_too() {
        let process = shell("sleep 60 & wait");
        let deadline = Instant::now() + Duration::from_secs(10);
        let grandchild = loop {
            if let Some(pid) = tree::descendants(process.pid).first() {
                break *pid;
            }
            assert!(Instant::now() < deadline, "the shell never forked");
        };
        drop(process);
        let state = || std::fs::read_to_string(format!("/proc/{grandchild}/stat"));
        while state().is_ok_and(|stat| !stat.contains(") Z ")) {
            assert!(Instant::now() < deadline, "pid {grandchild} still runs");
        }
    }
}
