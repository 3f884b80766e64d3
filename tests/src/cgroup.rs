// SPDX-License-Identifier: MIT OR Apache-2.0
//! Control groups of version 2: processes that get one event together.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::process::until;
use crate::scene::END;

/// Groups of one test program have different names.
static NUMBER: AtomicUsize = AtomicUsize::new(0);

/// A group below this process's own. Dropping it kills what is in it, and removes it.
#[derive(Debug)]
pub struct Cgroup {
    path: PathBuf,
}

impl Cgroup {
    /// An empty group.
    ///
    /// # Errors
    /// Why this machine has no such groups.
    pub fn new() -> Result<Self, String> {
        Self::below(&own()?)
    }

    /// A group that runs out of memory as one: all its processes are killed (`memory.oom.group`).
    ///
    /// # Errors
    /// Why this machine has no such groups.
    pub fn with_memory() -> Result<Self, String> {
        let parent = own()?;
        write(&parent, "cgroup.subtree_control", "+memory")?;
        let group = Self::below(&parent)?;
        write(&group.path, "memory.oom.group", "1")?;
        Ok(group)
    }

    fn below(parent: &Path) -> Result<Self, String> {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = parent.join(format!("rewake-test-{}-{number}", std::process::id()));
        fs::create_dir(&path).map_err(|error| format!("mkdir {}: {error}", path.display()))?;
        Ok(Self { path })
    }

    /// A command that enters the group and then becomes `command`: what it starts is in the group, too.
    #[must_use]
    pub fn entered_by(&self, command: &Command) -> Command {
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", "echo $$ > \"$0\" && exec \"$@\""]).arg(self.path.join("cgroup.procs"));
        shell.arg(command.get_program()).args(command.get_args());
        shell
    }

    /// Moves a process into the group. Its children stay where they are.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn take(&self, pid: Pid) -> Result<(), String> {
        write(&self.path, "cgroup.procs", &pid.to_string())
    }

    /// Its processes.
    #[must_use]
    pub fn processes(&self) -> Vec<Pid> {
        let text = fs::read_to_string(self.path.join("cgroup.procs")).unwrap_or_default();
        text.lines().filter_map(|line| line.parse().ok()).map(Pid::from_raw).collect()
    }

    /// Sends a signal to every process, one after the other, as a service manager does.
    pub fn signal(&self, signal: Signal) {
        for pid in self.processes() {
            // One that has ended meanwhile needs none.
            let _ = kill(pid, signal);
        }
    }

    /// Kills every process at one moment (`cgroup.kill`).
    ///
    /// # Errors
    /// The kernel has no such file.
    pub fn kill(&self) -> Result<(), String> {
        write(&self.path, "cgroup.kill", "1")
    }

    /// Leaves the group no memory: the kernel kills all of it.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn run_out_of_memory(&self) -> Result<(), String> {
        write(&self.path, "memory.max", "0")
    }

    /// How often the kernel has killed the group for want of memory.
    #[must_use]
    pub fn group_kills(&self) -> usize {
        let events = fs::read_to_string(self.path.join("memory.events")).unwrap_or_default();
        let count = events.lines().find_map(|line| line.strip_prefix("oom_group_kill "));
        count.and_then(|count| count.parse().ok()).unwrap_or(0)
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = self.kill();
        if until(END, || fs::remove_dir(&self.path).ok()).is_none() {
            eprintln!("{} is left behind", self.path.display());
        }
    }
}

/// The folder of this process's own group.
fn own() -> Result<PathBuf, String> {
    let read = |path: &str| fs::read_to_string(path).map_err(|error| format!("{path}: {error}"));
    let mounts = read("/proc/self/mounts")?;
    let mounted = |line: &str| {
        let mut fields = line.split(' ').skip(1);
        let (place, kind) = (fields.next()?, fields.next()?);
        (kind == "cgroup2").then(|| place.to_owned())
    };
    let root = mounts.lines().find_map(mounted).ok_or("no cgroup2 file system is mounted")?;
    let groups = read("/proc/self/cgroup")?;
    let path = groups.lines().find_map(|line| line.strip_prefix("0::/"));
    let path = path.ok_or("/proc/self/cgroup names no group of version 2")?;
    Ok(Path::new(&root).join(path))
}

fn write(folder: &Path, name: &str, value: &str) -> Result<(), String> {
    let path = folder.join(name);
    fs::write(&path, value).map_err(|error| format!("write {value} to {}: {error}", path.display()))
}
