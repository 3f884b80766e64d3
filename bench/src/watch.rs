// SPDX-License-Identifier: MIT OR Apache-2.0
//! Anonymous and shared memory of a process and its descendants, one by one.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use nix::unistd::Pid;

use crate::processes::{descendants, reap_adopted};

const INTERVAL: Duration = Duration::from_millis(50);

/// Reads the memory of a tree of processes at intervals.
#[derive(Debug)]
pub(crate) struct Watch {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<BTreeMap<i32, u64>>,
}

impl Watch {
    pub(crate) fn start(root: Pid) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut peaks = BTreeMap::new();
            while !stopped.load(Ordering::Relaxed) {
                for pid in descendants(root).into_iter().chain([root]) {
                    let peak = peaks.entry(pid.as_raw()).or_insert(0);
                    *peak = memory(pid).unwrap_or(0).max(*peak);
                }
                std::thread::sleep(INTERVAL);
            }
            peaks
        });
        Self { stop, thread }
    }

    /// Ends the watch when the root has ended, and waits for descendants that outlive it. Returns the largest memory of
    /// one process in bytes.
    pub(crate) fn finish(self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        let peaks = self.thread.join().expect("the watch cannot panic: it only reads files and compares");
        reap_adopted(&peaks.keys().map(|pid| Pid::from_raw(*pid)).collect::<Vec<_>>());
        peaks.into_values().max().unwrap_or(0)
    }
}

/// Resident anonymous and shared memory in bytes; none of a process that has ended.
fn memory(pid: Pid) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    Some(kilobytes(&status, "RssAnon:")? + kilobytes(&status, "RssShmem:")?)
}

/// `RssAnon:    1234 kB` of /proc/PID/status, in bytes.
fn kilobytes(status: &str, field: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(field))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn anonymous_and_shared_memory_of_the_status_are_added() {
        let status = "VmRSS:\t 99 kB\nRssAnon:\t 12 kB\nRssFile:\t 4 kB\nRssShmem:\t 3 kB\n";
        assert_eq!(kilobytes(status, "RssAnon:"), Some(12 << 10));
        assert_eq!(kilobytes(status, "RssShmem:"), Some(3 << 10));
        assert!(memory(Pid::this()).unwrap() > 0);
    }
}
