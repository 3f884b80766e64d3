// SPDX-License-Identifier: MIT OR Apache-2.0
//! The memory of GPUs, loaded behind processes that run already.
//!
//! The plugin restores all but the contents of buffers that may come later, shuts the gate of every process (PROCESS_INFO),
//! resumes it, and hands over ([`handoff`]). Here the rest is loaded; CPUs that touch it wait for it ([`fault_server`], [`placeholders`]).
//! Each process's gate is opened when all of its memory is there ([`queue_resume`], [`gate`], [`blocked_calls`]), or, where its GPUs reach different memory, for each
//! of them when its own is ([`reachability`], [`per_gpu_resume`]): no queue runs before every byte that its GPU may reach is there (I2). In the end it is looked
//! whether all do ([`queue_monitor`]). What CPUs touched can be kept for the next restore of the image ([`working_set`]). A process whose gate nobody would open any more is killed, by the supervisor if need be.

mod bar_mappings;
mod blocked_calls;
pub mod duplicates_file;
mod fault_server;
mod gate;
mod handoff;
mod per_gpu_resume;
mod placeholder_range;
mod placeholders;
pub mod plugin_folder;
#[cfg(test)]
mod program;
mod queue_monitor;
mod queue_resume;
mod reachability;
mod sidecar_file;
mod working_set;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use nix::sys::signal::{SigSet, SigmaskHow, Signal, sigprocmask};
use rewake_amdgpu_uapi::call_filter::BlockList;
use rewake_bo_contents::{BackgroundLoad, LoadHandle, Process, Report};
use rewake_image_io::io_budget::{BackgroundHold, IoBudget};
use rewake_plugin_protocol::Listener;
use tracing::{debug, info, warn};

use fault_server::{AccessTrace, FaultServer, ResidencyState};
use handoff::Handoff;
use placeholders::Placeholders;
use queue_monitor::{Opened, QueueMonitor, QueueVerdict};
use queue_resume::QueueResumer;

use crate::ledger::Ledger;
use crate::record::Timeline;
use crate::sys;

/// For queues to run whose gates are open. Memory that programs have registered is mapped first, which takes as long as finding its
/// pages does.
const CONFIRMED: Duration = Duration::from_secs(10);

/// What else there is.
#[derive(Debug, Default)]
pub struct StreamOptions {
    /// Where memory of the same restore's CPUs comes from here, too: what both keep to.
    pub cpus: Option<Arc<IoBudget>>,
    /// Where calls can be held and kept away.
    pub marks: Option<BlockList>,
    /// Record in the image directory which buffers CPUs touch. What was recorded before is not used then, and replaced: it would be the
    /// order of that.
    pub record: bool,
}

/// How one restore went.
#[derive(Debug)]
pub struct Summary {
    /// Processes that compute.
    pub processes: usize,
    /// What was loaded behind them; none if nothing was left for that.
    pub loaded: Option<Report>,
    /// How often CPUs waited for memory.
    pub touches: u64,
    /// From the moment at which they ran until the last gate was open.
    pub took: Duration,
    /// Queues, of a process on a GPU each, that the driver still held some time afterwards.
    pub held: usize,
}

/// Loads all of it, serves whoever touches it meanwhile, and opens the gates. When it is done no placeholder is left.
fn load(
    processes: &[Process<'_>],
    placeholders: Vec<Placeholders<'_>>,
    opening: &QueueResumer<'_>,
    loading: BackgroundLoad<'_>,
) -> anyhow::Result<(Option<Report>, AccessTrace, Vec<Opened>)> {
    let &QueueResumer { ledger, timeline, .. } = opening;
    let sets = opening.sets();
    let resident = ResidencyState::new(processes.len(), &placeholders, &sets)?;
    let (done, ready) = mpsc::channel();
    let touches = FaultServer::new(placeholders, loading.handle(), &resident, &sets, done, ledger, timeline);
    timeline.loads(loading.handle());
    // Who asks now is told of it.
    timeline.look();
    thread::scope(|scope| {
        let (desk, other_desk) = (loading.handle(), loading.handle());
        // What waits for either would wait for ever, and what placeholders have would be zeros.
        let touches = scope.spawn(move || or_give_up(ledger, &desk, || touches.run()));
        let opener =
            scope.spawn(move || or_give_up(ledger, &other_desk, || opening.run(&ready, &other_desk)));
        let loaded = loading.run(|whole| {
            debug!("there: {whole:?}");
            resident.tell(whole);
        });
        resident.ended(loaded.is_ok());
        // Why it was given up, before that it was.
        let touched = touches.join().and_then(|touched| touched).unwrap_or_else(|panic| resume_unwind(panic));
        let opened = opener.join().and_then(|opened| opened).unwrap_or_else(|panic| resume_unwind(panic));
        let touched = touched?;
        let opened = opened.context("opening gates")?;
        Ok((loaded.context("loading memory of GPUs")?, touched, opened))
    })
}

/// Where this fails the load ends, and whoever is behind a gate is killed.
fn or_give_up<T>(
    ledger: Ledger,
    desk: &LoadHandle,
    act: impl FnOnce() -> anyhow::Result<T>,
) -> thread::Result<anyhow::Result<T>> {
    let done = catch_unwind(AssertUnwindSafe(act));
    if !matches!(done, Ok(Ok(_))) {
        ledger.gates().end_all();
        desk.give_up();
    }
    done
}

/// Loads what was taken over, and opens the gates: of whom, in the end.
fn serve_taken(
    taken: &Handoff,
    standing: Option<BackgroundHold>,
    beside: StreamOptions,
    ledger: Ledger,
    timeline: &Timeline,
) -> anyhow::Result<(Summary, Vec<Opened>)> {
    let (mut gates, mut placeholders) = (Vec::new(), Vec::new());
    let StreamOptions { cpus, marks, record } = beside;
    let pace = cpus.map_or_else(|| IoBudget::new(Vec::new()).map(Arc::new), Ok)?;
    for (place, gated) in taken.go(ledger, marks.as_ref())? {
        timeline.runs(place, sys::pidfd_pid(gated.gate.process).unwrap_or_default());
        gates.push((place, gated.gate));
        placeholders.extend(gated.placeholders);
    }
    drop(standing);
    let start = Instant::now();
    info!(processes = gates.len(), "loading memory of GPUs behind running processes");
    let processes: Vec<Process<'_>> = taken.processes().collect();
    let count = gates.len();
    let opening = QueueResumer { taken, gates, ledger, timeline };
    let first = if record { Vec::new() } else { taken.recorded() };
    let loading = BackgroundLoad::new(&processes, Some(pace))
        .map(|loading| loading.prioritize(first).duplicates(taken.twins()));
    let loaded =
        loading.map_err(Into::into).and_then(|loading| load(&processes, placeholders, &opening, loading));
    if loaded.is_err() {
        // Before they could hand over what is not there.
        ledger.gates().end_all();
    }
    let (loaded, heard, opened) = loaded?;
    if record {
        taken.record(&heard.order);
    }
    let touches = heard.touches;
    Ok((Summary { processes: count, loaded, touches, took: start.elapsed(), held: 0 }, opened))
}

/// Waits until the queues run whose gates are open, and says whose do not, and of whose nothing can be told. How many do not.
fn look_at_queues(confirm: &QueueMonitor, opened: &[Opened]) -> usize {
    let QueueVerdict { ran, held, unknown } = confirm.wait(opened, CONFIRMED);
    held.iter().for_each(|held| warn!("after {CONFIRMED:?} {held}"));
    unknown.iter().for_each(|unknown| info!("{unknown}"));
    if held.is_empty() && ran > 0 {
        info!("the driver lets queues run: {ran}, of a process on a GPU each");
    }
    held.len()
}

/// Serves the one restore that comes, and tells `timeline` how. None if the listener is closed before one comes.
///
/// # Errors
/// The plugin gave up, or memory could not be loaded: those whose gates are not open by then are killed, or the ledger knows them.
pub fn serve(
    listener: &Listener,
    beside: StreamOptions,
    ledger: Ledger,
    timeline: &Timeline,
) -> anyhow::Result<Option<Summary>> {
    let holds = beside.cpus.as_ref().filter(|_| beside.marks.is_some());
    let Some(mut taken) = handoff::take(listener, holds)? else { return Ok(None) };
    let (confirm, standing) = (taken.confirm.take(), taken.standing.take());
    timeline.handed_over();
    // Asked to stop, it goes on from here: it takes as long as it takes to load, and then no gate is shut.
    let stop: SigSet = [Signal::SIGTERM, Signal::SIGINT].into_iter().collect();
    sigprocmask(SigmaskHow::SIG_BLOCK, Some(&stop), None).context("blocking signals")?;
    let (mut summary, opened) = serve_taken(&taken, standing, beside, ledger, timeline)?;
    // Who ends now is taken apart by the driver: nothing of it is open here.
    drop(taken);
    if let Some(confirm) = confirm {
        summary.held = look_at_queues(&confirm, &opened);
    }
    Ok(Some(summary))
}
