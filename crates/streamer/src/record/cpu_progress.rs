// SPDX-License-Identifier: MIT OR Apache-2.0
//! Samples the progress of CPU memory from the counts of the threads that fill it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use rewake_process::names::printable;
use rewake_process::proc;
use rewake_uffd::PAGE_SIZE;

use super::model::{LoadedBytes, MemoryOrigin};
use crate::cpu::stats::{LoadCause, Stats, TaskStats};
use crate::fault_latencies::LatencyCounts;
use crate::session::root::{ProgramState, RootProcess};
use crate::session::{Session, WorkingSetPart};

/// The progress of one process's CPU memory.
#[derive(Debug, Clone, Default)]
pub(super) struct CpuProgress {
    pub(super) pid: i32,
    pub(super) name: String,
    /// The bytes that were missing at the start and are not unmapped, including missing bytes of its forked
    /// children.
    pub(super) bytes: u64,
    pub(super) resident: u64,
    /// The bytes that were missing when it ended.
    pub(super) missing_at_end: u64,
    pub(super) faults: u64,
    pub(super) fault_wait_us: u64,
    pub(super) longest_fault_us: u64,
}

/// The progress of all processes.
#[derive(Debug, Clone, Default)]
pub(super) struct CpuSnapshot {
    /// How long ago all processes were in place, and loading began.
    pub(super) begun: Duration,
    pub(super) processes: Vec<CpuProgress>,
    /// How long ago the working set was resident; none: not yet, or there is none.
    pub(super) working_set: Option<Duration>,
    /// How long ago the first and the last page fault were served.
    pub(super) first_fault: Option<Duration>,
    pub(super) last_fault: Option<Duration>,
    /// The latency of the median page fault and the 99th percentile; zero without any.
    pub(super) p50: Duration,
    pub(super) p99: Duration,
    /// The bytes that were filled with zeros.
    pub(super) zero_bytes: u64,
    /// What filled memory.
    pub(super) loaded: LoadedBytes,
    pub(super) latencies: LatencyCounts,
    pub(super) source: MemoryOrigin,
}

/// The restore whose CPU memory is loaded here.
#[derive(Debug)]
pub(super) struct Cpus {
    session: Arc<Session>,
    /// The tasks with missing memory, and their names: all are known when they are in place.
    tasks: OnceLock<Vec<(Arc<TaskStats>, String)>>,
}

impl Cpus {
    pub(super) fn new(session: Arc<Session>) -> Self {
        Self { session, tasks: OnceLock::new() }
    }

    /// Notes that the buffers of the working set are resident.
    pub(super) fn first_buffers_are_resident(&self) {
        self.session.note_working_set(WorkingSetPart::Gpus);
    }

    /// Returns what has become of the program, if its first process is known.
    pub(super) fn program(&self) -> Option<ProgramState> {
        self.session.root().map(RootProcess::state)
    }

    /// Returns `None` before all are in place: until then tasks have CRIU's name.
    pub(super) fn look(&self) -> Option<CpuSnapshot> {
        if !self.session.is_released() {
            return None;
        }
        let tasks = self.tasks.get_or_init(|| {
            let tasks = self.session.tasks().into_iter();
            tasks
                .filter(|task| get(&task.pages_total) > 0)
                .map(|task| (Arc::clone(&task), name(task.pid)))
                .collect()
        });
        let stats = &self.session.stats;
        let now = stats.elapsed();
        let ago = |at: u64| Duration::from_nanos(now.saturating_sub(at));
        let [first_fault, last_fault] =
            <[u64; 2]>::from(stats.fault_times()).map(|at| (at > 0).then(|| ago(at)));
        let [p50, p99] = [0.5, 0.99].map(|share| stats.latencies.quantile(share).unwrap_or_default());
        Some(CpuSnapshot {
            begun: ago(self.session.running_ns()),
            working_set: Some(self.session.working_set_ns()).filter(|at| *at > 0).map(ago),
            processes: tasks.iter().map(|(task, name)| of(task, name.clone())).collect(),
            first_fault,
            last_fault,
            p50,
            p99,
            zero_bytes: get(&stats.pages_zero) * PAGE_SIZE,
            loaded: loaded(stats),
            latencies: stats.latencies.counts(),
            source: self.session.source(),
        })
    }
}

fn loaded(stats: &Stats) -> LoadedBytes {
    let bytes = |cause| stats.pages_loaded(cause) * PAGE_SIZE;
    LoadedBytes {
        fault: bytes(LoadCause::Fault),
        working_set: bytes(LoadCause::WorkingSet),
        background: bytes(LoadCause::Background),
    }
}

fn of(task: &TaskStats, name: String) -> CpuProgress {
    let resident = get(&task.pages_back) * PAGE_SIZE;
    let bytes = get(&task.pages_total).saturating_sub(get(&task.pages_dropped)) * PAGE_SIZE;
    CpuProgress {
        pid: task.pid,
        name,
        bytes,
        // The counts are not read at one moment.
        resident: resident.min(bytes),
        missing_at_end: get(&task.pages_ended) * PAGE_SIZE,
        faults: get(&task.faults),
        fault_wait_us: get(&task.fault_wait_us),
        longest_fault_us: get(&task.longest_fault_us),
    }
}

fn get(count: &AtomicU64) -> u64 {
    count.load(Ordering::Relaxed)
}

/// Returns a process's name for users; empty where it has ended.
pub(super) fn name(pid: i32) -> String {
    printable(&proc::name(pid))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::cpu::stats::add;

    #[test]
    fn a_process_in_place_is_shown_with_its_missing_memory() {
        let session = Arc::new(Session::new(PathBuf::new()));
        let cpus = Cpus::new(Arc::clone(&session));
        let own = nix::unistd::getpid().as_raw();
        let task = session.task_arrived(own, 10);
        session.task_arrived(1, 0);
        add(&task.pages_back, 3);
        add(&task.pages_dropped, 2);
        task.fault(Duration::from_micros(40));
        assert!(cpus.look().is_none());
        session.release();
        let seen = cpus.look().unwrap();
        assert_eq!(seen.processes.len(), 1, "nothing of the other was left out");
        let of = &seen.processes[0];
        assert_eq!((of.pid, of.bytes, of.resident), (own, 8 * PAGE_SIZE, 3 * PAGE_SIZE));
        assert_eq!((of.faults, of.fault_wait_us, of.longest_fault_us), (1, 40, 40));
        assert!(!of.name.is_empty());
    }
}
