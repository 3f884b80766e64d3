// SPDX-License-Identifier: MIT OR Apache-2.0
//! The scene's inference server, as its clients see it.

use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};

use super::actors::wait_until;
use crate::{files, program};

/// Weights: four layers of 32 MiB, random, where no CPU can access them. One queue, because each has 64 MB of
/// memory for its state, which must be resident before the process runs.
pub(super) const SHAPE: [&str; 10] =
    ["--layers", "4", "--layer-kib", "32768", "--cache-mib", "4", "--queues", "1", "--mode", "no-access"];
/// How long anything of it may take.
const LIMIT: Duration = Duration::from_secs(120);
/// Between two looks at what it does, which keep an emulated processor from other work.
const LOOK: Duration = Duration::from_millis(20);

/// Where it serves.
#[derive(Debug)]
pub(super) struct Server {
    /// `gpu-app`.
    program: PathBuf,
    socket: PathBuf,
}

/// How far an answer was.
#[derive(Debug, Clone, Copy)]
pub(super) struct Progress {
    pub(super) tokens: usize,
    pub(super) at: Instant,
}

impl Server {
    /// Starts it, and waits until it serves.
    pub(super) fn start(program: &Path, folder: &Path) -> anyhow::Result<(Self, Child)> {
        let path = folder.join("server.log");
        let server = Self { program: program.to_owned(), socket: folder.join("socket") };
        let log = files::create(&path)?;
        let mut command = Command::new("setsid");
        command.arg(program).args(["serve", "--socket"]).arg(&server.socket).args(SHAPE);
        command.stdin(Stdio::null()).stdout(log.try_clone().context("share the log")?).stderr(log);
        let mut child = command.spawn().context("start the server")?;
        wait_until(LIMIT, "the server does not get ready", || {
            let said = fs::read_to_string(&path).unwrap_or_default();
            ensure!(child.try_wait()?.is_none(), "the server ended: {said}");
            Ok(said.contains("READY"))
        })?;
        Ok((server, child))
    }

    /// The right tokens, computed without any GPU.
    pub(super) fn expected(program: &Path, tokens: &str, prompt: &[&str]) -> anyhow::Result<String> {
        let mut command = Command::new(program);
        command.args(["expect", "--tokens", tokens]).args(SHAPE).args(prompt);
        Ok(program::capture(&mut command)?.trim().to_owned())
    }

    /// Sends a line; returns the answer.
    pub(super) fn tell(&self, words: &[&str]) -> anyhow::Result<String> {
        let mut command = Command::new(&self.program);
        command.arg("tell").arg("--socket").arg(&self.socket).args(words);
        Ok(program::capture(&mut command)?.trim().to_owned())
    }

    /// Waits for a number of tokens, unless the server is lost. A restored process answers as soon as it
    /// runs.
    pub(super) fn progress(
        &self,
        until: impl Fn(usize) -> bool,
        is_lost: impl Fn() -> bool,
    ) -> anyhow::Result<Progress> {
        let start = Instant::now();
        while start.elapsed() < LIMIT && !is_lost() {
            match self.tokens() {
                Some(tokens) if until(tokens) => return Ok(Progress { tokens, at: Instant::now() }),
                _ => sleep(LOOK),
            }
        }
        bail!("the server made no progress for {} s", start.elapsed().as_secs())
    }

    /// `None` while no process serves.
    fn tokens(&self) -> Option<usize> {
        let mut stream = UnixStream::connect(&self.socket).ok()?;
        stream.set_read_timeout(Some(LIMIT)).ok()?;
        stream.write_all(b"progress\n").ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        answer.trim().strip_prefix("progress ")?.parse().ok()
    }

    /// Waits for the rest of the unfinished answer, which must be right.
    pub(super) fn finishes(&self, right: &str) -> anyhow::Result<()> {
        let answer = self.tell(&["result"])?;
        let answer = answer.strip_prefix("tokens ").unwrap_or(&answer);
        ensure!(answer == right, "the server's answer is {answer}, expected {right}");
        Ok(())
    }

    /// Ends the process.
    pub(super) fn ends(&self, pid: u32) -> anyhow::Result<()> {
        self.tell(&["quit"])?;
        let task = Path::new("/proc").join(pid.to_string());
        wait_until(LIMIT, "the server does not end", || Ok(!task.exists()))
    }
}
