// SPDX-License-Identifier: MIT OR Apache-2.0
//! Marks processes with a closed gate, so that they are not dumped: an image would have zeros in the place of
//! missing memory. The driver shows no difference from any other eviction.
//!
//! A mark is an empty file in [`DUMP_BLOCKS`], named by the process's pid and start time (`/proc/PID/stat`).
//! A name that is left over never names another process, and creating the file is atomic. A mark does not
//! depend on the streamer's life. If the streamer was killed, queues stay evicted for ever, and the process
//! must not be dumped either. CRIU sees marks if it has the same `/run` and the same pid namespace.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use nix::unistd::unlink;

/// The folder of the marks. Any user may read it, as CRIU may be unprivileged.
pub const DUMP_BLOCKS: &str = "/run/rewake/dump-blocks";

/// The right of group and others to pass through a folder.
const PASS: u32 = 0o011;
/// Bytes of the longest path.
const MAX_PATH: usize = 64;
/// Fields of `/proc/PID/stat` after the program's name, counted from 0: the state, the number of threads, and
/// the start time in clock ticks.
const STATE: usize = 0;
const THREADS: usize = 17;
const STARTED: usize = 19;

/// A process; no other one has the same id until the machine restarts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ProcessId {
    /// Its pid.
    pub pid: i32,
    /// The start time, in clock ticks since the machine started.
    pub started: u64,
}

impl ProcessId {
    /// Returns the id of a process; `None` if it has ended, reaped or not.
    ///
    /// # Errors
    /// `/proc` cannot be read.
    pub fn of(pid: i32) -> io::Result<Option<Self>> {
        let fields = match rewake_process::proc::stat(pid) {
            Err(error) if has_ended(&error) => return Ok(None),
            fields => fields?,
        };
        let started = fields.get(STARTED).and_then(|ticks| ticks.parse().ok());
        let started = started.ok_or_else(|| io::Error::other(format!("/proc/{pid}/stat: {fields:?}")))?;
        let lives = match fields.get(STATE).map(String::as_str) {
            // The first thread has ended. The process lives as long as it has other threads.
            Some("Z") => fields.get(THREADS).and_then(|count| count.parse::<u32>().ok()) > Some(1),
            Some("X") => false,
            _ => true,
        };
        Ok(Some(Self { pid, started }).filter(|_| lives))
    }

    /// Whether a folder of `/run/rewake/sessions` is this process's, or of one in another pid namespace with
    /// the same pid and start time.
    pub(crate) fn names(self, folder: &str) -> bool {
        let rest = folder.strip_prefix(&self.to_string());
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
    }

    /// Makes the folder of the marks, which any user can reach.
    ///
    /// # Errors
    /// The kernel's.
    pub fn prepare() -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o755).create(DUMP_BLOCKS)?;
        Path::new(DUMP_BLOCKS).parent().map_or(Ok(()), let_all_users_pass)
    }

    /// Marks the process: its gate is closed.
    ///
    /// # Errors
    /// The kernel's.
    pub fn block_dump(self) -> io::Result<()> {
        File::create(self.path()).map(drop)
    }

    /// Removes the mark: the gate is open, or the process has ended. It makes system calls only.
    pub fn allow_dump(self) {
        let mut path = [0; MAX_PATH];
        let mut rest = &mut path[..];
        // The path fits. A mark that cannot be removed prevents only dumps of this process.
        let _ = write!(rest, "{DUMP_BLOCKS}/{self}");
        let left = rest.len();
        let _ = unlink(&path[..MAX_PATH - left]);
    }

    /// Whether the process is marked.
    ///
    /// # Errors
    /// The kernel's.
    pub fn is_dump_blocked(self) -> io::Result<bool> {
        match fs::exists(self.path()) {
            // A folder that this user cannot reach has no mark: [`ProcessId::prepare`] opens it before the
            // first one.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(false),
            found => found,
        }
    }

    fn path(self) -> PathBuf {
        Path::new(DUMP_BLOCKS).join(self.to_string())
    }
}

/// Lets all users pass through a folder. A daemon makes it for its own user only.
fn let_all_users_pass(folder: &Path) -> io::Result<()> {
    let mut permissions = fs::metadata(folder)?.permissions();
    if permissions.mode() & PASS != PASS {
        permissions.set_mode(permissions.mode() | PASS);
        fs::set_permissions(folder, permissions)?;
    }
    Ok(())
}

impl std::fmt::Display for ProcessId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}-{}", self.pid, self.started)
    }
}

/// Whether the file does not exist, or the process ended while it was read.
pub(crate) fn has_ended(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    fn own() -> i32 {
        std::process::id().cast_signed()
    }

    #[test]
    fn a_process_keeps_its_id_and_later_ones_have_another() {
        // The name must not confuse the parser.
        fs::write("/proc/self/comm", "a) Z 1 (").unwrap();
        let first = ProcessId::of(own()).unwrap().unwrap();
        // A tick is 10 ms.
        std::thread::sleep(std::time::Duration::from_millis(30));
        assert_eq!(ProcessId::of(own()).unwrap(), Some(first));
        let mut child = Command::new("sleep").arg("100").spawn().unwrap();
        let later = ProcessId::of(child.id().cast_signed()).unwrap().unwrap();
        assert!(later.started > first.started, "{later} {first}");
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_process_that_has_ended_has_no_id() {
        let mut child = Command::new("true").spawn().unwrap();
        let pid = child.id().cast_signed();
        let ended = (0..1000).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(5));
            ProcessId::of(pid).unwrap().is_none()
        });
        assert!(ended);
        child.wait().unwrap();
        assert_eq!(ProcessId::of(pid).unwrap(), None);
    }

    #[test]
    fn the_longest_path_fits() {
        let longest = ProcessId { pid: i32::MIN, started: u64::MAX };
        assert!(longest.path().as_os_str().len() <= MAX_PATH);
    }

    #[test]
    fn all_users_can_pass_through_a_folder_that_a_daemon_has_made() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("rewake");
        DirBuilder::new().mode(0o700).create(&folder).unwrap();
        let_all_users_pass(&folder).unwrap();
        assert_eq!(fs::metadata(&folder).unwrap().permissions().mode() & 0o777, 0o711);
    }

    #[test]
    fn a_mark_is_for_one_process_only() {
        if let Err(error) = ProcessId::prepare() {
            rewake_skip::skip!("{DUMP_BLOCKS}: {error}");
        }
        let blocked = ProcessId::of(own()).unwrap().unwrap();
        blocked.block_dump().unwrap();
        let with_the_same_pid = ProcessId { started: blocked.started + 1, ..blocked };
        assert!(blocked.is_dump_blocked().unwrap() && !with_the_same_pid.is_dump_blocked().unwrap());
        blocked.allow_dump();
        assert!(!blocked.is_dump_blocked().unwrap());
        // The mark may be removed already.
        blocked.allow_dump();
    }
}
