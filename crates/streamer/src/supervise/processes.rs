// SPDX-License-Identifier: MIT OR Apache-2.0
//! The processes behind address spaces, as /proc tells them.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd, RawFd};

use crate::sys;

/// Processes looked at when a restored tree is ended; more than that is a fork bomb, which is left to others.
const MAX_PROCESSES: usize = 4096;

/// Kills every living descendant of the process `pid` behind `pidfd`. A child forked after the restore is known
/// by its userfaultfd only, and no event tells its pid; its parent still does.
pub fn kill_descendants(pid: i32, pidfd: RawFd) {
    let listed = descendants(pid);
    // Until it is reaped the number is its own; after that the list may be a stranger's.
    if pidfd < 0 || sys::has_ended(pidfd) {
        return;
    }
    for &child in &listed {
        let Ok(pidfd) = sys::pidfd_open(child) else { continue };
        // The number may have gone to another process between the listing and the descriptor.
        if parent(child).is_some_and(|parent| parent == pid || listed.contains(&parent)) {
            let _ = sys::pidfd_kill(pidfd.as_raw_fd());
        }
    }
}

/// The number that a process has in its own pid namespace.
#[must_use]
pub fn own_number(pid: i32) -> Option<i32> {
    status(pid, "NSpid:")?.split_whitespace().last()?.parse().ok()
}

/// How the memory of a process is laid out: where its code begins and ends, and its stack begins. Another program's is at random places.
pub type Layout = [u64; 3];

/// None if it cannot be told.
#[must_use]
pub fn layout(pid: i32) -> Option<Layout> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Behind the name, which may have anything: `startcode`, the 26th field, is the 24th (proc(5)).
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(23).map(str::parse);
    Some([fields.next()?.ok()?, fields.next()?.ok()?, fields.next()?.ok()?])
}

/// All processes that /proc shows.
pub fn all() -> impl Iterator<Item = i32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten();
    entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
}

/// Threads of a process that wait for a userfaultfd: for a page, or for an event to be read. 0 where the kernel does not
/// say in which function a thread sleeps.
#[must_use]
pub fn waiting_threads(pid: i32) -> usize {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return 0 };
    let waits = |thread: std::io::Result<std::fs::DirEntry>| {
        let function = std::fs::read_to_string(thread.ok()?.path().join("wchan")).ok()?;
        ["handle_userfault", "userfaultfd_event_wait_completion"].contains(&function.trim()).then_some(())
    };
    threads.filter_map(waits).count()
}

/// The number of a descriptor that a process has of the socket with this inode; none if it has none, or has ended.
#[must_use]
pub fn number_of_socket(pid: i32, inode: u64) -> Option<RawFd> {
    let sockets = rewake_plugin_protocol::sockets_of(pid).ok()?;
    sockets.into_iter().find(|(_, found)| *found == inode).map(|(number, _)| number)
}

/// A copy of a descriptor of a process. Where its first thread has ended, another thread of it gives it.
///
/// # Errors
/// The process has ended, or has no such descriptor, or may not be traced.
pub fn descriptor_of(pid: i32, number: RawFd) -> io::Result<OwnedFd> {
    let first = sys::pidfd_open(pid).and_then(|process| sys::pidfd_getfd(process.as_fd(), number));
    let Err(error) = first else { return first };
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten();
    let numbers = threads.filter_map(|thread| thread.ok()?.file_name().to_str()?.parse::<i32>().ok());
    let give = |thread: i32| sys::pidfd_getfd(sys::pidfd_open_thread(thread).ok()?.as_fd(), number).ok();
    numbers.filter(|thread| *thread != pid).find_map(give).ok_or(error)
}

fn parent(pid: i32) -> Option<i32> {
    status(pid, "PPid:")?.trim().parse().ok()
}

/// What follows a name in its status.
fn status(pid: i32, name: &str) -> Option<String> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    Some(status.lines().find_map(|line| line.strip_prefix(name))?.to_owned())
}

/// The living descendants of a process.
#[must_use]
pub fn descendants(pid: i32) -> BTreeSet<i32> {
    let mut found = BTreeSet::new();
    let mut open = vec![pid];
    while let Some(pid) = open.pop() {
        for child in children(pid) {
            if found.len() < MAX_PROCESSES && found.insert(child) {
                open.push(child);
            }
        }
    }
    found
}

fn children(pid: i32) -> Vec<i32> {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let list = |thread: std::io::Result<std::fs::DirEntry>| {
        std::fs::read_to_string(thread.ok()?.path().join("children")).ok()
    };
    let lists: Vec<String> = threads.filter_map(list).collect();
    lists.iter().flat_map(|list| list.split_ascii_whitespace()).filter_map(|pid| pid.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn here_a_process_has_the_number_that_it_has_itself() {
        let own = std::process::id().cast_signed();
        assert_eq!(own_number(own), Some(own));
        assert_eq!(own_number(-1), None);
    }

    #[test]
    fn when_the_process_has_ended_its_number_may_be_a_stranger_s_whose_children_live_on() {
        let mut stranger = Command::new("sh").args(["-c", "sleep 100; true"]).spawn().unwrap();
        let pid = i32::try_from(stranger.id()).unwrap();
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
        assert!(!sys::has_ended(child.as_raw_fd()), "a stranger's child was killed");
        let pidfd = sys::pidfd_open(pid).unwrap();
        kill_descendants(pid, pidfd.as_raw_fd());
        stranger.wait().unwrap();
    }

    #[test]
    fn a_child_of_any_thread_is_found() {
        let (tell, told) = std::sync::mpsc::channel();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            let mut child = Command::new("sleep").arg("100").spawn().unwrap();
            tell.send(i32::try_from(child.id()).unwrap()).unwrap();
            let _ = ended.recv();
            child.kill().unwrap();
            child.wait().unwrap();
        });
        let child = told.recv().unwrap();
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
        // The outer shell goes on to its own sleep, which is killed too.
        while shell.try_wait().unwrap().is_none() {
            kill_descendants(pid, pidfd.as_raw_fd());
            std::thread::yield_now();
        }
        assert!(descendants(pid).is_empty());
    }
}
