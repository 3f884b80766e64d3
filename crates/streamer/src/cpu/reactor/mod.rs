// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs the loop of a reactor thread: events and completions first, then one bounded piece of background
//! work.

mod absent;
mod background;
mod demand;

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use absent::{AbsentBlock, AbsentPage};
use anyhow::Context as _;
use background::{BlockRead, Claim, Pace, StepOutcome, Work};
use demand::{DEMAND_TOKEN, Demand, WINDOW_BUFFER};
use memmap2::{Advice, MmapMut};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use rewake_image_io::io_budget::Lane;
use rewake_image_io::{BLOCK, BufferSlice, Completion, Engine};
use rewake_pager::Run;
use rewake_process::Notifier;
use rewake_process::wake_socket::WakeSocket;
use slab::Slab;
use tracing::{debug, error, info, warn};

use super::events::{EventBatch, UffdReader};
use super::shared::{ReactorRequest, Shared};
use super::space::AddressSpace;
use crate::ledger::wants_room;
use crate::session::Session;
use crate::sys;

/// Longest sleep of an idle reactor. It bounds the harm if a bug in Rewake loses a wake-up.
const IDLE_INTERVAL: Duration = Duration::from_secs(1);
/// Sleep between two tries while a program changes its layout.
const STALL_INTERVAL: Duration = Duration::from_millis(1);
/// Tries without a sleep before the first [`STALL_INTERVAL`].
const SPINS: u32 = 64;
/// Sleep of a reactor that leaves the disk to demand loads.
const YIELD_INTERVAL: Duration = Duration::from_millis(1);
/// Descriptors that one wait can report. The next wait reports the others.
const EVENTS: usize = 64;

/// The addresses that mappings can have: from the default `vm.mmap_min_addr` to the end of user space on
/// x86_64 with four-level page tables. The kernel refuses to wake threads outside it.
const LOWEST_ADDRESS: u64 = 0x1_0000;
const HIGHEST_ADDRESS: u64 = 0x7fff_ffff_f000;

const WAKER: u64 = 0;
const ENGINE: u64 = 1;
const ARRIVED: u64 = 2;
const FIRST_HOME: u64 = 3;

/// The state of one reactor thread. The work itself is in `demand`, `background`, `events` and `abort`.
pub(super) struct Reactor {
    index: usize,
    shared: Arc<Shared>,
    engine: Engine<BufferSlice>,
    waker: Notifier,
    arrived: WakeSocket,
    epoll: Epoll,
    homes: Slab<UffdReader>,
    /// Address spaces of all reactors, as of `version`.
    spaces: Vec<Arc<AddressSpace>>,
    version: usize,
    turn: usize,
    demands: Slab<Demand>,
    deferred: Vec<Demand>,
    /// Page faults whose block some reactor is reading.
    blocked: Vec<Demand>,
    /// Page faults whose pages have not arrived from a page server.
    absent_pages: Vec<AbsentPage>,
    loads: Slab<BlockRead>,
    waiting: Vec<Claim>,
    /// Claimed blocks that have not arrived from a page server.
    absent_blocks: Vec<AbsentBlock>,
    ready: std::collections::VecDeque<Work>,
    /// The block that is being filled.
    current: Option<Work>,
    pace: Pace,
    runs: Vec<Run>,
    /// The bytes of a sweep's window, or of a page and its block.
    window: MmapMut,
    /// The bytes of a background block that the page cache has.
    block: MmapMut,
    /// Turns in a row in which every fill was refused because a program is changing its layout.
    spins: u32,
    idle: bool,
    /// Whether background reads wait because demand loads use the disk.
    held_back: bool,
    engine_ready: bool,
    /// Whether the last block was not in the page cache.
    cold: bool,
    /// Whether the last block was one of a cache file.
    is_fetched: bool,
    /// Whether an address space could not be ended yet.
    unended: bool,
    /// The session, if its fd store still has retired address spaces.
    unforgotten: Option<Arc<Session>>,
    /// Whether events of some address space wait for room.
    crowded: bool,
    done: Vec<Completion<BufferSlice>>,
}

pub(super) fn run(index: usize, shared: Arc<Shared>) {
    match Reactor::new(index, shared) {
        Ok(mut reactor) => loop {
            reactor.turn();
        },
        Err(error) => {
            // A worker without its reactors cannot serve its sessions: the supervisor starts another.
            error!("reactor {index}: {error:#}");
            std::process::abort();
        }
    }
}

impl Reactor {
    fn new(index: usize, shared: Arc<Shared>) -> anyhow::Result<Self> {
        if let Err(error) = rewake_process::time_slice::short_time_slice() {
            debug!(%error, "no short time slice");
        }
        let budget = (Arc::clone(&shared.budget), Lane::Cpus);
        let engine = Engine::new(Some(budget))?;
        if let Some(note) = engine.note().filter(|_| index == 0) {
            info!("{note}");
        }
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).context("making an epoll")?;
        let handle = shared.handles.get(index).context("no handle for this reactor")?;
        let (waker, arrived) = (handle.waker.clone(), handle.arrived.clone());
        let [window, block] = [WINDOW_BUFFER, BLOCK].map(|bytes| -> anyhow::Result<MmapMut> {
            let buffer = MmapMut::map_anon(bytes).context("mapping a buffer")?;
            // A core dump of this process must not have memory of other processes.
            buffer.advise(Advice::DontDump).context("excluding memory from core dumps")?;
            Ok(buffer)
        });
        let (window, block) = (window?, block?);
        let reactor = Self {
            index,
            shared,
            engine,
            waker,
            arrived,
            epoll,
            homes: Slab::new(),
            spaces: Vec::new(),
            version: 0,
            turn: 0,
            demands: Slab::new(),
            deferred: Vec::new(),
            blocked: Vec::new(),
            absent_pages: Vec::new(),
            loads: Slab::new(),
            waiting: Vec::new(),
            absent_blocks: Vec::new(),
            ready: std::collections::VecDeque::new(),
            current: None,
            pace: Pace::default(),
            runs: Vec::new(),
            window,
            block,
            spins: 0,
            idle: false,
            held_back: false,
            engine_ready: false,
            cold: false,
            is_fetched: false,
            unended: false,
            unforgotten: None,
            crowded: false,
            done: Vec::new(),
        };
        reactor.watch(reactor.waker.as_fd(), WAKER)?;
        reactor.watch(reactor.arrived.as_fd(), ARRIVED)?;
        if let Some(event) = reactor.engine.event() {
            reactor.watch(event, ENGINE)?;
        }
        Ok(reactor)
    }

    fn turn(&mut self) {
        self.wait();
        self.reap();
        let deferred = self.retry_deferred();
        self.refresh();
        let outcome = self.background();
        let stalled = outcome != StepOutcome::Worked && (deferred || outcome == StepOutcome::Refused);
        self.spins = if stalled { self.spins.saturating_add(1) } else { 0 };
        if stalled && self.spins < SPINS {
            std::thread::yield_now();
        }
        self.idle = outcome == StepOutcome::Idle && !stalled;
    }

    /// Handles the descriptors that are ready. Sleeps only when the last turn found nothing to do.
    fn wait(&mut self) {
        let timeout = if self.idle && self.held_back {
            YIELD_INTERVAL
        } else if self.idle && !self.unended && !self.crowded {
            IDLE_INTERVAL.min(self.engine.patience())
        } else if self.idle || self.spins >= SPINS {
            STALL_INTERVAL
        } else {
            Duration::ZERO
        };
        let timeout = EpollTimeout::try_from(timeout).unwrap_or(EpollTimeout::ZERO);
        let mut events = [EpollEvent::empty(); EVENTS];
        let count = match self.epoll.wait(&mut events, timeout) {
            Ok(count) => count,
            Err(nix::Error::EINTR) => 0,
            Err(error) => {
                error!("reactor {}: epoll: {error}", self.index);
                std::process::abort();
            }
        };
        let tokens = || events.iter().take(count).map(EpollEvent::data);
        for token in tokens().filter(|token| *token >= FIRST_HOME) {
            self.home_ready(token - FIRST_HOME);
        }
        // Last: it may retire homes, and a token of this round must not be mistaken for that of a new home.
        if tokens().any(|token| [WAKER, ARRIVED].contains(&token)) {
            self.handle_wakeup();
        }
        self.engine_ready = tokens().any(|token| token == ENGINE);
        if self.unended {
            self.reap_finished_spaces();
        }
        if self.crowded {
            self.read_crowded();
        }
    }

    /// Reads events that waited for room: any reactor may have freed slots and descriptors.
    fn read_crowded(&mut self) {
        // Only an address space that is resident makes room.
        let waiting = self.homes.iter().filter(|(_, home)| home.crowded);
        if waiting.fold(false, |ended, (_, home)| home.space.session.end_on_demand() || ended) {
            warn!("a forked process waits for room: all memory is loaded from now on");
            self.shared.attention_all();
        }
        if self.shared.ledger.room() == 0 {
            return;
        }
        self.crowded = false;
        let waiting = self.homes.iter().filter(|(_, home)| home.crowded);
        let keys: Vec<usize> = waiting.map(|(key, _)| key).collect();
        keys.into_iter().for_each(|key| self.read_home(key));
    }

    fn handle_wakeup(&mut self) {
        self.waker.drain();
        self.arrived.drain();
        self.retry_blocked();
        self.serve_arrived();
        let Some(handle) = self.shared.handles.get(self.index) else { return };
        let requests = std::mem::take(&mut *handle.inbox.lock().unwrap_or_else(PoisonError::into_inner));
        let attention = handle.attention.swap(false, Ordering::AcqRel);
        for ReactorRequest::Adopt { space, journal, inherited } in requests {
            let mut home = UffdReader::new(space, journal);
            if let Some(known) = inherited {
                self.inherit(&mut home, &known);
            }
            self.adopt(home);
        }
        if attention {
            self.reap_finished_spaces();
        }
    }

    /// Handles what a dead worker left unfinished in an address space.
    fn inherit(&mut self, home: &mut UffdReader, known: &BTreeSet<i32>) {
        let mut batch = EventBatch::default();
        match home.finish_pending(self.shared.ledger, known, &mut batch) {
            Err(error) if wants_room(&error) => {
                home.crowded = true;
                self.crowded = true;
            }
            Err(error) => home.space.session.fail(format!("taking over: {error}")),
            Ok(()) => {}
        }
        // No record exists of faults that were read and not served: their threads must fault again. They can
        // wait at any address, so this wakes the whole range.
        let (start, end) = (LOWEST_ADDRESS, HIGHEST_ADDRESS);
        if let Err(error) = rewake_uffd::FillPort::wake(&home.space.uffd, start, end - start) {
            debug!(%error, "waking after takeover");
        }
        self.deliver(&Arc::clone(&home.space), batch);
    }

    /// Starts to watch and serve an address space.
    fn adopt(&mut self, home: UffdReader) {
        let (space, crowded) = (Arc::clone(&home.space), home.crowded);
        let key = self.homes.insert(home);
        let token = FIRST_HOME + 2 * key as u64;
        let watched = self
            .watch(space.uffd.as_fd(), token)
            .and_then(|()| space.process().map_or(Ok(()), |process| self.watch(process, token + 1)));
        if let Err(error) = watched {
            space.session.fail(format!("watching a userfaultfd: {error}"));
        } else if crowded {
            self.watch_events(key, &space, false);
        }
        self.shared.add(&space);
        self.shared.attention(&space);
    }

    fn home_ready(&mut self, token: u64) {
        let Ok(key) = usize::try_from(token / 2) else { return };
        if token % 2 == 1 {
            if let Some(home) = self.homes.get(key) {
                let space = Arc::clone(&home.space);
                self.process_ended(&space);
            }
            return;
        }
        self.read_home(key);
    }

    fn read_home(&mut self, key: usize) {
        let mut batch = EventBatch::default();
        let Some(home) = self.homes.get_mut(key) else { return };
        let (space, waited) = (Arc::clone(&home.space), home.crowded);
        home.crowded = false;
        match home.read_events(self.shared.ledger, &mut batch) {
            Err(error) if wants_room(&error) => {
                home.crowded = true;
                self.crowded = true;
                if !waited {
                    warn!("a fork waits: {error}");
                }
            }
            Err(error) => {
                space.session.fail(format!("reading a userfaultfd: {error}"));
                self.shared.attention_all();
            }
            Ok(()) => {}
        }
        let crowded = self.homes.get(key).is_some_and(|home| home.crowded);
        if crowded != waited {
            self.watch_events(key, &space, !crowded);
        }
        self.deliver(&space, batch);
    }

    /// Sets whether events of an address space wake this reactor. Without room they must not: the descriptor
    /// stays readable, and the reactor would never sleep.
    fn watch_events(&self, key: usize, space: &AddressSpace, wakes: bool) {
        let flags = if wakes { EpollFlags::EPOLLIN } else { EpollFlags::empty() };
        let mut event = EpollEvent::new(flags, FIRST_HOME + 2 * key as u64);
        if let Err(error) = self.epoll.modify(space.uffd.as_fd(), &mut event) {
            space.session.fail(format!("watching a userfaultfd: {error}"));
        }
    }

    /// Handles the end of a process. Another process may share its memory (vfork): then the reactor still
    /// serves it, and a fill finds the end of the memory.
    fn process_ended(&mut self, space: &Arc<AddressSpace>) {
        let Some(process) = space.process().filter(|process| sys::has_ended(process.as_raw_fd())) else {
            return;
        };
        self.unwatch(process);
        if rewake_uffd::address_space_ended(space.uffd.as_fd()) {
            self.gone(space);
        }
    }

    fn deliver(&mut self, space: &Arc<AddressSpace>, batch: EventBatch) {
        for child in batch.children {
            self.adopt(child);
        }
        let since = Instant::now();
        for address in batch.faults {
            self.serve(Demand::new(space, address, since));
        }
        self.shared.check_finished(space);
    }

    /// Handles finished reads: demand reads first, because threads wait for them.
    fn reap(&mut self) {
        // Also without reads in flight: the eventfd may be signalled for earlier reads, and must be reset.
        if self.engine.in_flight() == 0 && !self.engine_ready {
            return;
        }
        let mut done = std::mem::take(&mut self.done);
        self.engine.reap(&mut done);
        done.sort_by_key(|done| done.token & DEMAND_TOKEN == 0);
        for done in done.drain(..) {
            if done.token & DEMAND_TOKEN == 0 { self.block_read(done) } else { self.page_read(done) }
        }
        self.done = done;
    }

    fn refresh(&mut self) {
        let version = self.shared.version.load(Ordering::Acquire);
        if version != self.version {
            self.version = version;
            self.spaces.clone_from(&self.shared.spaces.lock().unwrap_or_else(PoisonError::into_inner));
            self.turn = 0;
        }
    }

    /// Handles the end of a process or of its memory.
    fn gone(&mut self, space: &Arc<AddressSpace>) {
        space.set_gone();
        self.shared.attention(space);
    }

    /// Fails the session: the kernel refused a fill, and another try would not help.
    fn refused(&mut self, space: &Arc<AddressSpace>, errno: i32) {
        space.session.fail(space.complaint(errno));
        self.shared.attention_all();
    }

    /// Retires finished address spaces, and ends all of them if the session has failed.
    fn reap_finished_spaces(&mut self) {
        let finished = |home: &UffdReader| {
            let space = &home.space;
            space.is_gone() || space.session.is_released() && space.layout().missing() == 0
        };
        self.unended = false;
        let mut retired: Vec<Arc<Session>> = Vec::new();
        let keys: Vec<usize> = self.homes.iter().map(|(key, _)| key).collect();
        for key in keys {
            let Some(home) = self.homes.get(key) else { continue };
            let session = Arc::clone(&home.space.session);
            let failed = session.has_failed();
            let done = finished(home) || failed && super::abort::kill_or_poison(&home.space);
            if done && self.has_settled(key) {
                self.retire(key);
                retired.push(session);
            } else {
                self.unended |= failed || done;
            }
        }
        let session = retired.first().cloned().or_else(|| self.unforgotten.take());
        self.unforgotten = session.filter(|session| !session.forget_retired(self.shared.ledger));
        self.unended |= self.unforgotten.is_some();
        // Not before: a session without address spaces closes its fd store.
        retired.iter().for_each(|session| session.space_closed());
    }

    /// Returns false while a forked child has no slot of the ledger: only its parent's messages name it to a
    /// successor.
    fn has_settled(&mut self, key: usize) -> bool {
        let Some(home) = self.homes.get_mut(key) else { return true };
        let mut batch = EventBatch::default();
        let settled = home.settle(self.shared.ledger, &mut batch).is_ok();
        let space = Arc::clone(&home.space);
        self.deliver(&space, batch);
        settled
    }

    /// Stops serving an address space: no page is missing, or its memory does not exist any more. The caller
    /// notes the end in the session.
    fn retire(&mut self, key: usize) {
        let space = Arc::clone(&self.homes.remove(key).space);
        if !space.is_gone() && !space.session.has_failed() && !space.is_registered() {
            self.shared.huge_pages.note(&space);
        }
        if !space.is_gone() && !space.session.has_failed() {
            self.shared.ledger.session().note_resident();
        }
        // No reactor reads its events from here on. A fill that the kernel refuses until one is read would be
        // tried for ever, and would keep the descriptor open.
        space.set_gone();
        space.ended();
        let promotions_lost = space.layout().promotions_lost();
        debug!(promotions_lost, "an address space needs nothing more");
        self.unwatch(space.uffd.as_fd());
        space.process().into_iter().for_each(|process| self.unwatch(process));
        self.shared.remove(&space);
        space.retire();
    }

    fn watch(&self, fd: BorrowedFd<'_>, token: u64) -> io::Result<()> {
        Ok(self.epoll.add(fd, EpollEvent::new(EpollFlags::EPOLLIN, token))?)
    }

    fn unwatch(&self, fd: BorrowedFd<'_>) {
        // The kernel refuses only a descriptor that was never added.
        let _ = self.epoll.delete(fd);
    }
}
