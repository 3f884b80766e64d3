// SPDX-License-Identifier: MIT OR Apache-2.0
//! The workload, run as a program of its own.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, bail};
use gpu_app::client;
use gpu_app::shape::Shape;
use nix::sys::signal::{Signal, kill};
use rewake_testkit::process::{ProcessId as _, output};
use rewake_testkit::programs::beside;
use rewake_testkit::{PATIENCE, until};

use crate::answers::Answers;
use crate::criu::Version;

const SOCKET: &str = "app.sock";
/// Where `cargo xtask vm` puts an older libc.
const OLDER: &str = "/usr/local/lib/older";

/// A running server.
#[derive(Debug)]
pub struct App {
    pid: u32,
    /// None once it has been dumped: a restored server is no child.
    child: Option<Child>,
    socket: PathBuf,
    right: Answers,
    quit: bool,
}

impl App {
    /// Starts a server of this shape with its files in `folder`, and waits until it serves. It is a session
    /// leader without a terminal, as CRIU wants it.
    ///
    /// # Errors
    /// The server does not start; the panic shows its log.
    pub fn start(shape: &Shape, folder: &Path) -> anyhow::Result<Self> {
        Self::start_by(&program()?, shape, folder)
    }

    /// As [`App::start`], of this program.
    ///
    /// # Errors
    /// As [`App::start`].
    pub fn start_by(program: &Path, shape: &Shape, folder: &Path) -> anyhow::Result<Self> {
        let log = folder.join("app.log");
        let output = File::create(&log).with_context(|| format!("create {}", log.display()))?;
        let mut command = serve(program, shape, folder);
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        let mut child = command.spawn().context("start gpu-app")?;
        let said = || std::fs::read_to_string(&log).unwrap_or_default();
        let mut ended = None;
        until(PATIENCE, || {
            ended = child.try_wait().ok().flatten();
            (ended.is_some() || said().contains("READY")).then_some(())
        });
        if ended.is_some() || !said().contains("READY") {
            // It may have ended.
            let _ = child.kill();
            bail!("gpu-app does not serve ({ended:?}): {}", said());
        }
        let pid = child.id();
        Ok(Self {
            pid,
            child: Some(child),
            socket: folder.join(SOCKET),
            right: Answers::of(shape),
            quit: false,
        })
    }

    /// A server that was dumped, with its files in `folder`.
    pub(crate) fn dumped(pid: u32, shape: &Shape, folder: &Path) -> Self {
        Self { pid, child: None, socket: folder.join(SOCKET), right: Answers::of(shape), quit: false }
    }

    /// A server in pid and mount namespaces of its own, whose files are in `folder` there, too.
    #[must_use]
    pub fn in_copy(shape: &Shape, folder: &Path) -> Self {
        Self { pid: 0, child: None, socket: folder.join(SOCKET), right: Answers::of(shape), quit: true }
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// Its socket.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Waits for the end of a dumped process; it may be restored later.
    pub fn was_dumped(&mut self) {
        if let Some(mut child) = self.child.take() {
            // The dump killed it: its status is known.
            let _ = child.wait();
        }
    }

    /// The server was dumped, and will not be restored: drop ends nothing.
    pub fn is_over(&mut self) {
        self.quit = true;
    }

    /// Kills the server, as a crash would; it may be restored from an image.
    ///
    /// # Errors
    /// It cannot be killed.
    pub fn kill(&mut self) -> anyhow::Result<()> {
        if let Some(mut child) = self.child.take() {
            child.kill().context("kill gpu-app")?;
            child.wait()?;
        }
        Ok(())
    }

    /// Asks for tokens and compares them with the model's.
    ///
    /// # Errors
    /// No answer, or a wrong one.
    pub fn answers(&self, prompt: &[u32], count: usize) -> anyhow::Result<()> {
        client::start(&self.socket, prompt, count)?;
        self.answer_is(prompt, count)
    }

    /// Compares an answer that was begun with the model's.
    ///
    /// # Errors
    /// No answer, or a wrong one.
    pub fn answer_is(&self, prompt: &[u32], count: usize) -> anyhow::Result<()> {
        let (found, right) = (client::result(&self.socket)?, self.right.to(prompt, count));
        if found != right {
            bail!("the answer to {prompt:?} is {found:?}, expected {right:?}");
        }
        Ok(())
    }

    /// Rounds of the work that runs in addition to the answers.
    ///
    /// # Errors
    /// A round was wrong.
    pub fn rounds(&self) -> anyhow::Result<u64> {
        let answer = client::ask(&self.socket, "check")?;
        let rounds = answer.strip_prefix("ok ").and_then(|rounds| rounds.parse().ok());
        rounds.with_context(|| format!("`check` was answered by {answer:?}"))
    }

    /// Waits until some more rounds have succeeded.
    ///
    /// # Errors
    /// A round was wrong, or none ends.
    pub fn continues(&self, more: u64) -> anyhow::Result<()> {
        let before = self.rounds()?;
        let wrong_or_more = || match self.rounds() {
            Ok(rounds) => (rounds >= before + more).then_some(Ok(())),
            Err(error) => Some(Err(error)),
        };
        until(PATIENCE, wrong_or_more).with_context(|| format!("no {more} rounds after {before}"))?
    }

    /// Waits for the start of a new round: a dump that begins now finds GPUs at work, in modes whose rounds
    /// take seconds.
    ///
    /// # Errors
    /// A round went wrong, or none ends.
    pub fn gets_busy(&self) -> anyhow::Result<()> {
        self.continues(1)
    }

    /// Checks a part of its process with render nodes only: `node`, `fresh` or `kept`.
    ///
    /// # Errors
    /// The answer, where it is not right.
    pub fn rendered(&self, part: &str) -> anyhow::Result<()> {
        client::ask(&self.socket, &format!("rendered {part}")).map(drop)
    }

    /// Asks the server to end.
    ///
    /// # Errors
    /// It does not listen.
    pub fn quit(mut self) -> anyhow::Result<()> {
        client::ask(&self.socket, "quit")?;
        self.quit = true;
        if let Some(mut child) = self.child.take() {
            let status = child.wait()?;
            if !status.success() {
                bail!("gpu-app ended by {status}");
            }
        }
        Ok(())
    }
}

impl Drop for App {
    fn drop(&mut self) {
        // After `quit` there is nothing to end; a test that failed before has reported why.
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        } else if !self.quit {
            let _ = kill(self.pid.pid(), Signal::SIGKILL);
        }
    }
}

/// The command of a server with its files in `folder`, which it runs in a session of its own.
#[must_use]
pub fn serve(program: &Path, shape: &Shape, folder: &Path) -> Command {
    let mut command = Command::new("setsid");
    command.arg(program).args(["serve", "--socket"]).arg(folder.join(SOCKET)).args(shape.arguments());
    command
}

/// The workload's program, in `folder` if it is made there: one that this CRIU can dump. CRIU 4.1 takes guard
/// pages under threads' stacks for pages, and glibc 2.42 makes them. There the program gets an older libc if
/// the machine has one.
///
/// # Errors
/// There is no program, or it cannot be made.
pub fn program_for(version: Version, folder: &Path) -> anyhow::Result<PathBuf> {
    let (program, libraries) = (program()?, Path::new(OLDER));
    let made = folder.join("gpu-app");
    if made.exists() {
        return Ok(made);
    }
    if version == Version::V4_2 || !libraries.is_dir() {
        return Ok(program);
    }
    let mut command = Command::new("patchelf");
    command.arg("--set-interpreter").arg(libraries.join("ld-linux-x86-64.so.2"));
    command.arg("--set-rpath").arg(libraries).arg("--output").arg(&made).arg(program);
    output(&mut command)?;
    Ok(made)
}

/// `GPU_APP`, or the program beside the folder of this test's own.
pub(crate) fn program() -> anyhow::Result<PathBuf> {
    beside("GPU_APP", "gpu-app", "cargo build -p gpu-app")
}
