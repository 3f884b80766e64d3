// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake serve` under test, and the commands that talk to it.

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

use crate::criu::Criu;
use crate::process::{run, tail, until, wait_child};
use crate::scene::Scene;
use crate::server::rewake;

/// Time until a daemon answers.
const START: Duration = Duration::from_secs(60);

/// A running `rewake serve` with a socket of its own. Dropping it kills it; streamers run on.
#[derive(Debug)]
pub struct Daemon {
    dir: TempDir,
    child: Child,
}

impl Daemon {
    /// Starts one and waits until it answers.
    ///
    /// # Errors
    /// It does not, with the end of its log.
    pub fn start() -> anyhow::Result<Self> {
        let dir = tempfile::Builder::new().prefix("rewake-serve-").tempdir().context("make a directory")?;
        let child = spawn(&dir)?;
        let daemon = Self { dir, child };
        until(START, || daemon.status().ok()).with_context(|| format!("no answer\n{}", daemon.logs()))?;
        Ok(daemon)
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
        let output = command.args(["status", "--json", "--socket"]).arg(self.socket()).output()?;
        ensure!(output.status.success(), "rewake status: {}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).context("what rewake status says")
    }

    /// A `rewake restore` that uses this daemon.
    ///
    /// # Errors
    /// No program to start.
    pub fn restore(&self, criu: &Criu, images: &Path) -> anyhow::Result<Command> {
        let mut command = restore(criu, images)?;
        command.arg("--socket").arg(self.socket());
        Ok(command)
    }

    /// `rewake restore -- -d` with a scene's image and work directory, not yet started.
    ///
    /// # Errors
    /// No program to start.
    pub fn detached(&self, criu: &Criu, scene: &Scene) -> anyhow::Result<Command> {
        let mut command = self.restore(criu, &scene.images())?;
        command.arg("-W").arg(scene.work()).args(["--", "-d", "-v4"]);
        Ok(command)
    }

    /// The process that was started.
    #[must_use]
    pub fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id().cast_signed())
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
        self.child = spawn(&self.dir)?;
        until(START, || self.status().ok()).with_context(|| format!("no answer\n{}", self.logs()))?;
        Ok(())
    }

    /// Asks it to end.
    ///
    /// # Errors
    /// It is gone already.
    pub fn terminate(&self) -> anyhow::Result<()> {
        kill(self.pid(), Signal::SIGTERM).context("SIGTERM to the daemon")
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// It did not end in time.
    pub fn ended(&mut self, limit: Duration) -> anyhow::Result<ExitStatus> {
        wait_child(&mut self.child, limit).with_context(|| format!("it did not end\n{}", self.logs()))
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

fn spawn(dir: &TempDir) -> anyhow::Result<Child> {
    let log = File::options().create(true).append(true).open(dir.path().join("serve.err"))?;
    let mut command = Command::new(rewake()?);
    command.arg("serve").arg("--socket").arg(dir.path().join("socket"));
    command.args(["-v4", "-o"]).arg(dir.path().join("serve.log"));
    // A group of its own: tests send signals to it.
    command.process_group(0);
    Ok(command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).spawn()?)
}

/// `rewake restore --json` of an image, with no daemon named and no CRIU options yet.
///
/// # Errors
/// No program to start.
pub fn restore(criu: &Criu, images: &Path) -> anyhow::Result<Command> {
    let mut command = Command::new(rewake()?);
    command.args(["restore", "--json", "-D"]).arg(images).env("CRIU", criu.command("").get_program());
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    Ok(command)
}

/// The timeline of a restore that must have gone well.
///
/// # Errors
/// It did not, with what it wrote.
pub fn timeline(output: &Output) -> anyhow::Result<Value> {
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "rewake restore: {}\n{errors}", output.status);
    let timeline: Value = serde_json::from_slice(&output.stdout).context("the timeline")?;
    ensure!(timeline["ok"] == true, "{timeline}\n{errors}");
    Ok(timeline)
}

/// The processes whose command line names `text`.
#[must_use]
pub fn processes_naming(text: &str) -> Vec<Pid> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let names = |pid: &Pid| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).replace('\0', " ").contains(text)
    };
    pids.map(Pid::from_raw).filter(names).collect()
}

/// A command that runs `inner` as the first process of new pid and mount namespaces, where the folder `files` lies over
/// the target's own. The same image can run there beside itself. When the first process ends, all others are killed.
#[must_use]
pub fn in_namespaces(inner: &Command, scene: &Scene, files: &Path) -> Command {
    let mut command = Command::new("unshare");
    command.args(["--mount", "--pid", "--fork", "--mount-proc", "sh", "-c"]);
    command.arg("mount --bind \"$0\" \"$1\" && shift && exec \"$@\"").arg(files).arg(scene.files());
    command.arg(inner.get_program()).args(inner.get_args());
    for (name, value) in inner.get_envs() {
        command.env(name, value.unwrap_or_default());
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Whether this machine has pid and mount namespaces to give.
#[must_use]
pub fn has_namespaces() -> bool {
    let mut probe = Command::new("unshare");
    let probe = run(probe.args(["--mount", "--pid", "--fork", "--mount-proc", "true"]), START);
    probe.is_ok_and(|status| status.success())
}
