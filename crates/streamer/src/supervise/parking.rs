// SPDX-License-Identifier: MIT OR Apache-2.0
//! Parking: each target of a session gets a descriptor of the session's [fd store](crate::ledger::fd_store), and loses it
//! when all memory is resident.
//!
//! A CRIU plugin parks before the target runs (`docs/rewake-plugin.md`). Without one it is done here, as soon as
//! CRIU has let go of the process. A child that the target forks inherits the descriptor.
//!
//! A thread of the target makes some system calls for that (`rewake park`). Whoever traces it must not be
//! killed meanwhile: the kernel kills the target then, for its registers are not its own. So a short-lived process in
//! a process group of its own does it, which no signal to the streamer's group reaches. A service manager signals every
//! process of a cgroup: all signals are blocked in that process.

use std::collections::BTreeSet;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use rewake_plugin_protocol::ProcessId;
use tracing::{debug, info, warn};

use crate::cpu::address_spaces;
use crate::ledger::{Ledger, SessionSlot, SpaceSlot};
use crate::session::Session;
use crate::supervise::launch;
use crate::supervise::processes;
use crate::sys;

/// The process has the descriptor, or needs none any more.
pub const DONE: &str = "done";
/// A later try may succeed.
pub const LATER: &str = "later";
/// No try can succeed.
pub const NEVER: &str = "never";

/// Between two tries to park, the first and the last.
const AGAIN: Duration = Duration::from_millis(5);
const SELDOM: Duration = Duration::from_secs(1);

/// Parks in every task of a session whose restore has finished, and in the children that they forked before that.
/// Returns when each has the store, or has ended.
///
/// # Errors
/// A process can never be parked in: it must not run on, for the end of this process would turn its missing
/// memory into zeros.
pub async fn park(ledger: Ledger, session: &Arc<Session>) -> anyhow::Result<()> {
    let mut done = BTreeSet::new();
    let mut pause = AGAIN;
    let mut warned = false;
    while !session.is_empty() && !session.has_failed() {
        let of = Arc::clone(session);
        let round = tokio::task::spawn_blocking(move || {
            let targets = targets(ledger, &of, &done);
            let left = give(&of, &targets)?;
            done.extend(targets.iter().filter(|target| left.iter().all(|(of, _)| of != *target)));
            anyhow::Ok((targets, left, done))
        });
        let (targets, left, parked) = round.await.context("parking")??;
        if targets.is_empty() {
            return Ok(());
        }
        done = parked;
        let Some((first, why)) = left.first() else { continue };
        if pause >= SELDOM && !warned {
            warned = true;
            warn!(
                session = session.number,
                pid = first.pid,
                "not parked yet, so its memory depends on this streamer's processes alone: {why}"
            );
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(SELDOM);
    }
    Ok(())
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
        unpark_slot(slot);
    }
}

/// The same for one session.
pub fn unpark_slot(slot: &SessionSlot) {
    let inode = slot.inode.load(Ordering::Acquire);
    if inode != 0 {
        unpark_of(inode, slot.number());
    }
}

fn unpark_of(inode: u64, session: u64) {
    let unpark = || -> anyhow::Result<()> {
        let mut command = parker()?;
        command.args(["--unpark", &inode.to_string()]).stdin(Stdio::null());
        let output = command.output().context("starting rewake park")?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout).trim_end());
        Ok(())
    };
    if let Err(error) = unpark() {
        info!(
            session,
            "a process keeps an empty descriptor of this session, and CRIU cannot dump it: {error:#}"
        );
    }
}

/// Tasks of the session, and children that they forked before they had the store; without those that are done.
fn targets(ledger: Ledger, session: &Session, done: &BTreeSet<ProcessId>) -> Vec<ProcessId> {
    let Some(store) = session.store() else { return Vec::new() };
    let task = |(_, slot): (usize, &SpaceSlot)| {
        let (pid, started) = (slot.host_pid.load(Ordering::Acquire), slot.started.load(Ordering::Acquire));
        (pid > 0).then_some(ProcessId { pid, started })
    };
    let tasks: BTreeSet<ProcessId> =
        address_spaces::of_session(ledger, session.index).filter_map(task).collect();
    let mut targets: Vec<ProcessId> = tasks.difference(done).copied().collect();
    for task in &tasks {
        let layout = processes::layout(task.pid);
        for pid in processes::descendants(task.pid) {
            // One with another layout has called exec: it has none of the session's memory.
            let forked = layout.is_some() && processes::layout(pid) == layout;
            let Ok(Some(child)) = ProcessId::of(pid) else { continue };
            let is_new = !tasks.contains(&child) && !done.contains(&child) && !targets.contains(&child);
            if forked && is_new && processes::number_of_socket(pid, store.inode()).is_none() {
                targets.push(child);
            }
        }
    }
    targets
}

/// Tries to park in each; gives those that are left, with the reasons.
fn give(session: &Session, targets: &[ProcessId]) -> anyhow::Result<Vec<(ProcessId, String)>> {
    let Some(store) = session.store().filter(|_| !targets.is_empty()) else { return Ok(Vec::new()) };
    let mut command = parker()?;
    command.args(targets.iter().map(ToString::to_string));
    let store = store.descriptor().try_clone_to_owned().context("sharing the fd store")?;
    // A process that cannot be started now may be started later, and the targets are served meanwhile.
    let again = |why: String| Ok(targets.iter().map(|target| (*target, why.clone())).collect());
    let output = match command.stdin(store).output() {
        Ok(output) => output,
        Err(error) => return again(format!("starting rewake park: {error}")),
    };
    let text = String::from_utf8_lossy(&output.stdout);
    let lines: Vec<(&str, &str)> = text.lines().filter_map(|line| line.split_once(' ')).collect();
    if lines.len() != targets.len() {
        // If a signal killed it, the kernel has killed the target that it traced at that moment, and no other.
        return again(format!("rewake park: {}: {}", output.status, text.trim_end()));
    }
    let mut left = Vec::new();
    for (target, (word, why)) in targets.iter().zip(lines) {
        match word {
            DONE => debug!(session = session.number, pid = target.pid, "parked: {why}"),
            LATER => left.push((*target, why.to_owned())),
            NEVER => bail!(
                "process {} cannot be given a descriptor that keeps its memory waiting, and would read zeros if this \
                 streamer were killed: {why}",
                target.pid
            ),
            other => bail!("rewake park: expected {DONE}, {LATER} or {NEVER}, found {other:?}"),
        }
    }
    Ok(left)
}

fn parker() -> anyhow::Result<Command> {
    let mut command = Command::new(launch::program()?);
    command.arg("park").process_group(0).stderr(Stdio::null());
    sys::leave_descriptors(&mut command);
    sys::block_signals(&mut command);
    Ok(command)
}
