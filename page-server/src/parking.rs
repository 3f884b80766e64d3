// SPDX-License-Identifier: MIT OR Apache-2.0
//! Parking: each target of a session gets a descriptor of the session's [fd store](crate::fd_store), and loses it
//! when all memory is resident.
//!
//! A CRIU plugin parks before the target runs (`docs/rewake-plugin.md`). Without one it is done here, as soon as
//! CRIU has let go of the process: a thread of it makes some system calls for us (`rewake_tracer`). A child that
//! the target forks inherits the descriptor.

use std::os::fd::{AsRawFd as _, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context as _, bail};
use rewake_tracer::{Error, with_stopped};
use tracing::{debug, info, warn};

use crate::ledger::{Ledger, NO_FD, SpaceSlot};
use crate::session::Session;
use crate::{processes, sys};

/// For a tracer to let go of a process, CRIU above all, and for its threads to stop.
const PATIENCE: Duration = Duration::from_secs(1);
/// Between two tries to park, the first and the last.
const AGAIN: Duration = Duration::from_millis(5);
const SELDOM: Duration = Duration::from_secs(1);
/// Tries to take the descriptor out of a process again, [`SELDOM`] apart.
const UNPARK_TRIES: u32 = 5;

/// A target to be parked in.
#[derive(Debug)]
struct Target {
    pid: i32,
    /// Its own copy of the process descriptor: the slot may be retired meanwhile.
    pidfd: OwnedFd,
}

/// How a try ended.
#[derive(Debug, PartialEq, Eq)]
enum Tried {
    /// The process has the descriptor, or needs none any more.
    Done,
    /// Not now, for this reason.
    NotNow(String),
}

/// Parks in every task of a session whose restore has finished. Returns when each has the store, or has ended.
///
/// # Errors
/// A process can never be parked in: it must not run on, for the end of this process would turn its missing
/// memory into zeros.
pub async fn park(ledger: Ledger, session: &Arc<Session>) -> anyhow::Result<()> {
    let mut targets = targets(ledger, session);
    let mut pause = AGAIN;
    let mut warned = false;
    loop {
        let of = Arc::clone(session);
        let tried = move || -> anyhow::Result<Vec<(Target, String)>> {
            let mut left = Vec::new();
            for target in targets {
                match give(&of, &target)? {
                    Tried::Done => {}
                    Tried::NotNow(why) => left.push((target, why)),
                }
            }
            Ok(left)
        };
        let left = tokio::task::spawn_blocking(tried).await.context("parking")??;
        let Some((first, why)) = left.first() else { return Ok(()) };
        if pause >= SELDOM && !warned {
            warned = true;
            warn!(
                session = session.number,
                pid = first.pid,
                "not parked yet, so its memory depends on this streamer's processes alone: {why}"
            );
        }
        targets = left.into_iter().map(|(target, _)| target).collect();
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(SELDOM);
        if session.is_empty() || session.has_failed() {
            return Ok(());
        }
    }
}

/// Takes the store's descriptor out of every process that has it. The store is empty: nothing of it waits for that.
pub async fn unpark(session: u64, inode: u64, store: OwnedFd, writer: OwnedFd) {
    let work = move || unpark_now(session, inode, store, &writer);
    let _ = tokio::task::spawn_blocking(work).await;
}

/// The same, in this thread.
pub fn unpark_now(session: u64, inode: u64, store: OwnedFd, writer: &OwnedFd) {
    drop(store);
    // With the last copy of the store the writer hangs up: the usual end, when the processes have ended.
    if !sys::has_hung_up(writer.as_raw_fd()) {
        unpark_of(inode, session);
    }
}

/// The same for all sessions of a ledger whose streamer was killed before it came to that.
pub fn unpark_all(ledger: Ledger) {
    for slot in ledger.sessions() {
        let inode = slot.inode.load(Ordering::Acquire);
        if inode != 0 {
            unpark_of(inode, slot.number());
        }
    }
}

fn unpark_of(inode: u64, session: u64) {
    for _ in 0..UNPARK_TRIES {
        let left: Vec<(i32, String)> = processes::all().filter_map(|pid| take_back(pid, inode)).collect();
        let Some((pid, why)) = left.first() else { return };
        debug!(session, pid, "still parked: {why}");
        std::thread::sleep(SELDOM);
    }
    info!(session, "a process keeps an empty descriptor of this session: CRIU cannot dump it");
}

fn targets(ledger: Ledger, session: &Session) -> Vec<Target> {
    let target = |(_, slot): (usize, &SpaceSlot)| {
        let pidfd = slot.pidfd.load(Ordering::Acquire);
        let pid = slot.host_pid.load(Ordering::Acquire);
        if pid <= 0 || pidfd == NO_FD {
            return None;
        }
        // One that a reactor has just retired needs no parking.
        Some(Target { pid, pidfd: sys::duplicate_number(pidfd).ok()? })
    };
    crate::spaces::of_session(ledger, session.index).filter_map(target).collect()
}

fn give(session: &Session, target: &Target) -> anyhow::Result<Tried> {
    let Some(store) = session.store() else { return Ok(Tried::Done) };
    let pid = target.pid;
    let ended = || sys::has_ended(target.pidfd.as_raw_fd());
    if ended() || processes::number_of_socket(pid, store.inode()).is_some() {
        return Ok(Tried::Done);
    }
    let given = with_stopped(pid, PATIENCE, |stopped| {
        // As long as the process has not ended its number is its own. The plugin may have been quicker.
        match processes::number_of_socket(pid, store.inode()) {
            _ if ended() => Ok(None),
            Some(number) => Ok(Some(number)),
            None => stopped.give(store.descriptor()).map(Some),
        }
    });
    match given.and_then(|given| given) {
        Ok(number) => {
            debug!(session = session.number, pid, number, "parked");
            Ok(Tried::Done)
        }
        Err(_) if ended() => Ok(Tried::Done),
        Err(error) if may_pass(&error) => Ok(Tried::NotNow(error.to_string())),
        Err(error) => bail!(
            "process {pid} cannot be given a descriptor that keeps its memory waiting ({error}), and would read zeros \
             if this streamer were killed"
        ),
    }
}

/// What is left to do for a process that has the store: why it could not be done.
fn take_back(pid: i32, inode: u64) -> Option<(i32, String)> {
    processes::number_of_socket(pid, inode)?;
    let closed = with_stopped(pid, PATIENCE, |stopped| -> Result<(), Error> {
        let number: Option<RawFd> = processes::number_of_socket(pid, inode);
        number.map_or(Ok(()), |number| stopped.close(number))
    });
    match closed.and_then(|closed| closed) {
        Ok(()) | Err(Error::Ended { .. }) => None,
        Err(error) => Some((pid, error.to_string())),
    }
}

/// Whether a later try may succeed.
fn may_pass(error: &Error) -> bool {
    matches!(
        error,
        Error::Ended { .. }
            | Error::Traced { .. }
            | Error::Unstoppable { .. }
            | Error::SharedMemory { .. }
            | Error::Hung { .. }
            | Error::Spawn(_)
            | Error::Call { .. }
    )
}
