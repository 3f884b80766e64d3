// SPDX-License-Identifier: MIT OR Apache-2.0
//! A streamer that keeps the rules: an event reader for each address space, fill workers, demand loads, and a
//! journal that survives a crash.

use std::collections::VecDeque;
use std::sync::Arc;

use rewake_pager::{
    BLOCK_PAGES, BlockIx, Change, Finish, Locate, PAGE_SIZE, PageIx, Place, Plan, ResidencyMap, Run, Segment,
};

use crate::simulation::image_value;
use crate::simulation::kernel::{Message, Mm, Stop, Value};
use crate::simulation::rng::Rng;

/// What a successor of a crashed streamer finds.
#[derive(Debug, Default)]
struct Journal {
    snapshot: Option<Vec<Segment>>,
    changes: Vec<Change>,
    /// Messages that were read from the kernel and not applied.
    pending: VecDeque<Message>,
}

/// One address space that is served.
#[derive(Debug)]
struct Served {
    map: ResidencyMap,
    journal: Journal,
    /// The layout lock.
    shared: usize,
    exclusive: bool,
}

#[derive(Debug)]
enum Worker {
    Idle,
    Reading {
        mm: usize,
        block: BlockIx,
        left: u64,
    },
    Ready {
        mm: usize,
        block: BlockIx,
        from: PageIx,
    },
    /// Addresses were looked up; the lock is held.
    Filling {
        mm: usize,
        block: BlockIx,
        runs: VecDeque<Run>,
        next: Option<PageIx>,
    },
}

#[derive(Debug)]
struct Demand {
    mm: usize,
    page: u64,
    state: Serving,
}

#[derive(Debug)]
enum Serving {
    Lookup {
        have: Option<Place>,
    },
    /// The address was looked up; the lock is held.
    Fill {
        place: Option<Place>,
    },
}

/// The streamer.
#[derive(Debug)]
pub(crate) struct Handler {
    plan: Arc<Plan>,
    /// By address space; none while it is not served.
    served: Vec<Option<Served>>,
    workers: Vec<Worker>,
    demands: Vec<Demand>,
    /// The address space of the last step.
    last_mm: Option<usize>,
    /// False in the canary: it looks up and fills without the layout lock.
    pub(crate) locking: bool,
    /// One read in this number fails. If it is zero, no read fails.
    pub(crate) failures: u64,
    /// A source failed: the session is over.
    pub(crate) failed: bool,
}

impl Served {
    fn new(map: ResidencyMap, snapshot: Option<Vec<Segment>>) -> Self {
        let journal = Journal { snapshot, ..Journal::default() };
        Self { map, journal, shared: 0, exclusive: false }
    }
}

impl Handler {
    pub(crate) fn new(plan: Plan, workers: usize) -> Self {
        let plan = Arc::new(plan);
        let first = Served::new(ResidencyMap::new(Arc::clone(&plan)), None);
        let workers = (0..workers).map(|_| Worker::Idle).collect();
        let (locking, failures, failed) = (true, 0, false);
        let (served, demands, last_mm) = (vec![Some(first)], Vec::new(), None);
        Self { plan, served, workers, demands, last_mm, locking, failures, failed }
    }

    /// Returns true when every address space was released, with no missing page.
    pub(crate) fn has_finished(&self) -> bool {
        self.served.iter().all(Option::is_none)
    }

    /// Checks the invariants of the address space of the last step.
    pub(crate) fn check(&mut self) -> Result<(), String> {
        match self.last_mm.take() {
            Some(mm) => {
                self.served.get(mm).and_then(Option::as_ref).map_or(Ok(()), |served| served.map.check())
            }
            None => Ok(()),
        }
    }

    /// One step of the event reader of `mm`: it takes the lock and reads, or applies one message.
    pub(crate) fn read_events(&mut self, mm: usize, kernel: &mut [Mm], rng: &mut Rng) {
        let locking = self.locking;
        self.last_mm = Some(mm);
        let Some(served) = self.served.get_mut(mm).and_then(Option::as_mut) else { return };
        if !served.exclusive {
            if kernel[mm].has_messages() && (served.shared == 0 || !locking) {
                served.exclusive = true;
                let most = rng.index(4) + 1;
                served.journal.pending.extend((0..most).map_while(|_| kernel[mm].read()));
            }
            return;
        }
        match served.journal.pending.pop_front() {
            None => served.exclusive = false,
            Some(Message::Fault(page)) => {
                self.demands.push(Demand { mm, page, state: Serving::Lookup { have: None } });
            }
            Some(Message::Fork(child)) => {
                let map = served.map.fork();
                let snapshot = Some(map.snapshot());
                let len = self.served.len().max(child + 1);
                self.served.resize_with(len, || None);
                self.served[child] = Some(Served::new(map, snapshot));
            }
            Some(message) => served.change(&to_change(&message), rng),
        }
    }

    /// Releases `mm` when no page of it is missing. Returns children that are not served.
    pub(crate) fn retire(&mut self, mm: usize, kernel: &mut [Mm]) -> Vec<usize> {
        let Some(Some(served)) = self.served.get(mm) else { return Vec::new() };
        if served.exclusive || !served.journal.pending.is_empty() || !served.map.background_done() {
            return Vec::new();
        }
        self.served[mm] = None;
        self.demands.retain(|demand| demand.mm != mm);
        kernel[mm].close()
    }

    /// Kills the streamer between two instructions; a successor takes over from the journals.
    pub(crate) fn crash(&mut self, kernel: &mut [Mm]) {
        self.workers.iter_mut().for_each(|worker| *worker = Worker::Idle);
        self.demands.clear();
        for (mm, served) in self.served.iter_mut().enumerate() {
            let Some(served) = served else { continue };
            served.map = served.journal.replay(&self.plan);
            served.shared = 0;
            // The successor applies messages that were read before it fills anything.
            served.exclusive = !served.journal.pending.is_empty();
            kernel[mm].wake_all();
        }
    }

    /// One step of a fill worker.
    pub(crate) fn work(&mut self, number: usize, kernel: &mut [Mm], rng: &mut Rng) {
        let worker = std::mem::replace(&mut self.workers[number], Worker::Idle);
        let mm = match worker {
            Worker::Idle => rng.index(self.served.len()),
            Worker::Reading { mm, .. } | Worker::Ready { mm, .. } | Worker::Filling { mm, .. } => mm,
        };
        self.last_mm = Some(mm);
        let Some(served) = self.served.get_mut(mm).and_then(Option::as_mut) else { return };
        self.workers[number] = match worker {
            Worker::Idle => match served.map.claim() {
                Some(block) => Worker::Reading { mm, block, left: rng.within(0..6) },
                None => Worker::Idle,
            },
            Worker::Reading { left: 0, .. } if self.failures > 0 && rng.once_in(self.failures) => {
                self.failed = true;
                Worker::Idle
            }
            // Now and then no buffer is free.
            Worker::Reading { block, left: 0, .. } if rng.once_in(12) => {
                served.map.release(block, Finish::Retry);
                Worker::Idle
            }
            Worker::Reading { block, left: 0, .. } => Worker::Ready { mm, block, from: PageIx(0) },
            Worker::Reading { block, left, .. } => Worker::Reading { mm, block, left: left - 1 },
            Worker::Ready { block, from, .. } if served.exclusive && self.locking => {
                Worker::Ready { mm, block, from }
            }
            Worker::Ready { block, from, .. } => {
                served.shared += 1;
                let mut runs = Vec::new();
                let next = served.map.runs(block, from, rng.within(1..9), &mut runs);
                Worker::Filling { mm, block, runs: runs.into(), next }
            }
            Worker::Filling { block, runs, next, .. } => {
                served.fill_next(mm, block, runs, next, &mut kernel[mm])
            }
        };
    }

    /// One step of a random demand.
    pub(crate) fn serve(&mut self, kernel: &mut [Mm], rng: &mut Rng) {
        if self.demands.is_empty() {
            return;
        }
        let number = rng.index(self.demands.len());
        let demand = &mut self.demands[number];
        let (mm, page) = (demand.mm, demand.page);
        self.last_mm = Some(mm);
        let Some(served) = self.served.get_mut(mm).and_then(Option::as_mut) else { return };
        match demand.state {
            Serving::Lookup { .. } if served.exclusive && self.locking => {}
            Serving::Lookup { have } => {
                let place = match served.map.locate(page * PAGE_SIZE) {
                    Locate::Missing(place) | Locate::Resident(place) => Some(place),
                    Locate::Unbacked => None,
                };
                if place == have || place.is_none() {
                    served.shared += 1;
                    demand.state = Serving::Fill { place };
                    return;
                }
                // The page alone is read without the lock; then it is looked up again.
                place.into_iter().for_each(|place| served.map.promote(place.block));
                self.failed |= self.failures > 0 && rng.once_in(self.failures);
                demand.state = Serving::Lookup { have: place };
            }
            Serving::Fill { place } => {
                served.shared -= 1;
                if served.fill_demand(page, place, &mut kernel[mm]) {
                    self.demands.swap_remove(number);
                } else {
                    demand.state = Serving::Lookup { have: None };
                }
            }
        }
    }
}

impl Served {
    fn change(&mut self, change: &Change, rng: &mut Rng) {
        self.map.apply(change).unwrap();
        self.journal.changes.push(*change);
        if rng.once_in(6) {
            self.journal.snapshot = Some(self.map.snapshot());
            self.journal.changes.clear();
        }
    }

    fn fill_next(
        &mut self,
        mm: usize,
        block: BlockIx,
        mut runs: VecDeque<Run>,
        next: Option<PageIx>,
        kernel: &mut Mm,
    ) -> Worker {
        let Some(mut run) = runs.pop_front() else {
            self.shared -= 1;
            let Some(from) = next else {
                self.map.release(block, Finish::Done);
                return Worker::Idle;
            };
            return Worker::Ready { mm, block, from };
        };
        let place = self.map.plan().block(block);
        let offset = place.index * BLOCK_PAGES + run.block_offset as u64 / PAGE_SIZE;
        let values: Vec<Value> =
            (offset..offset + run.pages).map(|page| image_value(place.file, page)).collect();
        let (mut done, stop) = kernel.fill(run.target / PAGE_SIZE, &values);
        match stop {
            Some(Stop::Changing) => {
                self.shared -= 1;
                return Worker::Ready { mm, block, from: run.page };
            }
            Some(Stop::Present) => {
                kernel.wake(run.target / PAGE_SIZE + done);
                done += 1;
            }
            Some(Stop::NotMapped) => done += 1,
            None => {}
        }
        self.map.set_resident(run.page, done);
        if done < run.pages {
            let bytes = usize::try_from(done * PAGE_SIZE).unwrap();
            run = Run {
                target: run.target + done * PAGE_SIZE,
                page: PageIx(run.page.0 + done),
                pages: run.pages - done,
                block_offset: run.block_offset + bytes,
            };
            runs.push_front(run);
        }
        Worker::Filling { mm, block, runs, next }
    }

    /// Returns true when the faulting thread is woken.
    fn fill_demand(&self, page: u64, place: Option<Place>, kernel: &mut Mm) -> bool {
        let value = place.map_or(0, |place| image_value(place.file, place.file_offset / PAGE_SIZE));
        let (done, stop) = kernel.fill(page, &[value]);
        if stop == Some(Stop::Changing) {
            return false;
        }
        kernel.wake(page);
        if done == 1 || stop == Some(Stop::Present) {
            let _ = place.map(|place| self.map.set_resident(place.page, 1));
        }
        true
    }
}

impl Journal {
    fn replay(&self, plan: &Arc<Plan>) -> ResidencyMap {
        let plan = Arc::clone(plan);
        let mut map = match &self.snapshot {
            Some(segments) => ResidencyMap::restore(plan, segments).unwrap(),
            None => ResidencyMap::new(plan),
        };
        self.changes.iter().for_each(|change| map.apply(change).unwrap());
        map
    }
}

fn to_change(message: &Message) -> Change {
    let bytes = |pages: u64| pages * PAGE_SIZE;
    match message {
        Message::Remove(range) => Change::Remove { start: bytes(range.start), end: bytes(range.end) },
        Message::Unmap(range) => Change::Unmap { start: bytes(range.start), end: bytes(range.end) },
        Message::Remap { from, to, len } => {
            Change::Remap { from: bytes(*from), to: bytes(*to), len: bytes(*len) }
        }
        Message::Fault(_) | Message::Fork(_) => unreachable!("not a change"),
    }
}
