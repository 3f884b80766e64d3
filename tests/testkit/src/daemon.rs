// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake serve` under test, and the commands that talk to it.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::Duration;

use anyhow::{Context, ensure};
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use serde_json::Value;
use tempfile::TempDir;

use crate::process::{PATIENCE, ProcessId as _, output, tail, until, wait_child};
use crate::programs::rewake;

/// A running `rewake serve` with a socket of its own. Dropping it kills it; streamers continue.
#[derive(Debug)]
pub struct Daemon {
    dir: TempDir,
    options: DaemonOptions,
    child: Child,
}

/// Options and environment of a daemon.
#[derive(Debug, Default)]
pub struct DaemonOptions {
    /// Options of `rewake serve`.
    pub arguments: Vec<OsString>,
    /// Variables in addition to the test's own.
    pub environment: Vec<(String, String)>,
}

impl Daemon {
    /// Starts one and waits until it answers.
    ///
    /// # Errors
    /// It does not, with the end of its log.
    pub fn start() -> anyhow::Result<Self> {
        Self::with(DaemonOptions::default())
    }

    /// [`Daemon::start`] with options.
    ///
    /// # Errors
    /// It does not answer, with the end of its log.
    pub fn with(options: DaemonOptions) -> anyhow::Result<Self> {
        let dir = tempfile::Builder::new().prefix("rewake-serve-").tempdir().context("make a directory")?;
        let child = spawn(&dir, &options)?;
        let daemon = Self { dir, options, child };
        daemon.answers().map(|()| daemon)
    }

    /// Its control socket.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("socket")
    }

    /// What `rewake status --json` says.
    ///
    /// # Errors
    /// It fails.
    pub fn status(&self) -> anyhow::Result<Value> {
        let mut command = Command::new(rewake()?);
        let answer = output(command.args(["status", "--json", "--socket"]).arg(self.socket()))?;
        serde_json::from_str(&answer).context("what rewake status says")
    }

    /// A `rewake restore` that uses this daemon.
    ///
    /// # Errors
    /// No program to start.
    pub fn restore(&self, criu: impl AsRef<OsStr>, images: &Path) -> anyhow::Result<Command> {
        let mut command = restore(criu, images)?;
        command.arg("--socket").arg(self.socket());
        Ok(command)
    }

    /// The process that was started.
    #[must_use]
    pub fn pid(&self) -> Pid {
        self.id().pid()
    }

    /// Its pid, in the standard library's type.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal to its process group.
    ///
    /// # Errors
    /// They have ended.
    pub fn signal_group(&self, signal: Signal) -> anyhow::Result<()> {
        killpg(self.pid(), signal).context("a signal to the daemon's group")
    }

    /// Kills it, and starts another in its place.
    ///
    /// # Errors
    /// It does not answer.
    pub fn replace(&mut self) -> anyhow::Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        self.child = spawn(&self.dir, &self.options)?;
        self.answers()
    }

    fn answers(&self) -> anyhow::Result<()> {
        let answer = until(PATIENCE, || self.status().ok());
        answer.map(drop).with_context(|| format!("rewake serve does not answer\n{}", self.logs()))
    }

    /// Asks it to end.
    ///
    /// # Errors
    /// It has ended already.
    pub fn terminate(&self) -> anyhow::Result<()> {
        kill(self.pid(), Signal::SIGTERM).context("SIGTERM to the daemon")
    }

    /// Whether it has ended.
    pub fn has_ended(&mut self) -> bool {
        wait_child(&mut self.child, Duration::ZERO).is_some()
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// It did not end in time.
    pub fn ended(&mut self, limit: Duration) -> anyhow::Result<ExitStatus> {
        wait_child(&mut self.child, limit).with_context(|| format!("it did not end\n{}", self.logs()))
    }

    /// All that it has logged.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("serve.log")).unwrap_or_default()
    }

    /// The bytes that it has read from the store of the one image in its cache, until that was complete.
    ///
    /// # Errors
    /// It is not complete, with the log.
    pub fn read_from_store(&self) -> anyhow::Result<u64> {
        let read = || -> Option<u64> {
            let log = self.log();
            let (before, _) = log.split_once(" bytes were read from its store")?;
            before.rsplit(' ').next()?.parse().ok()
        };
        until(PATIENCE, read).with_context(|| format!("the image is not complete\n{}", self.log()))
    }

    /// The ends of its logs.
    #[must_use]
    pub fn logs(&self) -> String {
        tail(&self.dir.path().join("serve.log"), 60) + &tail(&self.dir.path().join("serve.err"), 20)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.logs());
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn spawn(dir: &TempDir, options: &DaemonOptions) -> anyhow::Result<Child> {
    let log = File::options().create(true).append(true).open(dir.path().join("serve.err"))?;
    let mut command = Command::new(rewake()?);
    command.arg("serve").arg("--socket").arg(dir.path().join("socket"));
    command.args(["-v4", "-o"]).arg(dir.path().join("serve.log")).args(&options.arguments);
    command.envs(options.environment.iter().map(|(name, value)| (name, value)));
    // A group of its own: tests send signals to it.
    command.process_group(0);
    Ok(command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).spawn()?)
}

/// `rewake restore --json` of an image, with no daemon named and no CRIU options yet.
///
/// # Errors
/// No program to start.
pub fn restore(criu: impl AsRef<OsStr>, images: &Path) -> anyhow::Result<Command> {
    let mut command = Command::new(rewake()?);
    command.args(["restore", "--json", "-D"]).arg(images).env("CRIU", criu);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    Ok(command)
}

/// A command that runs `inner` as the first process of new pid and mount namespaces, where the folder `files`
/// lies over `place`. Several copies of one image can run in this way. When the first process ends,
/// the kernel kills all others.
#[must_use]
pub fn in_namespaces(inner: &Command, place: &Path, files: &Path) -> Command {
    let mut command = Command::new("unshare");
    command.args(["--mount", "--pid", "--fork", "--mount-proc", "sh", "-c"]);
    command.arg("mount --bind \"$0\" \"$1\" && shift && exec \"$@\"").arg(files).arg(place);
    command.arg(inner.get_program()).args(inner.get_args());
    for (name, value) in inner.get_envs() {
        command.env(name, value.unwrap_or_default());
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// The timeline of a restore that must have succeeded.
///
/// # Errors
/// It failed, with its output.
pub fn timeline(output: &Output) -> anyhow::Result<Value> {
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "rewake restore: {}\n{errors}", output.status);
    let timeline: Value = serde_json::from_slice(&output.stdout).context("the timeline")?;
    ensure!(timeline["ok"] == true, "{timeline}\n{errors}");
    Ok(timeline)
}
