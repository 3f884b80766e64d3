// SPDX-License-Identifier: MIT OR Apache-2.0
//! Control groups of version 2: processes that get one event together.

use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::process::{PATIENCE, ProcessId, run, until};

/// Bytes that a group may have in addition to the ones that it has, before it runs out of memory.
const MORE: u64 = 16 << 20;
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
        // A kernel without swap has no such file.
        let _ = write(&group.path, "memory.swap.max", "0");
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
    pub fn take<P: ProcessId>(&self, process: P) -> Result<(), String> {
        write(&self.path, "cgroup.procs", &process.pid().to_string())
    }

    /// Its processes.
    #[must_use]
    pub fn processes(&self) -> Vec<Pid> {
        self.read("cgroup.procs").lines().filter_map(|line| line.parse().ok()).map(Pid::from_raw).collect()
    }

    /// Sends a signal to every process, one after the other, as a service manager does.
    pub fn signal(&self, signal: Signal) {
        for pid in self.processes() {
            // A process that has ended needs no signal.
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

    /// Freezes all its processes, as `docker pause` does, and waits until they are.
    ///
    /// # Errors
    /// The kernel has no such file, or a process does not stop.
    pub fn freeze(&self) -> Result<(), String> {
        write(&self.path, "cgroup.freeze", "1")?;
        let is_frozen = || self.read("cgroup.events").lines().any(|line| line == "frozen 1");
        until(PATIENCE, || is_frozen().then_some(())).ok_or_else(|| "a process does not freeze".to_owned())
    }

    /// Makes the group run out of memory: one more process of it allocates without end. The kernel kills all
    /// of it.
    ///
    /// # Errors
    /// The kernel refuses, or that process is not killed.
    pub fn run_out_of_memory(&self) -> Result<(), String> {
        let used = self.read("memory.current").trim().parse::<u64>().map_err(|error| error.to_string())?;
        // Not less than the group has when all processes have ended: the kernel would look for more to kill.
        write(&self.path, "memory.max", &(used + MORE).to_string())?;
        let mut endless = Command::new("tail");
        endless.arg("/dev/zero");
        let status = run(self.entered_by(&endless).stdout(Stdio::null()), PATIENCE);
        let status = status.map_err(|error| format!("{error:#}"))?;
        if status.signal() == Some(Signal::SIGKILL as i32) { Ok(()) } else { Err(status.to_string()) }
    }

    /// How often the kernel has killed the group because it was out of memory.
    #[must_use]
    pub fn group_kills(&self) -> usize {
        let events = self.read("memory.events");
        let count = events.lines().find_map(|line| line.strip_prefix("oom_group_kill "));
        count.and_then(|count| count.parse().ok()).unwrap_or(0)
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path.join(name)).unwrap_or_default()
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = self.kill();
        if until(PATIENCE, || fs::remove_dir(&self.path).ok()).is_none() {
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
