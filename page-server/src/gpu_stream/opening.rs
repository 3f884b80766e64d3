// SPDX-License-Identifier: MIT OR Apache-2.0
//! Gates are opened: one by one, each when its process has all of its memory, or all when all have.
//!
//! A process's GPUs reach its own buffers, and those that others have handed it. What was handed over before the dump is loaded before
//! anything runs; what is handed over now is there, where such calls are kept away from what is not (`docs/decisions/0012-gates-one-by-one.md`).

use std::panic::resume_unwind;
use std::sync::mpsc::Receiver;
use std::thread;

use rewake_contents::Desk;
use tracing::warn;

use super::confirm::Opened;
use super::gate::Gate;
use super::intake::Taken;
use crate::ledger::Ledger;
use crate::processes;
use crate::timeline::Timeline;

/// The gates of a restore's processes.
#[derive(Debug)]
pub(super) struct Opening<'a> {
    pub(super) taken: &'a Taken,
    /// With their processes' places.
    pub(super) gates: Vec<(usize, Gate<'a>)>,
    pub(super) ledger: Ledger,
    pub(super) timeline: &'a Timeline,
}

impl Opening<'_> {
    /// Opens that of each process that it hears of, all of whose GPUs' memory must be there; of all when it has heard of all if they are
    /// not opened one by one. Ends when all are open, or when it can hear of no more. Whose are open.
    ///
    /// # Errors
    /// One cannot be opened: `load` is given up then.
    pub(super) fn run(&self, ready: &Receiver<usize>, load: &Desk) -> anyhow::Result<Vec<Opened>> {
        let one_by_one = self.gates.iter().all(|(_, gate)| gate.kept.is_some());
        thread::scope(|scope| {
            let (mut waiting, mut opening) = (Vec::new(), Vec::new());
            for (heard, place) in ready.iter().enumerate() {
                waiting.push(place);
                if one_by_one || heard + 1 == self.gates.len() {
                    // Each in a thread: one that a debugger traces keeps none of the others waiting.
                    let open = |place| scope.spawn(move || self.open(place).inspect_err(|_| load.give_up()));
                    opening.extend(waiting.drain(..).map(open));
                }
            }
            let opened =
                opening.into_iter().map(|one| one.join().unwrap_or_else(|panic| resume_unwind(panic)));
            let opened = opened.collect::<Vec<_>>().into_iter().collect::<anyhow::Result<Vec<_>>>()?;
            Ok(opened.into_iter().flatten().collect())
        })
    }

    /// None if the process has ended.
    fn open(&self, place: usize) -> anyhow::Result<Option<Opened>> {
        let Some((_, gate)) = self.gates.iter().find(|(of, _)| *of == place) else { return Ok(None) };
        // What is there is told before the gate is open.
        self.timeline.look();
        match gate.open() {
            Ok(pid) => {
                self.timeline.gate_opened(place);
                self.ledger.gates().opened(gate.process);
                let numbers = [pid, processes::own_number(pid).unwrap_or(pid)].map(i32::unsigned_abs);
                let minors = self.taken.minors(place).collect();
                Ok(Some(Opened { numbers, process: gate.process, minors }))
            }
            Err(error) if gate.has_ended() => {
                self.timeline.gone(place);
                warn!("a process ended before its GPUs went on: {error:#}");
                self.ledger.gates().opened(gate.process);
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}
