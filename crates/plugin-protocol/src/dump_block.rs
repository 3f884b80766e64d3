// SPDX-License-Identifier: MIT OR Apache-2.0
//! Processes whose GPUs stand still, told to whoever would dump them: an image would have zeros in the place of what is not loaded
//! yet. The driver does not tell it from any other pause.
//!
//! An empty file in [`FOLDER`] for each, named by its pid and its start time (`/proc/PID/stat`): a name that stays behind is
//! never another process's, and made at once it is never half there. It is not bound to the server's life: a process that
//! stands still for good, as all who knew of it were killed, is one that must not be dumped either. Seen by who has the same
//! `/run` and counts pids in the same namespace.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Write as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;

use nix::unistd::unlink;

/// Where the files are. Anybody may look: an unprivileged CRIU, too.
pub const FOLDER: &str = "/run/rewake-gated";

/// Room for the longest path.
const LONGEST: usize = 64;
/// Of `/proc/PID/stat` behind the program's name, counted from 0: the state, how many threads there are, and the start
/// time in clock ticks.
const STATE: usize = 0;
const THREADS: usize = 17;
const STARTED: usize = 19;

/// A process, as no other one is called before the machine starts again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ProcessId {
    /// Its pid.
    pub pid: i32,
    /// When it started, in clock ticks since the machine did.
    pub started: u64,
}

impl ProcessId {
    /// A process that is there; none if it has ended, waited for or not.
    ///
    /// # Errors
    /// It cannot be looked at.
    pub fn of(pid: i32) -> io::Result<Option<Self>> {
        let stat = match fs::read(format!("/proc/{pid}/stat")) {
            Err(error) if has_ended(&error) => return Ok(None),
            stat => stat?,
        };
        let stat = String::from_utf8_lossy(&stat);
        // The name is anything, parentheses included.
        let fields: Vec<&str> =
            stat.rsplit_once(')').map_or(Vec::new(), |(_, rest)| rest.split_whitespace().collect());
        let started = fields.get(STARTED).and_then(|ticks| ticks.parse().ok());
        let started = started.ok_or_else(|| io::Error::other(format!("/proc/{pid}/stat: {stat}")))?;
        let lives = match fields.get(STATE) {
            // Its first thread has ended. The others are the process as long as there are some.
            Some(&"Z") => fields.get(THREADS).and_then(|count| count.parse::<u32>().ok()) > Some(1),
            Some(&"X") => false,
            _ => true,
        };
        Ok(Some(Self { pid, started }).filter(|_| lives))
    }

    /// Makes the folder.
    ///
    /// # Errors
    /// The kernel's.
    pub fn prepare() -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o755).create(FOLDER)
    }

    /// Its gate is shut.
    ///
    /// # Errors
    /// The kernel's.
    pub fn shut(self) -> io::Result<()> {
        File::create(self.path()).map(drop)
    }

    /// Its gate is open, or it has ended. Only a system call.
    pub fn opened(self) {
        let mut path = [0; LONGEST];
        let mut rest = &mut path[..];
        // It has room. A file that cannot be removed keeps this process from being dumped, and nobody else.
        let _ = write!(rest, "{FOLDER}/{self}");
        let left = rest.len();
        let _ = unlink(&path[..LONGEST - left]);
    }

    /// Whether its gate is shut.
    ///
    /// # Errors
    /// The kernel's.
    pub fn is_shut(self) -> io::Result<bool> {
        fs::exists(self.path())
    }

    fn path(self) -> std::path::PathBuf {
        Path::new(FOLDER).join(self.to_string())
    }
}

impl std::fmt::Display for ProcessId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}-{}", self.pid, self.started)
    }
}

/// There is no such file, or the process went while it was read.
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
    fn a_process_is_one_for_its_whole_life_and_another_is_another() {
        // Its name is no trap.
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
    fn one_that_has_ended_is_none_whether_it_was_waited_for_or_not() {
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
    fn the_longest_path_has_room() {
        let longest = ProcessId { pid: i32::MIN, started: u64::MAX };
        assert!(longest.path().as_os_str().len() <= LONGEST);
    }

    #[test]
    fn a_name_is_one_life_s_only() {
        if let Err(error) = ProcessId::prepare() {
            rewake_skip::skip!("{FOLDER}: {error}");
        }
        let shut = ProcessId::of(own()).unwrap().unwrap();
        shut.shut().unwrap();
        let with_the_same_pid = ProcessId { started: shut.started + 1, ..shut };
        assert!(shut.is_shut().unwrap() && !with_the_same_pid.is_shut().unwrap());
        shut.opened();
        assert!(!shut.is_shut().unwrap());
        // It may have ended long ago.
        shut.opened();
    }
}
