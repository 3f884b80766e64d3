// SPDX-License-Identifier: MIT OR Apache-2.0
//! The `criu restore` that `rewake restore` runs.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use anyhow::{Context as _, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::io::unix::AsyncFd;

use crate::{processes, sys};

/// CRIU's log when its options name none.
const LOG: &str = "restore.log";
/// Error lines of the log that are shown.
const SHOWN: usize = 8;
/// Bytes of the log's end that are looked at.
const LOOKED_AT: usize = 256 * 1024;

/// What the options for `criu restore` say that matters here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Options {
    /// `-d`: CRIU ends once the tree runs.
    pub(super) detached: bool,
    /// Its log, relative to the work directory.
    pub(super) log: Option<PathBuf>,
}

impl Options {
    /// Reads the options.
    ///
    /// # Errors
    /// One is given that `rewake restore` gives itself.
    pub(super) fn read(options: &[OsString]) -> anyhow::Result<Self> {
        let mut found = Self { detached: false, log: None };
        let mut options = options.iter();
        while let Some(option) = options.next() {
            let text = option.to_string_lossy();
            let (name, value) = match text.split_once('=') {
                Some((name, value)) => (name, Some(value.to_owned())),
                None => (&*text, None),
            };
            match name {
                "-d" | "--restore-detached" => found.detached = true,
                "--lazy-pages" => {}
                "-o" | "--log-file" => {
                    let value = value.map(OsString::from).or_else(|| options.next().cloned());
                    found.log = Some(value.with_context(|| format!("{name}: expected a file"))?.into());
                }
                "-D" | "--images-dir" | "-W" | "--work-dir" => {
                    bail!("{name}: give it to `rewake restore`, before `--`: the page server needs it too")
                }
                _ => {}
            }
        }
        Ok(found)
    }
}

/// A running `criu restore`.
#[derive(Debug)]
pub(super) struct Criu {
    child: Child,
    pidfd: AsyncFd<OwnedFd>,
    log: PathBuf,
}

impl Criu {
    /// Starts it. With `stdout` false its output goes to stderr.
    ///
    /// # Errors
    /// There is no such program.
    pub(super) fn start(
        program: &Path,
        images: &Path,
        work: &Path,
        given: &[OsString],
        options: &Options,
        stdout: bool,
    ) -> anyhow::Result<Self> {
        let mut command = Command::new(program);
        command.args([
            OsStr::new("restore"),
            OsStr::new("--lazy-pages"),
            OsStr::new("-D"),
            images.as_os_str(),
        ]);
        command.arg("-W").arg(work);
        if options.log.is_none() {
            command.args(["-o", LOG]);
        }
        command.args(given);
        if !stdout {
            command.stdout(Stdio::from(sys::duplicate(io::stderr().as_fd())?));
        }
        let child = command.spawn();
        let child = child.with_context(|| format!("starting {} (name it with --criu)", program.display()))?;
        let pidfd =
            sys::pidfd_open(child.id().cast_signed()).and_then(sys::watch).context("watching criu")?;
        let log = work.join(options.log.as_deref().unwrap_or_else(|| Path::new(LOG)));
        Ok(Self { child, pidfd, log })
    }

    /// Waits for its end. May be dropped and called again.
    pub(super) async fn ended(&mut self) -> anyhow::Result<ExitStatus> {
        self.pidfd.readable().await.context("watching criu")?.retain_ready();
        self.child.wait().context("waiting for criu")
    }

    /// Sends a signal; an ended CRIU is as good.
    pub(super) fn signal(&self, signal: Signal) {
        let _ = kill(Pid::from_raw(self.child.id().cast_signed()), signal);
    }

    /// Kills it and the tasks that it has made: they are parts of a tree that will never run.
    pub(super) fn kill_tree(&self) {
        let pid = self.child.id().cast_signed();
        // Not collected yet, so the number is its own.
        if let Ok(pidfd) = crate::sys::pidfd_open(pid) {
            processes::kill_descendants(pid, pidfd.as_raw_fd());
        }
        self.signal(Signal::SIGKILL);
    }

    /// The last error lines of its log.
    pub(super) fn errors(&self) -> Vec<String> {
        let bytes = fs::read(&self.log).unwrap_or_default();
        errors(&String::from_utf8_lossy(&bytes[bytes.len().saturating_sub(LOOKED_AT)..]))
    }
}

/// Lines that CRIU marks as errors, the last ones.
fn errors(log: &str) -> Vec<String> {
    let lines: Vec<&str> = log.lines().filter(|line| line.contains("Error (")).collect();
    lines[lines.len().saturating_sub(SHOWN)..].iter().map(|line| (*line).to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(options: &[&str]) -> anyhow::Result<Options> {
        Options::read(&options.iter().map(OsString::from).collect::<Vec<_>>())
    }

    #[test]
    fn detached_in_both_spellings() {
        assert!(!read(&["-v4", "--shell-job"]).unwrap().detached);
        assert!(read(&["-d"]).unwrap().detached && read(&["--restore-detached"]).unwrap().detached);
    }

    #[test]
    fn the_log_in_all_spellings() {
        for options in [&["-o", "-d"][..], &["--log-file", "-d"], &["--log-file=-d"]] {
            let found = read(options).unwrap();
            assert_eq!(found, Options { detached: false, log: Some("-d".into()) }, "{options:?}");
        }
        assert!(read(&["-o"]).is_err());
    }

    #[test]
    fn directories_are_refused_by_name() {
        for option in ["-D", "--images-dir=/x", "-W", "--work-dir"] {
            let error = read(&[option]).unwrap_err().to_string();
            assert!(error.starts_with(option.split('=').next().unwrap()), "{error}");
        }
    }

    #[test]
    fn only_the_last_error_lines_of_a_log_are_shown() {
        let mut log = String::from("(00.1) Warn  (x.c:1): no\n");
        for number in 0..20 {
            log.push_str(&format!("(00.2) Error (criu/x.c:{number}): went wrong\n(00.2) fine\n"));
        }
        let shown = errors(&log);
        assert_eq!(shown.len(), SHOWN);
        assert!(shown.iter().all(|line| line.contains("went wrong")) && shown[SHOWN - 1].contains("x.c:19"));
    }
}
