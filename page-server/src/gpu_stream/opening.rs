// SPDX-License-Identifier: MIT OR Apache-2.0
//! Gates are opened: one by one, each when its process has all of its memory, or all when all have.
//!
//! A process's GPUs reach its own buffers, and those that others have handed it. What was handed over before the dump is loaded before
//! anything runs; what is handed over now is there, where such calls are kept away from what is not (`docs/decisions/0012-gates-one-by-one.md`).

use std::sync::mpsc::Receiver;

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
    pub(super) one_by_one: bool,
    pub(super) ledger: Ledger,
    pub(super) timeline: &'a Timeline,
}

impl Opening<'_> {
    /// Opens that of each process that it hears of, which must have all of its memory; of all when it has heard of all if they are not
    /// opened one by one. Ends when all are open, or when it can hear of no more. Whose are open.
    ///
    /// # Errors
    /// One cannot be opened.
    pub(super) fn run(&self, ready: &Receiver<usize>) -> anyhow::Result<Vec<Opened>> {
        let (mut opened, mut waiting) = (Vec::new(), Vec::new());
        for (heard, place) in ready.iter().enumerate() {
            waiting.push(place);
            if self.one_by_one || heard + 1 == self.gates.len() {
                for place in waiting.drain(..) {
                    opened.extend(self.open(place)?);
                }
            }
        }
        Ok(opened)
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
                gate.keeps_nothing_away();
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}
