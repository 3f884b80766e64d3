// SPDX-License-Identifier: MIT OR Apache-2.0
//! The state of one process, from its first missing buffer to its open gate. It decides what is done next;
//! the coordinator does it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use anyhow::bail;
use tracing::info;

use super::REFUSAL_LIMIT;
use super::placeholders::{Placeholders, SwapOutcome};
use super::queue_monitor::Opened;
use super::swapping::{PageFault, SwapResult, SwapTask};

/// The time between two stops of a process, so that it can run.
const STOP_INTERVAL: Duration = Duration::from_millis(5);
/// The number of buffers that one stop swaps when no thread waits for them. One buffer takes 0.2 ms and
/// more; reading the mappings takes 2 to 3 us for each mapping of the process (`docs/history.md`). With
/// thousands of them the stop takes about 20 ms.
pub(super) const BUFFERS_PER_STOP: usize = 64;

/// How far a process is. A later phase is never followed by an earlier one.
#[derive(Debug)]
pub(super) enum ProcessPhase {
    /// Memory of it is missing.
    Loading,
    /// All of its memory is resident, and placeholders are left.
    Swapping(SwapProgress),
    /// It has no placeholders, and its gate is closed.
    Resident,
    /// A thread opens its gate.
    Opening,
    /// Its gate was opened.
    Open(Opened),
    /// It ended before its gate was opened.
    Ended,
}

/// The swaps that no thread waited for.
#[derive(Debug)]
pub(super) struct SwapProgress {
    /// When the process last stopped, or when all of it became resident.
    stopped_at: Instant,
    /// The number of buffers that were swapped.
    buffers: usize,
    /// How long the process was stopped for that.
    stopped: Duration,
}

/// The placeholders of a process.
#[derive(Debug)]
pub(super) enum PlaceholderState<'a> {
    /// The coordinator reads their page faults.
    Watched(Placeholders<'a>),
    /// A thread swaps some of them.
    Lent,
    /// None is left.
    None,
}

/// The state of one process.
#[derive(Debug)]
pub(super) struct ProcessState<'a> {
    pub(super) phase: ProcessPhase,
    pub(super) placeholders: PlaceholderState<'a>,
    /// The buffers that have placeholders and are missing.
    missing: BTreeSet<usize>,
    /// The page faults that threads wait for, by address.
    waiting: BTreeMap<u64, PageFault>,
    /// When the next page faults may be served, and when the next buffers may be swapped.
    next_faults: Instant,
    next_buffers: Instant,
}

impl<'a> ProcessState<'a> {
    pub(super) fn new(placeholders: Option<Placeholders<'a>>) -> Self {
        let now = Instant::now();
        Self {
            phase: ProcessPhase::Loading,
            missing: placeholders.iter().flat_map(Placeholders::left).collect(),
            placeholders: placeholders.map_or(PlaceholderState::None, PlaceholderState::Watched),
            waiting: BTreeMap::new(),
            next_faults: now,
            next_buffers: now,
        }
    }

    /// Notes that a buffer is resident.
    pub(super) fn buffer_is_resident(&mut self, buffer: usize) {
        self.missing.remove(&buffer);
    }

    /// Notes that all memory of the process is resident.
    pub(super) fn all_is_resident(&mut self) {
        self.missing.clear();
        if matches!(self.phase, ProcessPhase::Loading) {
            let swaps = SwapProgress { stopped_at: Instant::now(), buffers: 0, stopped: Duration::ZERO };
            self.phase = ProcessPhase::Swapping(swaps);
            self.finish_swaps();
        }
    }

    /// Notes that a thread waits for a page of a buffer. Returns whether it did not wait before. An
    /// interrupted thread faults again.
    pub(super) fn faulted(&mut self, address: u64, buffer: usize) -> bool {
        let is_new = !self.waiting.contains_key(&address);
        if is_new {
            self.waiting.insert(address, PageFault { address, buffer, since: Instant::now() });
        }
        is_new
    }

    /// Returns whether the buffer's bytes must be loaded before an access.
    pub(super) fn is_missing(&self, buffer: usize) -> bool {
        self.missing.contains(&buffer)
    }

    /// Returns whether all memory is resident and no placeholder is left.
    pub(super) fn is_resident(&self) -> bool {
        !matches!(self.phase, ProcessPhase::Loading | ProcessPhase::Swapping(_))
    }

    /// Returns whether nothing is left to do.
    pub(super) fn is_done(&self) -> bool {
        matches!(self.phase, ProcessPhase::Open(_) | ProcessPhase::Ended)
    }

    /// Returns whether a thread works on the process.
    pub(super) fn is_busy(&self) -> bool {
        matches!(self.placeholders, PlaceholderState::Lent) || matches!(self.phase, ProcessPhase::Opening)
    }

    fn can_serve(&self) -> bool {
        self.waiting.values().any(|fault| !self.missing.contains(&fault.buffer))
    }

    /// Returns when a thread could next swap placeholders, or `None` if it has nothing to do, or is at work.
    pub(super) fn next_swap(&self) -> Option<Instant> {
        if !matches!(self.placeholders, PlaceholderState::Watched(_)) {
            None
        } else if self.can_serve() {
            Some(self.next_faults)
        } else {
            matches!(self.phase, ProcessPhase::Swapping(_)).then_some(self.next_buffers)
        }
    }

    /// Lends the placeholders for what a thread can do now, if there is something. Page faults go before
    /// buffers that no thread waits for.
    pub(super) fn lend(&mut self, now: Instant) -> Option<(Placeholders<'a>, SwapTask)> {
        if self.next_swap().is_none_or(|at| at > now) {
            return None;
        }
        let lent = std::mem::replace(&mut self.placeholders, PlaceholderState::Lent);
        let PlaceholderState::Watched(placeholders) = lent else { return None };
        let missing = &self.missing;
        let served = self.waiting.extract_if(.., |_, fault| !missing.contains(&fault.buffer));
        let faults: Vec<PageFault> = served.map(|(_, fault)| fault).collect();
        let task = if faults.is_empty() {
            SwapTask::Buffers(placeholders.left().take(BUFFERS_PER_STOP).collect())
        } else {
            SwapTask::Faults(faults)
        };
        Some((placeholders, task))
    }

    /// Takes the placeholders back. `loads_cpus` says whether this streamer loads CPU memory too: a thread
    /// may wait for that in the kernel, and does not stop meanwhile.
    ///
    /// # Errors
    /// The process has not stopped for [`REFUSAL_LIMIT`].
    pub(super) fn take_back(
        &mut self,
        placeholders: Placeholders<'a>,
        result: SwapResult,
        loads_cpus: bool,
    ) -> anyhow::Result<()> {
        let now = Instant::now();
        let pid = placeholders.pid();
        self.waiting.extend(result.unserved.into_iter().map(|fault| (fault.address, fault)));
        match (result.outcome, &mut self.phase) {
            (Some(SwapOutcome::Ended), _) => {
                self.waiting.clear();
                self.placeholders = PlaceholderState::None;
                placeholders.close();
                self.finish_swaps();
                return Ok(());
            }
            (Some(SwapOutcome::Done { stopped }), ProcessPhase::Swapping(swaps)) => {
                swaps.stopped_at = now;
                self.next_buffers = now + STOP_INTERVAL;
                if result.buffers > 0 {
                    swaps.buffers += result.buffers;
                    swaps.stopped += stopped;
                }
            }
            (Some(SwapOutcome::NotNow(why)), phase) => {
                (self.next_faults, self.next_buffers) = (now + STOP_INTERVAL, now + STOP_INTERVAL);
                match phase {
                    ProcessPhase::Swapping(swaps) if loads_cpus => swaps.stopped_at = now,
                    ProcessPhase::Swapping(swaps) if swaps.stopped_at.elapsed() > REFUSAL_LIMIT => {
                        bail!("process {pid} could not be stopped within {REFUSAL_LIMIT:?}: {why}")
                    }
                    _ => {}
                }
            }
            (Some(SwapOutcome::Done { .. }) | None, _) => {}
        }
        self.placeholders = PlaceholderState::Watched(placeholders);
        self.finish_swaps();
        Ok(())
    }

    /// Ends the swaps if all memory is resident and no placeholder is left.
    fn finish_swaps(&mut self) {
        let ProcessPhase::Swapping(SwapProgress { buffers, stopped, .. }) = self.phase else { return };
        match std::mem::replace(&mut self.placeholders, PlaceholderState::None) {
            PlaceholderState::Watched(placeholders) if placeholders.left().next().is_none() => {
                info!(
                    "process {}: {buffers} more mapped buffers were swapped, {stopped:?}",
                    placeholders.pid()
                );
                placeholders.close();
            }
            PlaceholderState::None => {}
            in_use => {
                self.placeholders = in_use;
                return;
            }
        }
        self.phase = ProcessPhase::Resident;
    }
}
