// SPDX-License-Identifier: MIT OR Apache-2.0
//! A restored program: threads that use memory as a correct program may, and that notice every wrong byte.
//!
//! Threads may run while another thread changes the layout or forks. They do not use memory that is being
//! unmapped or moved. They may read memory that is being discarded, and find its contents or zeros.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use crate::simulation::ADDRESSES;
use crate::simulation::kernel::{Message, Mm, Value};
use crate::simulation::rng::Rng;

/// One process: the threads of one address space.
#[derive(Debug)]
pub(crate) struct Program {
    /// The values that each page may have by the program's own actions.
    pub(crate) expect: BTreeMap<u64, Vec<Value>>,
    threads: Vec<Thread>,
}

#[derive(Debug)]
struct Thread {
    left: u64,
    activity: Activity,
}

#[derive(Debug)]
enum Activity {
    Nothing,
    Access { page: u64, write: Option<Value> },
    Change { steps: VecDeque<Step>, busy: Vec<Range<u64>>, discard: bool },
}

#[derive(Debug)]
enum Step {
    Queue(Message),
    /// Waits until the event was read; then fills may continue.
    Await(u64),
    Zap(Range<u64>),
    /// The child starts to run.
    Start(usize),
}

/// What a step of the program requests from the world.
#[derive(Debug)]
pub(crate) enum Wish {
    Nothing,
    /// Make the forked child.
    Fork,
    Start(usize),
    /// This child is not served: its descriptor is closed with its parent's.
    Orphan(usize),
}

impl Program {
    pub(crate) fn new(expect: BTreeMap<u64, Vec<Value>>, threads: u64, rng: &mut Rng) -> Self {
        let mut program = Self { expect, threads: Vec::new() };
        program.start(threads, rng);
        program
    }

    /// Makes a forked child that does not run yet.
    pub(crate) fn forked(&self) -> Self {
        Self { expect: self.expect.clone(), threads: Vec::new() }
    }

    pub(crate) fn start(&mut self, threads: u64, rng: &mut Rng) {
        let thread = |_| Thread { left: rng.within(3..25), activity: Activity::Nothing };
        self.threads = (0..threads).map(thread).collect();
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.threads.iter().all(|thread| thread.left == 0 && matches!(thread.activity, Activity::Nothing))
    }

    /// One step of a random thread. `next_child` is the index for a forked child; none when enough exist.
    pub(crate) fn step(
        &mut self,
        mm: &mut Mm,
        next_child: Option<usize>,
        rng: &mut Rng,
    ) -> Result<Wish, String> {
        if self.threads.is_empty() {
            return Ok(Wish::Nothing);
        }
        let number = rng.index(self.threads.len());
        if mm.is_waiting(number) {
            return Ok(Wish::Nothing);
        }
        match self.threads[number].activity {
            Activity::Nothing if self.threads[number].left == 0 => Ok(Wish::Nothing),
            Activity::Nothing => {
                self.threads[number].left -= 1;
                Ok(self.begin(number, mm, next_child, rng))
            }
            Activity::Access { page, write } => self.access(number, page, write, mm).map(|()| Wish::Nothing),
            Activity::Change { .. } => Ok(self.continue_change(number, mm)),
        }
    }

    fn access(&mut self, number: usize, page: u64, write: Option<Value>, mm: &mut Mm) -> Result<(), String> {
        let Some(value) = mm.access(page, number) else { return Ok(()) };
        let expected = self.expect.get_mut(&page).ok_or("a page vanished")?;
        if !expected.contains(&value) {
            return Err(format!("page {page} has {value}, one of {expected:?} was expected"));
        }
        *expected = vec![write.unwrap_or(value)];
        if let Some(value) = write {
            mm.store(page, value);
        }
        self.threads[number].activity = Activity::Nothing;
        Ok(())
    }

    fn begin(&mut self, number: usize, mm: &mut Mm, next_child: Option<usize>, rng: &mut Rng) -> Wish {
        let Some((&first, _)) = self.expect.iter().nth(rng.index(self.expect.len().max(1))) else {
            return Wish::Nothing;
        };
        let range = first..self.contiguous_end(first, rng.within(1..24));
        match rng.within(0..16) {
            0..=6 => self.begin_access(number, first, rng),
            7..=9 if self.may_change(&range, false) => self.begin_remove(number, range, mm),
            10..=11 if self.may_change(&range, true) => self.begin_unmap(number, range, mm),
            12..=14 if self.may_change(&range, true) => self.begin_remap(number, range, mm, rng),
            15 if !self.has_unqueued_events() => return self.begin_fork(number, mm, next_child),
            _ => {}
        }
        Wish::Nothing
    }

    fn begin_access(&mut self, number: usize, page: u64, rng: &mut Rng) {
        let write = rng.once_in(3).then(|| rng.within(1 << 32..1 << 33));
        let usable = |discard: bool| discard && write.is_none();
        let free = |thread: &Thread| match &thread.activity {
            Activity::Change { busy, discard, .. } => {
                usable(*discard) || !busy.iter().any(|busy| busy.contains(&page))
            }
            // Two threads that write one page would have to agree on the order.
            Activity::Access { page: other, write: theirs } => *other != page || write.or(*theirs).is_none(),
            Activity::Nothing => true,
        };
        if self.threads.iter().all(free) {
            self.threads[number].activity = Activity::Access { page, write };
        }
    }

    fn begin_remove(&mut self, number: usize, range: Range<u64>, mm: &mut Mm) {
        for (_, expected) in self.expect.range_mut(range.clone()) {
            expected.push(0);
        }
        let steps = match begin_event(mm, Message::Remove(range.clone())) {
            Some(Step::Queue(message)) => vec![Step::Await(mm.queue(message)), Step::Zap(range.clone())],
            _ => vec![Step::Zap(range.clone())],
        };
        self.threads[number].activity =
            Activity::Change { steps: steps.into(), busy: vec![range], discard: true };
    }

    fn begin_unmap(&mut self, number: usize, range: Range<u64>, mm: &mut Mm) {
        mm.take(range.clone());
        self.expect.retain(|page, _| !range.contains(page));
        let steps = begin_event(mm, Message::Unmap(range.clone())).into_iter().collect();
        self.threads[number].activity = Activity::Change { steps, busy: vec![range], discard: false };
    }

    fn begin_remap(&mut self, number: usize, from: Range<u64>, mm: &mut Mm, rng: &mut Rng) {
        let len = from.end - from.start;
        let start = rng.within(0..ADDRESSES);
        let to = start..start + len;
        if overlap(&from, &to) || !self.may_change(&to, true) {
            return;
        }
        let mut steps = VecDeque::new();
        if !mm.take(to.clone()).is_empty() {
            self.expect.retain(|page, _| !to.contains(page));
            steps.extend(begin_event(mm, Message::Unmap(to.clone())));
        }
        let keep = rng.once_in(4); // MREMAP_DONTUNMAP
        for (page, content) in mm.take(from.clone()) {
            let expected = self.expect.remove(&page).unwrap_or_default();
            mm.pages.insert(page - from.start + to.start, content);
            self.expect.insert(page - from.start + to.start, expected);
            if keep {
                mm.pages.insert(page, crate::simulation::kernel::Page::Missing);
                self.expect.insert(page, vec![0]);
            }
        }
        steps.extend(begin_event(mm, Message::Remap { from: from.start, to: to.start, len }));
        self.threads[number].activity = Activity::Change { steps, busy: vec![from, to], discard: false };
    }

    fn begin_fork(&mut self, number: usize, mm: &mut Mm, next_child: Option<usize>) -> Wish {
        let Some(child) = next_child else { return Wish::Nothing };
        let event = begin_event(mm, Message::Fork(child));
        let steps = event.into_iter().chain([Step::Start(child)]).collect();
        self.threads[number].activity = Activity::Change { steps, busy: Vec::new(), discard: false };
        Wish::Fork
    }

    fn continue_change(&mut self, number: usize, mm: &mut Mm) -> Wish {
        let Activity::Change { steps, .. } = &mut self.threads[number].activity else { return Wish::Nothing };
        match steps.pop_front() {
            None => self.threads[number].activity = Activity::Nothing,
            Some(Step::Queue(message)) if mm.is_closed() => {
                mm.end_change();
                if let Message::Fork(child) = message {
                    return Wish::Orphan(child);
                }
            }
            Some(Step::Queue(message)) => steps.push_front(Step::Await(mm.queue(message))),
            Some(Step::Await(ticket)) if mm.was_read(ticket) => mm.end_change(),
            Some(step @ Step::Await(_)) => steps.push_front(step),
            Some(Step::Zap(range)) => {
                mm.zap(range.clone());
                self.expect.range_mut(range).for_each(|(_, expected)| *expected = vec![0]);
            }
            Some(Step::Start(child)) => return Wish::Start(child),
        }
        Wish::Nothing
    }

    fn contiguous_end(&self, first: u64, most: u64) -> u64 {
        (first..first + most).find(|page| !self.expect.contains_key(page)).unwrap_or(first + most)
    }

    fn may_change(&self, range: &Range<u64>, also_readers: bool) -> bool {
        let free = |thread: &Thread| match &thread.activity {
            Activity::Access { page, write } => !range.contains(page) || write.is_none() && !also_readers,
            Activity::Change { busy, .. } => !busy.iter().any(|busy| overlap(busy, range)),
            Activity::Nothing => true,
        };
        !self.has_unqueued_events() && self.threads.iter().all(free)
    }

    /// Linux may deliver the events of two threads in another order than their changes were made: a thread
    /// may be preempted between its change and its event. No handler can know that, so the model leaves it
    /// out.
    fn has_unqueued_events(&self) -> bool {
        let is_unqueued = |thread: &Thread| match &thread.activity {
            Activity::Change { steps, .. } => steps.iter().any(|step| matches!(step, Step::Queue(_))),
            _ => false,
        };
        self.threads.iter().any(is_unqueued)
    }
}

fn begin_event(mm: &mut Mm, message: Message) -> Option<Step> {
    if mm.is_closed() {
        return None;
    }
    mm.begin_change();
    Some(Step::Queue(message))
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}
