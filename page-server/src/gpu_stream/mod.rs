// SPDX-License-Identifier: MIT OR Apache-2.0
//! The memory of GPUs, loaded behind processes that run already.
//!
//! The plugin restores all but the contents of buffers that may come later, shuts the gate of every process (PROCESS_INFO),
//! resumes it, and hands over ([`intake`]). Here the rest is loaded; CPUs that touch it wait for it ([`touches`], [`placeholders`]). Then
//! the gates are opened ([`gate`]): no queue runs before every byte that its GPU may reach is there (I2); and it is looked whether all do
//! ([`confirm`]). A process whose gate nobody would open any more is killed, by the supervisor if need be.

mod confirm;
mod gate;
mod intake;
mod parts;
mod placeholders;
#[cfg(test)]
mod program;
mod touches;
mod view;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use nix::sys::signal::{SigSet, SigmaskHow, Signal, sigprocmask};
use rewake_contents::{Loading, Process, Report};
use rewake_handover::Listener;
use rewake_store::pace::{Pace, Standing};
use tracing::{info, warn};

use confirm::{Confirm, Opened, Verdict};
use intake::Taken;
use placeholders::Placeholders;
use touches::{Resident, Touches};

use crate::ledger::Ledger;
use crate::timeline::Timeline;
use crate::{processes, sys};

/// For queues to run whose gates are open. Memory that programs have registered is mapped first, which takes as long as finding its
/// pages does.
const CONFIRMED: Duration = Duration::from_secs(10);

/// What else comes from this process.
#[derive(Debug)]
pub enum Beside {
    /// Nothing.
    Nothing,
    /// Memory of the same restore's CPUs.
    Cpus {
        /// Calls that register some of it are held.
        holds: bool,
        /// What both keep to.
        pace: Arc<Pace>,
    },
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

/// Loads all of it, and serves whoever touches it meanwhile. When it is done no placeholder is left.
fn load(
    processes: &[Process<'_>],
    placeholders: Vec<Placeholders<'_>>,
    ledger: Ledger,
    timeline: &Timeline,
    pace: Arc<Pace>,
) -> anyhow::Result<(Option<Report>, u64)> {
    let loading = Loading::new(processes, Some(pace))?;
    let resident = Resident::new(processes.len(), &placeholders)?;
    let touches = Touches::new(placeholders, loading.desk(), &resident, ledger, timeline);
    let giving_up = loading.desk();
    timeline.loads(loading.desk());
    // Who asks now is told of it.
    timeline.look();
    std::thread::scope(|scope| {
        let touches = scope.spawn(|| {
            // What they wait for would never come, and what they have would be zeros.
            let touched = catch_unwind(AssertUnwindSafe(|| touches.run()));
            if !matches!(touched, Ok(Ok(_))) {
                ledger.gates().end_all();
                giving_up.give_up();
            }
            touched
        });
        let loaded = loading.run(|process, buffer| resident.tell(process, buffer));
        resident.ended(loaded.is_ok());
        let touched = touches.join().and_then(|touched| touched);
        // Why it was given up, before that it was.
        let touched = touched.unwrap_or_else(|panic| resume_unwind(panic))?;
        // What is there is told before gates are open.
        timeline.look();
        Ok((loaded?, touched))
    })
}

/// Loads what was taken over, and opens the gates: of whom, in the end.
fn serve_taken(
    taken: &Taken,
    standing: Option<Standing>,
    ledger: Ledger,
    timeline: &Timeline,
    pace: Arc<Pace>,
) -> anyhow::Result<(Summary, Vec<Opened>)> {
    let (mut gates, mut placeholders) = (Vec::new(), Vec::new());
    for (place, gated) in taken.go(ledger)? {
        timeline.runs(place, sys::pidfd_pid(gated.gate.process).unwrap_or_default());
        gates.push((place, gated.gate));
        placeholders.extend(gated.placeholders);
    }
    drop(standing);
    let start = Instant::now();
    info!(processes = gates.len(), "loading memory of GPUs behind running processes");
    let processes: Vec<Process<'_>> = taken.processes().collect();
    let (loaded, touches) =
        load(&processes, placeholders, ledger, timeline, pace).context("loading memory of GPUs")?;
    let mut opened = Vec::new();
    for (place, gate) in &gates {
        match gate.open() {
            Ok(pid) => {
                timeline.gate_opened(*place);
                ledger.gates().opened(gate.process);
                let numbers = [pid, processes::own_number(pid).unwrap_or(pid)].map(i32::unsigned_abs);
                let minors = taken.minors(*place).collect();
                opened.push(Opened { numbers, process: gate.process, minors });
            }
            Err(error) if gate.has_ended() => {
                timeline.gone(*place);
                warn!("a process ended before its GPUs went on: {error:#}");
                ledger.gates().opened(gate.process);
            }
            Err(error) => return Err(error),
        }
    }
    Ok((Summary { processes: gates.len(), loaded, touches, took: start.elapsed(), held: 0 }, opened))
}

/// Waits until the queues run whose gates are open, and says whose do not, and of whose nothing can be told. How many do not.
fn look_at_queues(confirm: &Confirm, opened: &[Opened]) -> usize {
    let Verdict { ran, held, unknown } = confirm.wait(opened, CONFIRMED);
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
/// The plugin gave up, or memory could not be loaded: gates are shut then, and the ledger knows whose.
pub fn serve(
    listener: &Listener,
    beside: Beside,
    ledger: Ledger,
    timeline: &Timeline,
) -> anyhow::Result<Option<Summary>> {
    let (holds, pace) = match beside {
        Beside::Nothing => (false, Arc::new(Pace::new(Vec::new())?)),
        Beside::Cpus { holds, pace } => (holds, pace),
    };
    let Some(mut taken) = intake::take(listener, holds.then_some(&pace))? else { return Ok(None) };
    let (confirm, standing) = (taken.confirm.take(), taken.standing.take());
    timeline.handed_over();
    // Asked to stop, it goes on from here: it takes as long as it takes to load, and then no gate is shut.
    let stop: SigSet = [Signal::SIGTERM, Signal::SIGINT].into_iter().collect();
    sigprocmask(SigmaskHow::SIG_BLOCK, Some(&stop), None).context("blocking signals")?;
    let (mut summary, opened) = serve_taken(&taken, standing, ledger, timeline, pace)?;
    // Who ends now is taken apart by the driver: nothing of it is open here.
    drop(taken);
    if let Some(confirm) = confirm {
        summary.held = look_at_queues(&confirm, &opened);
    }
    Ok(Some(summary))
}
