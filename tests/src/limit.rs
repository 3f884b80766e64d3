// SPDX-License-Identifier: MIT OR Apache-2.0
//! A limit to a process's memory at which the kernel refuses more instead of killing.

use std::fs;
use std::path::{Path, PathBuf};

use nix::unistd::Pid;

use crate::process::{PATIENCE, until};

/// A control group (version 1, which has `memory.oom_control`) below this process's own. Dropping it removes
/// it, once its processes have ended.
#[derive(Debug)]
pub struct MemoryLimit {
    group: PathBuf,
}

impl MemoryLimit {
    /// A group whose processes may have `mib` MiB; beyond that the kernel returns ENOMEM and kills no
    /// process.
    ///
    /// # Errors
    /// Why this machine has no such groups.
    pub fn new(mib: usize) -> Result<Self, String> {
        let limit = Self::that_kills(mib)?;
        limit.write("memory.oom_control", "1")?;
        Ok(limit)
    }

    /// A group whose processes may get `mib` MiB more once they are in it; beyond that the kernel kills one.
    ///
    /// # Errors
    /// Why this machine has no such groups.
    pub fn that_kills(mib: usize) -> Result<Self, String> {
        let own = fs::read_to_string("/proc/self/cgroup").map_err(|error| error.to_string())?;
        let path = own.lines().find_map(|line| line.split_once(":memory:")).map(|(_, path)| path);
        let path = path.ok_or("/proc/self/cgroup names no memory controller of version 1")?;
        let parent = Path::new("/sys/fs/cgroup/memory").join(path.trim_start_matches('/'));
        let group = parent.join(format!("rewake-test-{}-{mib}", std::process::id()));
        fs::create_dir(&group).map_err(|error| format!("mkdir {}: {error}", group.display()))?;
        let limit = Self { group };
        limit.write("memory.limit_in_bytes", &(mib << 20).to_string())?;
        Ok(limit)
    }

    /// Puts a process into the group: what it takes from now on counts.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn hold(&self, pid: Pid) -> Result<(), String> {
        self.write("cgroup.procs", &pid.to_string())
    }

    /// Takes the limit away.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn lift(&self) -> Result<(), String> {
        self.write("memory.limit_in_bytes", "-1")
    }

    fn write(&self, name: &str, value: &str) -> Result<(), String> {
        let path = self.group.join(name);
        fs::write(&path, value).map_err(|error| format!("write {value} to {}: {error}", path.display()))
    }
}

impl Drop for MemoryLimit {
    fn drop(&mut self) {
        if until(PATIENCE, || fs::remove_dir(&self.group).ok()).is_none() {
            eprintln!("{} is left behind", self.group.display());
        }
    }
}
