// SPDX-License-Identifier: MIT OR Apache-2.0
//! The cgroup of a tree: its freezer decides whether the tree runs, whatever process has died.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::fd::AsRawFd as _;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use nix::fcntl::{Flock, FlockArg};
use rewake_process::names::{lines, unescaped};
use rewake_process::pidfd::{pidfd_kill, pidfd_open};
use rewake_process::proc;
use serde::{Deserialize, Serialize};

use crate::frame::new_name;
use crate::text_path::TextPath;

/// A flag in field 9 of `/proc/PID/stat`, proc(5), as Linux's sched.h names it: the process is ending, or has
/// ended.
const PF_EXITING: u32 = 0x4;
/// Tasks of a tree at most.
const MAX_TASKS: usize = 4096;
/// Passes over a tree that forks while it is moved into a group.
const MAX_PASSES: usize = 10;
/// Time that the kernel has to freeze or kill a group, and between two tries to kill it.
const CHANGE_LIMIT: Duration = Duration::from_secs(10);
/// Groups that another agent may remove before they are locked.
const MAX_GROUPS: usize = 10;
/// How the names of groups of restored trees begin.
const RESTORED: &str = "rewake-destination";
/// Pause between two looks at a group, whose processes freeze or end within milliseconds. A look reads a few
/// files.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// A group of version 2 that has the tasks of one tree, and no other process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TreeCgroup {
    path: TextPath,
    /// The tree was moved into the group for the migration.
    is_made: bool,
}

impl TreeCgroup {
    /// Finds the group that a tree has for itself; otherwise makes one below the tree's group, whose limits
    /// stay in force.
    ///
    /// # Errors
    /// The tree is spread over groups that have other processes, too, or there are no groups of version 2.
    pub(crate) fn of_tree(root: i32) -> anyhow::Result<Self> {
        if let Some(found) = Self::find(root)? {
            return Ok(found);
        }
        let group = group_of(root)?;
        let made = Self::make(mount()?.join(&group).join(new_name("rewake-source")?))?;
        let filled = made.fill(root, &group);
        if filled.is_err() {
            made.release();
        }
        filled.map(|()| made)
    }

    /// The group that a tree has for itself, or `None` if one is to be made. Nothing is changed.
    ///
    /// # Errors
    /// As [`TreeCgroup::of_tree`].
    pub(crate) fn find(root: i32) -> anyhow::Result<Option<Self>> {
        let mount = mount()?;
        let group = group_of(root)?;
        let tasks = tree(root)?;
        let own = std::process::id().cast_signed();
        ensure!(!tasks.contains(&own), "-t {root}: this command is a child of it, and would stop itself");
        let path = TextPath::from(mount.join(&group));
        let is_root = group.as_os_str().is_empty();
        ensure!(
            is_root || !has_event(&path, "frozen 1")?,
            "-t {root}: its cgroup is frozen, which the end of a migration would undo: \
             write 0 to {}/cgroup.freeze first",
            path.display()
        );
        if !is_root && members(&path)?.iter().all(|pid| tasks.contains(pid)) {
            for task in &tasks {
                // It may have ended.
                let Ok(other) = group_of(*task) else { continue };
                ensure!(
                    other.starts_with(&group) || !lives(*task),
                    "process {task} of the tree is in cgroup /{}, outside /{}: move the tree into one cgroup",
                    other.display(),
                    group.display()
                );
            }
            return Ok(Some(Self { path, is_made: false }));
        }
        for task in &tasks {
            // It may have ended.
            let Ok(other) = group_of(*task) else { continue };
            ensure!(
                other == group || !lives(*task),
                "process {task} of the tree is in cgroup /{}, its root in /{}: move the tree into one cgroup",
                other.display(),
                group.display()
            );
        }
        Ok(None)
    }

    /// Moves a tree into the group, with the children that it forks meanwhile.
    fn fill(&self, root: i32, parent: &Path) -> anyhow::Result<()> {
        for _ in 0..MAX_PASSES {
            // In this order: a child that is born meanwhile is born in the group.
            let tasks = tree(root)?;
            let inside = members(&self.path)?;
            let is_outside = |task: &i32| !inside.contains(task) && lives(*task);
            let outside: Vec<i32> = tasks.into_iter().filter(is_outside).collect();
            if outside.is_empty() && inside.contains(&root) {
                return Ok(());
            }
            for task in outside {
                let Ok(group) = group_of(task) else { continue };
                ensure!(
                    group == parent || !lives(task),
                    "process {task} of the tree is in cgroup /{}, its root in /{}: move the tree into one \
                     cgroup",
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

    /// Makes an empty group below this process's own, for a tree that will be restored. It stays as long as
    /// the tree, so groups of earlier trees that have ended are removed. The lock keeps other agents from
    /// that while it is empty.
    pub(crate) fn for_restore() -> anyhow::Result<(Self, Flock<File>)> {
        let own = mount()?.join(group_of(std::process::id().cast_signed())?);
        for entry in fs::read_dir(&own).with_context(|| format!("listing {}", own.display()))?.flatten() {
            if entry.file_name().to_string_lossy().starts_with(RESTORED) {
                remove_unused(&entry.path());
            }
        }
        for _ in 0..MAX_GROUPS {
            let made = Self::make(own.join(new_name(RESTORED)?))?;
            // Another agent may remove it before it is locked.
            if let Ok(lock) = made.lock()
                && made.path.exists()
            {
                return Ok((made, lock));
            }
        }
        bail!("{}: {MAX_GROUPS} new cgroups were removed by other processes", own.display())
    }

    /// Keeps other agents from removing the group.
    pub(crate) fn lock(&self) -> anyhow::Result<Flock<File>> {
        let locking = || format!("locking cgroup {}", self.path.display());
        let folder = File::open(&self.path).with_context(locking)?;
        Flock::lock(folder, FlockArg::LockExclusive).map_err(|(_, error)| error).with_context(locking)
    }

    fn make(path: PathBuf) -> anyhow::Result<Self> {
        fs::create_dir(&path).with_context(|| format!("making cgroup {}", path.display()))?;
        Ok(Self { path: path.into(), is_made: true })
    }

    /// The file through which a process enters the group.
    pub(crate) fn entrance(&self) -> PathBuf {
        self.path.join("cgroup.procs")
    }

    /// Returns its processes, as this process's pid namespace numbers them.
    pub(crate) fn processes(&self) -> anyhow::Result<Vec<i32>> {
        members(&self.path)
    }

    /// Whether it may have processes.
    pub(crate) fn has_processes(&self) -> bool {
        !self.is_removed() && !has_event(&self.path, "populated 0").unwrap_or(false)
    }

    /// Stops every task. One that is traced counts as frozen, and stays so when its tracer ends.
    pub(crate) fn freeze(&self) -> anyhow::Result<()> {
        self.write("cgroup.freeze", "1")?;
        self.wait_for("frozen 1")
    }

    /// Compares the group with a tree that is stopped. CRIU dumps the tree, and the freezer holds the group.
    ///
    /// # Errors
    /// A process of one is not in the other.
    pub(crate) fn expect_tree(&self, root: i32) -> anyhow::Result<()> {
        let tasks = tree(root)?;
        let inside: BTreeSet<i32> = members(&self.path)?.into_iter().collect();
        // 0 stands for a process of another pid namespace.
        if let Some(other) = inside.difference(&tasks).find(|pid| **pid == 0 || lives(**pid)) {
            bail!("process {other} in cgroup {} is not in the tree of {root}", self.path.display());
        }
        if let Some(task) = tasks.difference(&inside).find(|pid| lives(**pid)) {
            bail!("process {task} of the tree has left cgroup {}", self.path.display());
        }
        Ok(())
    }

    /// Lets the tasks run. A group that was removed has none, and CRIU's script may remove the group at the
    /// same time.
    pub(crate) fn thaw(&self) -> anyhow::Result<()> {
        self.write("cgroup.freeze", "0").or_else(|error| if self.is_removed() { Ok(()) } else { Err(error) })
    }

    /// Kills every process, frozen or not, and returns when the group has none. There is no limit: what keeps
    /// missing memory, or says that the tree must not run, must stay until then.
    pub(crate) fn kill(&self) {
        loop {
            let start = Instant::now();
            let Err(error) = self.try_kill() else { return };
            tracing::error!("cgroup {}: its processes are not killed yet: {error:#}", self.path.display());
            sleep(CHANGE_LIMIT.saturating_sub(start.elapsed()));
        }
    }

    fn try_kill(&self) -> anyhow::Result<()> {
        if self.is_removed() {
            return Ok(());
        }
        if self.write("cgroup.kill", "1").is_err() {
            // Linux before 5.14.
            self.kill_each()?;
        }
        self.wait_for("populated 0")
    }

    /// Kills the processes one by one, frozen: none of them forks meanwhile.
    fn kill_each(&self) -> anyhow::Result<()> {
        self.freeze()?;
        let mount = mount()?;
        // 0 stands for a process of another pid namespace.
        for pid in members(&self.path)?.into_iter().filter(|pid| *pid > 0) {
            // It may have ended, and another process may have got its number.
            let Ok(process) = pidfd_open(pid) else { continue };
            if group_of(pid).is_ok_and(|group| mount.join(group).starts_with(&self.path)) {
                // It may have ended meanwhile.
                let _ = pidfd_kill(process.as_raw_fd());
            }
        }
        Ok(())
    }

    /// Whether the group does not exist, so that it has no process. A file system that is not mounted says
    /// nothing.
    fn is_removed(&self) -> bool {
        let is_group = |path: &Path| path.join("cgroup.procs").exists();
        !self.path.exists() && self.path.ancestors().skip(1).any(is_group)
    }

    /// Moves the tasks back, and removes a group that was made. The tree can stay in it otherwise.
    pub(crate) fn release(&self) {
        let Some(parent) = self.path.parent().filter(|_| self.is_made) else { return };
        let mut reason = None;
        for _ in 0..MAX_PASSES {
            // A task that forks has children in the group.
            // 0 stands for a process of another pid namespace, and would move this one.
            for task in members(&self.path).unwrap_or_default().into_iter().filter(|task| *task > 0) {
                let moved = fs::write(parent.join("cgroup.procs"), task.to_string());
                reason = moved.err().filter(|_| lives(task));
            }
            match fs::remove_dir(&self.path) {
                Ok(()) => return,
                Err(error) if error.kind() == ErrorKind::NotFound => return,
                Err(error) => reason = reason.or(Some(error)),
            }
            sleep(POLL_INTERVAL);
        }
        let (path, tasks) = (self.path.display(), members(&self.path).unwrap_or_default());
        let reason = reason.map_or_else(|| "unknown".to_owned(), |error| error.to_string());
        tracing::warn!("cgroup {path} stays, with processes {tasks:?} ({reason}): move them, and remove it");
    }

    fn write(&self, name: &str, value: &str) -> anyhow::Result<()> {
        let path = self.path.join(name);
        fs::write(&path, value).with_context(|| format!("writing {value} to {}", path.display()))
    }

    fn wait_for(&self, event: &str) -> anyhow::Result<()> {
        let path = self.path.join("cgroup.events");
        let start = Instant::now();
        loop {
            if has_event(&self.path, event)? {
                return Ok(());
            }
            let limit = CHANGE_LIMIT.as_secs();
            ensure!(start.elapsed() < CHANGE_LIMIT, "{}: not {event:?} within {limit} s", path.display());
            sleep(POLL_INTERVAL);
        }
    }
}

/// The processes of a tree.
///
/// # Errors
/// There are too many.
pub(crate) fn tree(root: i32) -> anyhow::Result<BTreeSet<i32>> {
    let tasks = proc::tree(root, MAX_TASKS + 1);
    ensure!(tasks.len() <= MAX_TASKS, "-t {root}: the tree has more than {MAX_TASKS} processes");
    Ok(tasks.into_iter().collect())
}

/// Whether a process exists, and is not ending. The kernel moves none that is ending, and its group may not
/// list it, though it needs milliseconds to return its memory.
pub(crate) fn lives(pid: i32) -> bool {
    let flags = proc::stat(pid).ok().and_then(|fields| fields.get(6)?.parse::<u32>().ok());
    flags.is_some_and(|flags| flags & PF_EXITING == 0)
}

/// What this process's group and each one above it permit in addition, in bytes. One without a limit is left
/// out.
pub(crate) fn free_memory() -> anyhow::Result<Vec<(PathBuf, u64)>> {
    let group = group_of(std::process::id().cast_signed())?;
    let mount = mount()?;
    let number = |group: &Path, name| -> Option<u64> {
        fs::read_to_string(mount.join(group).join(name)).ok()?.trim().parse().ok()
    };
    let free = |group: &Path| {
        let left = number(group, "memory.max")?.saturating_sub(number(group, "memory.current")?);
        Some((mount.join(group), left))
    };
    Ok(group.ancestors().filter_map(free).collect())
}

/// Removes a group that no agent uses. The kernel refuses while it has processes.
fn remove_unused(path: &Path) {
    if let Ok(folder) = File::open(path)
        && let Ok(_lock) = Flock::lock(folder, FlockArg::LockExclusiveNonblock)
    {
        let _ = fs::remove_dir(path);
    }
}

fn has_event(group: &Path, event: &str) -> anyhow::Result<bool> {
    let path = group.join("cgroup.events");
    let events = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    Ok(events.lines().any(|line| line == event))
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
    let mounts = fs::read("/proc/self/mounts").context("reading /proc/self/mounts")?;
    lines(&mounts).find_map(place).context(
        "no cgroup2 file system is mounted: its freezer stops the tree; mount -t cgroup2 none /sys/fs/cgroup",
    )
}

/// Where a line of `/proc/self/mounts` mounts the groups of version 2, if it does.
fn place(line: &[u8]) -> Option<PathBuf> {
    let mut fields = line.split(|byte| *byte == b' ').skip(1);
    let (place, kind) = (fields.next()?, fields.next()?);
    (kind == b"cgroup2").then(|| OsString::from_vec(unescaped(place)).into())
}

/// The group of a process, relative to the mount.
fn group_of(pid: i32) -> anyhow::Result<PathBuf> {
    let path = format!("/proc/{pid}/cgroup");
    let group = proc::control_group(pid).with_context(|| format!("reading {path}"))?;
    let group = group.with_context(|| format!("{path} names no cgroup of version 2"))?;
    ensure!(
        !group.starts_with(".."),
        "{path}: /{} is outside this process's cgroup namespace",
        group.display()
    );
    Ok(group)
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use super::*;

    /// A group with a process; none without groups of version 2, or without the right to make one.
    fn group_with_sleeper() -> Option<(TreeCgroup, Child)> {
        let own = mount().ok()?.join(group_of(std::process::id().cast_signed()).ok()?);
        let group = TreeCgroup::make(own.join(new_name("rewake-test").unwrap())).ok()?;
        let sleeper = Command::new("sleep").arg("100").spawn().unwrap();
        fs::write(group.entrance(), sleeper.id().to_string()).unwrap();
        Some((group, sleeper))
    }

    #[test]
    fn a_group_is_killed_with_and_without_cgroup_kill() {
        let Some((group, mut sleeper)) = group_with_sleeper() else { return };
        group.kill_each().unwrap();
        group.wait_for("populated 0").unwrap();
        assert!(!sleeper.wait().unwrap().success());
        let mut sleeper = Command::new("sleep").arg("100").spawn().unwrap();
        group.thaw().unwrap();
        fs::write(group.entrance(), sleeper.id().to_string()).unwrap();
        group.kill();
        assert!(!sleeper.wait().unwrap().success());
        group.release();
        assert!(group.is_removed());
        group.kill();
        group.thaw().unwrap();
    }

    #[test]
    fn a_tree_whose_children_are_ending_gets_a_group() {
        // Each child needs milliseconds to return its memory. The kernel does not move it meanwhile.
        if mount().is_err() {
            return;
        }
        let script = "x = b'x' * (1 << 29)\nimport os\nwhile True:\n os.fork() or os._exit(0)\n os.wait()";
        let mut forks = Command::new("python3").args(["-c", script]).spawn().unwrap();
        let root = forks.id().cast_signed();
        let has_children = |_| {
            sleep(POLL_INTERVAL);
            !proc::children(root).is_empty()
        };
        assert!((0..10_000).any(has_children));
        let groups: Vec<_> =
            (0..200).map(|_| TreeCgroup::of_tree(root).map(|group| group.release())).collect();
        forks.kill().unwrap();
        forks.wait().unwrap();
        groups.into_iter().collect::<anyhow::Result<()>>().unwrap();
    }

    #[test]
    fn a_group_is_released_while_its_processes_fork() {
        let Some((group, mut sleeper)) = group_with_sleeper() else { return };
        let mut forks = Command::new("sh").args(["-c", "while :; do sleep 0.001; done"]).spawn().unwrap();
        fs::write(group.entrance(), forks.id().to_string()).unwrap();
        group.release();
        assert!(group.is_removed());
        for child in [&mut forks, &mut sleeper] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    #[test]
    fn a_frozen_group_must_be_the_tree() {
        let Some((group, mut sleeper)) = group_with_sleeper() else { return };
        let root = sleeper.id().cast_signed();
        let mut tree = Command::new("sh").args(["-c", "sleep 100 & wait"]).spawn().unwrap();
        let shell = tree.id().cast_signed();
        group.expect_tree(root).unwrap();
        let error = |root| group.expect_tree(root).unwrap_err().to_string();
        assert!(error(std::process::id().cast_signed()).starts_with("process "), "this test is outside");
        fs::write(group.entrance(), shell.to_string()).unwrap();
        assert!(error(root).contains(&format!("process {shell} in cgroup")), "{}", error(root));
        sleeper.kill().unwrap();
        // Ended, and not collected.
        while lives(root) {
            sleep(POLL_INTERVAL);
        }
        let children = || proc::children(shell);
        while children().is_empty() {
            sleep(POLL_INTERVAL);
        }
        let child = children()[0];
        let parent = group.path.parent().unwrap().join("cgroup.procs");
        fs::write(parent, child.to_string()).unwrap();
        let left = format!("process {child} of the tree has left cgroup");
        assert!(error(shell).starts_with(&left), "{}", error(shell));
        fs::write(group.entrance(), child.to_string()).unwrap();
        group.expect_tree(shell).unwrap();
        group.kill();
        sleeper.wait().unwrap();
        tree.wait().unwrap();
        group.release();
    }

    #[test]
    fn the_place_of_the_groups_may_have_any_bytes() {
        assert_eq!(place(b"cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid 0 0"), Some("/sys/fs/cgroup".into()));
        let odd = OsString::from_vec(b"/mnt/caf\xe9 1".to_vec());
        assert_eq!(place(b"none /mnt/caf\xe9\\0401 cgroup2 rw 0 0"), Some(odd.into()));
        assert_eq!(place(b"tmpfs /cgroup2 tmpfs rw 0 0"), None);
    }

    #[test]
    fn a_path_outside_the_file_system_is_no_removed_group() {
        let group = TreeCgroup { path: PathBuf::from("/no/such/mount/group").into(), is_made: true };
        assert!(!group.is_removed());
        group.try_kill().unwrap_err();
        group.thaw().unwrap_err();
    }

    #[test]
    fn another_agent_does_not_remove_a_group_in_use() {
        let Ok((one, lock)) = TreeCgroup::for_restore() else { return };
        let (two, _lock) = TreeCgroup::for_restore().unwrap();
        assert!(one.path.exists());
        drop(lock);
        let (three, _lock) = TreeCgroup::for_restore().unwrap();
        assert!(one.is_removed() && two.path.exists());
        two.release();
        three.release();
    }

    #[test]
    fn a_tree_that_another_tool_froze_is_refused() {
        let Some((group, mut sleeper)) = group_with_sleeper() else { return };
        group.freeze().unwrap();
        let refused = TreeCgroup::of_tree(sleeper.id().cast_signed()).unwrap_err().to_string();
        assert!(refused.contains("its cgroup is frozen"), "{refused}");
        group.kill();
        sleeper.wait().unwrap();
        group.release();
    }
}
