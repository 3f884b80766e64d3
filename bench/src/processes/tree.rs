// SPDX-License-Identifier: MIT OR Apache-2.0
//! A process's descendants, and their peak memory, from /proc.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Context as _;
use nix::unistd::Pid;
use rewake_process::proc;

use super::reap_adopted;

const INTERVAL: Duration = Duration::from_millis(20);
/// The bench starts no larger tree than this.
const MAX_PROCESSES: usize = 256;

/// All live descendants of `root`, parents before children. Empty when the kernel lacks CONFIG_PROC_CHILDREN.
pub(crate) fn descendants(root: Pid) -> Vec<Pid> {
    tree(root).skip(1).collect()
}

fn tree(root: Pid) -> impl Iterator<Item = Pid> {
    proc::tree(root.as_raw(), MAX_PROCESSES).into_iter().map(Pid::from_raw)
}

/// Peaks of the memory of some processes, in bytes.
#[derive(Debug, Default)]
pub(crate) struct Peaks {
    /// Each process's own peak, by its pid.
    each: BTreeMap<i32, u64>,
    /// The largest sum at one moment.
    pub(crate) together: u64,
}

impl Peaks {
    /// The peak of this process.
    pub(crate) fn of(&self, pid: Pid) -> u64 {
        self.each.get(&pid.as_raw()).copied().unwrap_or(0)
    }

    /// The peak of the largest process.
    pub(crate) fn largest(&self) -> u64 {
        self.each.values().copied().max().unwrap_or(0)
    }

    /// Sum of every process's own peak; memory that two processes share counts twice.
    pub(crate) fn sum(&self) -> u64 {
        self.each.values().sum()
    }

    /// Number of processes seen.
    pub(crate) fn processes(&self) -> usize {
        self.each.len()
    }
}

/// Reads the memory of a process and its descendants every 20 ms until finished or dropped, and once more
/// then. Where the kernel keeps the peak, only growth in a process's last 20 ms can be missed.
#[derive(Debug)]
pub(crate) struct Watch {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Peaks>>,
}

impl Watch {
    /// `memory` is none of a process that does not count or has ended.
    pub(crate) fn start(root: Pid, memory: fn(Pid) -> Option<u64>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut peaks = Peaks::default();
            loop {
                let is_last = seen.load(Ordering::Relaxed);
                let mut together = 0;
                for (pid, now) in tree(root).filter_map(|pid| Some((pid, memory(pid)?))) {
                    together += now;
                    let peak = peaks.each.entry(pid.as_raw()).or_insert(0);
                    *peak = now.max(*peak);
                }
                peaks.together = together.max(peaks.together);
                if is_last {
                    return peaks;
                }
                std::thread::sleep(INTERVAL);
            }
        });
        Self { stop, thread: Some(thread) }
    }

    /// Stops and returns the peaks.
    pub(crate) fn finish(mut self) -> Peaks {
        self.stop.store(true, Ordering::Relaxed);
        let thread = self.thread.take().expect("taken only here, and finish consumes");
        thread.join().expect("the watch cannot panic: it only reads files and adds")
    }

    /// Stops when the root has ended, and waits for descendants that outlive it.
    pub(crate) fn reap(self) -> Peaks {
        let peaks = self.finish();
        reap_adopted(&peaks.each.keys().map(|pid| Pid::from_raw(*pid)).collect::<Vec<_>>());
        peaks
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// Largest resident memory of a process so far, in bytes, or `None` if it has ended.
pub(crate) fn high_water_mark(pid: Pid) -> Option<u64> {
    kilobytes(&proc_file(pid, "status")?, "VmHWM:")
}

/// Resident anonymous and shared memory of a process, in bytes, or `None` if it has ended.
pub(crate) fn anonymous_and_shared(pid: Pid) -> Option<u64> {
    let status = proc_file(pid, "status")?;
    Some(kilobytes(&status, "RssAnon:")? + kilobytes(&status, "RssShmem:")?)
}

/// Memory of a process of rewake, where memory that several share counts once (`Pss`, proc(5)); None of
/// another program's.
pub(crate) fn share_of_rewake(pid: Pid) -> Option<u64> {
    (proc::name(pid.as_raw()) == b"rewake").then_some(())?;
    kilobytes(&proc_file(pid, "smaps_rollup")?, "Pss:")
}

fn proc_file(pid: Pid, name: &str) -> Option<String> {
    std::fs::read_to_string(format!("/proc/{pid}/{name}")).ok()
}

/// `VmHWM:     1234 kB` of a file in /proc/PID, in bytes; a zombie has no such line.
fn kilobytes(text: &str, field: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(field))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? << 10)
}

/// Bytes that a process and the children that it has reaped have read from disks: proc(5). `process` is a
/// pid, or `self`.
pub(crate) fn read_bytes(process: impl Display) -> anyhow::Result<u64> {
    let path = format!("/proc/{process}/io");
    let text = std::fs::read_to_string(&path).with_context(|| path.clone())?;
    let line = text.lines().find_map(|line| line.strip_prefix("read_bytes: "));
    line.and_then(|bytes| bytes.parse().ok()).with_context(|| format!("{path} has no read_bytes"))
}

/// Page faults of all threads of a live process and its descendants so far, minor and major.
///
/// # Errors
/// A process has ended.
pub(crate) fn page_faults(root: Pid) -> anyhow::Result<u64> {
    tree(root).map(page_faults_of).sum()
}

/// Fields 10 and 12 of /proc/PID/stat (proc(5)); the first one here is field 3.
fn page_faults_of(pid: Pid) -> anyhow::Result<u64> {
    let fields = proc::stat(pid.as_raw()).with_context(|| format!("/proc/{pid}/stat"))?;
    let count = |at: usize| fields.get(at).and_then(|count| count.parse::<u64>().ok());
    count(7).zip(count(9)).map(|(minor, major)| minor + major).context("no counts of page faults")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_in_bytes() {
        let status = "Name:\tx\nVmHWM:\t    1234 kB\nRssAnon:\t 12 kB\nRssFile:\t 4 kB\nRssShmem:\t 3 kB\n";
        assert_eq!(kilobytes(status, "VmHWM:"), Some(1_263_616));
        assert_eq!(kilobytes(status, "RssAnon:"), Some(12 << 10));
        assert_eq!(kilobytes(status, "RssShmem:"), Some(3 << 10));
        assert_eq!(kilobytes("Name:\tzombie\n", "VmHWM:"), None);
        let peak = high_water_mark(Pid::this()).unwrap();
        assert!((1..peak).contains(&anonymous_and_shared(Pid::this()).unwrap()));
    }

    #[test]
    fn page_faults_of_a_process_are_counted() {
        let before = page_faults(Pid::this()).unwrap();
        let fresh = vec![1_u8; 64 << 20];
        assert!(page_faults(Pid::this()).unwrap() > before && fresh[fresh.len() - 1] == 1);
    }

    #[test]
    fn a_tree_counts_every_process() {
        let mut shell = std::process::Command::new("sh").args(["-c", "sleep 60 & sleep 60"]).spawn().unwrap();
        let root = Pid::from_raw(i32::try_from(shell.id()).unwrap());
        let watch = Watch::start(root, high_water_mark);
        while descendants(root).len() < 2 {
            std::thread::sleep(INTERVAL);
        }
        std::thread::sleep(INTERVAL * 3);
        let peaks = watch.finish();
        for pid in descendants(root) {
            nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
        }
        shell.wait().unwrap();
        assert_eq!(peaks.processes(), 3, "{peaks:?}");
        assert!(peaks.of(root) > 0 && peaks.largest() >= peaks.of(root), "{peaks:?}");
        assert!(peaks.sum() > peaks.largest() && peaks.together <= peaks.sum(), "{peaks:?}");
    }
}
