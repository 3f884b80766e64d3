// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads `/proc` files that only a tracer needs. An ended thread has none.

use std::fs;
use std::io;

use crate::abi::Tid;
use crate::error::Error;
use crate::stuck::Reason;

use rewake_process::proc::numbers;
pub(crate) use rewake_process::proc::{Status, children, name, processes, status, threads};

/// The CPU time after which an interrupted thread is certainly in the kernel: it would have left its own code
/// at the first interrupt. It suffices to take any lock without sleeping.
const IN_KERNEL_AFTER_NS: u64 = 3_000_000;

/// Returns the descriptor numbers of a thread.
pub(crate) fn descriptors(tid: Tid) -> Result<Vec<std::os::fd::RawFd>, Error> {
    let folder = format!("/proc/{tid}/fd");
    numbers(&folder).map_err(Error::read(&folder))
}

/// Returns a thread's limit of open files: the first number that it cannot use (`/proc/TID/limits`).
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

/// Returns whether a thread still has an address space.
pub(crate) fn has_memory(tid: Tid) -> bool {
    // The first number is the size, which is 0 without an address space (`fs/proc/array.c: proc_pid_statm`).
    fs::read_to_string(format!("/proc/{tid}/statm")).is_ok_and(|text| !text.starts_with("0 "))
}

/// Returns a thread's CPU time in nanoseconds, up to the last tick.
pub(crate) fn cpu_time(tid: Tid) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{tid}/schedstat")).ok()?;
    text.split_ascii_whitespace().next()?.parse().ok()
}

/// Returns the number of the system call in which a thread sleeps, or -1 in a page fault. Returns `None` if
/// it runs.
pub(crate) fn call(tid: Tid) -> Option<i64> {
    let text = fs::read_to_string(format!("/proc/{tid}/syscall")).ok()?;
    text.split_ascii_whitespace().next()?.parse().ok()
}

/// Returns why a thread does not stop that had a CPU time of `since` ns at its interrupt.
pub(crate) fn why_stuck(tid: Tid, since: Option<u64>) -> Reason {
    if let Some(call) = call(tid) {
        return Reason::Sleeps(call);
    }
    match (since, cpu_time(tid)) {
        (Some(since), Some(now)) if now.saturating_sub(since) >= IN_KERNEL_AFTER_NS => Reason::Spins,
        _ => Reason::Unknown,
    }
}

/// Returns the kind of a program that is not for x86-64, by its ELF header (System V ABI, chapter 4).
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
    fn the_limit_of_files_is_the_soft_one() {
        let line = "Max processes             100                  200                  processes\n\
                    Max open files            1024                 524288               files     \n";
        assert_eq!(parse_limit(line), Some(1024));
        assert_eq!(parse_limit("Max open files  unlimited  unlimited  files"), Some(u64::MAX));
        assert_eq!(parse_limit(""), None);
    }

    #[test]
    fn this_process_runs_an_x86_64_program() {
        assert_eq!(foreign_program(std::process::id().cast_signed()), None);
    }
}
