// SPDX-License-Identifier: MIT OR Apache-2.0
//! Gates are opened: one by one, each when its process has all of its memory, or one of its GPUs all that it reaches; or all when all have.
//!
//! A process's GPUs reach its own buffers, and those that others have handed it. What was handed over before the dump is loaded before
//! anything runs; what is handed over now is there, where such calls are kept away from what is not (`docs/decisions/0012-gates-one-by-one.md`).

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

/// Between two tries of what a process that does not stand still keeps us from.
const AGAIN: Duration = Duration::from_millis(20);
/// Looks whether a process that cannot be traced is ending, [`AGAIN`] apart: a second.
const ENDING: u32 = 50;
/// For a process to stand still, when all of it is there.
const PATIENCE: Duration = Duration::from_secs(120);

/// The gates of a restore's processes.
#[derive(Debug)]
pub(super) struct QueueResumer<'a> {
    pub(super) taken: &'a Handoff,
    /// With their processes' places.
    pub(super) gates: Vec<(usize, Gate<'a>)>,
    pub(super) ledger: Ledger,
    pub(super) timeline: &'a Timeline,
}

/// How far a process is.
#[derive(Debug, Default)]
struct ProcessState {
    /// GPUs, of those that go on one by one, whose sets are there.
    ready: BTreeSet<usize>,
    /// Those that run.
    on: BTreeSet<usize>,
    /// They cannot go on one by one.
    together: bool,
    /// All of it is there, since then.
    whole: Option<Instant>,
    /// What its memory was laid out like when the first went on: another program has none of its queues.
    layout: Option<Layout>,
}

/// What one try came to.
enum Attempt {
    /// All of the process goes on.
    Opened(Opened),
    /// It has ended.
    Ended,
    /// Some of it may.
    GoesOn,
}

impl ProcessState {
    fn waits(&self) -> bool {
        self.whole.is_some() || (!self.together && self.ready != self.on)
    }

    fn note(&mut self, news: ReadyEvent) {
        match news {
            ReadyEvent::Gpu(_, set) => drop(self.ready.insert(set)),
            ReadyEvent::Process(_) => self.whole = Some(Instant::now()),
        }
    }
}

impl<'a> QueueResumer<'a> {
    /// GPUs that go on one by one, with their processes' places.
    pub(super) fn sets(&self) -> Vec<(usize, &'a [GpuReach])> {
        self.gates.iter().map(|(place, gate)| (*place, gate.sets)).collect()
    }

    /// Opens that of each process that it hears of, all of whose GPUs' memory must be there, or for each of its GPUs when that has what it
    /// reaches; of all when it has heard of all if they are not opened one by one. Ends when all are open, or when it can hear of no more.
    /// Whose are open.
    ///
    /// # Errors
    /// One cannot be opened: `load` is given up then.
    pub(super) fn run(&self, ready: &Receiver<ReadyEvent>, load: &LoadHandle) -> anyhow::Result<Vec<Opened>> {
        let one_by_one = self.gates.iter().all(|(_, gate)| gate.kept.is_some());
        thread::scope(|scope| {
            let (mut tell, mut threads) = (Vec::new(), Vec::new());
            for (place, gate) in &self.gates {
                let (sender, hears) = channel();
                tell.push((*place, sender));
                // One that a debugger traces, or that does not stand still, keeps none of the others waiting.
                threads.push(scope.spawn(move || {
                    let done = catch_unwind(AssertUnwindSafe(|| self.turns(*place, gate, &hears, load)));
                    if !matches!(done, Ok(Ok(_))) {
                        // At once: others may take their time to end.
                        let _ = sys::pidfd_kill(gate.process);
                        load.give_up();
                    }
                    done
                }));
            }
            let (mut waiting, mut whole) = (Vec::new(), 0);
            for news in ready {
                waiting.push(news);
                whole += usize::from(matches!(news, ReadyEvent::Process(_)));
                if one_by_one || whole == self.gates.len() {
                    for news in waiting.drain(..) {
                        let (ReadyEvent::Gpu(process, _) | ReadyEvent::Process(process)) = news;
                        // One that hears no more has failed, and says so.
                        tell.iter().filter(|(place, _)| *place == process).for_each(|(_, sender)| {
                            let _ = sender.send(news);
                        });
                    }
                }
            }
            drop(tell);
            let ended: Vec<_> = threads.into_iter().map(|of| of.join().and_then(|done| done)).collect();
            let ended = ended.into_iter().map(|of| of.unwrap_or_else(|panic| resume_unwind(panic)));
            Ok(ended.collect::<anyhow::Result<Vec<_>>>()?.into_iter().flatten().collect())
        })
    }

    /// Tries, as often as there is news or something could not be done. None if the process has ended, or nothing more is heard.
    fn turns(
        &self,
        place: usize,
        gate: &Gate<'_>,
        hears: &Receiver<ReadyEvent>,
        load: &LoadHandle,
    ) -> anyhow::Result<Option<Opened>> {
        let mut turn = ProcessState::default();
        loop {
            let heard =
                if turn.waits() { hears.recv_timeout(AGAIN) } else { hears.recv().map_err(Into::into) };
            match heard {
                Ok(news) => turn.note(news),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) if turn.whole.is_none() || load.is_given_up() => {
                    return Ok(None);
                }
                Err(RecvTimeoutError::Disconnected) => thread::sleep(AGAIN),
            }
            hears.try_iter().for_each(|news| turn.note(news));
            if turn.waits() {
                match self.advance(place, gate, &mut turn)? {
                    Attempt::Opened(opened) => return Ok(Some(opened)),
                    Attempt::Ended => return Ok(None),
                    Attempt::GoesOn => {}
                }
            }
        }
    }

    fn advance(&self, place: usize, gate: &Gate<'_>, turn: &mut ProcessState) -> anyhow::Result<Attempt> {
        if turn.on.is_empty() && turn.whole.is_some() {
            return self.open(place, gate, || gate.open());
        }
        if turn.whole.is_some() {
            turn.ready = (0..gate.sets.len()).collect();
        }
        let more: BTreeSet<usize> = turn.ready.difference(&turn.on).copied().collect();
        // What is there is told before.
        self.timeline.look();
        let step = match (turn.on.is_empty(), more.is_empty()) {
            (_, true) => Ok(ResumeStep::Done),
            (true, false) => gate.resume_first_gpus(&more),
            (false, false) => gate.restore_queue_percentage(&more),
        };
        match step {
            Ok(ResumeStep::Done) => {
                let minors: Vec<u32> = more.iter().map(|set| gate.sets[*set].minor).collect();
                self.timeline.gpus_go_on(place, &minors);
                turn.on.extend(more);
                turn.layout = turn.layout.or_else(|| gate.layout());
            }
            _ if gate.has_ended() || turn.layout.is_some_and(|of| gate.layout() != Some(of)) => {
                self.ended(place, gate);
                return Ok(Attempt::Ended);
            }
            Ok(ResumeStep::NotNow(why)) => turn.whole.map_or(Ok(()), |whole| is_late(whole, &why))?,
            Ok(ResumeStep::Never(error)) => {
                turn.together = true;
                warn!("GPUs of a process go on together, when all is there: {error:#}");
            }
            Err(error) => return Err(error),
        }
        if turn.whole.is_some() && turn.on.len() == gate.sets.len() {
            return self.open(place, gate, || gate.is_open());
        }
        Ok(Attempt::GoesOn)
    }

    /// All of the process goes on.
    fn open(
        &self,
        place: usize,
        gate: &Gate<'_>,
        open: impl FnOnce() -> anyhow::Result<i32>,
    ) -> anyhow::Result<Attempt> {
        // What is there is told before the gate is open.
        self.timeline.look();
        match open() {
            Ok(pid) => {
                self.timeline.gate_opened(place);
                self.ledger.gates().opened(gate.process);
                let numbers = [pid, processes::own_number(pid).unwrap_or(pid)].map(i32::unsigned_abs);
                let minors = self.taken.minors(place).collect();
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

/// Whether the process ends within [`ENDING`] looks: one that was killed has no thread to trace some time before.
fn ends_soon(gate: &Gate<'_>) -> bool {
    (0..ENDING).any(|_| {
        gate.has_ended() || {
            thread::sleep(AGAIN);
            false
        }
    })
}

fn is_late(whole: Instant, why: &str) -> anyhow::Result<()> {
    ensure!(whole.elapsed() < PATIENCE, "a process did not stand still for {PATIENCE:?}: {why}");
    Ok(())
}
