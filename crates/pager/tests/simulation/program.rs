// SPDX-License-Identifier: MIT OR Apache-2.0
//! A restored program: threads that use their memory as a sane program may, and notice every wrong byte.
//!
//! Threads may work while another changes the layout, also fork, but do not use what is being unmapped or
//! moved; what is being discarded they may read, and find it or zeros.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use crate::ADDRESSES;
use crate::kernel::{Message, Mm, Value};
use crate::rng::Rng;

/// One process: the threads of one address space.
#[derive(Debug)]
pub(crate) struct Program {
    /// What each page may hold by the rules of the program's own doings.
    pub(crate) expect: BTreeMap<u64, Vec<Value>>,
    threads: Vec<Thread>,
}

#[derive(Debug)]
struct Thread {
    left: u64,
    doing: Doing,
}

#[derive(Debug)]
enum Doing {
    Nothing,
    Touch { page: u64, write: Option<Value> },
    Change { steps: VecDeque<Step>, busy: Vec<Range<u64>>, discard: bool },
}

#[derive(Debug)]
enum Step {
    Queue(Message),
    /// Until the event was read; then fills may go on.
    Await(u64),
    Zap(Range<u64>),
    /// The child begins to run.
    Start(usize),
}

/// What a step of the program asks of the world.
#[derive(Debug)]
pub(crate) enum Wish {
    Nothing,
    /// Make the forked child.
    Fork,
    Start(usize),
    /// Nobody will hear of this child: its descriptor closes with its parent's.
    Orphan(usize),
}

impl Program {
    pub(crate) fn new(expect: BTreeMap<u64, Vec<Value>>, threads: u64, rng: &mut Rng) -> Self {
        let mut program = Self { expect, threads: Vec::new() };
        program.start(threads, rng);
        program
    }

    /// A forked child that does not run yet.
    pub(crate) fn forked(&self) -> Self {
        Self { expect: self.expect.clone(), threads: Vec::new() }
    }

    pub(crate) fn start(&mut self, threads: u64, rng: &mut Rng) {
        let thread = |_| Thread { left: rng.within(3..25), doing: Doing::Nothing };
        self.threads = (0..threads).map(thread).collect();
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.threads.iter().all(|thread| thread.left == 0 && matches!(thread.doing, Doing::Nothing))
    }

    /// One step of a random thread. `next_child` is the index that a forked child would get, none when there
    /// are enough.
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
        match self.threads[number].doing {
            Doing::Nothing if self.threads[number].left == 0 => Ok(Wish::Nothing),
            Doing::Nothing => {
                self.threads[number].left -= 1;
                Ok(self.begin(number, mm, next_child, rng))
            }
            Doing::Touch { page, write } => self.touch(number, page, write, mm).map(|()| Wish::Nothing),
            Doing::Change { .. } => Ok(self.go_on(number, mm)),
        }
    }

    fn touch(&mut self, number: usize, page: u64, write: Option<Value>, mm: &mut Mm) -> Result<(), String> {
        let Some(value) = mm.access(page, number) else { return Ok(()) };
        let expected = self.expect.get_mut(&page).ok_or("a page vanished")?;
        if !expected.contains(&value) {
            return Err(format!("page {page} holds {value}, one of {expected:?} was expected"));
        }
        *expected = vec![write.unwrap_or(value)];
        if let Some(value) = write {
            mm.store(page, value);
        }
        self.threads[number].doing = Doing::Nothing;
        Ok(())
    }

    fn begin(&mut self, number: usize, mm: &mut Mm, next_child: Option<usize>, rng: &mut Rng) -> Wish {
        let Some((&first, _)) = self.expect.iter().nth(rng.index(self.expect.len().max(1))) else {
            return Wish::Nothing;
        };
        let range = first..self.contiguous_end(first, rng.within(1..24));
        match rng.within(0..16) {
            0..=6 => self.begin_touch(number, first, rng),
            7..=9 if self.may_change(&range, false) => self.begin_remove(number, range, mm),
            10..=11 if self.may_change(&range, true) => self.begin_unmap(number, range, mm),
            12..=14 if self.may_change(&range, true) => self.begin_remap(number, range, mm, rng),
            15 if !self.others_have_to_tell() => return self.begin_fork(number, mm, next_child),
            _ => {}
        }
        Wish::Nothing
    }

    fn begin_touch(&mut self, number: usize, page: u64, rng: &mut Rng) {
        let write = rng.once_in(3).then(|| rng.within(1 << 32..1 << 33));
        let usable = |discard: bool| discard && write.is_none();
        let free = |thread: &Thread| match &thread.doing {
            Doing::Change { busy, discard, .. } => {
                usable(*discard) || !busy.iter().any(|busy| busy.contains(&page))
            }
            // Two threads that write one page would have to agree on the order.
            Doing::Touch { page: other, write: theirs } => *other != page || write.or(*theirs).is_none(),
            Doing::Nothing => true,
        };
        if self.threads.iter().all(free) {
            self.threads[number].doing = Doing::Touch { page, write };
        }
    }

    fn begin_remove(&mut self, number: usize, range: Range<u64>, mm: &mut Mm) {
        for (_, expected) in self.expect.range_mut(range.clone()) {
            expected.push(0);
        }
        let steps = match announce(mm, Message::Remove(range.clone())) {
            Some(Step::Queue(message)) => vec![Step::Await(mm.queue(message)), Step::Zap(range.clone())],
            _ => vec![Step::Zap(range.clone())],
        };
        self.threads[number].doing = Doing::Change { steps: steps.into(), busy: vec![range], discard: true };
    }

    fn begin_unmap(&mut self, number: usize, range: Range<u64>, mm: &mut Mm) {
        mm.take(range.clone());
        self.expect.retain(|page, _| !range.contains(page));
        let steps = announce(mm, Message::Unmap(range.clone())).into_iter().collect();
        self.threads[number].doing = Doing::Change { steps, busy: vec![range], discard: false };
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
            steps.extend(announce(mm, Message::Unmap(to.clone())));
        }
        let keep = rng.once_in(4); // MREMAP_DONTUNMAP
        for (page, content) in mm.take(from.clone()) {
            let expected = self.expect.remove(&page).unwrap_or_default();
            mm.pages.insert(page - from.start + to.start, content);
            self.expect.insert(page - from.start + to.start, expected);
            if keep {
                mm.pages.insert(page, crate::kernel::Page::Missing);
                self.expect.insert(page, vec![0]);
            }
        }
        steps.extend(announce(mm, Message::Remap { from: from.start, to: to.start, len }));
        self.threads[number].doing = Doing::Change { steps, busy: vec![from, to], discard: false };
    }

    fn begin_fork(&mut self, number: usize, mm: &mut Mm, next_child: Option<usize>) -> Wish {
        let Some(child) = next_child else { return Wish::Nothing };
        let told = announce(mm, Message::Fork(child));
        let steps = told.into_iter().chain([Step::Start(child)]).collect();
        self.threads[number].doing = Doing::Change { steps, busy: Vec::new(), discard: false };
        Wish::Fork
    }

    fn go_on(&mut self, number: usize, mm: &mut Mm) -> Wish {
        let Doing::Change { steps, .. } = &mut self.threads[number].doing else { return Wish::Nothing };
        match steps.pop_front() {
            None => self.threads[number].doing = Doing::Nothing,
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
        let free = |thread: &Thread| match &thread.doing {
            Doing::Touch { page, write } => !range.contains(page) || write.is_none() && !also_readers,
            Doing::Change { busy, .. } => !busy.iter().any(|busy| overlap(busy, range)),
            Doing::Nothing => true,
        };
        !self.others_have_to_tell() && self.threads.iter().all(free)
    }

    /// Linux may deliver the events of two threads in another order than their changes were done in, when one
    /// is put off between its change and its event. No handler can tell; the model leaves that out.
    fn others_have_to_tell(&self) -> bool {
        let untold = |thread: &Thread| match &thread.doing {
            Doing::Change { steps, .. } => steps.iter().any(|step| matches!(step, Step::Queue(_))),
            _ => false,
        };
        self.threads.iter().any(untold)
    }
}

fn announce(mm: &mut Mm, message: Message) -> Option<Step> {
    if mm.is_closed() {
        return None;
    }
    mm.begin_change();
    Some(Step::Queue(message))
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}
