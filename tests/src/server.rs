// SPDX-License-Identifier: MIT OR Apache-2.0
//! The page server under test.

use std::env;
use std::fs::{self, File};
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill, killpg};
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::{Pid, pipe2};

use crate::criu::Criu;
use crate::process::{PATIENCE, children, kill_all, stop_command, until, wait_child};
pub use rewake_testkit::programs::rewake;

/// How a server is started.
#[derive(Clone, Debug)]
pub struct Setup {
    program: PathBuf,
    stock: bool,
    images: PathBuf,
    work: PathBuf,
    extra: Vec<String>,
    joined: bool,
    own_work: bool,
}

/// Why a server did not start.
#[derive(Clone, Debug)]
pub struct Refusal {
    /// How it ended.
    pub status: ExitStatus,
    /// What it wrote to standard error, standard output and its log.
    pub text: String,
}

impl Refusal {
    /// True when one line holds all of `parts`.
    #[must_use]
    pub fn line_with(&self, parts: &[&str]) -> bool {
        self.text.lines().any(|line| parts.iter().all(|part| line.contains(part)))
    }
}

/// True when `REWAKE_TEST_SERVER=stock` asks for CRIU's own page server.
#[must_use]
pub fn stock() -> bool {
    env::var("REWAKE_TEST_SERVER").is_ok_and(|value| value == "stock")
}

impl Setup {
    /// A server for `images` with its socket and log in `work`.
    ///
    /// # Errors
    /// No program to start.
    pub fn new(criu: &Criu, images: &Path, work: &Path) -> anyhow::Result<Self> {
        let program = if stock() { criu.command("").get_program().into() } else { rewake()? };
        Ok(Self {
            program,
            stock: stock(),
            images: images.to_owned(),
            work: work.to_owned(),
            extra: Vec::new(),
            joined: false,
            own_work: true,
        })
    }

    /// Runs another program in its place, which has to run it.
    #[must_use]
    pub fn by(mut self, program: &Path) -> Self {
        self.program = program.to_owned();
        self
    }

    /// Adds an option.
    #[must_use]
    pub fn with(mut self, option: &str) -> Self {
        self.extra.push(option.to_owned());
        self
    }

    /// Spells options as `--option=value` and in words, instead of `-o value`.
    #[must_use]
    pub fn joined(mut self) -> Self {
        self.joined = true;
        self
    }

    /// Puts the socket and the log into the images directory, as without a work directory.
    #[must_use]
    pub fn without_work_dir(mut self) -> Self {
        self.work.clone_from(&self.images);
        self.own_work = false;
        self
    }

    /// The log file.
    #[must_use]
    pub fn log(&self) -> PathBuf {
        self.work.join("lazy.log")
    }

    /// The command line without `--status-fd`.
    #[must_use]
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.arg("lazy-pages");
        if self.joined {
            command.arg("--no-default-config");
            command.arg(format!("--images-dir={}", self.images.display()));
            command.args(["--log-file=lazy.log", "--verbosity=4"]);
        } else {
            command.arg("-D").arg(&self.images).args(["-o", "lazy.log", "-v4"]);
        }
        if self.own_work {
            command.arg(if self.joined { "--work-dir" } else { "-W" }).arg(&self.work);
        }
        command.args(&self.extra).stdin(Stdio::null());
        command
    }

    fn output(&self) -> PathBuf {
        self.work.join("lazy.out")
    }

    /// Starts the server and waits until it listens.
    ///
    /// # Errors
    /// The outer one: the machine or the test is broken. The inner one: the server refused.
    pub fn start(&self) -> anyhow::Result<Result<Server, Refusal>> {
        let (reader, writer) = pipe2(OFlag::O_CLOEXEC).context("status pipe")?;
        let output = File::create(self.output()).context("create the server's output file")?;
        let mut command = with_status_fd(&self.command(), writer);
        command.stdout(output.try_clone()?).stderr(output);
        let mut child = command.spawn().context("start the server")?;
        drop(command);
        if ready(reader)? {
            return Ok(Ok(Server { child, setup: self.clone(), seen: Vec::new() }));
        }
        let Some(status) = wait_child(&mut child, PATIENCE) else {
            child.kill()?;
            child.wait()?;
            bail!("the server neither said that it is ready nor ended within {PATIENCE:?}");
        };
        Ok(Err(Refusal { status, text: self.text() }))
    }

    /// Starts the server, which must not refuse.
    ///
    /// # Errors
    /// It refused, or the machine is broken.
    pub fn listening(&self) -> anyhow::Result<Server> {
        self.start()?.map_err(|refusal| anyhow::anyhow!("refused: {}\n{}", refusal.status, refusal.text))
    }

    /// Everything that the server wrote.
    #[must_use]
    pub fn text(&self) -> String {
        let read = |path| String::from_utf8_lossy(&fs::read(path).unwrap_or_default()).into_owned();
        format!("{}\n{}", read(self.output()), read(self.log()))
    }
}

/// The same command with `--status-fd`. A shell puts the pipe at a number of its choice and then becomes the
/// command. So only this child inherits the pipe, and no code of ours runs between fork and exec.
#[must_use]
pub fn with_status_fd(command: &Command, pipe: OwnedFd) -> Command {
    let mut shell = Command::new("/bin/sh");
    shell.args(["-c", "exec \"$@\" 7>&0 0</dev/null", "sh"]);
    shell.arg(command.get_program()).args(command.get_args()).args(["--status-fd", "7"]);
    // A group of its own: tests send signals to it.
    shell.stdin(pipe).process_group(0);
    shell
}

/// A script for CRIU's `--action-script` that stops these processes once `log` reports a task.
pub(crate) fn stopper(processes: &[Pid], log: &Path) -> String {
    format!(
        "#!/bin/sh\n[ \"$CRTOOLS_SCRIPT_ACTION\" = post-restore ] || exit 0\n\
         until grep -q 'task arrived' {}; do sleep 0.01; done\n{}\n",
        log.display(),
        stop_command(processes)
    )
}

/// True when the byte that means "listening" was received; false when the pipe was closed without it.
pub(crate) fn ready(reader: OwnedFd) -> anyhow::Result<bool> {
    let limit = PollTimeout::try_from(PATIENCE).context("time limit")?;
    let came =
        poll(&mut [PollFd::new(reader.as_fd(), PollFlags::POLLIN)], limit).context("wait for status")?;
    if came == 0 {
        return Ok(false);
    }
    let mut byte = [1];
    let count = File::from(reader).read(&mut byte).context("read the status pipe")?;
    ensure!(count == 0 || byte == [0], "the status byte is {byte:?}, expected a zero byte");
    Ok(count == 1)
}

/// A page server that listens or serves. Dropping it kills it and its children.
#[derive(Debug)]
pub struct Server {
    child: Child,
    setup: Setup,
    /// Every child it was seen to have: they may outlive it when it is killed.
    seen: Vec<Pid>,
}

impl Server {
    /// Its process.
    #[must_use]
    pub fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id().cast_signed())
    }

    /// The process that serves: its child. None for a server without children.
    pub fn worker(&mut self) -> Option<Pid> {
        let found = children(self.pid());
        self.seen.extend(&found);
        found.into_iter().max()
    }

    /// A script for CRIU's `--action-script` that stops this server, its worker and all, once a task has
    /// arrived.
    pub(crate) fn stopper(&mut self) -> String {
        stopper(&self.processes(), &self.setup.log())
    }

    /// The process that was started, and its worker.
    pub fn processes(&mut self) -> Vec<Pid> {
        [self.pid()].into_iter().chain(self.worker()).collect()
    }

    /// Sends a signal to every process of its group.
    ///
    /// # Errors
    /// All of them have ended.
    pub fn signal_group(&self, signal: Signal) -> anyhow::Result<()> {
        killpg(self.pid(), signal).with_context(|| format!("{signal} to the server's group"))
    }

    /// Waits for the end of every process of its group.
    ///
    /// # Errors
    /// It did not end in time.
    pub fn all_ended(&mut self, limit: Duration) -> anyhow::Result<()> {
        self.ended(limit)?;
        let group = self.pid();
        until(limit, || {
            // A worker whose starter has ended becomes a child of this process, which has to collect it.
            let _ = waitpid(Pid::from_raw(-group.as_raw()), Some(WaitPidFlag::WNOHANG));
            killpg(group, None).is_err().then_some(())
        })
        .context("a worker outlives its starter")
    }

    /// Resumes a stopped server: the worker, then the process that was started, which cannot replace the
    /// worker before.
    ///
    /// # Errors
    /// One of them has ended.
    pub fn continues(&mut self) -> anyhow::Result<()> {
        let mut all = self.worker().into_iter().chain([self.pid()]);
        all.try_for_each(|pid| kill(pid, Signal::SIGCONT).context("SIGCONT to the server"))
    }

    /// The process that brings pages from a page server. None while none runs.
    pub fn fetcher(&mut self) -> Option<Pid> {
        let is_fetcher = |pid: &Pid| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            line.ends_with(b"\0fetcher\0")
        };
        // After its worker's death it is a child of this process.
        let parents = self.worker().into_iter().chain([nix::unistd::getpid()]);
        parents.flat_map(children).filter(is_fetcher).max()
    }

    /// Kills the process that serves; false when it has none any more.
    pub fn kill_worker(&mut self) -> bool {
        let serving = if self.setup.stock { Some(self.pid()) } else { self.worker() };
        serving.is_some_and(|pid| kill(pid, Signal::SIGKILL).is_ok())
    }

    /// Kills the process that was started, and leaves its children alone.
    pub fn kill_supervisor(&mut self) -> bool {
        self.worker();
        self.child.try_wait().is_ok_and(|ended| ended.is_none()) && self.child.kill().is_ok()
    }

    /// Asks it to end.
    ///
    /// # Errors
    /// It has ended already.
    pub fn terminate(&self) -> anyhow::Result<()> {
        kill(self.pid(), Signal::SIGTERM).context("SIGTERM to the server")
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// It did not end in time; with its last output.
    pub fn ended(&mut self, limit: Duration) -> anyhow::Result<ExitStatus> {
        wait_child(&mut self.child, limit).with_context(|| format!("the server did not end within {limit:?}"))
    }

    /// Everything that it wrote.
    #[must_use]
    pub fn text(&self) -> String {
        self.setup.text()
    }

    /// Waits until it has no children; does not wait for its own end.
    #[must_use]
    pub fn childless(&mut self, limit: Duration) -> bool {
        until(limit, || self.worker().is_none().then_some(())).is_some()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.worker();
        // A supervisor whose child ends starts another, so kill it first.
        let _ = self.child.kill();
        let _ = self.child.wait();
        kill_all(&self.seen);
    }
}
