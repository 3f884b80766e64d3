// SPDX-License-Identifier: MIT OR Apache-2.0
//! Starts the program `accessor`, sends it orders and reads its answers.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail};
use rewake_testkit::{PATIENCE, until};

use crate::criu::{Criu, Plugin, Version, wait_for_the_end_of};
use crate::dumped::dies;

/// Its buffers, and bytes of each.
pub const BUFFERS: usize = 2;
/// Large enough to be loaded in the background.
pub const BYTES: usize = 4 << 20;
/// Parts of its own memory, each as long as a buffer: a page server loads them in a second or more, under
/// emulation.
pub const OWN_PARTS: usize = 16;
/// Bytes at the end of a buffer. All else of a large one is zero, which costs images nothing.
pub const TAIL: usize = 4096;
/// Offset in a buffer of the bytes that it reads: not at the start of a page.
pub const READ: usize = (1 << 20) + 123;
/// Polling interval for a file.
pub const LOOK: Duration = Duration::from_millis(2);

/// Large buffers instead of the default.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Large {
    /// How many.
    pub count: usize,
    /// Size of each.
    pub mib: usize,
    /// All bytes are pattern, not the end alone.
    pub full: bool,
}

impl Large {
    /// Where the pattern begins in a buffer.
    #[must_use]
    pub fn pattern_at(self) -> usize {
        if self.full { 0 } else { (self.mib << 20) - TAIL }
    }

    /// The arguments of the program.
    fn arguments(self) -> [String; 3] {
        [self.count.to_string(), self.mib.to_string(), self.full.to_string()]
    }
}

/// The content of a buffer: no two pages are alike.
#[must_use]
pub fn pattern(buffer: usize) -> Vec<u8> {
    pattern_of(buffer, BYTES)
}

/// Its first bytes, whole words of eight.
#[must_use]
pub fn pattern_of(buffer: usize, bytes: usize) -> Vec<u8> {
    let word = |at: usize| ((at * 2 + buffer + 1) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
    let mut pattern = vec![0; bytes / 8 * 8];
    // Word by word, since tests make much of it under emulation.
    pattern.chunks_exact_mut(8).enumerate().for_each(|(at, bytes)| bytes.copy_from_slice(&word(at)));
    pattern
}

/// A running accessor.
#[derive(Debug)]
pub struct Accessor {
    folder: PathBuf,
    pid: u32,
    child: Option<Child>,
}

impl Accessor {
    /// Starts `program` with its files in `folder`, and waits until it has its buffers; large ones, if given.
    ///
    /// # Errors
    /// It does not start.
    pub fn start(program: &str, folder: &Path, large: Option<Large>) -> anyhow::Result<Self> {
        let log = fs::File::create(folder.join("log"))?;
        let mut command = Command::new("setsid");
        command
            .arg(program)
            .arg(folder)
            .args(large.into_iter().flat_map(Large::arguments))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        let child = command.spawn().context("start accessor")?;
        let accessor = Self { folder: folder.to_owned(), pid: child.id(), child: Some(child) };
        accessor.answer()?;
        Ok(accessor)
    }

    /// Starts `program`, dumps it with memory of its own into a folder of `folder`, and orders it to register
    /// that memory; it reads the order after its restore.
    ///
    /// # Errors
    /// It does not start, or is not dumped.
    pub fn about_to_register(program: &str, folder: &Path, version: Version) -> anyhow::Result<(Self, Criu)> {
        let mut accessor = Self::start(program, folder, None)?;
        accessor.asked(&format!("allocate {OWN_PARTS}"))?;
        let criu = accessor.dump(version)?;
        accessor.ask("register 0")?;
        Ok((accessor, criu))
    }

    /// An accessor that was restored with this folder over its own: its files are here. Its process id is not
    /// known.
    #[must_use]
    pub fn in_copy(folder: &Path) -> Self {
        Self { folder: folder.to_owned(), pid: 0, child: None }
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Dumps it into a folder of its own folder.
    ///
    /// # Errors
    /// The dump fails.
    pub fn dump(&mut self, version: Version) -> anyhow::Result<Criu> {
        let criu = Criu::with(Plugin::Ours, version, &self.folder.join("images"))?;
        criu.dump(self.pid)?;
        self.was_dumped()?;
        Ok(criu)
    }

    /// Kills the restored process.
    ///
    /// # Panics
    /// It does not end.
    pub fn ends(&self) {
        dies(self.pid);
        wait_for_the_end_of(self.pid).unwrap();
    }

    /// Collects the dumped process; a restored one is no child.
    ///
    /// # Errors
    /// Its end cannot be awaited.
    pub fn was_dumped(&mut self) -> anyhow::Result<()> {
        self.child.take().map_or(Ok(()), |mut child| Ok(child.wait().map(drop)?))
    }

    /// Sends it an order, and waits for its answer.
    ///
    /// # Errors
    /// As [`Accessor::ask`] and [`Accessor::answer`].
    pub fn asked(&self, order: &str) -> anyhow::Result<()> {
        self.ask(order)?;
        self.answer().with_context(|| order.to_owned())
    }

    /// Sends it an order.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn ask(&self, order: &str) -> anyhow::Result<()> {
        let part = self.folder.join("order.part");
        fs::write(&part, order)?;
        Ok(fs::rename(part, self.folder.join("order"))?)
    }

    /// Its answer, if it has one; then removes the order.
    #[must_use]
    pub fn answered(&self) -> Option<String> {
        let _ = fs::remove_file(self.folder.join("order"));
        self.take_answer()
    }

    fn take_answer(&self) -> Option<String> {
        let path = self.folder.join("answer");
        let answer = fs::read_to_string(&path).ok()?;
        let _ = fs::remove_file(&path);
        Some(answer)
    }

    /// Its standard error.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.join("log")).unwrap_or_default()
    }

    /// Waits for the answer to the last order.
    ///
    /// # Errors
    /// The answer is not `ok`, or is missing.
    pub fn answer(&self) -> anyhow::Result<()> {
        let answer = until(PATIENCE, || self.take_answer());
        let answer = answer.with_context(|| format!("no answer: {}", self.log()))?;
        if answer == "ok" { Ok(()) } else { bail!(answer) }
    }
}
