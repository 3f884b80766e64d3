// SPDX-License-Identifier: MIT OR Apache-2.0
//! Serves page faults of CPUs in missing GPU memory. It demands the buffers, and swaps their placeholders
//! for the mappings of the buffers as soon as these are resident.

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

/// The time between two tries with a process that does not stop, and between two stops of one that does, so
/// that it can run; in milliseconds.
const RETRY_MS: u16 = 5;
/// The number of buffers that one stop swaps when no thread waits for them. One buffer takes 0.2 ms and
/// more; reading the mappings takes 2 to 3 us for each mapping of the process (`docs/performance.md`). With
/// thousands of them the stop takes about 20 ms.
const BUFFERS_PER_STOP: usize = 64;
/// How long a process may refuse to stop, after all is resident or after its last stop. It is killed then:
/// its placeholders would stay for ever.
const PATIENCE: Duration = Duration::from_secs(120);

/// What is resident: the load writes it, the fault server reads it.
#[derive(Debug)]
pub(super) struct ResidencyState {
    /// One flag for each process and buffer, without buffers that have no placeholder and that all GPUs of
    /// the process wait for alike.
    buffers: Vec<BTreeMap<usize, AtomicBool>>,
    /// By process.
    whole: Vec<AtomicBool>,
    all: AtomicBool,
    given_up: AtomicBool,
    news: EventFd,
}

impl ResidencyState {
    /// Builds the state of `processes` processes; nothing is resident.
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

    /// Marks a buffer or a whole process as resident.
    pub(super) fn mark_resident(&self, whole: LoadEvent) {
        let flag = match whole {
            LoadEvent::Buffer { process, number } => self.buffers[process].get(&number),
            LoadEvent::Process { process } => Some(&self.whole[process]),
        };
        if let Some(flag) = flag {
            flag.store(true, Ordering::Release);
            self.wake();
        }
    }

    /// Records that the load has ended: everything is resident, or the load has failed.
    pub(super) fn ended(&self, well: bool) {
        if well { &self.all } else { &self.given_up }.store(true, Ordering::Release);
        self.wake();
    }

    fn wake(&self) {
        // A write fails only where the counter would overflow: the reader is woken then anyway.
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

/// A set of memory that has become resident and without placeholders.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReadyEvent {
    /// Everything that one GPU reaches whose process resumes GPUs one by one: the process, and the index of
    /// the GPU's reach.
    Gpu(usize, usize),
    /// All memory of a process.
    Process(usize),
}

/// A page that threads of a process wait for: the process's index, and the address. An interrupted thread
/// faults again.
type FaultingPage = (usize, u64);

/// The progress of swaps that no thread waited for, of one process.
#[derive(Debug)]
struct SwapProgress {
    /// When the process last stopped, or when all of it became resident.
    stood: Instant,
    /// The number of buffers that were swapped.
    buffers: usize,
    /// How long the process was stopped for that.
    stopped: Duration,
}

/// Serves the page faults in all processes' placeholders.
#[derive(Debug)]
pub(super) struct FaultServer<'a> {
    /// The placeholders by process; of resident processes the first is swapped next.
    places: VecDeque<Placeholders<'a>>,
    /// The swaps of each process that is resident.
    rest: BTreeMap<usize, SwapProgress>,
    /// The processes that are not resident, or have placeholders.
    left: BTreeSet<usize>,
    /// The GPUs whose reach is not resident or has placeholders: the process, the index, and the reach.
    sets: Vec<(usize, usize, &'a GpuReach)>,
    /// Receives an event for each process and reach that is resident without placeholders.
    done: Sender<ReadyEvent>,
    handle: LoadHandle,
    resident: &'a ResidencyState,
    ledger: Ledger,
    timeline: &'a Timeline,
    bar_mappings: BarMappings,
    /// The pages that threads wait for, and since when.
    waiting: BTreeMap<FaultingPage, Instant>,
    /// Whether a process did not stop, so that it must be tried again.
    retry: bool,
    trace: AccessTrace,
}

/// The buffers that CPUs accessed while they were missing.
#[derive(Debug, Default)]
pub(super) struct AccessTrace {
    /// The number of page faults.
    pub(super) faults: u64,
    /// The buffers, by process and number, each once, in the order of their first page faults.
    pub(super) buffers: Vec<(usize, usize)>,
    seen: BTreeSet<(usize, usize)>,
}

impl AccessTrace {
    fn of(&mut self, process: usize, buffer: usize) {
        if self.seen.insert((process, buffer)) {
            self.buffers.push((process, buffer));
        }
    }
}

impl<'a> FaultServer<'a> {
    pub(super) fn new(
        places: Vec<Placeholders<'a>>,
        handle: LoadHandle,
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
            handle,
            resident,
            ledger,
            timeline,
            bar_mappings: BarMappings::default(),
            waiting: BTreeMap::new(),
            retry: false,
            trace: AccessTrace::default(),
        }
    }

    /// Serves page faults until no placeholder is left, and returns the access trace. Returns early where
    /// the load fails: the processes with closed gates are killed then.
    ///
    /// # Errors
    /// A process's placeholders cannot be served, or not replaced.
    pub(super) fn run(mut self) -> anyhow::Result<AccessTrace> {
        self.send_ready();
        while !self.left.is_empty() && !self.resident.given_up.load(Ordering::Acquire) {
            self.wait()?;
            self.receive()?;
            self.serve()?;
            self.finish()?;
            self.send_ready();
        }
        Ok(self.trace)
    }

    fn send_ready(&mut self) {
        let Self { places, left, sets, resident, done, .. } = self;
        left.retain(|process| {
            let is_done = resident.is_whole(*process) && !places.iter().any(|of| of.process() == *process);
            if is_done {
                // A receiver that is gone has failed, and reports that itself.
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

    /// Waits for a page fault, for memory that becomes resident, or for the next try.
    fn wait(&self) -> anyhow::Result<()> {
        let timeout = match self.places.iter().filter(|of| self.can_finish(of)).count() {
            0 if self.retry => RETRY_MS.into(),
            0 => PollTimeout::NONE,
            // Processes take turns: others run while one is stopped.
            whole => (RETRY_MS / u16::try_from(whole).unwrap_or(u16::MAX)).max(1).into(),
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

    /// Reads the page faults of all processes.
    fn receive(&mut self) -> anyhow::Result<()> {
        for placeholders in &mut self.places {
            for address in placeholders.touched()? {
                if let Entry::Vacant(touch) = self.waiting.entry((placeholders.process(), address)) {
                    touch.insert(Instant::now());
                    self.trace.faults += 1;
                }
            }
        }
        Ok(())
    }

    /// Wakes the threads whose buffers are resident, and demands the others. A process that does not stop
    /// gets one try in each pass: it may be waiting for its own messages to be read.
    fn serve(&mut self) -> anyhow::Result<()> {
        let mut unstopped = BTreeSet::new();
        for ((process, address), since) in std::mem::take(&mut self.waiting) {
            // The kernel wakes the waiters of a closed userfaultfd, and they fault again.
            let of = self.places.iter_mut().find(|of| of.process() == process);
            let Some(placeholders) = of else { continue };
            let Some(touched) = placeholders.at(address)? else {
                // The buffer was swapped meanwhile, or nothing is mapped.
                placeholders.wake(address, rewake_uffd::PAGE_SIZE);
                continue;
            };
            self.trace.of(process, touched.buffer);
            let is_there = self.resident.has(process, touched.buffer);
            if !is_there {
                self.handle.demand(process, touched.buffer);
            }
            if !is_there || unstopped.contains(&process) {
                self.waiting.insert((process, address), since);
                continue;
            }
            match placeholders.swap(&BTreeSet::from([touched.buffer]), &mut self.bar_mappings)? {
                Outcome::Done { stopped } => {
                    placeholders.wake(address, rewake_uffd::PAGE_SIZE);
                    self.timeline.swapped(process, touched.buffer, stopped);
                }
                Outcome::NotNow(why) => {
                    debug!("a copy for process {}: {why}", placeholders.pid());
                    placeholders.copy(address, touched, &mut self.bar_mappings)?;
                    unstopped.insert(process);
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
        self.retry = !unstopped.is_empty();
        Ok(())
    }

    /// Returns the resident buffers of a process that still have placeholders: all, if the process is
    /// resident, or those of each resident reach.
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

    /// Swaps placeholders in one stop of one process that is resident, or that has a GPU whose reach is. A
    /// process that does not stop now is tried again.
    fn finish(&mut self) -> anyhow::Result<()> {
        let next = self.places.iter().position(|of| self.can_finish(of));
        let Some(mut placeholders) = next.and_then(|next| self.places.remove(next)) else { return Ok(()) };
        let (process, pid) = (placeholders.process(), placeholders.pid());
        let new = || SwapProgress { stood: Instant::now(), buffers: 0, stopped: Duration::ZERO };
        let is_whole = self.resident.is_whole(process);
        let buffers: BTreeSet<usize> = self.unfinished(&placeholders).take(BUFFERS_PER_STOP).collect();
        let rest = self.rest.entry(process).or_insert_with(new);
        if !buffers.is_empty() {
            match placeholders.swap(&buffers, &mut self.bar_mappings)? {
                Outcome::Done { stopped } => {
                    rest.stood = Instant::now();
                    rest.buffers += buffers.len();
                    rest.stopped += stopped;
                    let share = stopped / u32::try_from(buffers.len()).unwrap_or(u32::MAX);
                    buffers.iter().for_each(|buffer| self.timeline.swapped(process, *buffer, share));
                }
                // A thread may wait in the kernel for CPU memory, which this streamer loads.
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

    /// More than two stops can swap.
    const BUFFERS: usize = 2 * BUFFERS_PER_STOP + 1;

    /// The number of programs to try until one stops at once where it faults.
    const PROGRAMS: u32 = 10;

    #[test]
    fn what_nobody_waits_for_becomes_the_device_in_several_stops_and_touches_are_heard_between_them() {
        assert!((0..PROGRAMS).any(|_| stood_still_when_it_was_touched()), "none of {PROGRAMS} stands still");
    }

    /// Returns false where the page was copied instead.
    fn stood_still_when_it_was_touched() -> bool {
        let program = Program::start(BUFFERS);
        let (pidfd, handed, timeline) = (program.pidfd(), program.handed(), Timeline::default());
        let renders = program.renders();
        let (store, writer) = FdStore::create().unwrap();
        let store = FdStore::of(store.into_raw_fd(), writer.into_raw_fd()).unwrap();
        let places = vec![handed.watch(0, pidfd.as_raw_fd(), program.buffers(), &renders, &store).unwrap()];
        let resident = ResidencyState::new(1, &places, &[]).unwrap();
        let processes = [Process { files: &[], dmabufs: &[] }];
        let handle = BackgroundLoad::new(&processes, None).unwrap().handle();
        let (done, hears) = channel();
        let mut touches =
            FaultServer::new(places, handle, &resident, &[], done, Ledger::new().unwrap(), &timeline);
        resident.ended(true);

        // One stop, and further tries where the program does not stop.
        until(|| {
            touches.finish().unwrap();
            program.mappings() != (BUFFERS, 0)
        });
        assert_eq!(program.mappings(), (BUFFERS_PER_STOP + 1, BUFFERS_PER_STOP));

        program.touch();
        let mut message = [PollFd::new(touches.places[0].uffd(), PollFlags::POLLIN)];
        assert_eq!(poll(&mut message, 60_000_u16), Ok(1));
        touches.receive().unwrap();
        touches.serve().unwrap();
        until(|| program.read() == LAST);
        if touches.retry {
            return false;
        }
        assert_eq!(program.mappings(), (BUFFERS_PER_STOP, BUFFERS_PER_STOP + 1));

        assert!(hears.try_recv().is_err());
        let trace = touches.run().unwrap();
        assert_eq!((trace.faults, trace.buffers), (1, vec![(0, BUFFERS - 1)]));
        assert_eq!(program.mappings(), (0, BUFFERS));
        assert_eq!(hears.iter().collect::<Vec<_>>(), [ReadyEvent::Process(0)]);
        let of = &timeline.record().processes[0];
        assert_eq!((of.swaps, of.faults), (BUFFERS as u64, 1));
        assert!(of.stopped_us > 0);
        true
    }
}
