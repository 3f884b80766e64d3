// SPDX-License-Identifier: MIT OR Apache-2.0
//! Makes huge pages of restored memory. UFFDIO_COPY fills small pages only, also where the kernel gives huge
//! ones to all programs, restored ones included. They are collapsed at the end of the session: until its
//! userfaultfd is closed, the kernel refuses ranges with zero pages.

use std::fs;
use std::ops::Range;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rewake_process::maps::Mapping;
use rewake_process::names::lines;
use tracing::debug;

use super::space::AddressSpace;
use crate::sys;

/// Bytes of a huge page.
const HUGE: u64 = 2 << 20;
/// Bytes that one call collapses.
const CALL: u64 = 16 * HUGE;
/// How long the end of a session takes for that at most. A huge page takes 0.2 ms for the copy, and up to ten
/// for the search for free memory, where that is fragmented. Memory that is left keeps small pages, until the
/// kernel's own thread collapses them.
const COLLAPSE_LIMIT: Duration = Duration::from_secs(2);
/// The most processes, because each needs a descriptor. In the others, memory keeps small pages.
const MAX_PROCESSES: usize = 64;
/// Whether and where the kernel makes huge pages.
const SETTING: &str = "/sys/kernel/mm/transparent_hugepage/enabled";

/// The processes whose memory is resident.
#[derive(Debug)]
pub(super) struct HugePages {
    /// Whether the kernel makes huge pages for all programs. Where only madvise(2) asks for them, CRIU
    /// restores none either: its restorer asks when the memory is filled.
    always: bool,
    processes: Mutex<Vec<ResidentProcess>>,
}

/// A process, and the ranges of its memory that huge pages can cover.
#[derive(Debug)]
struct ResidentProcess {
    process: OwnedFd,
    ranges: Vec<Range<u64>>,
}

impl HugePages {
    pub(super) fn new() -> Self {
        let always = fs::read_to_string(SETTING).is_ok_and(|setting| setting.contains("[always]"));
        Self { always, processes: Mutex::default() }
    }

    /// Notes an address space whose pages are all resident.
    pub(super) fn note(&self, space: &AddressSpace) {
        if !self.always || self.lock().len() >= MAX_PROCESSES {
            return;
        }
        let ranges = space.layout().whole_ranges(HUGE);
        let process = space.process().and_then(|pidfd| pidfd.try_clone_to_owned().ok());
        if let Some(process) = process.filter(|_| !ranges.is_empty()) {
            self.lock().push(ResidentProcess { process, ranges });
        }
    }

    /// Collapses the memory of all processes that were noted, for no longer than [`COLLAPSE_LIMIT`].
    pub(super) fn collapse(&self) {
        let deadline = Instant::now() + COLLAPSE_LIMIT;
        let processes = std::mem::take(&mut *self.lock());
        for resident in processes {
            if let Err(errno) = collapse(&resident, deadline) {
                debug!(%errno, "the kernel does not collapse memory of other processes");
                break;
            }
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<ResidentProcess>> {
        self.processes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Collapses what may have huge pages, until the deadline.
///
/// # Errors
/// The kernel does not collapse memory of other processes: before Linux 6.1, or without `CAP_SYS_NICE`.
fn collapse(resident: &ResidentProcess, deadline: Instant) -> nix::Result<()> {
    let Ok(pid) = sys::pidfd_pid(resident.process.as_raw_fd()) else { return Ok(()) };
    let Ok(smaps) = fs::read(format!("/proc/{pid}/smaps")) else { return Ok(()) };
    let (began, mut bytes) = (Instant::now(), 0);
    for range in parts(&resident.ranges, &eligible(&smaps)) {
        if Instant::now() > deadline {
            break;
        }
        match sys::collapse(resident.process.as_fd(), &range) {
            Ok(()) => bytes += range.end - range.start,
            Err(errno @ (nix::Error::ENOSYS | nix::Error::EPERM)) => return Err(errno),
            // The process has ended.
            Err(nix::Error::ESRCH) => return Ok(()),
            // A part of it is unmapped, in use by a device, or the host lacks memory: it keeps small pages.
            Err(_) => {}
        }
    }
    debug!(pid, bytes, elapsed = ?began.elapsed(), "huge pages");
    Ok(())
}

/// Returns the parts of `ranges` that are inside `mappings`, in whole huge pages, [`CALL`] bytes at most
/// each. Both are in the order of addresses.
fn parts(ranges: &[Range<u64>], mappings: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut parts = Vec::new();
    for mapping in mappings {
        let first = ranges.partition_point(|range| range.end <= mapping.start);
        for range in ranges[first..].iter().take_while(|range| range.start < mapping.end) {
            let start = range.start.max(mapping.start).next_multiple_of(HUGE);
            let end = range.end.min(mapping.end) / HUGE * HUGE;
            let starts = (start..end).step_by(usize::try_from(CALL).unwrap_or(usize::MAX));
            parts.extend(starts.map(|start| start..end.min(start + CALL)));
        }
    }
    parts
}

/// Returns the mappings that may have huge pages and have small ones, of proc_pid_smaps(5). Pages that a
/// forked child shares are left: each process would get a copy.
fn eligible(smaps: &[u8]) -> Vec<Range<u64>> {
    let mut mappings = Vec::new();
    let (mut mapping, mut resident, mut huge, mut shared) = (0..0, 0, 0, 0);
    for line in lines(smaps) {
        if let Some(first) = Mapping::parse(line) {
            mapping = first.start..first.end;
            continue;
        }
        let mut words = str::from_utf8(line).unwrap_or_default().split_ascii_whitespace();
        let (Some(key), value) = (words.next(), words.next()) else { continue };
        let number = value.and_then(|value| value.parse::<u64>().ok()).unwrap_or(0);
        match key {
            "Rss:" => resident = number,
            "Shared_Clean:" => shared = number,
            "Shared_Dirty:" => shared += number,
            "AnonHugePages:" => huge = number,
            "THPeligible:" if number == 1 && huge < resident && shared == 0 => mappings.push(mapping.clone()),
            _ => {}
        }
    }
    mappings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_that_may_have_huge_pages_are_found() {
        let of = |range: &str, rss: u32, shared: u32, huge: u32, eligible: u32| {
            format!(
                "{range} rw-p 00000000 08:01 7 /data é\nSize: 9 kB\nRss: {rss} kB\nShared_Clean: 0 kB\n\
                 Shared_Dirty: {shared} kB\nAnonHugePages: {huge} kB\nTHPeligible:    {eligible}\nVmFlags: \
                 rd wr\n"
            )
        };
        let mapping = |range, rss, huge, eligible| of(range, rss, 0, huge, eligible);
        let smaps = [
            mapping("1000-2000", 4, 0, 1),
            mapping("3000-4000", 4, 0, 0),
            mapping("7f0000400000-7f0000800000", 4096, 4096, 1),
            of("6000-7000", 4, 4, 0, 1),
            mapping("7f0000800000-7f0000a00000", 2048, 0, 1),
        ];
        // The files have names in Latin-1.
        let smaps: Vec<u8> = smaps.concat().chars().map(|letter| u8::try_from(letter).unwrap()).collect();
        assert_eq!(eligible(&smaps), [0x1000..0x2000, 0x7f00_0080_0000..0x7f00_00a0_0000]);
    }

    #[test]
    fn only_whole_huge_pages_inside_a_mapping_are_collapsed() {
        let huge = |range: Range<u64>| range.start * HUGE..range.end * HUGE;
        let small = 3 * HUGE + 4096..7 * HUGE - 4096;
        assert_eq!(parts(&[huge(1..9)], &[small]), [huge(4..6)]);
        let long = parts(&[huge(0..20), huge(30..31)], &[huge(1..50)]);
        assert_eq!(long, [huge(1..17), huge(17..20), huge(30..31)]);
        assert!(parts(&[huge(1..3)], &[huge(3..5)]).is_empty());
    }
}
