// SPDX-License-Identifier: MIT OR Apache-2.0
//! The cgroup of a tree: its freezer decides whether the tree runs, whatever process has died.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use rewake_process::proc;
use serde::{Deserialize, Serialize};

use crate::frame::new_name;

/// Tasks of a tree at most.
const MAX_TASKS: usize = 4096;
/// Passes over a tree that forks while it is moved into a group.
const MAX_PASSES: usize = 10;
/// Time that the kernel has to freeze or kill a group.
const CHANGE_LIMIT: Duration = Duration::from_secs(10);
/// How the names of groups of restored trees begin.
const RESTORED: &str = "rewake-destination";
const POLL: Duration = Duration::from_millis(1);

/// A group of version 2 that has the tasks of one tree, and no other process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TreeCgroup {
    path: PathBuf,
    /// The tree was moved into the group for the migration.
    is_made: bool,
}

impl TreeCgroup {
    /// Finds the group that a tree has for itself; otherwise makes one below the tree's group, whose limits stay in
    /// force.
    ///
    /// # Errors
    /// The tree is spread over groups that have other processes, too, or there are no groups of version 2.
    pub(crate) fn of_tree(root: i32) -> anyhow::Result<Self> {
        let mount = mount()?;
        let group = group_of(root)?;
        let tasks: BTreeSet<i32> = proc::tree(root, MAX_TASKS).into_iter().collect();
        let own = std::process::id().cast_signed();
        ensure!(!tasks.contains(&own), "-t {root}: this command is a child of it, and would stop itself");
        let path = mount.join(&group);
        let is_root = group.as_os_str().is_empty();
        if !is_root && members(&path)?.iter().all(|pid| tasks.contains(pid)) {
            for task in &tasks {
                let other = group_of(*task)?;
                ensure!(
                    other.starts_with(&group),
                    "process {task} of the tree is in cgroup /{}, outside /{}: move the tree into one cgroup",
                    other.display(),
                    group.display()
                );
            }
            return Ok(Self { path, is_made: false });
        }
        let made = Self::make(path.join(new_name("rewake-source")?))?;
        let filled = made.fill(root, &group);
        if filled.is_err() {
            made.release();
        }
        filled.map(|()| made)
    }

    /// Moves a tree into the group, with the children that it forks meanwhile.
    fn fill(&self, root: i32, parent: &Path) -> anyhow::Result<()> {
        for _ in 0..MAX_PASSES {
            let inside = members(&self.path)?;
            let tasks = proc::tree(root, MAX_TASKS);
            let outside: Vec<i32> = tasks.into_iter().filter(|task| !inside.contains(task)).collect();
            if outside.is_empty() && inside.contains(&root) {
                return Ok(());
            }
            for task in outside {
                let Ok(group) = group_of(task) else { continue };
                ensure!(
                    group == parent,
                    "process {task} of the tree is in cgroup /{}, its root in /{}: move the tree into one cgroup",
                    group.display(),
                    parent.display()
                );
                // One that has ended need not be moved.
                let moved = fs::write(self.path.join("cgroup.procs"), task.to_string());
                if let Err(error) = moved
                    && Path::new(&format!("/proc/{task}")).exists()
                {
                    return Err(error).with_context(|| format!("moving process {task} into its own cgroup"));
                }
            }
        }
        bail!("process {root} forks faster than its tree can be moved into a cgroup, {MAX_PASSES} times")
    }

    /// Makes an empty group below this process's own, for a tree that will be restored. It stays as long as the tree, so
    /// groups of earlier trees that have ended are removed.
    pub(crate) fn for_restore() -> anyhow::Result<Self> {
        let own = mount()?.join(group_of(std::process::id().cast_signed())?);
        for entry in fs::read_dir(&own).with_context(|| format!("listing {}", own.display()))?.flatten() {
            if entry.file_name().to_string_lossy().starts_with(RESTORED) {
                // The kernel refuses while it has processes.
                let _ = fs::remove_dir(entry.path());
            }
        }
        Self::make(own.join(new_name(RESTORED)?))
    }

    fn make(path: PathBuf) -> anyhow::Result<Self> {
        fs::create_dir(&path).with_context(|| format!("making cgroup {}", path.display()))?;
        Ok(Self { path, is_made: true })
    }

    /// The file through which a process enters the group.
    pub(crate) fn entrance(&self) -> PathBuf {
        self.path.join("cgroup.procs")
    }

    /// Returns its processes, as this process's pid namespace numbers them.
    pub(crate) fn processes(&self) -> anyhow::Result<Vec<i32>> {
        members(&self.path)
    }

    /// Stops every task. One that is traced counts as frozen, and stays so when its tracer ends.
    pub(crate) fn freeze(&self) -> anyhow::Result<()> {
        self.write("cgroup.freeze", "1")?;
        self.wait_for("frozen 1")
    }

    /// Lets the tasks run. A group that was removed has none.
    pub(crate) fn thaw(&self) -> anyhow::Result<()> {
        if self.path.exists() { self.write("cgroup.freeze", "0") } else { Ok(()) }
    }

    /// Kills every process, frozen or not.
    pub(crate) fn kill(&self) -> anyhow::Result<()> {
        self.write("cgroup.kill", "1")?;
        self.wait_for("populated 0")
    }

    /// Moves the tasks back, and removes a group that was made. The tree can stay in it otherwise.
    pub(crate) fn release(&self) {
        let Some(parent) = self.path.parent().filter(|_| self.is_made) else { return };
        for task in members(&self.path).unwrap_or_default() {
            // It may have ended.
            let _ = fs::write(parent.join("cgroup.procs"), task.to_string());
        }
        let _ = fs::remove_dir(&self.path);
    }

    fn write(&self, name: &str, value: &str) -> anyhow::Result<()> {
        let path = self.path.join(name);
        fs::write(&path, value).with_context(|| format!("writing {value} to {}", path.display()))
    }

    fn wait_for(&self, event: &str) -> anyhow::Result<()> {
        let path = self.path.join("cgroup.events");
        let start = Instant::now();
        loop {
            let events = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
            if events.lines().any(|line| line == event) {
                return Ok(());
            }
            let limit = CHANGE_LIMIT.as_secs();
            ensure!(start.elapsed() < CHANGE_LIMIT, "{}: not {event:?} within {limit} s", path.display());
            sleep(POLL);
        }
    }
}

/// The processes of a group and of those below it.
fn members(path: &Path) -> anyhow::Result<Vec<i32>> {
    let file = path.join("cgroup.procs");
    let text = fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))?;
    let mut found: Vec<i32> = text.lines().filter_map(|line| line.parse().ok()).collect();
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            found.extend(members(&entry.path())?);
        }
    }
    Ok(found)
}

/// The place of the groups of version 2.
fn mount() -> anyhow::Result<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts").context("reading /proc/self/mounts")?;
    let place = |line: &str| {
        let mut fields = line.split(' ').skip(1);
        let (place, kind) = (fields.next()?, fields.next()?);
        (kind == "cgroup2").then(|| PathBuf::from(place))
    };
    mounts.lines().find_map(place).context(
        "no cgroup2 file system is mounted: its freezer stops the tree; mount -t cgroup2 none /sys/fs/cgroup",
    )
}

/// The group of a process, relative to the mount.
fn group_of(pid: i32) -> anyhow::Result<PathBuf> {
    let path = format!("/proc/{pid}/cgroup");
    let text = fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
    let group = text.lines().find_map(|line| line.strip_prefix("0::/"));
    let group = group.with_context(|| format!("{path} names no cgroup of version 2"))?;
    ensure!(!group.starts_with(".."), "{path}: /{group} is outside this process's cgroup namespace");
    Ok(group.into())
}
