// SPDX-License-Identifier: MIT OR Apache-2.0
//! Address spaces between the ledger and the reactors: opened when a task reports, taken over from a dead
//! worker, killed when neither can be.

use std::collections::BTreeSet;
use std::os::fd::{AsRawFd as _, IntoRawFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use anyhow::Context as _;
use rewake_pager::Space;
use rewake_uffd::Uffd;
use tracing::{debug, warn};

use crate::fill::{AddressSpace, Pool, Task};
use crate::image::{Image, TaskPlan};
use crate::ledger::{Journal, Ledger, MAX_SPACES, SpaceSlot};
use crate::session::Session;
use crate::{processes, sys};

/// A task that has just sent its userfaultfd.
#[derive(Debug)]
pub struct Arrival {
    /// Pid that names its images.
    pub image_pid: i32,
    /// Pid on this host; 0 when the kernel did not tell.
    pub host_pid: i32,
    /// Its userfaultfd.
    pub uffd: OwnedFd,
    /// Reactor to serve it.
    pub home: usize,
}

/// True when a live slot has this descriptor already.
#[must_use]
pub fn is_known(ledger: Ledger, number: i32) -> bool {
    ledger.live_spaces().any(|(_, slot)| slot.uffd.load(Ordering::Acquire) == number)
}

/// Notes a new address space in the ledger and makes the task for its reactor.
///
/// # Errors
/// No free slot, or descriptors are refused.
pub fn open(
    ledger: Ledger,
    plan: &TaskPlan,
    session: &Arc<Session>,
    arrival: Arrival,
) -> anyhow::Result<Task> {
    let uffd = Uffd::adopt(arrival.uffd).context("adopting a userfaultfd")?;
    let slot = ledger.take_space().and_then(|index| ledger.spaces().get(index));
    let slot =
        slot.with_context(|| format!("more than {MAX_SPACES} address spaces at once: run a second daemon"))?;
    slot.session.store(u32::try_from(session.index).unwrap_or(u32::MAX), Ordering::Relaxed);
    slot.image_pid.store(arrival.image_pid, Ordering::Relaxed);
    slot.host_pid.store(arrival.host_pid, Ordering::Relaxed);
    slot.uffd.store(uffd.as_raw_fd(), Ordering::Relaxed);
    match sys::pidfd_open(arrival.host_pid) {
        Ok(pidfd) => slot.pidfd.store(pidfd.into_raw_fd(), Ordering::Relaxed),
        // It can still be served and poisoned, but not killed.
        Err(error) => warn!(%error, pid = arrival.host_pid, "no process descriptor for a restored task"),
    }
    let journal = Journal::create(slot).context("making a journal")?;
    slot.publish();
    session.space_opened();
    session.stats.pages_total.fetch_add(plan.plan.pages(), Ordering::Relaxed);
    debug!(session = session.number, pid = arrival.image_pid, pages = plan.plan.pages(), "task arrived");
    let space = Space::new(Arc::clone(&plan.plan));
    let files = Arc::clone(&plan.files);
    let space = AddressSpace::new(Arc::clone(session), slot, uffd, files, space, arrival.home);
    Ok(Task::Adopt { space: Arc::new(space), journal, inherited: None })
}

/// Makes the tasks for all address spaces of a session that a dead worker served.
///
/// # Errors
/// The image lacks a task that was served, or a journal cannot be read. The session's processes are dead then.
pub fn inherit(
    ledger: Ledger,
    image: &Image,
    session: &Arc<Session>,
    pool: &Pool,
) -> anyhow::Result<Vec<Task>> {
    let mut tasks = Vec::new();
    let known: BTreeSet<i32> =
        ledger.live_spaces().map(|(_, slot)| slot.uffd.load(Ordering::Acquire)).collect();
    let known = Arc::new(known);
    for (_, slot) in of_session(ledger, session.index) {
        match inherit_one(slot, image, session, pool, &known) {
            Ok(task) => tasks.push(task),
            Err(error) => {
                // Before the tasks are dropped, and with them the last references to their userfaultfds.
                end(ledger, session.index);
                return Err(error);
            }
        }
    }
    Ok(tasks)
}

fn inherit_one(
    slot: &'static SpaceSlot,
    image: &Image,
    session: &Arc<Session>,
    pool: &Pool,
    known: &Arc<BTreeSet<i32>>,
) -> anyhow::Result<Task> {
    if slot.lossy.load(Ordering::Acquire) == 1 {
        slot.kill();
        session.fail("the worker died while a process's memory was in more pieces than its journal holds");
    }
    let pid = slot.image_pid.load(Ordering::Relaxed);
    let plan = u32::try_from(pid).ok().and_then(|pid| image.plan(pid));
    let plan = plan.with_context(|| format!("task {pid} is not in the image any more"))?;
    let journal = Journal::open(slot).context("mapping a journal")?;
    let space = rebuild(plan, &journal)?;
    // SAFETY: the ledger names it once, and its owner is dead.
    let uffd = Uffd::adopt(unsafe { sys::take_over(slot.uffd.load(Ordering::Acquire)) })?;
    session.space_opened();
    session.stats.pages_total.fetch_add(space.missing(), Ordering::Relaxed);
    let files = Arc::clone(&plan.files);
    let space = AddressSpace::new(Arc::clone(session), slot, uffd, files, space, pool.choose_home());
    Ok(Task::Adopt { space: Arc::new(space), journal, inherited: Some(Arc::clone(known)) })
}

/// The layout that the journal tells, every mapped page missing: those that are present say so when filled.
fn rebuild(plan: &TaskPlan, journal: &Journal) -> anyhow::Result<Space> {
    let replay = journal.replay();
    let mut space = match &replay.snapshot {
        Some(segments) => Space::restore(Arc::clone(&plan.plan), segments).context("replaying a journal")?,
        None => Space::new(Arc::clone(&plan.plan)),
    };
    for change in &replay.changes {
        if let Err(error) = space.apply(change) {
            warn!(%error, ?change, "layout change ignored");
        }
    }
    Ok(space)
}

/// Kills the processes of a session that cannot be taken over, waits for their end, and takes them out of the
/// ledger: what is dead misses nothing, so their descriptors may close.
pub fn end(ledger: Ledger, session: usize) {
    for (_, slot) in of_session(ledger, session) {
        let pid = slot.host_pid.load(Ordering::Relaxed);
        processes::kill_descendants(pid, slot.pidfd.load(Ordering::Acquire));
        if !slot.kill() {
            warn!(pid, "a process with lost memory could not be killed");
        }
    }
    for (_, slot) in of_session(ledger, session) {
        slot.wait_for_end();
        slot.retire();
    }
}

fn of_session(ledger: Ledger, session: usize) -> impl Iterator<Item = (usize, &'static SpaceSlot)> {
    let session = u32::try_from(session).unwrap_or(u32::MAX);
    ledger.live_spaces().filter(move |(_, slot)| slot.session.load(Ordering::Acquire) == session)
}
