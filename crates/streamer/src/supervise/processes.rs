// SPDX-License-Identifier: MIT OR Apache-2.0
//! Finds processes, their children and their descriptors in /proc.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd, RawFd};

use rewake_process::proc;

use crate::sys;

/// Most processes examined when a restored tree is killed. A larger tree is a fork bomb, and is not killed
/// whole.
const MAX_PROCESSES: usize = 4096;

/// Kills every living descendant of process `pid`, which has the descriptor `pidfd`.
///
/// The streamer knows a child forked after the restore only by its userfaultfd, as no event has its pid.
pub fn kill_descendants(pid: i32, pidfd: RawFd) {
    let listed = descendants(pid);
    // The number may be another process's once it is reaped, and so may the list.
    if pidfd < 0 || sys::has_ended(pidfd) {
        return;
    }
    for &child in &listed {
        let Ok(pidfd) = sys::pidfd_open(child) else { continue };
        // Another process may have got the number between the listing and the descriptor.
        if proc::status(child).is_some_and(|status| status.parent == pid || listed.contains(&status.parent)) {
            let _ = sys::pidfd_kill(pidfd.as_raw_fd());
        }
    }
}

/// Returns the pid that a process has in its own pid namespace.
#[must_use]
pub fn own_number(pid: i32) -> Option<i32> {
    proc::status(pid)?.own_number
}

/// How the memory of a process is laid out: the start and the end of its code, and the start of its stack.
///
/// After exec they are at other random addresses.
pub type Layout = [u64; 3];

/// Returns the layout of a process, or `None` if /proc does not show it.
#[must_use]
pub fn layout(pid: i32) -> Option<Layout> {
    let stat = proc::stat(pid).ok()?;
    // `startcode`, field 26 of proc(5), is the 24th after the name.
    let mut fields = stat.iter().skip(23).map(|field| field.parse());
    Some([fields.next()?.ok()?, fields.next()?.ok()?, fields.next()?.ok()?])
}

/// Returns the pids of all processes in /proc.
pub fn all() -> impl Iterator<Item = i32> {
    proc::processes().unwrap_or_default().into_iter()
}

/// Returns how many threads of a process wait for a userfaultfd: for a page, or until an event is read.
///
/// It is 0 if the kernel does not show in which function a thread sleeps.
#[must_use]
pub fn waiting_threads(pid: i32) -> usize {
    let waits = |thread: &i32| {
        let function = std::fs::read(format!("/proc/{pid}/task/{thread}/wchan")).unwrap_or_default();
        [&b"handle_userfault"[..], b"userfaultfd_event_wait_completion"].contains(&function.trim_ascii())
    };
    proc::threads(pid).iter().filter(|thread| waits(thread)).count()
}

/// Returns whether a process is frozen by its cgroup: it makes no system call until that is thawed.
///
/// It is false if the kernel does not show in which function a thread sleeps.
#[must_use]
pub fn is_frozen(pid: i32) -> bool {
    let function = std::fs::read(format!("/proc/{pid}/wchan")).unwrap_or_default();
    match function.trim_ascii() {
        // Of a cgroup of version 1.
        b"__refrigerator" => true,
        // Of version 2: a compiler may have made the first a part of the second, where stopped threads wait,
        // too.
        b"do_freezer_trap" | b"get_signal" => proc::status(pid).is_some_and(|status| status.state == 'S'),
        _ => false,
    }
}

/// Returns the number of a process's descriptor of the socket with this inode.
///
/// It is `None` if the process has no such descriptor, or has ended.
#[must_use]
pub fn number_of_socket(pid: i32, inode: u64) -> Option<RawFd> {
    let sockets = rewake_plugin_protocol::sockets_of(pid).ok()?;
    sockets.into_iter().find(|(_, found)| *found == inode).map(|(number, _)| number)
}

/// Returns the descriptors of a process, by number and inode, that are one of these sockets; none where the
/// process has ended.
#[must_use]
pub(crate) fn sockets_among(pid: i32, inodes: &BTreeSet<u64>) -> Vec<(RawFd, u64)> {
    let mut sockets = rewake_plugin_protocol::sockets_of(pid).unwrap_or_default();
    sockets.retain(|(_, inode)| inodes.contains(inode));
    sockets
}

/// Copies a descriptor of a process. If the first thread has ended, it copies it from another thread.
///
/// # Errors
/// The process has ended, or has no such descriptor, or may not be traced.
pub fn descriptor_of(pid: i32, number: RawFd) -> io::Result<OwnedFd> {
    let first = sys::pidfd_open(pid).and_then(|process| sys::pidfd_getfd(process.as_fd(), number));
    let Err(error) = first else { return first };
    let threads = proc::threads(pid).into_iter().filter(|thread| *thread != pid);
    let give = |thread: i32| sys::pidfd_getfd(sys::pidfd_open_thread(thread).ok()?.as_fd(), number).ok();
    threads.into_iter().find_map(give).ok_or(error)
}

/// Returns the living descendants of a process.
#[must_use]
pub fn descendants(pid: i32) -> BTreeSet<i32> {
    // The process itself is the first.
    proc::tree(pid, MAX_PROCESSES + 1).into_iter().skip(1).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn in_the_same_pid_namespace_own_number_is_the_pid() {
        let own = std::process::id().cast_signed();
        assert_eq!(own_number(own), Some(own));
        assert_eq!(own_number(-1), None);
    }

    #[test]
    fn children_of_another_process_with_the_same_pid_are_not_killed() {
        let mut other = Command::new("sh").args(["-c", "sleep 100; true"]).spawn().unwrap();
        let pid = i32::try_from(other.id()).unwrap();
        while descendants(pid).is_empty() {
            std::thread::yield_now();
        }
        let child = sys::pidfd_open(*descendants(pid).first().unwrap()).unwrap();
        let mut ended = Command::new("true").spawn().unwrap();
        let pidfd = sys::pidfd_open(i32::try_from(ended.id()).unwrap()).unwrap();
        ended.wait().unwrap();
        for pidfd in [pidfd.as_raw_fd(), crate::ledger::NO_FD] {
            kill_descendants(pid, pidfd);
        }
        std::thread::sleep(std::time::Duration::from_millis(100));
        assert!(!sys::has_ended(child.as_raw_fd()), "a child of another process was killed");
        let pidfd = sys::pidfd_open(pid).unwrap();
        kill_descendants(pid, pidfd.as_raw_fd());
        other.wait().unwrap();
    }

    #[test]
    fn a_child_of_any_thread_is_found() {
        let (sender, receiver) = std::sync::mpsc::channel();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            let mut child = Command::new("sleep").arg("100").spawn().unwrap();
            sender.send(i32::try_from(child.id()).unwrap()).unwrap();
            let _ = ended.recv();
            child.kill().unwrap();
            child.wait().unwrap();
        });
        let child = receiver.recv().unwrap();
        assert!(descendants(i32::try_from(std::process::id()).unwrap()).contains(&child));
        drop(end);
        thread.join().unwrap();
    }

    #[test]
    fn children_of_children_are_killed_and_the_process_itself_is_not() {
        let mut shell =
            Command::new("sh").args(["-c", "sh -c 'sleep 100; true'; sleep 100"]).spawn().unwrap();
        let pid = i32::try_from(shell.id()).unwrap();
        while descendants(pid).len() < 2 {
            std::thread::yield_now();
        }
        let pidfd = sys::pidfd_open(pid).unwrap();
        // The outer shell then starts its own sleep, which is killed too.
        while shell.try_wait().unwrap().is_none() {
            kill_descendants(pid, pidfd.as_raw_fd());
            std::thread::yield_now();
        }
        assert!(descendants(pid).is_empty());
    }
}
