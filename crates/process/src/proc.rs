// SPDX-License-Identifier: MIT OR Apache-2.0
//! What `/proc` shows of processes and threads. One that has ended shows nothing.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fmt::Display;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;

use crate::names::{field, lines};

/// Fields of `/proc/TID/status`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Status {
    /// `R` running, `S` sleeping, `D` in uninterruptible sleep, `T` stopped, `t` stopped by a tracer, `Z` `X`
    /// ended.
    pub state: char,
    /// The parent process, in this PID namespace, or 0.
    pub parent: i32,
    /// The tracing process, in this PID namespace, or 0.
    pub tracer: i32,
    /// The number in its own PID namespace. None: the kernel has no such namespaces.
    pub own_number: Option<i32>,
    /// Whether a seccomp filter checks its system calls.
    pub filtered: bool,
}

impl Status {
    /// Returns whether the thread has ended, and only its number remains.
    #[must_use]
    pub fn has_ended(self) -> bool {
        matches!(self.state, 'Z' | 'X' | 'x')
    }

    fn parse(file: &[u8]) -> Option<Self> {
        let field = |key| field(file, key);
        Some(Self {
            state: field("State:")?.chars().next()?,
            parent: field("PPid:")?.parse().ok()?,
            tracer: field("TracerPid:")?.parse().ok()?,
            own_number: field("NSpid:").and_then(|list| list.split_whitespace().last()?.parse().ok()),
            // The field is missing if the kernel has no seccomp.
            filtered: field("Seccomp:").is_some_and(|mode| mode != "0"),
        })
    }
}

/// Returns the status of a thread of any process.
#[must_use]
pub fn status(tid: i32) -> Option<Status> {
    Status::parse(&fs::read(format!("/proc/{tid}/status")).ok()?)
}

/// Returns the fields of `/proc/PID/stat` that follow the name: field 3 of proc(5), the state, is the first.
///
/// # Errors
/// The file cannot be read.
pub fn stat(pid: i32) -> io::Result<Vec<String>> {
    // The name may have any bytes, parentheses included.
    let stat = fs::read(format!("/proc/{pid}/stat"))?;
    let stat = String::from_utf8_lossy(&stat);
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
    Ok(fields.split_whitespace().map(str::to_owned).collect())
}

/// Returns whether a process has ended, or is ending: its memory may be gone before its number is.
#[must_use]
pub fn is_ending(pid: i32) -> bool {
    /// `PF_EXITING` (`include/linux/sched.h`), in field 9 of proc(5).
    const EXITING: u64 = 0x4;
    let Ok(fields) = stat(pid) else { return true };
    let flags = fields.get(6).and_then(|flags| flags.parse::<u64>().ok()).unwrap_or_default();
    flags & EXITING != 0 || fields.first().is_some_and(|state| matches!(state.as_str(), "Z" | "X"))
}

/// Returns how a process ended that its parent has not collected yet, as for wait(2) (field 52 of proc(5));
/// none: it has not ended, it was collected, or this process may not trace it.
#[must_use]
pub fn exit_status(pid: i32) -> Option<ExitStatus> {
    let fields = stat(pid).ok().filter(|fields| fields.first().is_some_and(|state| state == "Z"))?;
    fields.get(49)?.parse().ok().map(ExitStatus::from_raw)
}

/// Returns the CPU time that a process has used, in clock ticks (fields 14 and 15 of proc(5)).
#[must_use]
pub fn cpu_ticks(pid: i32) -> Option<u64> {
    let fields = stat(pid).ok()?;
    let ticks = fields.get(11..13)?.iter().map(|field| field.parse::<u64>().ok());
    ticks.sum()
}

/// Returns the name of a process or thread, which may have any bytes; empty if it has ended.
#[must_use]
pub fn name(pid: i32) -> Vec<u8> {
    let mut name = fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
    // The kernel adds a newline.
    name.pop();
    name
}

/// Returns the path of a process's control group (cgroup v2) below the mount, or `None` where the kernel
/// lists no such group for it. `process` is a pid, or `self`.
///
/// # Errors
/// The process has ended.
pub fn control_group(process: impl Display) -> io::Result<Option<PathBuf>> {
    let file = fs::read(format!("/proc/{process}/cgroup"))?;
    let group = lines(&file).find_map(|line| line.strip_prefix(b"0::/"));
    Ok(group.map(|group| OsStr::from_bytes(group).into()))
}

/// Returns all processes.
///
/// # Errors
/// `/proc` cannot be listed.
pub fn processes() -> io::Result<Vec<i32>> {
    numbers("/proc")
}

/// Returns the threads of a process. The list is empty if the process has ended.
#[must_use]
pub fn threads(pid: i32) -> Vec<i32> {
    numbers(format!("/proc/{pid}/task")).unwrap_or_default()
}

/// Returns the children of all threads of a process.
#[must_use]
pub fn children(pid: i32) -> Vec<i32> {
    threads(pid).into_iter().flat_map(|tid| children_of_thread(pid, tid)).collect()
}

/// Returns the children of a thread of process `pid`.
#[must_use]
pub fn children_of_thread(pid: i32, tid: i32) -> Vec<i32> {
    let list = fs::read_to_string(format!("/proc/{pid}/task/{tid}/children")).unwrap_or_default();
    list.split_ascii_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

/// Returns a process and its living descendants, parents first: at most `limit` processes.
#[must_use]
pub fn tree(root: i32, limit: usize) -> Vec<i32> {
    let (mut tree, mut known) = (vec![root], BTreeSet::from([root]));
    let mut next = 0;
    while let Some(pid) = tree.get(next) {
        for child in children(*pid) {
            if tree.len() < limit && known.insert(child) {
                tree.push(child);
            }
        }
        next += 1;
    }
    tree
}

/// Returns the entries of a folder whose names are numbers.
///
/// # Errors
/// The folder cannot be listed.
pub fn numbers(folder: impl AsRef<Path>) -> io::Result<Vec<i32>> {
    let names = fs::read_dir(folder)?.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    Ok(names.collect())
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    const OF_NAME: Status = Status { state: 'S', parent: 3, tracer: 17, own_number: Some(7), filtered: true };

    /// A status of a process of this name, which the kernel writes as here.
    fn of_name(name: &[u8]) -> Vec<u8> {
        let rest = b"\nState:\tS (sleeping)\nPPid:\t3\nTracerPid:\t17\nNSpid:\t40\t7\nSeccomp:\t2\n";
        [&b"Name:\t"[..], name, rest].concat()
    }

    #[test]
    fn a_status_has_state_parent_tracer_number_and_filter() {
        assert_eq!(Status::parse(&of_name(b"x")), Some(OF_NAME));
        let status = Status::parse(b"State:\tZ (zombie)\nPPid:\t1\nTracerPid:\t0\n").unwrap();
        assert!(status.has_ended() && !status.filtered && status.own_number.is_none());
    }

    #[test]
    fn the_name_in_a_status_is_cut_in_mid_character_and_escaped() {
        // The kernel writes a newline as `\n`, a backslash as `\\`, and everything else unchanged.
        for name in [&b"serveur-\xc3\xa9l\xc3\xa9v\xc3"[..], b"a\\nPPid:\t9", b"\\\\\tPPid:\t9", b" \xff "] {
            assert_eq!(Status::parse(&of_name(name)), Some(OF_NAME), "{}", name.escape_ascii());
        }
    }

    proptest! {
        #[test]
        fn a_name_of_any_bytes_changes_no_field(name in proptest::collection::vec(any::<u8>(), 0..16)) {
            let escaped = name.iter().flat_map(|byte| match byte {
                b'\n' => &b"\\n"[..],
                b'\\' => b"\\\\",
                byte => std::slice::from_ref(byte),
            });
            prop_assert_eq!(Status::parse(&of_name(&escaped.copied().collect::<Vec<u8>>())), Some(OF_NAME));
        }
    }

    #[test]
    fn a_thread_may_have_a_name_of_any_bytes() {
        const NAME: &[u8] = b"serveur-\xc3\xa9l\xc3\xa9v\xc3";
        std::thread::spawn(|| {
            fs::write("/proc/thread-self/comm", [NAME, b"\xa9 (cut)"].concat()).unwrap();
            let link = fs::read_link("/proc/thread-self").unwrap();
            let thread = link.file_name().unwrap().to_str().unwrap().parse().unwrap();
            assert_eq!(name(thread), NAME);
            assert_eq!(status(thread).unwrap().state, 'R');
        })
        .join()
        .unwrap();
    }

    #[test]
    fn this_process_has_a_status_threads_and_a_name() {
        let own = std::process::id().cast_signed();
        let status = status(own).unwrap();
        assert_eq!((status.own_number, status.has_ended()), (Some(own), false));
        assert!(threads(own).contains(&own) && threads(own).len() > 1);
        assert!(processes().unwrap().contains(&own));
        assert!(!name(own).is_empty());
    }

    #[test]
    fn a_number_of_no_process_shows_nothing() {
        assert_eq!((status(-1), name(-1), threads(-1)), (None, Vec::new(), Vec::new()));
        assert_eq!((tree(-1, 9), stat(-1).unwrap_err().kind()), (vec![-1], io::ErrorKind::NotFound));
    }

    #[test]
    fn the_fields_of_a_stat_follow_the_name() {
        let own = std::process::id().cast_signed();
        let parent = std::os::unix::process::parent_id().to_string();
        let name = fs::read(format!("/proc/{own}/comm")).unwrap();
        fs::write("/proc/self/comm", "a) Z 1 (").unwrap();
        let fields = stat(own).unwrap();
        fs::write("/proc/self/comm", name).unwrap();
        assert_eq!(fields[1], parent, "{fields:?}");
    }

    #[test]
    fn a_tree_has_its_root_first_and_its_descendants_up_to_the_limit() {
        // A shell that waits, with a child that has a child.
        let script = "(sleep 1000; true) & wait";
        let mut shell = Command::new("sh").args(["-c", script]).spawn().unwrap();
        let root = shell.id().cast_signed();
        let whole = (0..1000).map(|_| tree(root, 9)).find(|tree| {
            std::thread::sleep(Duration::from_millis(5));
            tree.len() == 3 && name(tree[2]) == b"sleep"
        });
        let whole = whole.unwrap_or_else(|| panic!("{:?}", tree(root, 9)));
        assert_eq!(whole[0], root);
        assert_eq!(tree(root, 2), whole[..2]);
        for pid in &whole[1..] {
            crate::pidfd::pidfd_open(*pid)
                .and_then(|pidfd| crate::pidfd::pidfd_kill(std::os::fd::AsRawFd::as_raw_fd(&pidfd)))
                .unwrap();
        }
        shell.kill().unwrap();
        shell.wait().unwrap();
        assert_eq!(tree(root, 9), [root], "a process that has ended has no children");
    }
}
