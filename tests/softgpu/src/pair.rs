// SPDX-License-Identifier: MIT OR Apache-2.0
//! Starts the program `pair`, controls it and checks its counts.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, ensure};

use crate::criu::{Criu, Plugin, Version, wait_for_the_end_of};
use crate::dumped::{dies, soon};

/// Sizes of the large buffers: where both are loaded at one rate, one is resident long before the other.
pub const BYTES: [usize; 2] = [8 << 20, 48 << 20];
/// Bytes of a round.
pub const COPIED: usize = 4096;

/// A running `pair`.
#[derive(Debug)]
pub struct Pair {
    folder: PathBuf,
    pid: u32,
    child: Option<Child>,
}

impl Pair {
    /// Starts `program` with its files in `folder`, and waits until both GPUs have copied.
    ///
    /// # Errors
    /// It does not start.
    pub fn start(program: &str, folder: &Path) -> anyhow::Result<Self> {
        Self::start_with(program, folder, &[])
    }

    /// As [`Pair::start`]; both GPUs have the same bytes, of the smaller buffer.
    ///
    /// # Errors
    /// It does not start.
    pub fn start_same(program: &str, folder: &Path) -> anyhow::Result<Self> {
        Self::start_with(program, folder, &["same"])
    }

    fn start_with(program: &str, folder: &Path, how: &[&str]) -> anyhow::Result<Self> {
        let log = fs::File::create(folder.join("log"))?;
        let mut command = Command::new("setsid");
        command.arg(program).arg(folder).args(how).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let child = command.spawn().context("start pair")?;
        let pair = Self { folder: folder.to_owned(), pid: child.id(), child: Some(child) };
        let runs = soon(|| pair.counts().is_ok_and(|counts| counts.iter().all(|count| *count > 2)));
        ensure!(runs, "{:?}: {}", pair.counts(), fs::read_to_string(folder.join("log"))?);
        Ok(pair)
    }

    /// As [`Pair::start`], and dumped into a folder of `folder`.
    ///
    /// # Errors
    /// It does not start, or is not dumped.
    pub fn dumped(program: &str, folder: &Path) -> anyhow::Result<(Self, Criu)> {
        let mut pair = Self::start(program, folder)?;
        let criu = Criu::with(Plugin::Ours, Version::V4_2, &folder.join("images"))?;
        criu.dump(pair.pid())?;
        pair.was_dumped()?;
        Ok((pair, criu))
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Collects the dumped process; a restored one is no child.
    ///
    /// # Errors
    /// Its end cannot be awaited.
    pub fn was_dumped(&mut self) -> anyhow::Result<()> {
        self.child.take().map_or(Ok(()), |mut child| Ok(child.wait().map(drop)?))
    }

    /// Sends it an order, by the file's name, and waits until it has read that.
    ///
    /// # Errors
    /// The file cannot be written, or is not read.
    pub fn asked(&self, what: &str) -> anyhow::Result<()> {
        let order = self.folder.join(what);
        fs::write(&order, "")?;
        ensure!(soon(|| !order.exists()), "it does not read {what}: {:?}", self.counts());
        Ok(())
    }

    /// Whether these queues run: some rounds are counted soon.
    ///
    /// # Panics
    /// A copy was wrong.
    #[must_use]
    pub fn continues(&self, gpus: &[usize]) -> bool {
        let before = self.counts().unwrap();
        soon(|| {
            let now = self.counts().unwrap();
            gpus.iter().all(|gpu| now[*gpu] > before[*gpu] + 2)
        })
    }

    /// Kills the restored process.
    ///
    /// # Panics
    /// It does not end.
    pub fn ends(&self) {
        dies(self.pid);
        wait_for_the_end_of(self.pid).unwrap();
    }

    /// Rounds of both GPUs.
    ///
    /// # Errors
    /// A copy was wrong.
    pub fn counts(&self) -> anyhow::Result<[u64; 2]> {
        let text = fs::read_to_string(self.folder.join("counts"))?;
        let (first, second) = text.split_once(' ').with_context(|| text.clone())?;
        Ok([first.parse().with_context(|| text.clone())?, second.parse().with_context(|| text.clone())?])
    }
}
