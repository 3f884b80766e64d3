// SPDX-License-Identifier: MIT OR Apache-2.0
//! A process's descendants and their peak memory, from /proc.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Context as _;
use nix::unistd::Pid;

const INTERVAL: Duration = Duration::from_millis(20);
/// The bench starts no tree deeper than this.
const MAX_PROCESSES: usize = 256;

/// All live descendants of `root`, parents before children. Empty when the kernel lacks CONFIG_PROC_CHILDREN.
pub(crate) fn descendants(root: Pid) -> Vec<Pid> {
    let mut found = children(root);
    let mut next = 0;
    while next < found.len() && found.len() < MAX_PROCESSES {
        found.extend(children(found[next]));
        next += 1;
    }
    found
}

fn children(pid: Pid) -> Vec<Pid> {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let lists = threads.flatten().flat_map(|thread| std::fs::read_to_string(thread.path().join("children")));
    let pids = lists.flat_map(|list| list.split_whitespace().flat_map(str::parse).collect::<Vec<i32>>());
    pids.map(Pid::from_raw).collect()
}

/// Peak resident memory of a tree of processes, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub(crate) struct PeakMemory {
    /// The peak of the largest process.
    pub(crate) largest: u64,
    /// Sum of every process's own peak; memory that two processes share counts twice.
    pub(crate) sum: u64,
    /// Number of processes seen.
    pub(crate) processes: usize,
}

/// Reads VmHWM of a process and its descendants every 20 ms until finished or dropped, and once more then. The
/// kernel keeps the peak, so only growth in a process's last 20 ms can be missed.
#[derive(Debug)]
pub(crate) struct Sampler {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<BTreeMap<i32, u64>>>,
}

impl Sampler {
    pub(crate) fn start(root: Pid) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut peaks = BTreeMap::new();
            loop {
                let is_last = seen.load(Ordering::Relaxed);
                for pid in descendants(root).into_iter().chain([root]) {
                    if let Some(peak) = high_water_mark(pid) {
                        let known = peaks.entry(pid.as_raw()).or_insert(0);
                        *known = peak.max(*known);
                    }
                }
                if is_last {
                    return peaks;
                }
                std::thread::sleep(INTERVAL);
            }
        });
        Self { stop, thread: Some(thread) }
    }

    /// Stops and returns the peaks.
    pub(crate) fn finish(mut self) -> PeakMemory {
        self.stop.store(true, Ordering::Relaxed);
        let thread = self.thread.take().expect("taken only here, and finish consumes");
        let peaks = thread.join().expect("the sampler cannot panic: it only reads files and adds");
        PeakMemory {
            largest: peaks.values().copied().max().unwrap_or(0),
            sum: peaks.values().sum(),
            processes: peaks.len(),
        }
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// Largest resident memory of a process so far, in bytes; None if it has ended.
pub(crate) fn high_water_mark(pid: Pid) -> Option<u64> {
    parse_high_water_mark(&std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?)
}

/// `VmHWM:     1234 kB` of /proc/PID/status, in bytes; none for a zombie.
fn parse_high_water_mark(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? << 10)
}

/// Page faults of all threads of a live process and its descendants so far, minor and major.
///
/// # Errors
/// A process has ended.
pub(crate) fn page_faults(root: Pid) -> anyhow::Result<u64> {
    [vec![root], descendants(root)].concat().into_iter().map(page_faults_of).sum()
}

fn page_faults_of(pid: Pid) -> anyhow::Result<u64> {
    let path = format!("/proc/{pid}/stat");
    let stat = std::fs::read_to_string(&path).with_context(|| path.clone())?;
    parse_page_faults(&stat).with_context(|| format!("{path} has no counts of page faults: {stat:?}"))
}

/// Fields 10 and 12 of /proc/PID/stat (proc(5)); the second one, the name, may have spaces and parentheses.
fn parse_page_faults(stat: &str) -> Option<u64> {
    let (_, fields) = stat.rsplit_once(") ")?;
    let mut fields = fields.split_whitespace();
    let minor: u64 = fields.nth(7)?.parse().ok()?;
    let major: u64 = fields.nth(1)?.parse().ok()?;
    Some(minor + major)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_high_water_mark_is_read_in_bytes() {
        assert_eq!(parse_high_water_mark("Name:\tx\nVmHWM:\t    1234 kB\nVmRSS:\t 9 kB\n"), Some(1_263_616));
        assert_eq!(parse_high_water_mark("Name:\tzombie\n"), None);
    }

    #[test]
    fn page_faults_are_read_whatever_the_process_is_called() {
        assert_eq!(parse_page_faults("7 (a) 1 (b) S 1 7 7 0 -1 4194304 30 99 12 98 5 6"), Some(42));
        assert_eq!(parse_page_faults("7 (short) S 1"), None);
        assert!(page_faults(Pid::this()).unwrap() > 0);
    }

    #[test]
    fn a_tree_counts_every_process() {
        let mut shell = std::process::Command::new("sh").args(["-c", "sleep 60 & sleep 60"]).spawn().unwrap();
        let root = Pid::from_raw(i32::try_from(shell.id()).unwrap());
        let sampler = Sampler::start(root);
        while descendants(root).len() < 2 {
            std::thread::sleep(INTERVAL);
        }
        std::thread::sleep(INTERVAL * 3);
        let memory = sampler.finish();
        for pid in descendants(root) {
            nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
        }
        shell.wait().unwrap();
        assert_eq!(memory.processes, 3, "{memory:?}");
        assert!(memory.largest > 0 && memory.sum > memory.largest, "{memory:?}");
    }
}
