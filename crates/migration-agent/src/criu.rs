// SPDX-License-Identifier: MIT OR Apache-2.0
//! The CRIU commands of a migration.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};

/// Error lines of a log that are shown.
const SHOWN: usize = 4;
const POLL: Duration = Duration::from_millis(2);

/// Which CRIU, and options of the user's for it.
#[derive(Debug, Clone)]
pub struct CriuChoice {
    /// The program.
    pub program: PathBuf,
    /// Options of `criu dump` or `criu restore`.
    pub options: Vec<OsString>,
}

impl CriuChoice {
    /// A command with its images and its log in these folders.
    pub(crate) fn command(&self, act: &str, images: &Path, work: &Path) -> Command {
        let mut command = Command::new(&self.program);
        command.arg(act).arg("-D").arg(images).arg("-W").arg(work).args(["-o", &format!("{act}.log")]);
        command
    }
}

/// A CRIU that runs.
#[derive(Debug)]
pub(crate) struct RunningCriu {
    child: Child,
    act: &'static str,
    log: PathBuf,
}

impl RunningCriu {
    /// Starts a command, whose log is in `work`. It leaves the terminal's process group: Ctrl-C is for the agent.
    pub(crate) fn start(command: &mut Command, act: &'static str, work: &Path) -> anyhow::Result<Self> {
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0);
        let program = command.get_program().to_owned();
        let child = command.spawn();
        let child = child.with_context(|| format!("starting {} (name it with --criu)", program.display()))?;
        Ok(Self { child, act, log: work.join(format!("{act}.log")) })
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
            sleep(POLL);
        }
    }

    pub(crate) fn kill(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Says how it failed.
    pub(crate) fn failure(&self, status: ExitStatus) -> String {
        let log = fs::read(&self.log).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let errors: Vec<&str> = log.lines().filter(|line| line.contains("Error")).collect();
        let last = &errors[errors.len().saturating_sub(SHOWN)..];
        let why = if last.is_empty() { self.log.display().to_string() } else { last.join("; ") };
        format!("criu {} failed ({status}): {why}", self.act)
    }
}

/// Makes a socket for CRIU's `--ps-socket`: our end, and CRIU's, which a child inherits with this number.
pub(crate) fn page_socket() -> anyhow::Result<(UnixStream, UnixStream, String)> {
    let (ours, criu) = UnixStream::pair().context("making a socket for CRIU")?;
    fcntl(criu.as_fd(), FcntlArg::F_SETFD(FdFlag::empty())).context("making a socket for CRIU")?;
    let number = criu.as_raw_fd().to_string();
    Ok((ours, criu, number))
}
