// SPDX-License-Identifier: MIT OR Apache-2.0
//! Who waits for device memory that CPUs have touched: buffers are demanded, and the device put in the placeholders' place as soon as
//! they are there; the rest when all of the process is.

use std::collections::btree_map::{BTreeMap, Entry};
use std::collections::{BTreeSet, VecDeque};
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use rewake_bo_contents::{LoadEvent, LoadHandle};
use tracing::{debug, info};

use super::bar_mappings::BarMappings;
use super::placeholders::{Outcome, Placeholders};
use super::reachability::GpuReach;
use crate::ledger::Ledger;
use crate::record::Timeline;

/// Between two tries of what a process that does not stand still keeps us from, and between two stops of one that does, for it to run;
/// milliseconds.
const AGAIN: u16 = 5;
/// Buffers that become the device in one stop when nobody waits for them. One is 0.2 ms and more, and reading the mappings 2 to 3 us for each
/// that the process has (`docs/performance.md`): with thousands of them the stop is about 20 ms.
const AT_ONCE: usize = 64;
/// For a process to stand still, when all is there or after it last did. It is killed then: its placeholders would be there for ever.
const PATIENCE: Duration = Duration::from_secs(120);

/// What is there: told by the load, asked by those who wait.
#[derive(Debug)]
pub(super) struct ResidencyState {
    /// By process and buffer; without those that no placeholder stands for, and that no GPU waits for more than another.
    buffers: Vec<BTreeMap<usize, AtomicBool>>,
    /// By process.
    whole: Vec<AtomicBool>,
    all: AtomicBool,
    given_up: AtomicBool,
    news: EventFd,
}

impl ResidencyState {
    /// Of so many processes.
    pub(super) fn new(
        processes: usize,
        places: &[Placeholders<'_>],
        sets: &[(usize, &[GpuReach])],
    ) -> anyhow::Result<Self> {
        let mut buffers: Vec<BTreeMap<usize, AtomicBool>> = (0..processes).map(|_| BTreeMap::new()).collect();
        for placeholders in places {
            let none = |buffer| (buffer, AtomicBool::new(false));
            buffers[placeholders.process()] = placeholders.left().map(none).collect();
        }
        for (process, sets) in sets {
            let all = sets.iter().flat_map(|set| &set.buffers);
            buffers[*process].extend(all.map(|buffer| (*buffer, AtomicBool::new(false))));
        }
        Ok(Self {
            buffers,
            whole: (0..processes).map(|_| AtomicBool::new(false)).collect(),
            all: AtomicBool::new(false),
            given_up: AtomicBool::new(false),
            news: EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK).context("eventfd")?,
        })
    }

    /// A buffer is, or a process.
    pub(super) fn tell(&self, whole: LoadEvent) {
        let flag = match whole {
            LoadEvent::Buffer { process, number } => self.buffers[process].get(&number),
            LoadEvent::Process { process } => Some(&self.whole[process]),
        };
        if let Some(flag) = flag {
            flag.store(true, Ordering::Release);
            self.wake();
        }
    }

    /// The load has ended: all are, or it has failed.
    pub(super) fn ended(&self, well: bool) {
        if well { &self.all } else { &self.given_up }.store(true, Ordering::Release);
        self.wake();
    }

    fn wake(&self) {
        // It fails where it would count too far: then there is news anyway.
        let _ = self.news.write(1);
    }

    fn is_whole(&self, process: usize) -> bool {
        self.all.load(Ordering::Acquire) || self.whole[process].load(Ordering::Acquire)
    }

    fn has_all(&self, process: usize, set: &GpuReach) -> bool {
        set.buffers.iter().all(|buffer| self.has(process, *buffer))
    }

    fn has(&self, process: usize, buffer: usize) -> bool {
        self.all.load(Ordering::Acquire)
            || self.buffers[process].get(&buffer).is_some_and(|flag| flag.load(Ordering::Acquire))
    }
}

/// What is there, as GPUs see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReadyEvent {
    /// All that one of the GPUs reaches that go on one by one: which process's, and which set.
    Gpu(usize, usize),
    /// All of a process.
    Process(usize),
}

/// A page that threads of a process wait for: the process, among those loaded, and the address. A thread that is interrupted asks again.
type Touch = (usize, u64);

/// What nobody waited for, of a process.
#[derive(Debug)]
struct SwapProgress {
    /// When the process last stood still, or was whole.
    stood: Instant,
    /// Buffers that have become the device.
    buffers: usize,
    /// How long it stood still for that.
    stopped: Duration,
}

/// All processes' placeholders.
#[derive(Debug)]
pub(super) struct FaultServer<'a> {
    /// Of processes that are whole, the first is next.
    places: VecDeque<Placeholders<'a>>,
    /// By process, when it is whole.
    rest: BTreeMap<usize, SwapProgress>,
    /// Processes that are not whole, or have placeholders.
    left: BTreeSet<usize>,
    /// By process, with their places: GPUs whose sets are not there, or have placeholders.
    sets: Vec<(usize, usize, &'a GpuReach)>,
    /// Hears of those of both that are, and have none.
    done: Sender<ReadyEvent>,
    desk: LoadHandle,
    resident: &'a ResidencyState,
    ledger: Ledger,
    timeline: &'a Timeline,
    views: BarMappings,
    /// Since when.
    waiting: BTreeMap<Touch, Instant>,
    /// Whether a process did not stand still: it is tried again.
    again: bool,
    heard: AccessTrace,
}

/// What CPUs touched.
#[derive(Debug, Default)]
pub(super) struct AccessTrace {
    /// How often they waited.
    pub(super) touches: u64,
    /// For what, by process and buffer: each once, in their order.
    pub(super) order: Vec<(usize, usize)>,
    seen: BTreeSet<(usize, usize)>,
}

impl AccessTrace {
    fn of(&mut self, process: usize, buffer: usize) {
        if self.seen.insert((process, buffer)) {
            self.order.push((process, buffer));
        }
    }
}

impl<'a> FaultServer<'a> {
    pub(super) fn new(
        places: Vec<Placeholders<'a>>,
        desk: LoadHandle,
        resident: &'a ResidencyState,
        sets: &[(usize, &'a [GpuReach])],
        done: Sender<ReadyEvent>,
        ledger: Ledger,
        timeline: &'a Timeline,
    ) -> Self {
        Self {
            places: places.into(),
            rest: BTreeMap::new(),
            left: (0..resident.whole.len()).collect(),
            sets: sets
                .iter()
                .flat_map(|(process, sets)| {
                    sets.iter().enumerate().map(|(place, set)| (*process, place, set))
                })
                .collect(),
            done,
            desk,
            resident,
            ledger,
            timeline,
            views: BarMappings::default(),
            waiting: BTreeMap::new(),
            again: false,
            heard: AccessTrace::default(),
        }
    }

    /// Serves until the device is everywhere; what was touched. Nothing to do where the load fails: whoever is behind
    /// a gate is killed.
    ///
    /// # Errors
    /// A process's placeholders cannot be served, or not replaced.
    pub(super) fn run(mut self) -> anyhow::Result<AccessTrace> {
        self.tell_done();
        while !self.left.is_empty() && !self.resident.given_up.load(Ordering::Acquire) {
            self.wait()?;
            self.hear()?;
            self.serve()?;
            self.finish()?;
            self.tell_done();
        }
        Ok(self.heard)
    }

    fn tell_done(&mut self) {
        let Self { places, left, sets, resident, done, .. } = self;
        left.retain(|process| {
            let is_done = resident.is_whole(*process) && !places.iter().any(|of| of.process() == *process);
            if is_done {
                // Whoever does not hear has failed, and says so.
                let _ = done.send(ReadyEvent::Process(*process));
            }
            !is_done
        });
        sets.retain(|(process, place, set)| {
            if !left.contains(process) {
                return false;
            }
            let of = places.iter().find(|of| of.process() == *process);
            let is_behind = |buffer: usize| set.buffers.contains(&buffer);
            let is_done = resident.has_all(*process, set) && !of.is_some_and(|of| of.left().any(is_behind));
            if is_done {
                let _ = done.send(ReadyEvent::Gpu(*process, *place));
            }
            !is_done
        });
    }

    /// Until something is touched, or there, or to be tried again.
    fn wait(&self) -> anyhow::Result<()> {
        let timeout = match self.places.iter().filter(|of| self.can_finish(of)).count() {
            0 if self.again => AGAIN.into(),
            0 => PollTimeout::NONE,
            // Others run while one stands still.
            whole => (AGAIN / u16::try_from(whole).unwrap_or(u16::MAX)).max(1).into(),
        };
        let mut fds = vec![PollFd::new(self.resident.news.as_fd(), PollFlags::POLLIN)];
        fds.extend(self.places.iter().map(|place| PollFd::new(place.uffd(), PollFlags::POLLIN)));
        match poll(&mut fds, timeout) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno).context("waiting for touches"),
        }
        // Nothing to read is no error.
        let _ = self.resident.news.read();
        Ok(())
    }

    /// Takes what was touched.
    fn hear(&mut self) -> anyhow::Result<()> {
        for placeholders in &mut self.places {
            for address in placeholders.touched()? {
                if let Entry::Vacant(touch) = self.waiting.entry((placeholders.process(), address)) {
                    touch.insert(Instant::now());
                    self.heard.touches += 1;
                }
            }
        }
        Ok(())
    }

    /// Lets go on whoever waits for what is there, and asks for what is not. A process that does not stand still is left alone after one try: it may be waiting for
    /// its own messages to be read.
    fn serve(&mut self) -> anyhow::Result<()> {
        let mut moving = BTreeSet::new();
        for ((process, address), since) in std::mem::take(&mut self.waiting) {
            // When a userfaultfd is closed its waiters look again.
            let of = self.places.iter_mut().find(|of| of.process() == process);
            let Some(placeholders) = of else { continue };
            let Some(touched) = placeholders.at(address)? else {
                // The device is there by now, or nothing is.
                placeholders.wake(address, rewake_uffd::PAGE_SIZE);
                continue;
            };
            self.heard.of(process, touched.buffer);
            let is_there = self.resident.has(process, touched.buffer);
            if !is_there {
                self.desk.demand(process, touched.buffer);
            }
            if !is_there || moving.contains(&process) {
                self.waiting.insert((process, address), since);
                continue;
            }
            match placeholders.swap(&BTreeSet::from([touched.buffer]), &mut self.views)? {
                Outcome::Done { stopped } => {
                    placeholders.wake(address, rewake_uffd::PAGE_SIZE);
                    self.timeline.swapped(process, touched.buffer, stopped);
                }
                Outcome::NotNow(why) => {
                    debug!("a copy for process {}: {why}", placeholders.pid());
                    placeholders.copy(address, touched, &mut self.views)?;
                    moving.insert(process);
                }
                Outcome::Ended => continue,
            }
            let waited = since.elapsed();
            self.timeline.fault(process, touched.buffer, address, waited);
            debug!(
                "process {} touched buffer {} at {address:#x}, and waited {waited:?}",
                placeholders.pid(),
                touched.buffer
            );
        }
        self.again = !moving.is_empty();
        Ok(())
    }

    /// Buffers of a process that is whole, or of a set that is, whose place the device has not taken yet.
    fn unfinished(&self, of: &Placeholders<'_>) -> impl Iterator<Item = usize> {
        let process = of.process();
        let is_whole = self.resident.is_whole(process);
        let there = |(of, _, set): &&(usize, usize, &'a GpuReach)| {
            *of == process && self.resident.has_all(process, set)
        };
        let sets: Vec<&GpuReach> = self.sets.iter().filter(there).map(|(_, _, set)| *set).collect();
        of.left().filter(move |buffer| is_whole || sets.iter().any(|set| set.buffers.contains(buffer)))
    }

    fn can_finish(&self, of: &Placeholders<'_>) -> bool {
        self.resident.is_whole(of.process()) || self.unfinished(of).next().is_some()
    }

    /// Puts the device where it is not yet, in one stop of one process that is whole, or has a GPU whose set is. One that does not stand still
    /// now is tried again.
    fn finish(&mut self) -> anyhow::Result<()> {
        let next = self.places.iter().position(|of| self.can_finish(of));
        let Some(mut placeholders) = next.and_then(|next| self.places.remove(next)) else { return Ok(()) };
        let (process, pid) = (placeholders.process(), placeholders.pid());
        let new = || SwapProgress { stood: Instant::now(), buffers: 0, stopped: Duration::ZERO };
        let is_whole = self.resident.is_whole(process);
        let buffers: BTreeSet<usize> = self.unfinished(&placeholders).take(AT_ONCE).collect();
        let rest = self.rest.entry(process).or_insert_with(new);
        if !buffers.is_empty() {
            match placeholders.swap(&buffers, &mut self.views)? {
                Outcome::Done { stopped } => {
                    rest.stood = Instant::now();
                    rest.buffers += buffers.len();
                    rest.stopped += stopped;
                    let share = stopped / u32::try_from(buffers.len()).unwrap_or(u32::MAX);
                    buffers.iter().for_each(|buffer| self.timeline.swapped(process, *buffer, share));
                }
                // A thread may wait in the kernel for memory of CPUs, which comes from here.
                Outcome::NotNow(_) if !is_whole || self.ledger.serves_spaces() => {
                    rest.stood = Instant::now();
                }
                Outcome::NotNow(why) if rest.stood.elapsed() > PATIENCE => {
                    bail!("process {pid} did not stand still for {PATIENCE:?}: {why}")
                }
                Outcome::NotNow(_) => {}
                Outcome::Ended => {
                    placeholders.close();
                    return Ok(());
                }
            }
        }
        if !is_whole || placeholders.left().next().is_some() {
            self.places.push_back(placeholders);
        } else {
            let SwapProgress { buffers, stopped, .. } = rest;
            info!("process {pid}: {buffers} more mapped buffers are the device's now, {stopped:?}");
            placeholders.close();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsRawFd as _, IntoRawFd as _};
    use std::sync::mpsc::channel;

    use rewake_bo_contents::{BackgroundLoad, Process};

    use super::super::program::{LAST, Program};
    use super::*;
    use crate::ledger::fd_store::FdStore;
    use crate::uffd_child::until;

    /// So many that two stops are not enough.
    const BUFFERS: usize = 2 * AT_ONCE + 1;

    /// Programs that are tried until one stands still at once where it is touched.
    const PROGRAMS: u32 = 10;

    #[test]
    fn what_nobody_waits_for_becomes_the_device_in_several_stops_and_touches_are_heard_between_them() {
        assert!((0..PROGRAMS).any(|_| stood_still_when_it_was_touched()), "none of {PROGRAMS} stands still");
    }

    /// False where its page was copied instead.
    fn stood_still_when_it_was_touched() -> bool {
        let program = Program::start(BUFFERS);
        let (pidfd, handed, timeline) = (program.pidfd(), program.handed(), Timeline::default());
        let renders = program.renders();
        let (store, writer) = FdStore::create().unwrap();
        let store = FdStore::of(store.into_raw_fd(), writer.into_raw_fd()).unwrap();
        let places = vec![handed.watch(0, pidfd.as_raw_fd(), program.buffers(), &renders, &store).unwrap()];
        let resident = ResidencyState::new(1, &places, &[]).unwrap();
        let processes = [Process { files: &[], dmabufs: &[] }];
        let desk = BackgroundLoad::new(&processes, None).unwrap().handle();
        let (done, hears) = channel();
        let mut touches =
            FaultServer::new(places, desk, &resident, &[], done, Ledger::new().unwrap(), &timeline);
        resident.ended(true);

        // One stop, and more where it does not stand still.
        until(|| {
            touches.finish().unwrap();
            program.mappings() != (BUFFERS, 0)
        });
        assert_eq!(program.mappings(), (AT_ONCE + 1, AT_ONCE));

        program.touch();
        let mut message = [PollFd::new(touches.places[0].uffd(), PollFlags::POLLIN)];
        assert_eq!(poll(&mut message, 60_000_u16), Ok(1));
        touches.hear().unwrap();
        touches.serve().unwrap();
        until(|| program.read() == LAST);
        if touches.again {
            return false;
        }
        assert_eq!(program.mappings(), (AT_ONCE, AT_ONCE + 1));

        assert!(hears.try_recv().is_err());
        let heard = touches.run().unwrap();
        assert_eq!((heard.touches, heard.order), (1, vec![(0, BUFFERS - 1)]));
        assert_eq!(program.mappings(), (0, BUFFERS));
        assert_eq!(hears.iter().collect::<Vec<_>>(), [ReadyEvent::Process(0)]);
        let of = &timeline.record().processes[0];
        assert_eq!((of.swaps, of.faults), (BUFFERS as u64, 1));
        assert!(of.stopped_us > 0);
        true
    }
}
