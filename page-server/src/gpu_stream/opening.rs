// SPDX-License-Identifier: MIT OR Apache-2.0
//! Gates are opened: one by one, each when its process has all of its memory, or all when all have.
//!
//! A process's GPUs reach its own buffers, and those that others have handed it. What was handed over before the dump is loaded before
//! anything runs; what is handed over now is there, where such calls are kept away from what is not (`docs/decisions/0012-gates-one-by-one.md`).

use std::collections::BTreeSet;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::ensure;
use tracing::warn;

use super::by_gpu::Step;
use super::confirm::Opened;
use super::gate::Gate;
use super::intake::Taken;
use super::sets::Set;
use super::touches::Ready;
use crate::ledger::Ledger;
use crate::processes;
use crate::timeline::Timeline;

/// Between two tries of what a process that does not stand still keeps us from.
const AGAIN: Duration = Duration::from_millis(20);
/// For a process to stand still, when all of it is there.
const PATIENCE: Duration = Duration::from_secs(120);

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

/// How far a process is.
#[derive(Debug, Default)]
struct Turn {
    /// GPUs, of those that go on one by one, whose sets are there.
    ready: BTreeSet<usize>,
    /// Those that run.
    on: BTreeSet<usize>,
    /// They cannot go on one by one.
    together: bool,
    /// All of it is there, since then.
    whole: Option<Instant>,
    /// Its gate is open, or it has ended.
    over: bool,
}

impl Turn {
    fn waits(&self) -> bool {
        !self.over && (self.whole.is_some() || (!self.together && self.ready != self.on))
    }
}

impl<'a> Opening<'a> {
    /// GPUs that go on one by one, with their processes' places.
    pub(super) fn sets(&self) -> Vec<(usize, &'a [Set])> {
        self.gates.iter().map(|(place, gate)| (*place, gate.sets)).collect()
    }

    /// Opens that of each process that it hears of, which must have all of its memory; of all when it has heard of all if they are not
    /// opened one by one. Where GPUs of a process go on one by one, that of each. Ends when all are open, or when it can hear of no more. Whose are open.
    ///
    /// # Errors
    /// One cannot be opened.
    pub(super) fn run(&self, ready: &Receiver<Ready>) -> anyhow::Result<Vec<Opened>> {
        let mut turns: Vec<Turn> = self.gates.iter().map(|_| Turn::default()).collect();
        let mut opened = Vec::new();
        loop {
            let may = self.one_by_one || turns.iter().all(|turn| turn.whole.is_some());
            let waits = may && turns.iter().any(Turn::waits);
            let heard = if waits { ready.recv_timeout(AGAIN) } else { ready.recv().map_err(Into::into) };
            match heard {
                Ok(news) => self.note(&mut turns, news),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected)
                    if !turns.iter().any(|turn| turn.waits() && turn.whole.is_some()) =>
                {
                    return Ok(opened);
                }
                Err(RecvTimeoutError::Disconnected) => thread::sleep(AGAIN),
            }
            ready.try_iter().for_each(|news| self.note(&mut turns, news));
            if self.one_by_one || turns.iter().all(|turn| turn.whole.is_some()) {
                for ((place, gate), turn) in
                    self.gates.iter().zip(&mut turns).filter(|(_, turn)| turn.waits())
                {
                    opened.extend(self.go_on(*place, gate, turn)?);
                }
            }
        }
    }

    fn note(&self, turns: &mut [Turn], news: Ready) {
        let (Ready::Gpu(process, _) | Ready::Process(process)) = news;
        let turn = self.gates.iter().zip(turns).find(|((of, _), _)| *of == process);
        let Some((_, turn)) = turn else { return };
        match news {
            Ready::Gpu(_, set) => drop(turn.ready.insert(set)),
            Ready::Process(_) => turn.whole = Some(Instant::now()),
        }
    }

    /// One try; when all of the process goes on, or it has ended, its turn is over.
    fn go_on(&self, place: usize, gate: &Gate<'_>, turn: &mut Turn) -> anyhow::Result<Option<Opened>> {
        if turn.on.is_empty() && turn.whole.is_some() {
            turn.over = true;
            return self.open(place, gate, || gate.open());
        }
        if turn.whole.is_some() {
            turn.ready = (0..gate.sets.len()).collect();
        }
        let more: BTreeSet<usize> = turn.ready.difference(&turn.on).copied().collect();
        // What is there is told before.
        self.timeline.look();
        let step = match (turn.on.is_empty(), more.is_empty()) {
            (_, true) => Ok(Step::Done),
            (true, false) => gate.open_for(&more),
            (false, false) => gate.lets_on(&more),
        };
        match step {
            Ok(Step::Done) => turn.on.extend(more),
            _ if gate.has_ended() => {
                turn.over = true;
                self.ended(place, gate);
                return Ok(None);
            }
            Ok(Step::NotNow(why)) => turn.whole.map_or(Ok(()), |whole| is_late(whole, &why))?,
            Ok(Step::Never(error)) => {
                turn.together = true;
                warn!("GPUs of a process go on together, when all is there: {error:#}");
            }
            Err(error) => return Err(error),
        }
        let is_over = turn.whole.is_some() && turn.on.len() == gate.sets.len();
        if !is_over {
            return Ok(None);
        }
        turn.over = true;
        self.open(place, gate, || gate.is_open())
    }

    /// None if the process has ended.
    fn open(
        &self,
        place: usize,
        gate: &Gate<'_>,
        open: impl FnOnce() -> anyhow::Result<i32>,
    ) -> anyhow::Result<Option<Opened>> {
        // What is there is told before the gate is open.
        self.timeline.look();
        match open() {
            Ok(pid) => {
                self.timeline.gate_opened(place);
                self.ledger.gates().opened(gate.process);
                let numbers = [pid, processes::own_number(pid).unwrap_or(pid)].map(i32::unsigned_abs);
                let minors = self.taken.minors(place).collect();
                Ok(Some(Opened { numbers, process: gate.process, minors }))
            }
            Err(error) if gate.has_ended() => {
                warn!("a process ended before its GPUs went on: {error:#}");
                self.ended(place, gate);
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    fn ended(&self, place: usize, gate: &Gate<'_>) {
        self.timeline.gone(place);
        self.ledger.gates().opened(gate.process);
        gate.keeps_nothing_away();
    }
}

fn is_late(whole: Instant, why: &str) -> anyhow::Result<()> {
    ensure!(whole.elapsed() < PATIENCE, "a process did not stand still for {PATIENCE:?}: {why}");
    Ok(())
}
