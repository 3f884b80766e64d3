// SPDX-License-Identifier: MIT OR Apache-2.0
//! Opens the address space of a task that reports, and takes over the address spaces of a dead worker. Ends
//! the tasks where neither is possible.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, IntoRawFd as _, RawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use rewake_pager::{Prefetch, ResidencyMap};
use rewake_plugin_protocol::ProcessId;
use rewake_uffd::Uffd;
use rewake_uffd::abi::FEATURES_CRIU;
use tracing::{debug, error, warn};

use crate::cpu::space::REGISTERED;
use crate::cpu::{AddressSpace, ReactorPool, ReactorRequest};
use crate::ledger::{Journal, Ledger, SpaceSlot};
use crate::session::Session;
use crate::session::image::{Image, TaskPlan};
use crate::supervise::processes;
use crate::sys;

/// How many times this process checks whether a killed process has ended. Together with [`DEATH_INTERVAL`] at
/// least a second, and longer where this process itself does not run.
const DEATH_LOOKS: u32 = 1000;
/// Pause between two checks.
const DEATH_INTERVAL: Duration = Duration::from_millis(1);

/// A task that has just sent its userfaultfd.
#[derive(Debug)]
pub struct Arrival {
    /// The pid in the names of its images.
    pub image_pid: i32,
    /// Its pid on this host; 0 when the kernel did not report it.
    pub host_pid: i32,
    /// Its userfaultfd, which is open and has no owner yet.
    pub uffd: RawFd,
    /// The index of its home reactor.
    pub home: usize,
}

/// Returns whether a live slot has this descriptor already.
#[must_use]
pub fn is_known(ledger: Ledger, number: i32) -> bool {
    ledger.live_spaces().any(|(_, slot)| slot.uffd.load(Ordering::Acquire) == number)
}

/// Enters a new address space in the ledger and returns the request to its reactor.
///
/// # Errors
/// Fails without a free slot, or when the kernel refuses descriptors. The userfaultfd is then still open and
/// has no owner: see [`kill_rejected`].
pub fn open(
    ledger: Ledger,
    plan: &TaskPlan,
    session: &Arc<Session>,
    arrival: &Arrival,
) -> anyhow::Result<ReactorRequest> {
    check_events(arrival)?;
    let slot = ledger.take_space().and_then(|index| ledger.spaces().get(index));
    let slot = slot.with_context(|| {
        format!(
            "more than {} address spaces at once: restore fewer processes at once",
            ledger.capacity().len()
        )
    })?;
    slot.image_pid.store(arrival.image_pid, Ordering::Relaxed);
    slot.host_pid.store(arrival.host_pid, Ordering::Relaxed);
    slot.uffd.store(arrival.uffd, Ordering::Relaxed);
    let journal =
        watch_process(slot).and_then(|()| Journal::create(ledger, slot).context("making a journal"));
    let kept = journal.and_then(|journal| {
        keep(ledger, session, slot).context("putting a userfaultfd into an fd store")?;
        Ok(journal)
    });
    let journal = kept.inspect_err(|_| slot.retire())?;
    // SAFETY: this worker or a dead one received it, and no slot had it: it has no owner.
    let uffd = Uffd::adopt(unsafe { sys::take_over(arrival.uffd) }).context("adopting a userfaultfd")?;
    slot.publish();
    session.space_opened();
    let counts = session.task_arrived(arrival.host_pid, plan.plan.pages());
    debug!(pid = arrival.image_pid, pages = plan.plan.pages(), "task arrived");
    let mut space = ResidencyMap::new(Arc::clone(&plan.plan));
    space.set_priority(&prefetch(plan, session));
    let files = Arc::clone(&plan.files);
    let space = AddressSpace::new(Arc::clone(session), counts, slot, uffd, files, space, arrival.home);
    Ok(ReactorRequest::Adopt { space: Arc::new(space), journal, inherited: None })
}

/// Puts the userfaultfd of a restored task into the task's store.
fn keep(ledger: Ledger, session: &Session, slot: &SpaceSlot) -> io::Result<()> {
    let task = slot.image_pid.load(Ordering::Relaxed);
    let Some(number) = session.store_of_task(ledger.session(), task)? else { return Ok(()) };
    slot.set_store_number(number);
    let store = session.store(number).ok_or(io::ErrorKind::NotFound)?;
    store.put(slot.entry(), &[slot.uffd.load(Ordering::Relaxed)])
}

/// Returns what is loaded first: what restores wait for, and the working set, unless memory is loaded only
/// when it is accessed.
fn prefetch(plan: &TaskPlan, session: &Session) -> Vec<Prefetch> {
    let registered = plan.first.iter().map(|range| Prefetch { addresses: range.clone(), rank: REGISTERED });
    let working_set = if session.is_on_demand() { &[][..] } else { &plan.working_set };
    registered.chain(working_set.iter().cloned()).collect()
}

/// Refuses a userfaultfd that does not report every change of the address space: a fork would read zeros, and
/// moved memory other pages' bytes. CRIU restores a task with what the kernel grants it.
fn check_events(arrival: &Arrival) -> anyhow::Result<()> {
    // SAFETY: it was received and is in no slot, so it is open and has no owner.
    let uffd = unsafe { BorrowedFd::borrow_raw(arrival.uffd) };
    let features = rewake_uffd::negotiated_features(uffd).context("looking at a userfaultfd")?;
    ensure!(
        features & FEATURES_CRIU == FEATURES_CRIU,
        "task {}: its userfaultfd has features {features:#x}, expected at least {FEATURES_CRIU:#x} (fork, \
         remap, remove and unmap events): run CRIU as root",
        arrival.image_pid
    );
    Ok(())
}

fn watch_process(slot: &SpaceSlot) -> anyhow::Result<()> {
    let pid = slot.host_pid.load(Ordering::Relaxed);
    match sys::pidfd_open(pid) {
        Ok(pidfd) => {
            let started = ProcessId::of(pid).ok().flatten().map_or(0, |of| of.started);
            // As long as the memory exists, the task lives and the pid is its own. Otherwise the pidfd may
            // refer to another process that got the pid since.
            if slot.memory_is_gone() {
                return Ok(());
            }
            slot.pidfd.store(pidfd.into_raw_fd(), Ordering::Relaxed);
            slot.started.store(started, Ordering::Relaxed);
        }
        Err(error) if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM)) => {
            return Err(error).context("opening a process descriptor for a restored task");
        }
        // It has ended, or its pid is not known here. It can still be served and poisoned, but not killed.
        Err(error) => warn!(%error, pid, "no process descriptor for a restored task"),
    }
    Ok(())
}

/// Kills a task that cannot be served. Returns true when it has ended, so that its userfaultfd may be closed.
///
/// Otherwise a slot of its own keeps the userfaultfd open, and the task waits rather than read zeros.
pub fn kill_rejected(ledger: Ledger, number: RawFd, host_pid: i32) -> bool {
    // SAFETY: it was received and is in no slot, so it is open and has no owner.
    let uffd = unsafe { BorrowedFd::borrow_raw(number) };
    let process = sys::pidfd_open(host_pid).ok();
    for _ in 0..DEATH_LOOKS {
        // As long as its memory exists the pid is its own: the pidfd refers to the process that sent the
        // userfaultfd.
        if rewake_uffd::address_space_ended(uffd) {
            return true;
        }
        if let Some(process) = &process {
            // ESRCH is no error: the process may have ended while another one still shares its memory.
            let _ = sys::pidfd_kill(process.as_raw_fd());
        }
        std::thread::sleep(DEATH_INTERVAL);
    }
    error!(pid = host_pid, "a task that cannot be served could not be killed: it waits for ever; kill it");
    abandon(ledger, number);
    false
}

/// Enters a userfaultfd that the session cannot serve in a slot, so that the supervisor and successors keep
/// it open.
fn abandon(ledger: Ledger, number: RawFd) {
    let Some(slot) = ledger.take_space().and_then(|index| ledger.spaces().get(index)) else {
        return error!(
            "more than {} address spaces: its userfaultfd is lost when this worker ends",
            ledger.capacity().len()
        );
    };
    slot.abandoned.store(1, Ordering::Relaxed);
    slot.uffd.store(number, Ordering::Relaxed);
    slot.publish();
}

/// Returns the requests for all address spaces that a dead worker served.
///
/// Where one cannot be taken over, this fails the session and kills the process.
pub fn inherit(
    ledger: Ledger,
    image: &Image,
    session: &Arc<Session>,
    pool: &ReactorPool,
) -> Vec<ReactorRequest> {
    let known: BTreeSet<i32> =
        ledger.live_spaces().map(|(_, slot)| slot.uffd.load(Ordering::Acquire)).collect();
    let known = Arc::new(known);
    let take_over =
        |(_, slot): (usize, &'static SpaceSlot)| match inherit_one(slot, image, session, pool, &known) {
            Ok(request) => Some(request),
            Err(error) => {
                session.fail(&error.context("taking over from a dead worker"));
                kill_and_abandon(slot);
                None
            }
        };
    ledger.served_spaces().filter_map(take_over).collect()
}

fn inherit_one(
    slot: &'static SpaceSlot,
    image: &Image,
    session: &Arc<Session>,
    pool: &ReactorPool,
    known: &Arc<BTreeSet<i32>>,
) -> anyhow::Result<ReactorRequest> {
    if slot.lossy.load(Ordering::Acquire) == 1 {
        bail!("a process's memory was in more pieces than its journal holds");
    }
    let pid = slot.image_pid.load(Ordering::Relaxed);
    let plan = u32::try_from(pid).ok().and_then(|pid| image.plan(pid));
    let plan = plan.with_context(|| format!("task {pid} is not in the image any more"))?;
    let journal = Journal::open(slot);
    let mut space = rebuild(plan, &journal)?;
    space.set_priority(&prefetch(plan, session));
    // SAFETY: the ledger names it once, and the worker that owned it is dead.
    let uffd = Uffd::adopt(unsafe { sys::take_over(slot.uffd.load(Ordering::Acquire)) })?;
    session.space_opened();
    let counts = session.task_arrived(slot.host_pid.load(Ordering::Relaxed), space.missing());
    let files = Arc::clone(&plan.files);
    let home = pool.choose_home();
    let space = AddressSpace::new(Arc::clone(session), counts, slot, uffd, files, space, home);
    Ok(ReactorRequest::Adopt { space: Arc::new(space), journal, inherited: Some(Arc::clone(known)) })
}

/// Returns the layout that the journal describes, with every mapped page missing. Resident pages are found
/// when a fill answers that they are present.
fn rebuild(plan: &TaskPlan, journal: &Journal) -> anyhow::Result<ResidencyMap> {
    let replay = journal.replay().context("reading a journal")?;
    let mut space = match &replay.snapshot {
        Some(segments) => {
            ResidencyMap::restore(Arc::clone(&plan.plan), segments).context("replaying a journal")?
        }
        None => ResidencyMap::new(Arc::clone(&plan.plan)),
    };
    for change in &replay.changes {
        if let Err(error) = space.apply(change) {
            warn!(%error, ?change, "layout change ignored");
        }
    }
    Ok(space)
}

/// Kills the processes of a session that cannot be taken over at all, because its image cannot be read.
///
/// It logs how many do not end within [`DEATH_LOOKS`] checks. They keep their userfaultfds.
pub fn kill_session(ledger: Ledger) {
    for (_, slot) in ledger.served_spaces() {
        kill_and_abandon(slot);
    }
    for _ in 0..DEATH_LOOKS {
        if reap_abandoned(ledger) == 0 {
            return;
        }
        std::thread::sleep(DEATH_INTERVAL);
    }
    let left = reap_abandoned(ledger);
    if left > 0 {
        error!("{left} processes without their memory could not be killed: they wait for ever; kill them");
    }
}

/// Kills the process of an address space that cannot be served, and its descendants. The userfaultfd stays
/// open as long as the memory exists: a child of unknown pid waits rather than read zeros.
fn kill_and_abandon(slot: &SpaceSlot) {
    let pid = slot.host_pid.load(Ordering::Relaxed);
    processes::kill_descendants(pid, slot.pidfd.load(Ordering::Acquire));
    if !slot.kill() {
        warn!(pid, "a process with lost memory could not be killed");
    }
    slot.abandoned.store(1, Ordering::Release);
}

/// Closes the userfaultfds of abandoned address spaces whose memory does not exist any more. Returns how many
/// are left.
pub fn reap_abandoned(ledger: Ledger) -> usize {
    let abandoned = |(_, slot): &(usize, &SpaceSlot)| slot.abandoned.load(Ordering::Acquire) == 1;
    let mut left = 0;
    for (_, slot) in ledger.live_spaces().filter(abandoned) {
        if slot.memory_is_gone() {
            let number = slot.uffd.load(Ordering::Acquire);
            slot.retire();
            // SAFETY: no reactor served it, so only the slot owned it.
            drop(unsafe { sys::take_over(number) });
        } else {
            left += 1;
        }
    }
    left
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;
    use std::path::PathBuf;
    use std::time::Instant;

    use rewake_image_io::{BlockCache, DEFAULT_BUDGET};
    use rewake_pager::Plan;

    use super::*;
    use crate::ledger::NO_FD;
    use crate::uffd_child::{self, UffdChild};

    fn session() -> Arc<Session> {
        Arc::new(Session::new(PathBuf::new()))
    }

    #[test]
    fn a_task_without_a_slot_is_dead_before_its_userfaultfd_is_closed() {
        let task = UffdChild::start(uffd_child::access);
        let ledger = Ledger::new().unwrap();
        while ledger.take_space().is_some() {}
        let plan = TaskPlan {
            plan: Arc::new(Plan::new(Vec::new()).unwrap()),
            files: Arc::default(),
            first: Vec::new(),
            working_set: Vec::new(),
        };
        let arrival = Arrival { image_pid: task.pid, host_pid: task.pid, uffd: task.uffd, home: 0 };
        assert!(open(ledger, &plan, &session(), &arrival).is_err());
        assert!(uffd_child::is_open(task.uffd) && task.lives());
        assert!(kill_rejected(ledger, task.uffd, task.pid));
        uffd_child::until(|| !task.lives());
        assert!(uffd_child::is_open(task.uffd));
    }

    #[test]
    fn a_userfaultfd_that_reports_no_forks_is_refused() {
        let uffd = Uffd::open(FEATURES_CRIU & !rewake_uffd::abi::FEATURE_FORK).unwrap();
        let own = std::process::id().cast_signed();
        let arrival = Arrival { image_pid: 7, host_pid: own, uffd: uffd.as_raw_fd(), home: 0 };
        let refused = check_events(&arrival).unwrap_err().to_string();
        assert!(refused.starts_with("task 7: ") && refused.contains("features 0x4c, expected"), "{refused}");
    }

    #[test]
    fn the_ledger_keeps_the_userfaultfd_of_a_task_that_survives() {
        let task = UffdChild::start(uffd_child::access);
        let ledger = Ledger::new().unwrap();
        let copy = task.copy();
        assert!(!kill_rejected(ledger, task.uffd, 0));
        assert!(task.lives() && uffd_child::is_open_for(task.uffd, &copy));
        assert_eq!(ledger.descriptors().collect::<Vec<_>>(), [task.uffd]);
        assert_eq!(reap_abandoned(ledger), 1);
        crate::uffd_child::kill(task.pid);
        uffd_child::until(|| reap_abandoned(ledger) == 0);
        assert!(!uffd_child::is_open_for(task.uffd, &copy) && ledger.descriptors().count() == 0);
    }

    #[test]
    fn a_pid_that_another_process_may_have_is_not_watched_or_killed() {
        let (task, stranger) = (UffdChild::start(uffd_child::access), UffdChild::start(uffd_child::sleep));
        let ledger = Ledger::new().unwrap();
        let index = ledger.take_space().unwrap();
        let slot = &ledger.spaces()[index];
        slot.uffd.store(task.uffd, Ordering::Relaxed);
        // As if the stranger had got the task's pid when the task ended.
        slot.host_pid.store(stranger.pid, Ordering::Relaxed);
        let copy = task.copy();
        drop(task);
        uffd_child::until(|| rewake_uffd::address_space_ended(copy.as_fd()));
        watch_process(slot).unwrap();
        assert_eq!(slot.pidfd.load(Ordering::Relaxed), NO_FD);
        assert!(kill_rejected(ledger, copy.as_raw_fd(), stranger.pid));
        assert!(stranger.lives());
    }

    #[test]
    fn a_task_that_cannot_be_taken_over_is_killed_or_keeps_waiting() {
        let ledger = Ledger::new().unwrap();
        let pool = ReactorPool::start(&BlockCache::new(DEFAULT_BUDGET).unwrap(), ledger).unwrap();
        let session = session();
        let [known, unknown, torn] = [(); 3].map(|()| UffdChild::start(uffd_child::access));
        known.slot(ledger, true);
        unknown.slot(ledger, false);
        torn.slot(ledger, false).lossy.store(1, Ordering::Relaxed);
        assert!(inherit(ledger, &Image::default(), &session, &pool).is_empty());
        assert!(
            session.failure().is_some_and(|failure| failure.reason.contains("not in the image")),
            "{session:?}"
        );
        uffd_child::until(|| !known.lives());
        for left in [&unknown, &torn] {
            assert!(left.lives() && uffd_child::is_open(left.uffd));
            assert!(ledger.descriptors().any(|number| number == left.uffd), "a successor must keep it open");
        }
        drop((unknown, torn));
        uffd_child::until(|| reap_abandoned(ledger) == 0);
    }

    #[test]
    fn the_kill_of_a_session_waits_for_a_limited_time() {
        let ledger = Ledger::new().unwrap();
        let task = UffdChild::start(uffd_child::access);
        task.slot(ledger, false);
        let begun = Instant::now();
        kill_session(ledger);
        assert!(begun.elapsed() < Duration::from_secs(60));
        assert!(task.lives() && uffd_child::is_open(task.uffd));
    }
}
