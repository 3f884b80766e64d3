// SPDX-License-Identifier: MIT OR Apache-2.0
//! Opens the gates: each when its process is resident, or all together where calls cannot be blocked. A GPU
//! that is resumed alone waits for its own reach only.
//!
//! A process's GPUs reach its own buffers, and those that other processes have exported to it. Buffers that
//! were exported before the dump are loaded before anything runs. Buffers that are exported now are
//! resident, where such calls are blocked for missing ones (`docs/decisions/0012-gates-one-by-one.md`).

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::ensure;
use rewake_bo_contents::LoadHandle;
use tracing::warn;

use super::fault_server::ReadyEvent;
use super::gate::Gate;
use super::handoff::Handoff;
use super::per_gpu_resume::ResumeStep;
use super::queue_monitor::Opened;
use super::reachability::GpuReach;
use crate::ledger::Ledger;
use crate::record::Timeline;
use crate::supervise::processes::{self, Layout};
use crate::sys;

/// The time between two tries with a process that does not stop.
const RETRY: Duration = Duration::from_millis(20);
/// The number of checks, [`RETRY`] apart, whether a process that cannot be traced is ending: a second.
const ENDING: u32 = 50;
/// How long a process may refuse to stop after all of it is resident.
const PATIENCE: Duration = Duration::from_secs(120);

/// Opens the gates of a restore's processes.
#[derive(Debug)]
pub(super) struct QueueResumer<'a> {
    pub(super) handoff: &'a Handoff,
    /// The gates, with their processes' indexes.
    pub(super) gates: Vec<(usize, Gate<'a>)>,
    pub(super) ledger: Ledger,
    pub(super) timeline: &'a Timeline,
}

/// How far a process is resumed.
#[derive(Debug, Default)]
struct ProcessState {
    /// The GPUs, of those that are resumed one by one, whose reach is resident.
    ready: BTreeSet<usize>,
    /// The GPUs that run.
    running: BTreeSet<usize>,
    /// Whether its GPUs can only be resumed together.
    all_at_once: bool,
    /// When all of the process became resident.
    resident_since: Option<Instant>,
    /// The layout of its memory when the first GPU was resumed. After an exec it differs, and the new
    /// program has none of the queues.
    layout: Option<Layout>,
}

/// The result of one try.
enum Attempt {
    /// All GPUs of the process run.
    Opened(Opened),
    /// The process has ended.
    Ended,
    /// The gate is not open for all GPUs yet.
    Pending,
}

impl ProcessState {
    fn waits(&self) -> bool {
        self.resident_since.is_some() || (!self.all_at_once && self.ready != self.running)
    }

    fn note(&mut self, event: ReadyEvent) {
        match event {
            ReadyEvent::Gpu(_, set) => drop(self.ready.insert(set)),
            ReadyEvent::Process(_) => self.resident_since = Some(Instant::now()),
        }
    }
}

impl<'a> QueueResumer<'a> {
    /// Returns the reach of the GPUs that are resumed one by one, with their processes' indexes.
    pub(super) fn sets(&self) -> Vec<(usize, &'a [GpuReach])> {
        self.gates.iter().map(|(place, gate)| (*place, gate.reach)).collect()
    }

    /// Opens gates as events arrive: a process's when all of it is resident, or a GPU's when its reach is.
    /// Where calls cannot be blocked, waits for all processes first. Returns the opened gates when all are
    /// open, or when no event can arrive.
    ///
    /// # Errors
    /// A gate cannot be opened: `load` is given up then.
    pub(super) fn run(&self, ready: &Receiver<ReadyEvent>, load: &LoadHandle) -> anyhow::Result<Vec<Opened>> {
        let one_by_one = self.gates.iter().all(|(_, gate)| gate.blocked_calls.is_some());
        thread::scope(|scope| {
            let (mut senders, mut threads) = (Vec::new(), Vec::new());
            for (place, gate) in &self.gates {
                let (sender, events) = channel();
                senders.push((*place, sender));
                // A thread each: a process that is traced or does not stop delays no other.
                threads.push(scope.spawn(move || {
                    let done =
                        catch_unwind(AssertUnwindSafe(|| self.serve_gate(*place, gate, &events, load)));
                    if !matches!(done, Ok(Ok(_))) {
                        // Killed at once: the other threads may take long to end.
                        let _ = sys::pidfd_kill(gate.process);
                        load.give_up();
                    }
                    done
                }));
            }
            let (mut waiting, mut resident) = (Vec::new(), 0);
            for event in ready {
                waiting.push(event);
                resident += usize::from(matches!(event, ReadyEvent::Process(_)));
                if one_by_one || resident == self.gates.len() {
                    for event in waiting.drain(..) {
                        let (ReadyEvent::Gpu(process, _) | ReadyEvent::Process(process)) = event;
                        // A receiver that is gone has failed, and reports that itself.
                        senders.iter().filter(|(place, _)| *place == process).for_each(|(_, sender)| {
                            let _ = sender.send(event);
                        });
                    }
                }
            }
            drop(senders);
            let ended: Vec<_> = threads.into_iter().map(|of| of.join().and_then(|done| done)).collect();
            let ended = ended.into_iter().map(|of| of.unwrap_or_else(|panic| resume_unwind(panic)));
            Ok(ended.collect::<anyhow::Result<Vec<_>>>()?.into_iter().flatten().collect())
        })
    }

    /// Tries after each event, and again after a failed try. Returns `None` if the process has ended, or no
    /// event can arrive.
    fn serve_gate(
        &self,
        place: usize,
        gate: &Gate<'_>,
        events: &Receiver<ReadyEvent>,
        load: &LoadHandle,
    ) -> anyhow::Result<Option<Opened>> {
        let mut state = ProcessState::default();
        loop {
            let heard =
                if state.waits() { events.recv_timeout(RETRY) } else { events.recv().map_err(Into::into) };
            match heard {
                Ok(event) => state.note(event),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected)
                    if state.resident_since.is_none() || load.is_given_up() =>
                {
                    return Ok(None);
                }
                Err(RecvTimeoutError::Disconnected) => thread::sleep(RETRY),
            }
            events.try_iter().for_each(|event| state.note(event));
            if state.waits() {
                match self.advance(place, gate, &mut state)? {
                    Attempt::Opened(opened) => return Ok(Some(opened)),
                    Attempt::Ended => return Ok(None),
                    Attempt::Pending => {}
                }
            }
        }
    }

    fn advance(&self, place: usize, gate: &Gate<'_>, state: &mut ProcessState) -> anyhow::Result<Attempt> {
        if state.running.is_empty() && state.resident_since.is_some() {
            return self.open(place, gate, || gate.open());
        }
        if state.resident_since.is_some() {
            state.ready = (0..gate.reach.len()).collect();
        }
        let more: BTreeSet<usize> = state.ready.difference(&state.running).copied().collect();
        // The timeline must show resident memory before GPUs run.
        self.timeline.look();
        let step = match (state.running.is_empty(), more.is_empty()) {
            (_, true) => Ok(ResumeStep::Done),
            (true, false) => gate.resume_first_gpus(&more),
            (false, false) => gate.restore_queue_percentage(&more),
        };
        match step {
            Ok(ResumeStep::Done) => {
                let minors: Vec<u32> = more.iter().map(|set| gate.reach[*set].minor).collect();
                self.timeline.gpus_go_on(place, &minors);
                state.running.extend(more);
                state.layout = state.layout.or_else(|| gate.layout());
            }
            _ if gate.has_ended() || state.layout.is_some_and(|of| gate.layout() != Some(of)) => {
                self.ended(place, gate);
                return Ok(Attempt::Ended);
            }
            Ok(ResumeStep::NotNow(why)) => {
                state.resident_since.map_or(Ok(()), |since| is_late(since, &why))?;
            }
            Ok(ResumeStep::Never(error)) => {
                state.all_at_once = true;
                warn!("GPUs of a process go on together, when all is there: {error:#}");
            }
            Err(error) => return Err(error),
        }
        if state.resident_since.is_some() && state.running.len() == gate.reach.len() {
            return self.open(place, gate, || gate.is_open());
        }
        Ok(Attempt::Pending)
    }

    /// Opens the whole gate of the process with `open`.
    fn open(
        &self,
        place: usize,
        gate: &Gate<'_>,
        open: impl FnOnce() -> anyhow::Result<i32>,
    ) -> anyhow::Result<Attempt> {
        // The timeline must show resident memory before the gate is open.
        self.timeline.look();
        match open() {
            Ok(pid) => {
                self.timeline.gate_opened(place);
                self.ledger.gates().opened(gate.process);
                let numbers = [pid, processes::own_number(pid).unwrap_or(pid)].map(i32::unsigned_abs);
                let minors = self.handoff.minors(place).collect();
                Ok(Attempt::Opened(Opened { numbers, process: gate.process, minors }))
            }
            Err(error) if ends_soon(gate) => {
                warn!("a process ended before its GPUs went on: {error:#}");
                self.ended(place, gate);
                Ok(Attempt::Ended)
            }
            Err(error) => Err(error),
        }
    }

    fn ended(&self, place: usize, gate: &Gate<'_>) {
        self.timeline.gone(place);
        self.ledger.gates().opened(gate.process);
    }
}

/// Returns whether the process ends within [`ENDING`] checks: a killed process has no thread to trace some
/// time before its end.
fn ends_soon(gate: &Gate<'_>) -> bool {
    (0..ENDING).any(|_| {
        gate.has_ended() || {
            thread::sleep(RETRY);
            false
        }
    })
}

fn is_late(resident_since: Instant, why: &str) -> anyhow::Result<()> {
    ensure!(resident_since.elapsed() < PATIENCE, "a process did not stand still for {PATIENCE:?}: {why}");
    Ok(())
}
