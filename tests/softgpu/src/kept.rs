// SPDX-License-Identifier: MIT OR Apache-2.0
//! Dumps that the tests of one machine share: the first test that needs a server of a shape starts and dumps
//! it, and each later one gets a copy of what that dump left, at the same paths. An emulated processor takes
//! ten seconds to make a dump and one to copy it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use gpu_app::kernel::hash;
use gpu_app::shape::{Mode, Shape};
use nix::sys::statvfs::statvfs;
use rewake_testkit::process::output;

use crate::answers::own_time;
use crate::criu::Version;
use crate::{Judge, Machine};

/// Root's alone, and empty when a machine starts.
const FOLDER: &str = "/run/rewake-test-dumps";
/// Lists the servers of a kept dump: the names of their folders and their pids.
const SERVERS: &str = "servers";
/// The number that the kernel gave last (`pid_namespaces(7)`).
const LAST_PID: &str = "/proc/sys/kernel/ns_last_pid";
/// Pids from here on belong to kept servers, so that no other process has one of them when the servers are
/// restored.
const FIRST_PID: usize = 1_000_000;
/// Pids for one kept dump: its servers, and what runs until they are dumped.
const PIDS: usize = 10_000;

/// Bytes of the folder's file system that stay free: kept dumps are in memory.
const FREE: u64 = 1 << 30;

/// A dump that other tests of this machine can restore, too.
#[derive(Debug)]
pub(crate) struct KeptDump(PathBuf);

/// The folder of a server and of its images, which is removed at the end.
#[derive(Debug)]
pub(crate) struct ServerFolder(PathBuf);

impl ServerFolder {
    /// One that no other test uses.
    ///
    /// # Panics
    /// It cannot be made.
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().unwrap().keep())
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for ServerFolder {
    fn drop(&mut self) {
        // A folder that stays costs memory until the machine ends.
        let _ = fs::remove_dir_all(&self.0);
    }
}

impl KeptDump {
    /// The dump of that many servers of a shape. None where GPUs are real, because the machine is not the
    /// tests' own, and in modes of which each test dumps another.
    pub(crate) fn of(shape: &Shape, version: Version, count: usize) -> Option<Self> {
        static USES: Mutex<BTreeMap<u64, usize>> = Mutex::new(BTreeMap::new());
        Judge::find()?;
        if shape.mode != Mode::NoAccess {
            return None;
        }
        let last = u64::try_from(FIRST_PID + PIDS * 100).ok()?;
        let most: u64 = fs::read_to_string("/proc/sys/kernel/pid_max").ok()?.trim().parse().ok()?;
        if most < last {
            return None;
        }
        let key = format!("{shape:?} {version:?} {count} {:?} {}", Machine::parameters()?, own_time());
        let key = hash(key.bytes().map(u64::from), 0);
        // A test that needs a second one needs other pids.
        let mut uses = USES.lock().unwrap_or_else(PoisonError::into_inner);
        let number = uses.entry(key).and_modify(|number| *number += 1).or_default();
        Some(Self(Path::new(FOLDER).join(format!("{key:016x}-{number}"))))
    }

    /// The folders of its servers and the servers' pids, if a test has made it.
    ///
    /// # Panics
    /// It cannot be copied.
    pub(crate) fn copies(&self) -> Option<Vec<(ServerFolder, u32)>> {
        let servers = fs::read_to_string(self.0.join(SERVERS)).ok()?;
        let copy = |line: &str| {
            let (name, pid) = line.split_once(' ').unwrap();
            let folder = self.0.join(name);
            copy(&self.kept(name), &folder);
            (ServerFolder(folder), pid.parse().unwrap())
        };
        Some(servers.lines().map(copy).collect())
    }

    /// Folders for the servers of a dump that no test has made. What starts from here on has pids that no
    /// other process gets, until [`LastPid`] is dropped.
    ///
    /// # Panics
    /// A folder cannot be made, or the kernel does not take the number.
    pub(crate) fn folders(&self, count: usize) -> (Vec<ServerFolder>, LastPid) {
        fs::create_dir_all(&self.0).unwrap();
        let cursor = LastPid::read();
        let others = fs::read_dir(FOLDER).unwrap().count();
        set_last_pid(FIRST_PID + others * PIDS).unwrap();
        let folder = |number: usize| {
            let folder = self.0.join(number.to_string());
            // Of a test that failed before its dump was kept.
            let _ = fs::remove_dir_all(&folder);
            fs::create_dir(&folder).unwrap();
            ServerFolder(folder)
        };
        ((0..count).map(folder).collect(), cursor)
    }

    /// Keeps what the servers' dumps have left, while there is room.
    ///
    /// # Panics
    /// It cannot be copied.
    pub(crate) fn keep<'a>(&self, servers: impl Iterator<Item = (&'a ServerFolder, u32)>) {
        let space = statvfs(&self.0).unwrap();
        if space.blocks_available() * space.fragment_size() < FREE {
            return;
        }
        let mut list = String::new();
        for (folder, pid) in servers {
            // A server is restored at its own path, whatever its place in this list.
            let name = folder.path().file_name().unwrap().to_str().unwrap();
            copy(folder.path(), &self.kept(name));
            list += &format!("{name} {pid}\n");
        }
        fs::write(self.0.join(SERVERS), list).unwrap();
    }

    fn kept(&self, name: &str) -> PathBuf {
        self.0.join(format!("kept-{name}"))
    }
}

/// Copies a folder with all times and holes of its files.
fn copy(from: &Path, to: &Path) {
    // Of a test that was killed.
    let _ = fs::remove_dir_all(to);
    output(Command::new("cp").arg("--archive").arg(from).arg(to)).unwrap();
}

/// The number from which the kernel counts pids. CRIU moves that number to the pids of restored tasks. A
/// later test's processes must not have the pids of servers that are restored again, so dropping this sets
/// the number back.
#[derive(Debug)]
pub(crate) struct LastPid(usize);

impl LastPid {
    /// # Panics
    /// The kernel does not say.
    pub(crate) fn read() -> Self {
        Self(fs::read_to_string(LAST_PID).unwrap().trim().parse().unwrap())
    }
}

impl Drop for LastPid {
    fn drop(&mut self) {
        // Only a later test could miss it, and would say which pid another process has.
        let _ = set_last_pid(self.0);
    }
}

fn set_last_pid(number: usize) -> std::io::Result<()> {
    fs::write(LAST_PID, number.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_server_s_copy_has_its_own_files_at_its_own_path() {
        let home = tempfile::tempdir().unwrap();
        let folder = |name: &str, says: &str| {
            let folder = home.path().join(name);
            fs::create_dir(&folder).unwrap();
            fs::write(folder.join("says"), says).unwrap();
            ServerFolder(folder)
        };
        let dump = KeptDump(home.path().to_owned());
        assert!(dump.copies().is_none(), "no test has made it");
        // The last server is dumped first.
        let servers = [(folder("1", "second"), 17), (folder("0", "first"), 11)];
        dump.keep(servers.iter().map(|(folder, pid)| (folder, *pid)));
        drop(servers);
        let copies = dump.copies().unwrap();
        let found: Vec<_> = copies
            .iter()
            .map(|(folder, pid)| (fs::read_to_string(folder.path().join("says")).unwrap(), *pid))
            .collect();
        assert_eq!(found, [("second".to_owned(), 17), ("first".to_owned(), 11)]);
        assert_eq!(copies[0].0.path(), home.path().join("1"));
    }
}
