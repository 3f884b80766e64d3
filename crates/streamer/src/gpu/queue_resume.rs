// SPDX-License-Identifier: MIT OR Apache-2.0
//! Opens the gates: each when its process is resident, or all together where calls cannot be blocked.
//!
//! A process's GPUs reach its own buffers, and those that other processes have exported to it. Buffers that
//! were exported before the dump are loaded before anything runs. Buffers that are exported now are
//! resident, where such calls are blocked for missing ones (`docs/decisions/0011-registered-memory.md`).

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc::Receiver;
use std::thread;
use std::time::Duration;

use rewake_bo_contents::LoadHandle;
use tracing::warn;

use super::gate::Gate;
use super::handoff::Handoff;
use super::queue_monitor::Opened;
use crate::ledger::Ledger;
use crate::record::Timeline;
use crate::supervise::processes;
use crate::sys;

/// The time between two checks whether a process that cannot be traced is ending.
const RETRY: Duration = Duration::from_millis(20);
/// The number of these checks: a second.
const ENDING: u32 = 50;

/// Opens the gates of a restore's processes.
#[derive(Debug)]
pub(super) struct QueueResumer<'a> {
    pub(super) handoff: &'a Handoff,
    /// The gates, with their processes' indexes.
    pub(super) gates: Vec<(usize, Gate<'a>)>,
    pub(super) ledger: Ledger,
    pub(super) timeline: &'a Timeline,
}

impl QueueResumer<'_> {
    /// Opens each gate as the index of its process arrives. Where calls cannot be blocked, waits for all
    /// processes first. Returns the opened gates when all are open, or when no index can arrive.
    ///
    /// # Errors
    /// A gate cannot be opened: `load` is given up then.
    pub(super) fn run(&self, ready: &Receiver<usize>, load: &LoadHandle) -> anyhow::Result<Vec<Opened>> {
        let alone = self.gates.iter().all(|(_, gate)| gate.blocked_calls.is_some());
        thread::scope(|scope| {
            let (mut waiting, mut resident, mut threads) = (Vec::new(), 0, Vec::new());
            for process in ready {
                waiting.extend(self.gates.iter().filter(|(place, _)| *place == process));
                resident += 1;
                if !alone && resident < self.gates.len() {
                    continue;
                }
                // A thread each: a process that is traced by another program delays no other.
                threads.extend(waiting.drain(..).map(|(place, gate)| {
                    scope.spawn(|| {
                        let done = catch_unwind(AssertUnwindSafe(|| self.open(*place, gate)));
                        if !matches!(done, Ok(Ok(_))) {
                            // Killed at once: the other threads may take long to end.
                            let _ = sys::pidfd_kill(gate.process);
                            load.give_up();
                        }
                        done
                    })
                }));
            }
            let ended: Vec<_> = threads.into_iter().map(|of| of.join().and_then(|done| done)).collect();
            let ended = ended.into_iter().map(|of| of.unwrap_or_else(|panic| resume_unwind(panic)));
            Ok(ended.collect::<anyhow::Result<Vec<_>>>()?.into_iter().flatten().collect())
        })
    }

    /// Opens the gate of a process. Returns `None` if the process has ended.
    fn open(&self, place: usize, gate: &Gate<'_>) -> anyhow::Result<Option<Opened>> {
        // The timeline must show resident memory before the gate is open.
        self.timeline.look();
        let opened = match gate.open() {
            Ok(pid) => {
                self.timeline.gate_opened(place);
                let numbers = [pid, processes::own_number(pid).unwrap_or(pid)].map(i32::unsigned_abs);
                Some(Opened { numbers, process: gate.process, minors: self.handoff.minors(place).collect() })
            }
            Err(error) if ends_soon(gate) => {
                warn!("a process ended before its GPUs were resumed: {error:#}");
                self.timeline.gone(place);
                None
            }
            Err(error) => return Err(error),
        };
        self.ledger.gates().opened(gate.process);
        Ok(opened)
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
