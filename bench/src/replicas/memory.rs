// SPDX-License-Identifier: MIT OR Apache-2.0
//! Peak memory of all processes of rewake that this one has started.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use nix::unistd::Pid;

use crate::processes::descendants;

const INTERVAL: Duration = Duration::from_millis(20);

/// Sums their memory at intervals; memory that several share counts once (`Pss`, proc(5)).
#[derive(Debug)]
pub(super) struct Sampler {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<u64>,
}

impl Sampler {
    pub(super) fn start() -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut peak = 0;
            while !stopped.load(Ordering::Relaxed) {
                peak = peak.max(descendants(Pid::this()).into_iter().filter_map(memory).sum());
                std::thread::sleep(INTERVAL);
            }
            peak
        });
        Self { stop, thread }
    }

    /// Ends the sampling; returns the peak in bytes.
    pub(super) fn finish(self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("the sampler cannot panic: it only reads files and adds")
    }
}

/// None of other programs, and of processes that have ended.
fn memory(pid: Pid) -> Option<u64> {
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
    if name.trim() != "rewake" {
        return None;
    }
    let rollup = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
    let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:"))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? << 10)
}
