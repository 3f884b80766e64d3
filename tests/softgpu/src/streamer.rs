// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake streamer`, which loads GPU memory in the background, and `rewake lazy-pages`, which loads CPU
//! memory.

use std::fs::File;
use std::io::Read as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use anyhow::Context as _;
use rewake_testkit::process::{PATIENCE, wait_child};
use rewake_testkit::programs::rewake;

pub use rewake_testkit::process::children;

/// A streamer with a process group of its own; killed when dropped.
#[derive(Debug)]
pub struct Streamer {
    child: Child,
    log: PathBuf,
}

impl Streamer {
    /// Starts it for a restore with this work directory; it listens when this returns.
    ///
    /// # Errors
    /// There is no such program (`REWAKE_BIN`, or beside this test), or it does not start.
    pub fn start(work: &Path) -> anyhow::Result<Self> {
        Self::of_gpus(work, &[])
    }

    /// As [`Streamer::start`]; it records in the image directory which memory CPUs access first.
    ///
    /// # Errors
    /// As [`Streamer::start`].
    pub fn recording(work: &Path) -> anyhow::Result<Self> {
        Self::of_gpus(work, &["--record"])
    }

    fn of_gpus(work: &Path, options: &[&str]) -> anyhow::Result<Self> {
        let mut command = Command::new(rewake()?);
        command.arg("streamer").arg("-W").arg(work).args(options).args(["-v4", "--status-fd", "1"]);
        Self::listens(command, work.join("streamer.log"))
    }

    /// Starts the one for CPU memory, for a restore of these images with `--lazy-pages`; it listens when this
    /// returns.
    ///
    /// # Errors
    /// As [`Streamer::start`].
    pub fn of_cpus(images: &Path) -> anyhow::Result<Self> {
        let mut command = Command::new(rewake()?);
        command.arg("lazy-pages").arg("-D").arg(images).args(["-v4", "--status-fd", "1"]);
        Self::listens(command, images.join("lazy-pages.log"))
    }

    /// Starts the one for CPU and GPU memory, for a restore of these images with `--lazy-pages`; it listens
    /// when this returns.
    ///
    /// # Errors
    /// As [`Streamer::start`].
    pub fn of_both(images: &Path) -> anyhow::Result<Self> {
        Self::of_both_with(images, &[])
    }

    /// As [`Streamer::of_both`]; it records in the image directory which memory CPUs access first.
    ///
    /// # Errors
    /// As [`Streamer::start`].
    pub fn recording_both(images: &Path) -> anyhow::Result<Self> {
        Self::of_both_with(images, &["--record"])
    }

    fn of_both_with(images: &Path, options: &[&str]) -> anyhow::Result<Self> {
        let mut command = Command::new(rewake()?);
        command.arg("streamer").arg("-D").arg(images).arg("-W").arg(images).args(options);
        command.args(["-v4", "--status-fd", "1"]);
        Self::listens(command, images.join("streamer.log"))
    }

    fn listens(mut command: Command, log: PathBuf) -> anyhow::Result<Self> {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(File::create(&log)?).process_group(0);
        let mut child = command.spawn().with_context(|| format!("start {command:?}"))?;
        let ready = child.stdout.take().context("no output")?.read_exact(&mut [0]);
        let streamer = Self { child, log };
        ready.with_context(|| format!("{command:?} does not listen: {}", streamer.said()))?;
        Ok(streamer)
    }

    /// Its supervisor's process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its workers' process ids.
    #[must_use]
    pub fn workers(&self) -> Vec<u32> {
        children(self.pid())
    }

    /// The process ids of both.
    #[must_use]
    pub fn processes(&self) -> Vec<u32> {
        [self.pid()].into_iter().chain(self.workers()).collect()
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// It does not end.
    pub fn end(&mut self) -> anyhow::Result<ExitStatus> {
        let status = wait_child(&mut self.child, PATIENCE);
        status.with_context(|| format!("it does not end: {}", self.said()))
    }

    /// Whether it has ended.
    ///
    /// # Errors
    /// Its status cannot be read.
    pub fn has_ended(&mut self) -> anyhow::Result<bool> {
        Ok(self.child.try_wait()?.is_some())
    }

    /// Its log.
    #[must_use]
    pub fn said(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }
}

/// Runs `rewake recover`: whether it served all sessions to their end, and its output.
///
/// # Errors
/// There is no such program.
pub fn recover() -> anyhow::Result<(bool, String)> {
    let output = Command::new(rewake()?).args(["recover", "-v4"]).stdin(Stdio::null()).output()?;
    Ok((output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned()))
}

impl Drop for Streamer {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The number after this text in a log.
///
/// # Panics
/// The log has none.
#[must_use]
pub fn number_after(said: &str, what: &str) -> u64 {
    let rest = said.split_once(what).unwrap_or_else(|| panic!("no {what:?}: {said}")).1;
    rest.split_whitespace().next().unwrap().parse().unwrap()
}
