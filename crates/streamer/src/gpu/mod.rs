// SPDX-License-Identifier: MIT OR Apache-2.0
//! Loads GPU memory in the background while the restored processes run.
//!
//! The plugin restores everything except the contents of buffers that can be loaded later. It closes the
//! gate of every process (PROCESS_INFO), resumes it, and hands its descriptors over ([`handoff`]). The
//! streamer loads the rest. A CPU that accesses missing memory waits for a demand load ([`placeholders`],
//! [`swapping`]).
//!
//! One thread has the state of all processes ([`coordinator`], [`process_state`]) and receives the [`event`]s
//! of the others. A process's gate is opened when all of its memory is resident ([`gate`],
//! [`blocked_calls`]): all its GPUs are resumed then. So no queue runs before every byte that its GPU can
//! reach is resident (invariant I2). [`queue_monitor`] checks at the end whether the queues run. The working
//! set can be recorded for the next restore of the image ([`crate::working_set`]). A process whose gate can
//! no longer be opened is killed, by the supervisor if the worker has died.

mod bar_mappings;
mod blocked_calls;
mod coordinator;
mod event;
pub(crate) mod fetched_files;
mod gate;
mod handoff;
mod placeholder_range;
mod placeholders;
mod process_state;
#[cfg(test)]
mod program;
mod queue_monitor;
mod swapping;

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use nix::sys::signal::{SigSet, SigmaskHow, Signal, sigprocmask};
use rewake_bo_contents::{BackgroundLoad, LoadEvent, LoadHandle, ProcessBuffers, Report};
use rewake_criu_images::ImageDir;
use rewake_image_io::io_budget::{BackgroundHold, IoBudget};
use rewake_ioctl_filter::BlockList;
use rewake_plugin_protocol::Listener;
use tracing::{debug, info, warn};

use coordinator::{AccessTrace, Coordinator};
use event::{CoordinatorEvent, event_queue};
use fetched_files::{FetchedGpuFiles, SessionGpuFiles};
use gate::Gate;
use handoff::Handoff;
use placeholders::Placeholders;
use queue_monitor::{Opened, QueueMonitor, QueueVerdict};

use crate::ledger::Ledger;
use crate::record::Timeline;
use crate::sys;

/// How long a process may refuse to stop, after all of it is resident or after its last stop, or be traced by
/// another program. It is killed then: its placeholders would stay, and its gate closed, for ever.
const REFUSAL_LIMIT: Duration = Duration::from_secs(120);
/// How long to wait until the queues run whose gates are open. The driver first maps the memory that
/// programs have registered, which takes as long as finding its pages does.
const CONFIRMATION_LIMIT: Duration = Duration::from_secs(10);

/// What a session passes to the GPU part of its streamer.
#[derive(Debug, Default)]
pub struct StreamOptions {
    /// The I/O budget that the restore's CPU memory shares with its GPU memory.
    pub cpus: Option<Arc<IoBudget>>,
    /// The image directory of that CPU memory.
    pub images: Option<ImageDir>,
    /// The list of files and calls that the kernel side blocks, where calls can be blocked.
    pub marks: Option<BlockList>,
    /// The files of GPU memory that a fetcher writes, from the moment when the session is open.
    pub fetched: SessionGpuFiles,
    /// Records in the image directory which buffers CPUs access. An earlier record is not used then: it would
    /// determine the order.
    pub record: bool,
}

/// How far the load of GPU memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GpuLoad {
    /// Some memory is missing, or no plugin has connected.
    Running,
    /// All memory is resident.
    Done,
    /// Memory could not be loaded: processes were killed.
    Failed,
}

impl GpuLoad {
    /// Whether it has ended.
    pub(crate) fn is_over(self) -> bool {
        self != Self::Running
    }
}

/// The result of one restore.
#[derive(Debug)]
pub struct GpuSummary {
    /// The number of processes that use GPUs.
    pub processes: usize,
    /// What was loaded in the background; `None` if nothing was left to load.
    pub loaded: Option<Report>,
    /// The number of page faults that waited for GPU memory.
    pub page_faults: u64,
    /// The time from the moment the processes ran until the last gate was open.
    pub took: Duration,
    /// The number of (process, GPU) pairs whose queues the driver still held after [`CONFIRMATION_LIMIT`].
    pub held: usize,
}

/// Loads all memory, serves page faults meanwhile, and opens the gates. No placeholder is left when it
/// returns. The buffers of the working set come with the load.
fn load<'env>(
    gates: &'env [Gate<'env>],
    placeholders: Vec<Placeholders<'env>>,
    (loading, mut first): (BackgroundLoad<'_>, HashSet<(usize, usize)>),
    ledger: Ledger,
    timeline: &'env Timeline,
) -> anyhow::Result<(Option<Report>, AccessTrace, Vec<Opened>)> {
    let (sender, events) = event_queue()?;
    timeline.loads(loading.handle());
    // A reader of the timeline sees the load from now on.
    timeline.look();
    thread::scope(|scope| {
        let (handle, queue) = (loading.handle(), (sender.clone(), events));
        let coordinator =
            Coordinator::new(scope, gates, placeholders, queue, handle.clone(), ledger, timeline);
        let coordinator = scope.spawn(move || or_give_up(ledger, &handle, || coordinator.run()));
        let loaded = loading.run(|event| {
            debug!("resident: {event:?}");
            if let LoadEvent::Buffer { process, number } = event
                && first.remove(&(process, number))
                && first.is_empty()
            {
                timeline.first_buffers_are_resident();
            }
            sender.send(CoordinatorEvent::Resident(event));
        });
        if loaded.is_ok() {
            // Some of them may have had no bytes to load.
            timeline.first_buffers_are_resident();
        }
        sender.send(if loaded.is_ok() { CoordinatorEvent::Loaded } else { CoordinatorEvent::LoadFailed });
        let done = coordinator.join().and_then(|done| done).unwrap_or_else(|panic| resume_unwind(panic));
        // This error first: it is the reason why the load was given up.
        let (trace, opened) = done?;
        Ok((loaded.context("loading GPU memory")?, trace, opened))
    })
}

/// Runs `act`; if it fails, kills every process whose gate is closed and gives up the load.
fn or_give_up<T>(
    ledger: Ledger,
    handle: &LoadHandle,
    act: impl FnOnce() -> anyhow::Result<T>,
) -> thread::Result<anyhow::Result<T>> {
    let done = catch_unwind(AssertUnwindSafe(act));
    if !matches!(done, Ok(Ok(_))) {
        ledger.gates().end_all();
        handle.give_up();
    }
    done
}

/// Loads what the plugin handed over and opens the gates. Returns the processes whose gates were opened.
fn serve_handoff(
    handoff: &Handoff,
    hold: Option<BackgroundHold>,
    options: StreamOptions,
    ledger: Ledger,
    timeline: &Timeline,
) -> anyhow::Result<(GpuSummary, Vec<Opened>)> {
    let (mut gates, mut placeholders) = (Vec::new(), Vec::new());
    let StreamOptions { cpus, marks, record, fetched, .. } = options;
    let budget = cpus.map_or_else(|| IoBudget::new(Vec::new()).map(Arc::new), Ok)?;
    // Before the processes run: their threads could not be served while the files are read.
    let working_set = if record { Vec::new() } else { handoff.recorded() };
    let duplicates = handoff.duplicates.clone();
    for (place, gated) in handoff.go(ledger, marks.as_ref())?.into_iter().enumerate() {
        timeline.runs(place, sys::pidfd_pid(gated.gate.process).unwrap_or_default());
        gates.push(gated.gate);
        placeholders.extend(gated.placeholders);
    }
    drop(hold);
    let start = Instant::now();
    info!(processes = gates.len(), "loading GPU memory in the background");
    let processes: Vec<ProcessBuffers<'_>> = handoff.processes().collect();
    let count = gates.len();
    // Of others no load says that they are resident.
    let is_loaded = |(process, number): &(usize, usize)| {
        processes.get(*process).and_then(|of| of.dmabufs.get(*number)).is_some_and(Option::is_some)
    };
    let first: HashSet<(usize, usize)> = working_set.iter().copied().filter(is_loaded).collect();
    if first.is_empty() {
        timeline.first_buffers_are_resident();
    }
    let loading = BackgroundLoad::new(&processes, Some(budget))
        .map(|loading| loading.prioritize(working_set).duplicates(duplicates))
        .map(|loading| loading.fetched_by(fetched.get().map(FetchedGpuFiles::reader)));
    let loaded = loading
        .map_err(Into::into)
        .and_then(|loading| load(&gates, placeholders, (loading, first), ledger, timeline));
    if loaded.is_err() {
        // The processes must end before they can export missing memory.
        ledger.gates().end_all();
    }
    let (loaded, trace, opened) = loaded?;
    ledger.set_gpus_loaded();
    if record {
        handoff.record(&trace.buffers);
    }
    let page_faults = trace.faults;
    Ok((GpuSummary { processes: count, loaded, page_faults, took: start.elapsed(), held: 0 }, opened))
}

/// Waits until the queues run whose gates are open. Logs which do not run and which are unknown, and returns
/// the number of those that do not.
fn confirm_queues(monitor: &QueueMonitor, opened: &[Opened]) -> usize {
    let QueueVerdict { ran, held, unknown } = monitor.wait(opened, CONFIRMATION_LIMIT);
    held.iter().for_each(|held| warn!("after {CONFIRMATION_LIMIT:?} {held}"));
    unknown.iter().for_each(|unknown| info!("{unknown}"));
    if held.is_empty() && ran > 0 {
        info!("the driver lets queues run: {ran}, of a process on a GPU each");
    }
    held.len()
}

/// Serves one restore and records it in `timeline`. Returns `None` if the listener is closed before a
/// restore arrives.
///
/// # Errors
/// The plugin gave up, or memory could not be loaded. Processes whose gates are closed are killed then, or
/// the ledger still lists them.
pub fn serve(
    listener: &Listener,
    options: StreamOptions,
    ledger: Ledger,
    timeline: &Timeline,
) -> anyhow::Result<Option<GpuSummary>> {
    let holds = options.cpus.as_ref().filter(|_| options.marks.is_some());
    let images = (options.images.as_ref(), &options.fetched);
    let Some(mut handoff) = handoff::accept(listener, holds, images)? else {
        return Ok(None);
    };
    let (monitor, hold) = (handoff.monitor.take(), handoff.hold.take());
    timeline.handed_over();
    // A stop signal has no effect from here on: the load must end, and then no gate is closed.
    let stop: SigSet = [Signal::SIGTERM, Signal::SIGINT].into_iter().collect();
    sigprocmask(SigmaskHow::SIG_BLOCK, Some(&stop), None).context("blocking signals")?;
    let (mut summary, opened) = serve_handoff(&handoff, hold, options, ledger, timeline)?;
    // The driver tears down a process that ends from here on: this process must hold none of its files open.
    drop(handoff);
    if let Some(monitor) = monitor {
        summary.held = confirm_queues(&monitor, &opened);
    }
    Ok(Some(summary))
}
