// SPDX-License-Identifier: MIT OR Apache-2.0
//! Starts a `rewake stream-gpu`, and reads what it reports about the processes whose memory it loads.

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

/// Explains [`RestoreOutcome::Killed`] to the user.
pub const KILLED: &str =
    "memory could not be loaded: the restored processes whose GPU queues were still evicted were killed";
/// Explains [`RestoreOutcome::Abandoned`] to the user: no process of the streamer is left to report.
pub const ABANDONED: &str = "every process of rewake stream-gpu was killed: the restored processes wait for \
     their memory; run `rewake recover`, which kills those whose GPUs were not resumed";

/// What became of memory that was to be loaded while the processes run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RestoreOutcome {
    /// The streamer took nothing over: the plugin had nothing for it, or loaded everything itself.
    Nothing,
    /// All gates are open, and all CPU memory is resident.
    Open,
    /// The processes with closed gates were killed, or those with missing memory.
    Killed,
    /// No process of the streamer is left: the gates stay closed.
    Abandoned,
}

impl RestoreOutcome {
    /// Returns the reason if the outcome is a failure.
    #[must_use]
    pub fn reason(self) -> Option<&'static str> {
        match self {
            Self::Nothing | Self::Open => None,
            Self::Killed => Some(KILLED),
            Self::Abandoned => Some(ABANDONED),
        }
    }
}

/// What the streamer's processes have reported so far on the `--status-fd`.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct StatusFlags(u32);

impl StatusFlags {
    const READY: u32 = 1;
    const SHUT: u32 = 2;
    const OPEN: u32 = 4;
    const KILLED: u32 = 8;
    const BACK: u32 = 16;

    /// Makes the flags from the number that [`StatusFlags::bits`] gave.
    #[must_use]
    pub fn from_bits(bits: u32) -> Self {
        Self(bits)
    }

    /// Returns all flags as one number.
    #[must_use]
    pub fn bits(self) -> u32 {
        self.0
    }

    /// Adds one more byte. Returns true if it is the first report that some memory is resident.
    pub fn hear(&mut self, byte: u8) -> bool {
        let (bit, resident) = match StatusByte::read(byte) {
            Some(StatusByte::Shut) => (Self::SHUT, false),
            Some(StatusByte::Open) => (Self::OPEN, true),
            Some(StatusByte::Killed) => (Self::KILLED, false),
            Some(StatusByte::Back) => (Self::BACK, true),
            None => (Self::READY, false),
        };
        let news = !self.has(bit);
        self.0 |= bit;
        news && resident
    }

    /// Returns true if the streamer accepts connections.
    #[must_use]
    pub fn is_ready(self) -> bool {
        self.has(Self::READY)
    }

    /// Returns true if processes ran while their GPU queues were evicted.
    #[must_use]
    pub fn any_ran(self) -> bool {
        self.has(Self::SHUT)
    }

    /// Returns true if some of the memory became resident.
    #[must_use]
    pub fn any_there(self) -> bool {
        self.has(Self::OPEN | Self::BACK)
    }

    /// Returns the outcome when no process is left to report more.
    ///
    /// `pages` is true if the streamer was to load CPU memory, too. `code` is its exit code, if that is
    /// known.
    #[must_use]
    pub fn fate(self, pages: bool, code: Option<i32>) -> RestoreOutcome {
        match self.reported(pages) {
            RestoreOutcome::Nothing | RestoreOutcome::Open if code == Some(1) => RestoreOutcome::Killed,
            fate => fate,
        }
    }

    fn reported(self, pages: bool) -> RestoreOutcome {
        if self.has(Self::KILLED) {
            return RestoreOutcome::Killed;
        }
        match (self.has(Self::SHUT), self.has(Self::OPEN)) {
            (true, false) => RestoreOutcome::Abandoned,
            // CPU memory was lost while no gate was closed.
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

/// Checks that CPU memory can be loaded while processes with GPUs run.
///
/// # Errors
/// The kernel does not hold calls, or the image's memory cannot be served.
pub fn can_bring_pages(images: &Path) -> anyhow::Result<()> {
    call_filter::attach()?;
    Image::open(images).map(drop)
}

/// Makes the command for a streamer that the plugin finds in CRIU's work directory.
///
/// With `images` the streamer loads CPU memory from there, too. With `record` it records what the processes
/// access. It reports on its standard output. It leads a process group of its own, so a terminal's signals do
/// not reach it.
///
/// # Errors
/// The path of this program cannot be found.
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

/// Returns the path of this program. After an upgrade it is the path of the new program in the old one's
/// place.
///
/// # Errors
/// The path cannot be found.
pub fn program() -> anyhow::Result<PathBuf> {
    let program = std::env::current_exe().context("finding this program")?;
    // The kernel appends this to the path of a removed file (`d_path` of fs/d_path.c).
    let replaced = program.to_str().and_then(|path| path.strip_suffix(" (deleted)")).map(PathBuf::from);
    Ok(replaced.filter(|path| path.is_file()).unwrap_or(program))
}

/// Returns true if a restore's plugin has connected to the streamer of this work directory.
///
/// The streamer removes its socket when the first plugin has connected. None can connect if the directory does not
/// exist.
#[must_use]
pub fn is_met(work: &Path) -> bool {
    work.is_dir() && !work.join(SOCKET).exists()
}

/// Sends SIGTERM to a streamer's process group: it ends when it has nothing left to do.
///
/// The whole group gets the signal, as a worker may have lost its supervisor, which would pass it on. No
/// other group gets the number while one of its processes lives.
pub fn ask_to_end(group: i32) {
    // All its processes may have ended.
    let _ = killpg(Pid::from_raw(group), Signal::SIGTERM);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fate(statuses: &[u8], pages: bool) -> RestoreOutcome {
        let mut all = StatusFlags::default();
        statuses.iter().for_each(|byte| {
            all.hear(*byte);
        });
        assert_eq!(StatusFlags::from_bits(all.bits()), all);
        all.fate(pages, None)
    }

    #[test]
    fn the_last_status_byte_decides_the_outcome() {
        assert_eq!(fate(b"\0", false), RestoreOutcome::Nothing);
        assert_eq!(fate(b"\0sso", false), RestoreOutcome::Open);
        assert_eq!(fate(b"\0ss", false), RestoreOutcome::Abandoned);
        assert_eq!(fate(b"\0ssk", false), RestoreOutcome::Killed);
        assert_eq!(fate(b"\0sobo", true), RestoreOutcome::Open);
        assert_eq!(fate(b"\0sbo", true), RestoreOutcome::Open);
        assert_eq!(fate(b"\0sok", true), RestoreOutcome::Killed);
    }

    #[test]
    fn cpu_memory_that_was_not_reported_resident_is_lost() {
        assert_eq!(fate(b"\0so", true), RestoreOutcome::Killed);
        assert_eq!(fate(b"\0", true), RestoreOutcome::Killed);
        assert_eq!(fate(b"\0s", true), RestoreOutcome::Abandoned);
        assert_eq!(fate(b"\0b", true), RestoreOutcome::Open);
    }

    #[test]
    fn a_streamer_that_exits_with_1_has_killed_the_processes() {
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
    fn each_kind_of_memory_is_reported_as_resident_once() {
        let mut said = StatusFlags::default();
        let news: Vec<bool> = b"\0ssobob".iter().map(|byte| said.hear(*byte)).collect();
        assert_eq!(news, [false, false, false, true, true, false, false]);
        assert!(said.is_ready());
    }
}
