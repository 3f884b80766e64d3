// SPDX-License-Identifier: MIT OR Apache-2.0
//! Fills the memory of one restored address space.

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};
use std::time::{Duration, Instant};

use rewake_image_io::ImageFile;
use rewake_pager::{BlockIx, FileRun, Locate, PAGE_SIZE, PageIx, ResidencyMap, Run, Sweeps};
use rewake_process::proc;
use rewake_uffd::{FillPort, Outcome, Stop, Uffd};
use tracing::{info, warn};

use super::enomem_retry::{ENOMEM_LIMIT, EnomemRetry, Refused};
use super::stats::{LoadCause, TaskStats, add};
use super::zero_pages::{PAGE_LEN, is_zero, leading_stretch};
use crate::ledger::fd_store::FdStore;
use crate::ledger::{NO_FD, SpaceSlot};
use crate::session::Session;
use crate::working_set::access_log::NotedBlocks;

/// The rank of memory that GPUs can access: restores wait for it.
pub const REGISTERED: u32 = 0;

/// How long a reactor that wants to read events tries before it sleeps: another one's fill ends sooner, and
/// to sleep and to be woken takes as long.
const LOCK_LIMIT: Duration = Duration::from_micros(30);

/// One restored address space.
///
/// A reactor holds `layout` shared from the look-up of a page's address until the fill of that address
/// returns. It holds `layout` exclusively while it reads events: a read event lets the program run, and an
/// address may then have another page. This is the only lock that is held over a system call
/// (docs/decisions/0004-layout-lock.md).
#[derive(Debug)]
pub struct AddressSpace {
    /// The session that serves it.
    pub session: Arc<Session>,
    /// The counters of its task, or of the task that has forked it.
    pub counts: Arc<TaskStats>,
    /// Its slot in the ledger.
    pub slot: &'static SpaceSlot,
    /// The fd store that has its userfaultfd; none in tests.
    pub(crate) store: Option<Arc<FdStore>>,
    /// The userfaultfd of its process.
    pub uffd: Uffd,
    /// Files that the plan's extents name by index.
    pub files: Arc<Vec<Arc<ImageFile>>>,
    /// Index of the reactor that reads its events.
    pub home: usize,
    layout: RwLock<ResidencyMap>,
    gone: AtomicBool,
    /// Whether a fork was read and its child has no slot yet: see [`AddressSpace::hold_fills`].
    held: AtomicBool,
    /// Whether GPUs can access memory of its process.
    is_registered: bool,
    /// Whether prefetch blocks may be left.
    first: AtomicBool,
    /// The blocks that were accessed, if the working set is recorded.
    accessed: Option<NotedBlocks>,
    begun: AtomicBool,
    since: Instant,
    /// Used by its home reactor only.
    sweeps: Mutex<Sweeps>,
    shortage: EnomemRetry,
}

/// The outcome of filling some pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Filled {
    /// All requested pages are resident or need no fill.
    All,
    /// Continue at this page later: events must be read first, because the program is changing its layout, or
    /// the kernel has no memory now.
    Later(PageIx),
    /// The address space does not exist any more.
    Gone,
    /// The kernel refused the fill with this errno.
    Failed(i32),
}

impl AddressSpace {
    /// Returns an address space in `slot` that no reactor serves yet.
    #[must_use]
    pub fn new(
        session: Arc<Session>,
        counts: Arc<TaskStats>,
        slot: &'static SpaceSlot,
        uffd: Uffd,
        files: Arc<Vec<Arc<ImageFile>>>,
        space: ResidencyMap,
        home: usize,
    ) -> Self {
        Self {
            is_registered: space.next_rank() == Some(REGISTERED),
            first: AtomicBool::new(space.next_rank().is_some()),
            accessed: session.log().map(|_| NotedBlocks::of(space.plan().blocks())),
            store: session.store(slot.store_number()),
            session,
            counts,
            slot,
            uffd,
            files,
            home,
            layout: RwLock::new(space),
            gone: AtomicBool::new(false),
            held: AtomicBool::new(false),
            begun: AtomicBool::new(false),
            since: Instant::now(),
            sweeps: Mutex::default(),
            shortage: EnomemRetry::default(),
        }
    }

    /// Locks the layout shared: addresses that are looked up stay valid until the guard is dropped.
    pub fn layout(&self) -> RwLockReadGuard<'_, ResidencyMap> {
        // Readers cannot leave it half changed, and a writer that panics ends the worker.
        self.layout.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the layout exclusively, to read events.
    pub fn layout_mut(&self) -> RwLockWriteGuard<'_, ResidencyMap> {
        let began = Instant::now();
        while began.elapsed() < LOCK_LIMIT {
            match self.layout.try_write() {
                Ok(layout) => return layout,
                Err(TryLockError::Poisoned(poisoned)) => return poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => std::hint::spin_loop(),
            }
        }
        self.layout.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// The pidfd of its process. None: it is a forked child whose process was not found yet.
    pub fn process(&self) -> Option<BorrowedFd<'_>> {
        let pidfd = self.slot.pidfd.load(Ordering::Acquire);
        // SAFETY: the slot owns this descriptor until it is retired, which its home reactor does last.
        (pidfd != NO_FD).then(|| unsafe { BorrowedFd::borrow_raw(pidfd) })
    }

    /// Returns whether its pages come from a fetcher.
    pub fn is_fetched(&self) -> bool {
        self.files.iter().any(|file| file.source().is_some())
    }

    /// Returns whether GPUs can access memory of its process: then the kernel stops their queues while it
    /// moves such memory.
    pub fn is_registered(&self) -> bool {
        self.is_registered
    }

    /// Returns whether the process or its memory has ended.
    pub fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    /// Notes that the process or its memory has ended.
    pub fn set_gone(&self) {
        self.gone.store(true, Ordering::Release);
    }

    /// Makes fills wait while `held`: a FORK event was read, and the child's layout is not copied from this
    /// one yet. A page that is filled in between would count as resident in the child, which does not have
    /// it. `_layout` shows that no fill is in flight.
    pub(super) fn hold_fills(&self, _layout: &ResidencyMap, held: bool) {
        self.held.store(held, Ordering::Relaxed);
    }

    /// Returns true once: to the caller that claims the first background block.
    pub fn begins(&self) -> bool {
        !self.begun.swap(true, Ordering::Relaxed)
    }

    /// Moves the next claim to the position of another process with the same pages (its parent), so that both
    /// share the reads from there. The blocks before it are read again at the end: the cache has dropped them
    /// long ago.
    pub fn join(&self, other: &Self) {
        let at = {
            let layout = other.layout();
            let Some(position) = layout.position() else { return };
            layout.plan().block(position)
        };
        let Some(file) = other.files.get(at.file as usize) else { return };
        let Some(own) = self.files.iter().position(|own| own.key() == file.key()) else { return };
        let layout = self.layout();
        let block = u32::try_from(own).ok().and_then(|own| layout.plan().block_from(own, at.index));
        if let Some(block) = block {
            layout.begin_at(block);
        }
    }

    /// Counts the missing pages of a forked child.
    pub fn forked(&self, pages: u64) {
        add(&self.session.stats.pages_total, pages);
        add(&self.counts.pages_total, pages);
    }

    /// Counts pages that are resident now. Another reactor may have filled them, or a worker that died, and
    /// has counted them as loaded.
    fn count_resident(&self, pages: u64, zero: bool) {
        let stats = &self.session.stats;
        add(if zero { &stats.pages_zero } else { &stats.pages_copied }, pages);
        add(&self.counts.pages_back, pages);
    }

    /// Counts pages that need no load any more.
    pub fn dropped(&self, pages: u64) {
        add(&self.session.stats.pages_dropped, pages);
        add(&self.counts.pages_dropped, pages);
    }

    /// Counts the missing pages, because the memory does not exist any more: the process has ended, or
    /// another program runs in it. Waits for fills in flight, which count their own pages.
    pub fn ended(&self) {
        let missing = self.layout_mut().missing();
        // After a failure the missing pages are lost, not dropped.
        if missing == 0 || self.session.has_failed() {
            return;
        }
        // The pid of a child that was forked after the restore is not known.
        let pid = self.slot.host_pid.load(Ordering::Relaxed);
        if pid > 0 && proc::is_ending(pid) {
            add(&self.counts.pages_ended, missing);
        } else {
            self.dropped(missing);
        }
    }

    /// Counts a page fault that was served `latency` after its message was read.
    pub fn note_fault(&self, latency: Duration) {
        self.session.stats.fault(latency);
        self.counts.fault(latency);
    }

    fn micros(&self) -> u64 {
        u64::try_from(self.since.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    /// Returns the rank of the next prefetch blocks; none when none are left. It takes no lock then.
    pub fn next_rank(&self) -> Option<u32> {
        let rank = self.first.load(Ordering::Relaxed).then(|| self.layout().next_rank()).flatten();
        if rank.is_none() {
            self.first.store(false, Ordering::Relaxed);
        }
        rank
    }

    /// Notes that a thread accesses missing pages: where the working set is recorded, their blocks belong to
    /// it.
    pub fn note_access(&self, layout: &ResidencyMap, page: PageIx, pages: u64) {
        let Some((log, noted)) = self.session.log().zip(self.accessed.as_ref()) else { return };
        if !self.session.is_on_demand() {
            return;
        }
        let task = self.slot.image_pid.load(Ordering::Relaxed).unsigned_abs();
        let mut at = page;
        while at.0 < page.0 + pages {
            let block = layout.plan().block_of(at);
            log.note(noted, block.0, task, at);
            let next = layout.plan().block(block).range().end;
            at = PageIx(next);
        }
    }

    /// Returns whether reactors may load blocks that no thread waits for.
    pub fn wants_background(&self) -> bool {
        self.session.is_released() && !self.is_gone() && !self.session.has_failed()
    }

    /// Returns whether a page fault has the rest of its block loaded: not while memory is loaded only when it
    /// is accessed.
    pub fn loads_whole_blocks(&self) -> bool {
        self.wants_background() && !self.session.is_on_demand()
    }

    /// Fills the missing pages of `block` from page `from`, at most `pages`, with the block's bytes. Returns
    /// the page to continue at, or none when the block is finished. `runs` is scratch space.
    pub fn fill_piece(
        &self,
        block: BlockIx,
        from: PageIx,
        pages: u64,
        bytes: &[u8],
        runs: &mut Vec<Run>,
    ) -> (Filled, Option<PageIx>) {
        let layout = self.layout();
        let cause = if layout.is_prefetched(block) { LoadCause::WorkingSet } else { LoadCause::Background };
        runs.clear();
        let next = layout.runs(block, from, pages, runs);
        for run in runs.iter() {
            let source = &bytes[run.block_offset..run.block_offset + pages_len(run.pages)];
            match self.fill_run(&layout, run, source, cause) {
                Filled::All => {}
                end => return (end, None),
            }
        }
        (Filled::All, next)
    }

    fn fill_run(&self, layout: &ResidencyMap, run: &Run, source: &[u8], cause: LoadCause) -> Filled {
        let mut done = 0;
        while done < source.len() {
            let rest = &source[done..];
            let (zero, len) = leading_stretch(rest);
            let target = run.target + done as u64;
            let page = PageIx(run.page.0 + done as u64 / PAGE_SIZE);
            match self.fill_stretch(layout, (target, page), &rest[..len], zero, cause) {
                Filled::All => done += len,
                end => return end,
            }
        }
        Filled::All
    }

    /// Fills pages that are either all zero or all not zero.
    fn fill_stretch(
        &self,
        layout: &ResidencyMap,
        (target, page): (u64, PageIx),
        bytes: &[u8],
        zero: bool,
        cause: LoadCause,
    ) -> Filled {
        let mut done = 0;
        let mut limit = bytes.len();
        while done < bytes.len() {
            let end = bytes.len().min(done + limit);
            let piece = &bytes[done..end];
            let outcome = self.fill(target + done as u64, piece, zero);
            self.note(layout, PageIx(page.0 + done as u64 / PAGE_SIZE), outcome, zero, cause);
            done += bytes_len(outcome.bytes);
            match outcome.stop {
                None => {}
                // A page fault at the same time or a dead worker has filled it.
                Some(Stop::Present) => {
                    let copied = layout.set_resident(PageIx(page.0 + done as u64 / PAGE_SIZE), 1);
                    self.count_resident(copied, false);
                    done += PAGE_LEN;
                }
                Some(Stop::Changing) => {
                    add(&self.session.stats.put_off, 1);
                    return Filled::Later(PageIx(page.0 + done as u64 / PAGE_SIZE));
                }
                // A fill may not cross the border of two mappings, and mprotect makes new borders: fill page
                // by page. A single page that is not mapped needs no fill.
                Some(Stop::NotMapped) if piece.len() > PAGE_LEN => limit = PAGE_LEN,
                Some(Stop::NotMapped) => {
                    let dropped = layout.set_resident(PageIx(page.0 + done as u64 / PAGE_SIZE), 1);
                    self.dropped(dropped);
                    done += PAGE_LEN;
                }
                Some(Stop::Gone) => return Filled::Gone,
                Some(Stop::BadSource) => return Filled::Failed(libc::EFAULT),
                Some(Stop::Failed(errno)) => {
                    return self.refused(errno, PageIx(page.0 + done as u64 / PAGE_SIZE));
                }
            }
        }
        Filled::All
    }

    fn fill(&self, target: u64, bytes: &[u8], zero: bool) -> Outcome {
        if self.held.load(Ordering::Relaxed) {
            return Outcome { bytes: 0, stop: Some(Stop::Changing) };
        }
        let outcome =
            if zero { self.uffd.zero(target, bytes.len() as u64) } else { self.uffd.copy(target, bytes) };
        if outcome.bytes > 0
            && let Some(refusals) = self.shortage.succeeded()
        {
            info!(refusals, "there is memory again");
        }
        outcome
    }

    /// Handles a refusal to fill `page`. Only after ENOMEM is the fill tried again.
    fn refused(&self, errno: i32, page: PageIx) -> Filled {
        if errno != libc::ENOMEM {
            return Filled::Failed(errno);
        }
        add(&self.session.stats.starved, 1);
        match self.shortage.refused(self.micros()) {
            Refused::TooLong => return Filled::Failed(errno),
            Refused::Again => {}
            Refused::First => {
                warn!("no memory for a restored process (ENOMEM): trying for {} s", ENOMEM_LIMIT.as_secs());
            }
        }
        Filled::Later(page)
    }

    /// Returns the error text for a fill that failed with `errno`.
    pub fn complaint(&self, errno: i32) -> String {
        let error = std::io::Error::from_raw_os_error(errno);
        if errno != libc::ENOMEM {
            return format!("filling memory of a restored process: {error}");
        }
        format!(
            "filling memory of a restored process: {error}, {} times within {} s: raise the memory limit of \
             its control group, or free memory on this host",
            self.shortage.refusals(),
            ENOMEM_LIMIT.as_secs()
        )
    }

    fn note(&self, layout: &ResidencyMap, page: PageIx, outcome: Outcome, zero: bool, cause: LoadCause) {
        if outcome.bytes > 0 {
            let filled = outcome.bytes / PAGE_SIZE;
            self.session.stats.loaded(cause, filled);
            self.count_resident(layout.set_resident(page, filled), zero);
        }
    }

    /// Fills the page at `target` for a thread that waits for it. Without `bytes` it becomes a zero page,
    /// because the image has no page for it. The caller holds the layout, or is the home reactor between two
    /// reads of events.
    pub fn fill_demand(
        &self,
        layout: &ResidencyMap,
        target: u64,
        page: Option<PageIx>,
        bytes: Option<&[u8]>,
    ) -> Filled {
        let outcome = match bytes {
            Some(bytes) if !is_zero(bytes) => self.fill(target, bytes, false),
            _ => self.fill(target, &[0; PAGE_LEN], true),
        };
        if let Some(page) = page {
            self.note(layout, page, outcome, bytes.is_none_or(is_zero), LoadCause::Fault);
        }
        match outcome.stop {
            None => Filled::All,
            // Present: the fault of another thread or a background load was faster. Not mapped: the thread
            // gets its own error. In both cases it must be woken.
            Some(Stop::Present | Stop::NotMapped) => {
                if let Some(page) = page.filter(|_| outcome.stop == Some(Stop::Present)) {
                    self.count_resident(layout.set_resident(page, 1), false);
                }
                // The next fill finds an ESRCH again.
                let _ = self.uffd.wake(target, PAGE_SIZE);
                Filled::All
            }
            Some(Stop::Changing) => {
                add(&self.session.stats.put_off, 1);
                Filled::Later(page.unwrap_or(PageIx(0)))
            }
            Some(Stop::Gone) => Filled::Gone,
            Some(Stop::BadSource) => Filled::Failed(libc::EFAULT),
            Some(Stop::Failed(errno)) => self.refused(errno, page.unwrap_or(PageIx(0))),
        }
    }

    /// Notes a page fault, and returns the addresses to fill: its page, or more where a thread sweeps.
    pub fn window(&self, address: u64) -> Range<u64> {
        self.sweeps.lock().unwrap_or_else(PoisonError::into_inner).fault(address)
    }

    /// Fills missing pages, one of which a thread waits for at `address`, with the bytes of the image.
    pub fn fill_window(&self, layout: &ResidencyMap, run: &FileRun, address: u64, bytes: &[u8]) -> Filled {
        let run = Run { target: run.target, page: run.page, pages: run.pages, block_offset: 0 };
        let filled = self.fill_run(layout, &run, &bytes[..pages_len(run.pages)], LoadCause::Fault);
        if filled == Filled::All {
            // A fill wakes threads of the pages that it copies. Another reactor may have filled this page
            // meanwhile. The next fill finds an ESRCH again.
            let _ = self.uffd.wake(address, PAGE_SIZE);
        }
        filled
    }

    /// Fills zero pages in `window` after `target`, where a thread sweeps through memory that no image has. A
    /// driver that gets such memory accesses every page of it. The caller has just served the page at
    /// `target`.
    pub fn fill_zero_window(&self, layout: &ResidencyMap, target: u64, window: &Range<u64>) {
        let next = target + PAGE_SIZE;
        let unbacked = |page: &u64| matches!(layout.locate(next + page * PAGE_SIZE), Locate::Unbacked);
        let most = window.end.saturating_sub(next) / PAGE_SIZE;
        let pages = (0..most).take_while(unbacked).count() as u64;
        if pages > 0 {
            // The result does not matter: a page that is still missing is served at its fault.
            self.uffd.zero(next, pages * PAGE_SIZE);
        }
    }
}

pub(super) fn pages_len(pages: u64) -> usize {
    bytes_len(pages * PAGE_SIZE)
}

/// Converts a length, which is at most one block here.
#[expect(clippy::cast_possible_truncation, reason = "64-bit only: CRIU's lazy pages are")]
fn bytes_len(bytes: u64) -> usize {
    bytes as usize
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;
    use std::path::PathBuf;

    use rewake_pager::Change;
    use rewake_uffd::{RawMessage, abi};

    use super::*;
    use crate::ledger::Ledger;
    use crate::uffd_child::{self, PAGES, UffdChild};

    /// The pages of a task whose memory ended with one page resident: all, resident, dropped and missing at
    /// its end. Its process was `killed`, or runs another program.
    fn ended_early(killed: bool, fail: bool) -> [u64; 4] {
        let task = UffdChild::start(uffd_child::sleep);
        let session = Arc::new(Session::new(PathBuf::new()));
        let space = task.address_space(&session, task.slot(Ledger::new().unwrap(), true));
        let filled = space.fill_demand(&space.layout(), task.start, Some(PageIx(0)), Some(&[7; PAGE_LEN]));
        assert_eq!(filled, Filled::All);
        space.note_fault(Duration::from_micros(70));
        space.forked(2);
        space.dropped(2);
        if fail {
            session.fail("a test");
        }
        if killed {
            crate::uffd_child::kill(task.pid);
            uffd_child::until(|| proc::is_ending(task.pid));
        }
        space.ended();
        let tasks = session.tasks();
        assert_eq!((tasks.len(), tasks[0].pid), (1, task.pid));
        let faults = [&tasks[0].faults, &tasks[0].fault_wait_us, &tasks[0].longest_fault_us];
        assert_eq!(faults.map(|count| count.load(Ordering::Relaxed)), [1, 70, 70]);
        let (counts, stats) = (&tasks[0], &session.stats);
        let of_task = [&counts.pages_total, &counts.pages_back, &counts.pages_dropped];
        let of_session = [&stats.pages_total, &stats.pages_copied, &stats.pages_dropped];
        let [of_task, of_session] =
            [of_task, of_session].map(|counts| counts.map(|count| count.load(Ordering::Relaxed)));
        assert_eq!(of_task, of_session);
        let [all, resident, dropped] = of_task;
        [all, resident, dropped, counts.pages_ended.load(Ordering::Relaxed)]
    }

    #[test]
    fn memory_of_an_ended_process_was_missing_and_of_a_replaced_program_it_is_dropped() {
        assert_eq!(ended_early(false, false), [PAGES + 2, 1, PAGES + 1, 0]);
        assert_eq!(ended_early(true, false), [PAGES + 2, 1, 2, PAGES - 1]);
        assert_eq!(ended_early(true, true), [PAGES + 2, 1, 2, 0], "it was lost");
    }

    #[test]
    fn pages_are_counted_by_what_loaded_them() {
        const BLOCK: usize = rewake_image_io::BLOCK;
        let loaded = |cause: LoadCause, rank: Option<u32>| {
            let task = UffdChild::start(uffd_child::sleep);
            let session = Arc::new(Session::new(PathBuf::new()));
            let space = task.address_space(&session, task.slot(Ledger::new().unwrap(), true));
            if let Some(rank) = rank {
                let addresses = task.start..task.start + PAGE_SIZE;
                space.layout_mut().set_priority(&[rewake_pager::Prefetch { addresses, rank }]);
            }
            let page = Some(&[7; PAGE_LEN][..]);
            assert_eq!(space.fill_demand(&space.layout(), task.start, Some(PageIx(0)), page), Filled::All);
            let block = space.layout().claim().unwrap();
            let (filled, _) = space.fill_piece(block, PageIx(0), PAGES, &[7; BLOCK], &mut Vec::new());
            assert_eq!(filled, Filled::All);
            let stats = &session.stats;
            (stats.pages_loaded(LoadCause::Fault), stats.pages_loaded(cause))
        };
        assert_eq!(loaded(LoadCause::Background, None), (1, PAGES - 1));
        assert_eq!(loaded(LoadCause::WorkingSet, Some(1)), (1, PAGES - 1));
        assert_eq!(loaded(LoadCause::Background, Some(REGISTERED)), (1, PAGES - 1));
    }

    /// The kernel wakes waiting threads when it fills their page, but not when it finds the page filled.
    #[test]
    fn a_thread_whose_page_is_resident_already_is_woken() {
        const DONTWAKE: u64 = 1;
        let task = UffdChild::start(uffd_child::access);
        let session = Arc::new(Session::new(PathBuf::new()));
        let space = task.address_space(&session, task.slot(Ledger::new().unwrap(), true));
        uffd_child::until(|| space.uffd.read(&mut [RawMessage::default()]).unwrap() == 1);
        let bytes = [7; PAGE_LEN];
        let src = bytes.as_ptr() as u64;
        let mut fill = abi::Copy { dst: task.start, src, len: PAGE_SIZE, mode: DONTWAKE, copy: 0 };
        abi::copy(space.uffd.as_fd(), &mut fill).unwrap();
        let filled = space.fill_demand(&space.layout(), task.start, Some(PageIx(0)), Some(&bytes));
        assert_eq!(filled, Filled::All);
        uffd_child::until(|| !task.lives());
    }

    #[test]
    fn zero_pages_ahead_of_a_sweep_end_where_pages_of_the_image_begin() {
        let task = UffdChild::start(uffd_child::sleep);
        let session = Arc::new(Session::new(PathBuf::new()));
        let space = task.address_space(&session, task.slot(Ledger::new().unwrap(), true));
        let page = |number: u64| task.start + number * PAGE_SIZE;
        space.layout_mut().apply(&Change::Remove { start: page(0), end: page(2) }).unwrap();
        space.fill_zero_window(&space.layout(), page(0), &(page(0)..page(PAGES)));
        let stops = [1, 2, 3].map(|number| space.uffd.copy(page(number), &[7; PAGE_LEN]).stop);
        assert_eq!(stops, [Some(Stop::Present), None, None]);
    }

    #[test]
    fn pages_of_a_dead_worker_are_not_counted_as_loaded_again() {
        let task = UffdChild::start(uffd_child::sleep);
        let session = Arc::new(Session::new(PathBuf::new()));
        let space = task.address_space(&session, task.slot(Ledger::new().unwrap(), true));
        let page = Some(&[7; PAGE_LEN][..]);
        // The residency map does not have it, as in a successor.
        assert_eq!(space.fill_demand(&space.layout(), task.start, None, page), Filled::All);
        assert_eq!(space.fill_demand(&space.layout(), task.start, Some(PageIx(0)), page), Filled::All);
        let block = space.layout().claim().unwrap();
        let bytes = [7; rewake_image_io::BLOCK];
        let (filled, _) = space.fill_piece(block, PageIx(0), PAGES, &bytes, &mut Vec::new());
        assert_eq!(filled, Filled::All);
        let stats = &session.stats;
        let loaded = [LoadCause::Fault, LoadCause::Background].map(|cause| stats.pages_loaded(cause));
        assert_eq!((loaded, stats.pages_copied.load(Ordering::Relaxed)), ([0, PAGES - 1], PAGES));
    }
}
