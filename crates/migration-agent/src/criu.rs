// SPDX-License-Identifier: MIT OR Apache-2.0
//! The CRIU commands of a migration.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rewake_process::criu;
use serde::{Deserialize, Serialize};

/// Error lines of a log that are shown.
const SHOWN: usize = 4;
/// Time between two log lines of a wait, so that a user sees that it lasts and a log stays short.
const REPORT_INTERVAL: Duration = Duration::from_secs(10);
/// Pause between two looks at CRIU. The program may be frozen then, so that a longer pause would be downtime.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Which CRIU, and options of the user's for it.
#[derive(Debug, Clone)]
pub struct CriuChoice {
    /// The program.
    pub program: PathBuf,
    /// Options of `criu dump` or `criu restore`.
    pub options: Vec<OsString>,
    /// The folder of CRIU's plugins; none: CRIU's own.
    pub plugins: Option<PathBuf>,
}

/// The release of a CRIU, as far as it matters for its images: 4.2.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct CriuRelease(pub(crate) [u32; 2]);

impl std::fmt::Display for CriuRelease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.0[0], self.0[1])
    }
}

impl CriuRelease {
    /// Reads what `criu --version` writes: `Version: 4.2.1`.
    fn parse(text: &str) -> Option<Self> {
        let number = text.lines().find_map(|line| line.strip_prefix("Version:"))?.trim();
        let mut parts = number.split('.').map(str::parse);
        Some(Self([parts.next()?.ok()?, parts.next()?.ok()?]))
    }
}

impl CriuChoice {
    /// Asks the program for its release.
    pub(crate) fn release(&self) -> anyhow::Result<CriuRelease> {
        let program = self.program.display();
        let output = Command::new(&self.program).arg("--version").stdin(Stdio::null()).output();
        let output = output.with_context(|| criu::starting(&self.program))?;
        let text = String::from_utf8_lossy(&output.stdout);
        ensure!(output.status.success(), "{program} --version: {}", output.status);
        CriuRelease::parse(&text).with_context(|| format!("{program} --version shows no version"))
    }

    /// Whether it is given an option.
    pub(crate) fn has(&self, option: &str) -> bool {
        self.options.iter().any(|given| given == option)
    }

    /// A command with its images and its log in these folders.
    pub(crate) fn command(&self, act: &str, images: &Path, work: &Path) -> Command {
        let log = format!("{act}.log");
        criu::command(&self.program, act, &[], [images, work], Some(log.as_ref()), self.plugins.as_deref())
    }
}

/// A CRIU that runs, or a `rewake lazy-pages` in the place of CRIU's.
#[derive(Debug)]
pub(crate) struct RunningCriu {
    child: Child,
    act: &'static str,
    /// Its log, and what it writes to standard error. They go with the migration's folder.
    logs: [PathBuf; 2],
}

impl RunningCriu {
    /// Starts a command, whose log is in `work`. It leaves the terminal's process group: Ctrl-C is for the
    /// agent.
    pub(crate) fn start(command: &mut Command, act: &'static str, work: &Path) -> anyhow::Result<Self> {
        let (log, words) = (work.join(format!("{act}.log")), work.join(format!("{act}.stderr")));
        let stderr = File::create(&words).with_context(|| format!("making {}", words.display()))?;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr).process_group(0);
        let program = PathBuf::from(command.get_program());
        let child = command.spawn().with_context(|| criu::starting(&program))?;
        Ok(Self { child, act, logs: [log, words] })
    }

    pub(crate) fn pid(&self) -> i32 {
        self.child.id().cast_signed()
    }

    /// Returns how it ended, if it has.
    pub(crate) fn ended(&mut self) -> io::Result<Option<ExitStatus>> {
        self.child.try_wait()
    }

    /// Waits for its end, and kills it at the limit.
    pub(crate) fn end_within(&mut self, limit: Duration) {
        let start = Instant::now();
        while matches!(self.ended(), Ok(None)) {
            if start.elapsed() > limit {
                self.kill();
                return;
            }
            sleep(POLL_INTERVAL);
        }
    }

    /// Waits for its end without a limit: killed, it would leave the tree in its hands.
    pub(crate) fn wait(&mut self, what: &'static str) {
        let mut reports = CriuReports::new(what);
        while matches!(self.ended(), Ok(None)) {
            reports.look();
            sleep(POLL_INTERVAL);
        }
    }

    /// Asks it to end, and kills it at the limit.
    pub(crate) fn stop_within(&mut self, limit: Duration) {
        // It may have ended.
        let _ = kill(Pid::from_raw(self.child.id().cast_signed()), Signal::SIGTERM);
        self.end_within(limit);
    }

    pub(crate) fn kill(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Says how it failed.
    pub(crate) fn failure(&self, status: ExitStatus) -> String {
        let texts = self.logs.each_ref().map(|log| fs::read(log).unwrap_or_default());
        let text = String::from_utf8_lossy(&texts.concat()).into_owned();
        let last = match criu::error_or_last_lines(&text, SHOWN) {
            lines if lines.is_empty() => "it has logged nothing".to_owned(),
            lines => lines.join("; "),
        };
        format!("{} failed ({status}): {last}", self.act)
    }
}

/// Reports of a wait that has no limit.
#[derive(Debug)]
pub(crate) struct CriuReports {
    what: &'static str,
    start: Instant,
    next: Duration,
}

impl CriuReports {
    pub(crate) fn new(what: &'static str) -> Self {
        Self { what, start: Instant::now(), next: REPORT_INTERVAL }
    }

    /// Logs a line when one is due.
    pub(crate) fn look(&mut self) {
        let elapsed = self.start.elapsed();
        if elapsed >= self.next {
            tracing::warn!("{}, for {} s now", self.what, elapsed.as_secs());
            self.next += REPORT_INTERVAL;
        }
    }
}

/// Makes a socket for CRIU's `--ps-socket`: our end, and CRIU's, which a child inherits with this number.
pub(crate) fn page_socket() -> anyhow::Result<(UnixStream, UnixStream, String)> {
    let (ours, criu) = UnixStream::pair().context("making a socket for CRIU")?;
    fcntl(criu.as_fd(), FcntlArg::F_SETFD(FdFlag::empty())).context("making a socket for CRIU")?;
    let number = criu.as_raw_fd().to_string();
    Ok((ours, criu, number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_shell_says_why() {
        let work = tempfile::tempdir().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "echo > /no/such/file"]);
        let mut criu = RunningCriu::start(&mut command, "restore", work.path()).unwrap();
        criu.wait("a shell");
        let status = criu.ended().unwrap().unwrap();
        let failure = criu.failure(status);
        assert!(failure.starts_with("restore failed (exit status: "), "{failure}");
        assert!(failure.contains("/no/such/file"), "{failure}");
    }
}
