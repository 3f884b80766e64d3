// SPDX-License-Identifier: MIT OR Apache-2.0
//! Processes that end with the bench, waits that end, CPU time and memory.

mod tree;

use std::os::fd::{AsFd as _, FromRawFd as _, OwnedFd, RawFd};
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

pub(crate) use tree::{PeakMemory, Sampler};

/// Time in which a killed process must be gone.
const KILL_WAIT: Duration = Duration::from_secs(10);

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
    pub(crate) success: bool,
    pub(crate) status: ExitStatus,
    /// User and system time of the process and of those descendants that it waited for, in seconds.
    pub(crate) cpu_seconds: f64,
    /// When the wait returned.
    pub(crate) at: Instant,
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
        // SAFETY: takes two integers, returns a new descriptor or -1.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid.as_raw(), 0) };
        if fd < 0 {
            let error = std::io::Error::last_os_error();
            return Err(error).with_context(|| format!("pidfd_open of {name}, pid {pid}"));
        }
        // SAFETY: a fresh descriptor that nobody else owns.
        let pidfd = unsafe { OwnedFd::from_raw_fd(RawFd::try_from(fd)?) };
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

    /// True when the process ends within `limit`.
    fn ends_within(&self, limit: Duration) -> anyhow::Result<bool> {
        let deadline = Instant::now() + limit;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let left = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
            match poll(&mut [PollFd::new(self.pidfd.as_fd(), PollFlags::POLLIN)], left) {
                Ok(ready) => return Ok(ready > 0),
                Err(nix::errno::Errno::EINTR) => {}
                Err(error) => return Err(error).context("poll of a pidfd"),
            }
        }
    }

    /// Waits for the end.
    ///
    /// # Errors
    /// Still running after `limit`.
    pub(crate) fn wait(&mut self, limit: Duration) -> anyhow::Result<Exit> {
        use std::os::unix::process::ExitStatusExt as _;
        if !self.ends_within(limit)? {
            bail!("{}, pid {}, still runs after {limit:?}", self.name, self.pid);
        }
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
        let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 * 1e-6;
        let cpu_seconds = seconds(usage.ru_utime) + seconds(usage.ru_stime);
        Ok(Exit { success: status.success(), status, cpu_seconds, at })
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.reaped {
            return;
        }
        // Descendants first read, then killed: their parents' death would hide them. Failures mean that they
        // are gone, which is what is wanted.
        let mut doomed = tree::descendants(self.pid);
        doomed.push(self.pid);
        for pid in doomed {
            let _ = kill(pid, Signal::SIGKILL);
        }
        let _ = self.wait(KILL_WAIT);
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
        assert!(!exit.success);
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
