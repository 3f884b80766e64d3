// SPDX-License-Identifier: MIT OR Apache-2.0
//! What `/proc` says of processes and threads. A thread that is gone gives none.

use std::fs;
use std::io;

use crate::abi::Tid;
use crate::error::Error;

/// What `/proc/TID/status` says of a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Status {
    /// `R` running, `S` asleep, `D` asleep and not to be disturbed, `T` stopped, `t` traced and stopped, `Z` `X` ended.
    pub(crate) state: char,
    /// The tracing process, in our own numbers; 0 when there is none.
    pub(crate) tracer: Tid,
    /// Whether a seccomp filter judges its system calls.
    pub(crate) filtered: bool,
}

impl Status {
    /// Whether the thread has ended; only its number is left.
    pub(crate) fn has_ended(self) -> bool {
        matches!(self.state, 'Z' | 'X' | 'x')
    }

    fn parse(text: &str) -> Option<Self> {
        let field = |name| text.lines().find_map(|line: &str| line.strip_prefix(name)).map(str::trim);
        Some(Self {
            state: field("State:")?.chars().next()?,
            tracer: field("TracerPid:")?.parse().ok()?,
            // Missing where the kernel has no seccomp.
            filtered: field("Seccomp:").is_some_and(|mode| mode != "0"),
        })
    }
}

/// A thread's status, of whichever process it is.
pub(crate) fn status(tid: Tid) -> Option<Status> {
    Status::parse(&fs::read_to_string(format!("/proc/{tid}/status")).ok()?)
}

/// The threads of a process, none when it has ended.
pub(crate) fn threads(pid: Tid) -> Vec<Tid> {
    numbers(&format!("/proc/{pid}/task")).unwrap_or_default()
}

/// The children of a process's threads.
pub(crate) fn children(pid: Tid) -> Vec<Tid> {
    let list = |tid| fs::read_to_string(format!("/proc/{pid}/task/{tid}/children")).ok();
    let lists: Vec<String> = threads(pid).into_iter().filter_map(list).collect();
    lists.iter().flat_map(|list| list.split_ascii_whitespace()).filter_map(|pid| pid.parse().ok()).collect()
}

/// The numbers of a thread's descriptors.
pub(crate) fn descriptors(tid: Tid) -> Result<Vec<std::os::fd::RawFd>, Error> {
    let folder = format!("/proc/{tid}/fd");
    numbers(&folder).map_err(Error::read(&folder))
}

/// How many descriptors a thread may have: the first number that it cannot use (`/proc/TID/limits`).
pub(crate) fn limit_of_files(tid: Tid) -> Result<u64, Error> {
    let path = format!("/proc/{tid}/limits");
    let text = fs::read_to_string(&path).map_err(Error::read(&path))?;
    parse_limit(&text).ok_or_else(|| Error::read(&path)(io::ErrorKind::InvalidData.into()))
}

fn parse_limit(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    match line.split_ascii_whitespace().next()? {
        "unlimited" => Some(u64::MAX),
        soft => soft.parse().ok(),
    }
}

/// All processes.
pub(crate) fn processes() -> Result<Vec<Tid>, Error> {
    numbers("/proc").map_err(Error::read("/proc"))
}

fn numbers(folder: &str) -> io::Result<Vec<Tid>> {
    let names = fs::read_dir(folder)?.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    Ok(names.collect())
}

/// Whether a thread has an address space still.
pub(crate) fn has_memory(tid: Tid) -> bool {
    // The first number is its size, 0 where there is none (`fs/proc/array.c: proc_pid_statm`).
    fs::read_to_string(format!("/proc/{tid}/statm")).is_ok_and(|text| !text.starts_with("0 "))
}

/// Nanoseconds that a thread has been on a CPU, up to the last tick.
pub(crate) fn cpu_time(tid: Tid) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{tid}/schedstat")).ok()?;
    text.split_ascii_whitespace().next()?.parse().ok()
}

/// The number of the system call in which a thread sleeps, -1 when it sleeps in a page fault; none when it runs.
pub(crate) fn call(tid: Tid) -> Option<i64> {
    let text = fs::read_to_string(format!("/proc/{tid}/syscall")).ok()?;
    text.split_ascii_whitespace().next()?.parse().ok()
}

/// A process's name.
pub(crate) fn name(pid: Tid) -> String {
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    name.trim_end().to_owned()
}

/// What a process runs if that is no x86-64 program; its ELF header says so (System V ABI, chapter 4).
pub(crate) fn foreign_program(pid: Tid) -> Option<&'static str> {
    const CLASS_64: u8 = 2;
    const X86_64: [u8; 2] = [62, 0];
    const I386: [u8; 2] = [3, 0];
    let mut header = [0; 20];
    let file = fs::File::open(format!("/proc/{pid}/exe")).ok()?;
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut header, 0).ok()?;
    match ([header[18], header[19]], header[4]) {
        (X86_64, CLASS_64) => None,
        (X86_64, _) => Some("an x32 program"),
        (I386, _) => Some("an i386 program"),
        _ => Some("a program for another machine"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_tells_state_tracer_and_filter() {
        let text = "Name:\tx\nState:\tS (sleeping)\nTracerPid:\t17\nSeccomp:\t2\n";
        assert_eq!(Status::parse(text), Some(Status { state: 'S', tracer: 17, filtered: true }));
        let text = "State:\tZ (zombie)\nTracerPid:\t0\n";
        let status = Status::parse(text).unwrap();
        assert!(status.has_ended() && !status.filtered);
    }

    #[test]
    fn the_limit_of_files_is_the_soft_one() {
        let line = "Max processes             100                  200                  processes\n\
                    Max open files            1024                 524288               files     \n";
        assert_eq!(parse_limit(line), Some(1024));
        assert_eq!(parse_limit("Max open files  unlimited  unlimited  files"), Some(u64::MAX));
        assert_eq!(parse_limit(""), None);
    }

    #[test]
    fn this_process_runs_an_x86_64_program_with_threads_and_a_name() {
        let pid = std::process::id().try_into().unwrap();
        assert_eq!(foreign_program(pid), None);
        assert!(threads(pid).contains(&crate::abi::this_thread()));
        assert!(processes().unwrap().contains(&pid));
        assert!(!name(pid).is_empty());
    }
}
