// SPDX-License-Identifier: MIT OR Apache-2.0
//! A `rewake stream-gpu` as those see it who start it: the program, and what it says of those whose memory it brings.

use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::Context as _;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use rewake_amdgpu_uapi::call_filter;
use rewake_plugin_protocol::SOCKET;

use crate::ledger::StatusByte;
use crate::session::image::Image;

/// For people, of [`RestoreOutcome::Killed`].
pub const KILLED: &str =
    "memory could not be brought back: the restored processes whose GPUs stood still were killed";
/// For people, of [`RestoreOutcome::Abandoned`]: no process is left that could say.
pub const ABANDONED: &str = "every process of rewake stream-gpu was killed: the restored processes wait for their memory; run `rewake recover`, \
     which kills those whose GPUs were not resumed";

/// What became of memory that could come later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RestoreOutcome {
    /// It took nothing over: the plugin had nothing for it, or did it all itself.
    Nothing,
    /// All gates are open and all memory of CPUs is back.
    Open,
    /// Those before gates were killed, or those with missing memory.
    Killed,
    /// Nobody is left to say: they stand before their gates for ever.
    Abandoned,
}

impl RestoreOutcome {
    /// Why it is no good one.
    #[must_use]
    pub fn reason(self) -> Option<&'static str> {
        match self {
            Self::Nothing | Self::Open => None,
            Self::Killed => Some(KILLED),
            Self::Abandoned => Some(ABANDONED),
        }
    }
}

/// What it has said so far on its `--status-fd`: whichever of its processes did.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct StatusFlags(u32);

impl StatusFlags {
    const READY: u32 = 1;
    const SHUT: u32 = 2;
    const OPEN: u32 = 4;
    const KILLED: u32 = 8;
    const BACK: u32 = 16;

    /// As [`StatusFlags::bits`] gave it.
    #[must_use]
    pub fn from_bits(bits: u32) -> Self {
        Self(bits)
    }

    /// All of it, in a number.
    #[must_use]
    pub fn bits(self) -> u32 {
        self.0
    }

    /// One more byte. Whether it is news that some of the memory is there.
    pub fn hear(&mut self, byte: u8) -> bool {
        let (bit, there) = match StatusByte::read(byte) {
            Some(StatusByte::Shut) => (Self::SHUT, false),
            Some(StatusByte::Open) => (Self::OPEN, true),
            Some(StatusByte::Killed) => (Self::KILLED, false),
            Some(StatusByte::Back) => (Self::BACK, true),
            None => (Self::READY, false),
        };
        let news = !self.has(bit);
        self.0 |= bit;
        news && there
    }

    /// Whether it listens.
    #[must_use]
    pub fn is_ready(self) -> bool {
        self.has(Self::READY)
    }

    /// Whether processes ran whose GPUs stood still.
    #[must_use]
    pub fn any_ran(self) -> bool {
        self.has(Self::SHUT)
    }

    /// Whether some of the memory was there.
    #[must_use]
    pub fn any_there(self) -> bool {
        self.has(Self::OPEN | Self::BACK)
    }

    /// What it means when nobody is left to say more; `pages`: memory of CPUs was to come from it, too; `code`: its exit code, where that is known.
    #[must_use]
    pub fn fate(self, pages: bool, code: Option<i32>) -> RestoreOutcome {
        match self.told(pages) {
            RestoreOutcome::Nothing | RestoreOutcome::Open if code == Some(1) => RestoreOutcome::Killed,
            fate => fate,
        }
    }

    fn told(self, pages: bool) -> RestoreOutcome {
        if self.has(Self::KILLED) {
            return RestoreOutcome::Killed;
        }
        match (self.has(Self::SHUT), self.has(Self::OPEN)) {
            (true, false) => RestoreOutcome::Abandoned,
            // Memory of CPUs was lost when nobody stood before a gate.
            _ if pages && !self.has(Self::BACK) => RestoreOutcome::Killed,
            (_, true) => RestoreOutcome::Open,
            (false, false) if pages => RestoreOutcome::Open,
            (false, false) => RestoreOutcome::Nothing,
        }
    }

    fn has(self, bit: u32) -> bool {
        self.0 & bit != 0
    }
}

/// Whether memory of CPUs can come behind processes with GPUs.
///
/// # Errors
/// Why not: the kernel does not hold calls, or the image's memory cannot be served.
pub fn can_bring_pages(images: &Path) -> anyhow::Result<()> {
    call_filter::attach()?;
    Image::open(images).map(drop)
}

/// One that the plugin finds in CRIU's work directory; with `images` it brings memory of CPUs from there, too; with `record` it records what
/// they touch. It says on its output what there
/// is to say. It leads a group of its own: no terminal's signal is for it.
///
/// # Errors
/// This program is not found.
pub fn command(work: &Path, images: Option<&Path>, record: bool) -> anyhow::Result<Command> {
    let mut command = Command::new(program()?);
    command.arg("stream-gpu").arg("-W").arg(work).args(["--status-fd", "1"]).process_group(0);
    if let Some(images) = images {
        command.arg("-D").arg(images);
    }
    if record {
        command.arg("--record");
    }
    command.stdin(Stdio::null());
    Ok(command)
}

/// This program; of a daemon that was started before an upgrade, the one in its place.
///
/// # Errors
/// It is not found.
pub fn program() -> anyhow::Result<PathBuf> {
    let program = std::env::current_exe().context("finding this program")?;
    // The kernel's word for a file that was removed (`d_path` of fs/d_path.c).
    let replaced = program.to_str().and_then(|path| path.strip_suffix(" (deleted)")).map(PathBuf::from);
    Ok(replaced.filter(|path| path.is_file()).unwrap_or(program))
}

/// Whether a restore's plugin has come to a streamer with this work directory: the socket there is for the first. Nobody comes when the
/// directory has gone.
#[must_use]
pub fn is_met(work: &Path) -> bool {
    work.is_dir() && !work.join(SOCKET).exists()
}

/// Asks one to end when it has nothing to do any more. The whole group: a worker whose supervisor was killed is asked by nobody else.
/// The number is the group's as long as one of it lives.
pub fn ask_to_end(group: i32) {
    // All may have ended.
    let _ = killpg(Pid::from_raw(group), Signal::SIGTERM);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fate(said: &[u8], pages: bool) -> RestoreOutcome {
        let mut all = StatusFlags::default();
        said.iter().for_each(|byte| {
            all.hear(*byte);
        });
        assert_eq!(StatusFlags::from_bits(all.bits()), all);
        all.fate(pages, None)
    }

    #[test]
    fn what_was_said_last_is_what_became_of_them() {
        assert_eq!(fate(b"\0", false), RestoreOutcome::Nothing);
        assert_eq!(fate(b"\0sso", false), RestoreOutcome::Open);
        assert_eq!(fate(b"\0ss", false), RestoreOutcome::Abandoned);
        assert_eq!(fate(b"\0ssk", false), RestoreOutcome::Killed);
        assert_eq!(fate(b"\0sobo", true), RestoreOutcome::Open);
        assert_eq!(fate(b"\0sbo", true), RestoreOutcome::Open);
        assert_eq!(fate(b"\0sok", true), RestoreOutcome::Killed);
    }

    #[test]
    fn memory_of_cpus_that_nobody_has_said_to_be_back_is_lost() {
        assert_eq!(fate(b"\0so", true), RestoreOutcome::Killed);
        assert_eq!(fate(b"\0", true), RestoreOutcome::Killed);
        assert_eq!(fate(b"\0s", true), RestoreOutcome::Abandoned);
        assert_eq!(fate(b"\0b", true), RestoreOutcome::Open);
    }

    #[test]
    fn one_that_has_failed_has_brought_nothing_to_a_good_end() {
        let mut said = StatusFlags::default();
        b"\0so".iter().for_each(|byte| {
            said.hear(*byte);
        });
        let fates = [Some(1), Some(0), Some(143), None].map(|code| said.fate(false, code));
        assert_eq!(
            fates,
            [RestoreOutcome::Killed, RestoreOutcome::Open, RestoreOutcome::Open, RestoreOutcome::Open]
        );
    }

    #[test]
    fn each_kind_of_memory_is_news_once() {
        let mut said = StatusFlags::default();
        let news: Vec<bool> = b"\0ssobob".iter().map(|byte| said.hear(*byte)).collect();
        assert_eq!(news, [false, false, false, true, true, false, false]);
        assert!(said.is_ready());
    }
}
