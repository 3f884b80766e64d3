// SPDX-License-Identifier: MIT OR Apache-2.0
//! Checks whether queues run after their gates were opened.
//!
//! A driver that accepts RESUME may still keep queues evicted. Its worker maps all that the GPUs can access,
//! and retries for ever if some memory cannot be loaded. It sends an SMI event each time it evicts or
//! restores a process's queues on a GPU; they run when both counts are equal. It buffers as little as 1 KiB
//! of events, so a thread reads them all the time.

use std::collections::BTreeMap;
use std::os::fd::{AsFd as _, RawFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, SigmaskHow};
use rewake_amdgpu_uapi::Kfd;
use rewake_amdgpu_uapi::smi::{QueueEvent, SmiEvent, Stream};
use rewake_amdgpu_uapi::topology::Topology;
use rewake_process::Notifier;
use tracing::warn;

use crate::sys;

/// RESTORE has evicted all queues once, before anything is handed over.
const BY_RESTORE: i64 = 1;
/// The time between two checks which processes have ended.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// A process whose gate is open.
#[derive(Debug)]
pub(super) struct Opened {
    /// Its pid here, and the one in its own namespace: kernels report either.
    pub(super) numbers: [u32; 2],
    /// The process descriptor, which the ledger owns.
    pub(super) process: RawFd,
    /// N of the `/dev/dri/renderDN` of its GPUs.
    pub(super) minors: Vec<u32>,
}

/// The state of the queues of all processes, as far as events show it.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct QueueVerdict {
    /// The number of (process, GPU) pairs whose queues have run.
    pub(super) ran: usize,
    /// A line for each pair whose queues are evicted.
    pub(super) held: Vec<String>,
    /// A line for each pair without events.
    pub(super) unknown: Vec<String>,
}

/// A process's queues on a GPU.
#[derive(Debug, Clone, Copy)]
struct Queues {
    /// The number of evictions without a restore.
    held: i64,
    /// The number of postponed restores since the last restore.
    postponed: u64,
    /// Whether all evictions were ever matched by restores.
    ran: bool,
}

/// The events that the driver has sent, counted by process and GPU.
#[derive(Debug, Default)]
struct EvictionCounts(BTreeMap<(u32, u32), Queues>);

/// Reads the driver's events of some GPUs, in its own thread, until it is dropped.
#[derive(Debug)]
pub(super) struct QueueMonitor {
    /// Ids in the topology, by N of `/dev/dri/renderDN`.
    gpus: BTreeMap<u32, u32>,
    shared: Arc<MonitorState>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct MonitorState {
    counts: Mutex<EvictionCounts>,
    news: Condvar,
    stop: Notifier,
}

impl QueueMonitor {
    /// Starts to read the events of the GPUs with these render nodes: after RESTORE, before PROCESS_INFO.
    ///
    /// # Errors
    /// The driver sends no events, or no thread can be started.
    pub(super) fn new(kfd: &Kfd, minors: impl IntoIterator<Item = u32>) -> anyhow::Result<Self> {
        let topology = Topology::read()?;
        let (mut gpus, mut streams) = (BTreeMap::new(), Vec::new());
        for minor in minors {
            let gpu = topology.gpus().find(|gpu| gpu.render_minor() == minor);
            let gpu = gpu.with_context(|| format!("renderD{minor} is not in the topology"))?.gpu_id;
            if gpus.insert(minor, gpu).is_none() {
                streams.push(Stream::open(kfd, gpu)?);
            }
        }
        let stop = Notifier::new().context("eventfd")?;
        let shared = Arc::new(MonitorState { counts: Mutex::default(), news: Condvar::new(), stop });
        let thread = {
            let shared = Arc::clone(&shared);
            // The main thread handles signals.
            let before = SigSet::all().thread_swap_mask(SigmaskHow::SIG_BLOCK).context("blocking signals")?;
            let thread = std::thread::Builder::new().name("queues".to_owned()).spawn(move || {
                if let Err(error) = shared.listen(&mut streams) {
                    warn!("no log will show whether queues run: {error:#}");
                }
            });
            before.thread_set_mask().context("unblocking signals")?;
            thread.context("starting a thread")?
        };
        Ok(Self { gpus, shared, thread: Some(thread) })
    }

    /// Waits at most `patience` until the queues of all processes in `opened` have run, without those that
    /// have ended. The verdict is empty where reading events failed, which was logged.
    pub(super) fn wait(&self, opened: &[Opened], patience: Duration) -> QueueVerdict {
        let start = Instant::now();
        let mut counts = self.shared.counts();
        loop {
            let alive: Vec<&Opened> = opened.iter().filter(|of| !sys::has_ended(of.process)).collect();
            let verdict = counts.verdict(&alive, &self.gpus);
            if self.thread.as_ref().is_some_and(JoinHandle::is_finished) {
                return QueueVerdict::default();
            }
            if verdict.held.is_empty() || start.elapsed() >= patience {
                return verdict;
            }
            let waited = self.shared.news.wait_timeout(counts, LOOK_INTERVAL);
            counts = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Drop for QueueMonitor {
    fn drop(&mut self) {
        self.shared.stop.wake();
        // The thread does not panic.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl MonitorState {
    fn counts(&self) -> MutexGuard<'_, EvictionCounts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads events until the monitor is dropped.
    fn listen(&self, streams: &mut [Stream]) -> anyhow::Result<()> {
        loop {
            let mut fds = vec![PollFd::new(self.stop.as_fd(), PollFlags::POLLIN)];
            fds.extend(streams.iter().map(|stream| PollFd::new(stream.as_fd(), PollFlags::POLLIN)));
            match poll(&mut fds, PollTimeout::NONE) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(errno) => return Err(errno).context("waiting for SMI events"),
            }
            if fds[0].any() == Some(true) {
                return Ok(());
            }
            for stream in &mut *streams {
                let events = stream.read().context("reading SMI events")?;
                self.counts().take(&events);
            }
            self.news.notify_all();
        }
    }
}

impl EvictionCounts {
    fn take(&mut self, events: &[QueueEvent]) {
        for event in events {
            let new = Queues { held: BY_RESTORE, postponed: 0, ran: false };
            let queues = self.0.entry((event.pid, event.gpu)).or_insert(new);
            match event.what {
                SmiEvent::QueueEviction => queues.held += 1,
                SmiEvent::RestoreRescheduled => queues.postponed += 1,
                SmiEvent::QueueRestore => {
                    queues.held -= 1;
                    queues.postponed = 0;
                    queues.ran |= queues.held == 0;
                }
            }
        }
    }

    /// Returns the verdict on `opened`; `gpus` are ids by render node.
    fn verdict(&self, opened: &[&Opened], gpus: &BTreeMap<u32, u32>) -> QueueVerdict {
        let mut verdict = QueueVerdict::default();
        for of in opened {
            for gpu in of.minors.iter().filter_map(|minor| gpus.get(minor)) {
                let queues = format!("queues of process {} on GPU {gpu:#x}", of.numbers[0]);
                match self.queues(of, opened, *gpu) {
                    // PROCESS_INFO must have caused an event, and no queue is restored more often than
                    // evicted.
                    None => verdict.unknown.push(format!(
                        "the driver has sent no events of the {queues} (CAP_SYS_ADMIN? another pid \
                         namespace?)"
                    )),
                    Some(Queues { held: ..0, .. }) => {
                        verdict.unknown.push(format!("events of the {queues} were lost"));
                    }
                    Some(Queues { ran: true, .. }) => verdict.ran += 1,
                    Some(Queues { held, postponed, .. }) => verdict.held.push(format!(
                        "the driver has evicted the {queues} {held} times more than it restored them, and \
                         has postponed {postponed} restores: memory that the GPU can access cannot be \
                         loaded, or changes"
                    )),
                }
            }
        }
        verdict
    }

    /// Returns the counts of a process by the pid that the driver uses; `None` if that may be another
    /// process's.
    fn queues(&self, of: &Opened, all: &[&Opened], gpu: u32) -> Option<Queues> {
        let [here, own] = of.numbers;
        let alone = all.iter().filter(|other| other.numbers.contains(&own)).count() == 1;
        self.0.get(&(here, gpu)).or_else(|| self.0.get(&(own, gpu)).filter(|_| alone)).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opened(here: u32, own: u32) -> Opened {
        Opened { numbers: [here, own], process: -1, minors: vec![128] }
    }

    fn counts_of(pid: u32, events: &[SmiEvent]) -> EvictionCounts {
        let mut counts = EvictionCounts::default();
        counts
            .take(&events.iter().map(|what| QueueEvent { pid, gpu: 0x1a, what: *what }).collect::<Vec<_>>());
        counts
    }

    fn verdict(counts: &EvictionCounts, opened: &[Opened]) -> (usize, usize, usize) {
        let of: Vec<&Opened> = opened.iter().collect();
        let QueueVerdict { ran, held, unknown } = counts.verdict(&of, &BTreeMap::from([(128, 0x1a)]));
        (ran, held.len(), unknown.len())
    }

    const RAN: (usize, usize, usize) = (1, 0, 0);
    const HELD: (usize, usize, usize) = (0, 1, 0);
    const UNKNOWN: (usize, usize, usize) = (0, 0, 1);

    #[test]
    fn queues_run_after_unpause_and_the_work_of_resume() {
        // PROCESS_INFO; then UNPAUSE and RESUME's worker, in any order.
        assert_eq!(
            verdict(&counts_of(7, &[SmiEvent::QueueEviction, SmiEvent::QueueRestore]), &[opened(7, 7)]),
            HELD
        );
        assert_eq!(
            verdict(
                &counts_of(7, &[SmiEvent::QueueEviction, SmiEvent::QueueRestore, SmiEvent::QueueRestore]),
                &[opened(7, 7)]
            ),
            RAN
        );
    }

    #[test]
    fn queues_that_are_evicted_again_after_they_ran_count_as_run() {
        let before = [
            SmiEvent::QueueEviction,
            SmiEvent::QueueRestore,
            SmiEvent::QueueEviction,
            SmiEvent::QueueRestore,
        ];
        assert_eq!(verdict(&counts_of(7, &before), &[opened(7, 7)]), HELD);
        let after = [
            SmiEvent::QueueEviction,
            SmiEvent::QueueRestore,
            SmiEvent::QueueRestore,
            SmiEvent::QueueEviction,
        ];
        assert_eq!(verdict(&counts_of(7, &after), &[opened(7, 7)]), RAN);
    }

    #[test]
    fn evictions_and_postponed_restores_are_reported() {
        let counts = counts_of(
            7,
            &[
                SmiEvent::RestoreRescheduled,
                SmiEvent::QueueEviction,
                SmiEvent::QueueRestore,
                SmiEvent::RestoreRescheduled,
                SmiEvent::RestoreRescheduled,
            ],
        );
        let held = counts.verdict(&[&opened(7, 7)], &BTreeMap::from([(128, 0x1a)])).held;
        assert!(
            held[0].contains(
                "process 7 on GPU 0x1a 1 times more than it restored them, and has postponed 2 restores"
            ),
            "{held:?}"
        );
    }

    #[test]
    fn missing_or_lost_events_confirm_nothing() {
        assert_eq!(verdict(&EvictionCounts::default(), &[opened(7, 7)]), UNKNOWN);
        assert_eq!(
            verdict(
                &counts_of(8, &[SmiEvent::QueueEviction, SmiEvent::QueueRestore, SmiEvent::QueueRestore]),
                &[opened(7, 7)]
            ),
            UNKNOWN
        );
        assert_eq!(
            verdict(&counts_of(7, &[SmiEvent::QueueRestore, SmiEvent::QueueRestore]), &[opened(7, 7)]),
            UNKNOWN
        );
    }

    #[test]
    fn the_driver_calls_a_process_in_a_namespace_by_either_number() {
        let events = [SmiEvent::QueueEviction, SmiEvent::QueueRestore, SmiEvent::QueueRestore];
        for pid in [4711, 12] {
            assert_eq!(verdict(&counts_of(pid, &events), &[opened(4711, 12)]), RAN);
        }
        // Two processes have the pid 12.
        assert_eq!(verdict(&counts_of(12, &events), &[opened(4711, 12), opened(4800, 12)]), (0, 0, 2));
        assert_eq!(verdict(&counts_of(12, &events), &[opened(4711, 12), opened(12, 9)]), (1, 0, 1));
    }
}
