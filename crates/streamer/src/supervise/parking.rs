// SPDX-License-Identifier: MIT OR Apache-2.0
//! Parks the targets of the session: each gets a descriptor of the session's [fd
//! store](crate::ledger::fd_store), and loses it when all memory is resident.
//!
//! A CRIU plugin parks before the target runs (`docs/rewake-plugin.md`). Without one, the streamer parks as
//! soon as CRIU has detached from the process. A child that the target forks inherits the descriptor.
//!
//! A thread of the target makes some system calls for that (`rewake park`). If its tracer is killed
//! meanwhile, the kernel kills the target, as its registers are not its own. So the tracer is a short-lived
//! process in a process group of its own, which no signal to the streamer's group reaches. A service manager
//! signals every process of a cgroup, so all signals are blocked in that process.

use std::collections::BTreeSet;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context as _, bail};
use rewake_plugin_protocol::ProcessId;
use tracing::{debug, info, warn};

use crate::ledger::{Ledger, SessionSlot, SpaceSlot};
use crate::session::Session;
use crate::supervise::launch;
use crate::supervise::left::{LeftStore, StoreId};
use crate::supervise::processes;
use crate::sys;

/// `rewake park` reports that the process has the descriptor, or needs none any more.
pub const DONE: &str = "done";
/// `rewake park` reports that a later try may succeed.
pub const LATER: &str = "later";
/// `rewake park` reports that no try can succeed.
pub const NEVER: &str = "never";

/// The pause before the second try to park. Each pause doubles, up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// Processes that a line names which keep a descriptor.
const SHOWN: usize = 3;

/// Parks every task of a session whose restore has finished, and the children that they forked before that.
///
/// Returns when each has the store, or has ended.
///
/// # Errors
/// A process can never be parked. It must not continue to run: the end of this process would turn its missing
/// memory into zeros.
pub async fn park(ledger: Ledger, session: &Arc<Session>) -> anyhow::Result<()> {
    let mut done = BTreeSet::new();
    let mut pause = FIRST_PAUSE;
    let mut warned = false;
    while !session.is_empty() && !session.has_failed() {
        let parking = Arc::clone(session);
        let round = tokio::task::spawn_blocking(move || {
            let targets = targets(ledger, &parking, &done);
            let left = park_targets(&parking, &targets)?;
            done.extend(targets.iter().filter(|target| left.iter().all(|(other, _)| other != *target)));
            anyhow::Ok((targets, left, done))
        });
        let (targets, left, parked) = round.await.context("parking")??;
        if targets.is_empty() {
            return Ok(());
        }
        done = parked;
        let Some((first, why)) = left.first() else { continue };
        if pause >= LONGEST_PAUSE && !warned {
            warned = true;
            warn!(
                pid = first.pid,
                "not parked yet, so its memory depends on this streamer's processes alone: {why}"
            );
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
    Ok(())
}

/// Takes the store's descriptor out of every process that has it. The store is empty by then. The slot has the store's
/// number until that has succeeded: a process that is frozen or traced keeps the descriptor.
pub async fn unpark(slot: &'static SessionSlot, store: OwnedFd, writer: OwnedFd) {
    let _ = tokio::task::spawn_blocking(move || unpark_now(slot, store, &writer)).await;
}

/// Unparks as [`unpark`] does, in this thread.
pub fn unpark_now(slot: &SessionSlot, store: OwnedFd, writer: &OwnedFd) {
    drop(store);
    // The writer hangs up when the last copy of the store is closed: usually because the processes have
    // ended.
    if sys::has_hung_up(writer.as_raw_fd()) {
        slot.inode.store(0, Ordering::Release);
    } else if let Err(error) = unpark_slot(slot) {
        info!("{error:#}");
    }
}

/// Unparks the session of a streamer that has not done it. It may take seconds.
///
/// # Errors
/// A process keeps the descriptor.
pub fn unpark_slot(slot: &SessionSlot) -> anyhow::Result<()> {
    let inode = slot.inode.load(Ordering::Acquire);
    if inode == 0 {
        return Ok(());
    }
    let id = StoreId { inode, cookie: None };
    let kept = unpark_by(&[(id, &slot.paths().0)])?.into_iter().flatten().next();
    if let Some(line) = kept {
        bail!(line);
    }
    slot.inode.store(0, Ordering::Release);
    Ok(())
}

/// Unparks sessions that are over. Returns a line for each of which a process keeps the descriptor, in their order.
///
/// # Errors
/// No process can be started.
pub fn unpark_left(stores: &[&LeftStore]) -> anyhow::Result<Vec<Option<String>>> {
    unpark_by(&stores.iter().map(|left| (left.id, &*left.images)).collect::<Vec<_>>())
}

/// One process takes all of them back: those that cannot be had do not keep it from the others.
fn unpark_by(stores: &[(StoreId, &Path)]) -> anyhow::Result<Vec<Option<String>>> {
    if stores.is_empty() {
        return Ok(Vec::new());
    }
    let mut command = park_command()?;
    command.arg("--unpark").args(stores.iter().map(|(id, _)| id.to_string())).stdin(Stdio::null());
    let output = command.output().context("starting rewake park")?;
    Ok(kept_by(stores, output.status, &String::from_utf8_lossy(&output.stdout)))
}

/// Reads what `rewake park --unpark` left: a line for each process that keeps a store. Returns a line for each store
/// that a process keeps.
fn kept_by(stores: &[(StoreId, &Path)], status: ExitStatus, text: &str) -> Vec<Option<String>> {
    let lines: Vec<(&str, &str)> = text.lines().filter_map(|line| line.split_once(' ')).collect();
    // A command that was killed, or that failed before its first line, has not looked at every store.
    let has_ended = status.success() || status.code() == Some(1) && !lines.is_empty();
    let kept = |(id, images): &(StoreId, &Path)| {
        let id = id.to_string();
        let why: Vec<&str> = lines.iter().filter(|(of, _)| *of == id).map(|(_, why)| *why).collect();
        let shown = &why[..why.len().min(SHOWN)];
        let more = match why.len() - shown.len() {
            0 => String::new(),
            more => format!("; and {more} more processes"),
        };
        (!shown.is_empty() || !has_ended).then(|| {
            format!(
                "a process keeps an empty descriptor of the restore of {}, and CRIU cannot dump that process: \
                 {}{more}; `rewake recover` takes the descriptor back when the process can be stopped",
                images.display(),
                if shown.is_empty() { status.to_string() } else { shown.join("; ") },
            )
        })
    };
    stores.iter().map(kept).collect()
}

/// Returns the session's tasks, and the children that they forked before they had the store; without those in
/// `done`.
fn targets(ledger: Ledger, session: &Session, done: &BTreeSet<ProcessId>) -> Vec<ProcessId> {
    let Some(store) = session.store() else { return Vec::new() };
    let task = |(_, slot): (usize, &SpaceSlot)| {
        let (pid, started) = (slot.host_pid.load(Ordering::Acquire), slot.started.load(Ordering::Acquire));
        (pid > 0).then_some(ProcessId { pid, started })
    };
    let tasks: BTreeSet<ProcessId> = ledger.served_spaces().filter_map(task).collect();
    let mut targets: Vec<ProcessId> = tasks.difference(done).copied().collect();
    for task in &tasks {
        let layout = processes::layout(task.pid);
        for pid in processes::descendants(task.pid) {
            // A child with another layout has called exec: it has none of the session's memory.
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

/// Tries to park each target. Returns those that are not parked, with the reasons.
fn park_targets(session: &Session, targets: &[ProcessId]) -> anyhow::Result<Vec<(ProcessId, String)>> {
    let Some(store) = session.store().filter(|_| !targets.is_empty()) else { return Ok(Vec::new()) };
    let mut command = park_command()?;
    command.args(targets.iter().map(ToString::to_string));
    // A process that cannot be started now may be started later, and the targets are served meanwhile.
    let all_left = |why: String| Ok(targets.iter().map(|target| (*target, why.clone())).collect());
    let store = match store.descriptor().try_clone_to_owned() {
        Ok(store) => store,
        Err(error) => return all_left(format!("sharing the fd store: {error}")),
    };
    let output = match command.stdin(store).output() {
        Ok(output) => output,
        Err(error) => return all_left(format!("starting rewake park: {error}")),
    };
    let text = String::from_utf8_lossy(&output.stdout);
    match left_by(targets, &text)? {
        Some(left) => Ok(left),
        // If a signal killed it, the kernel has killed the one target that it traced at that moment.
        None => all_left(format!("rewake park: {}: {}", output.status, text.trim_end())),
    }
}

/// Reads the output of `rewake park`, which has a line for each target. Returns the targets that are not parked yet,
/// with the reasons, or `None` when lines are missing because the command was killed.
fn left_by(targets: &[ProcessId], text: &str) -> anyhow::Result<Option<Vec<(ProcessId, String)>>> {
    let lines: Vec<(&str, &str)> = text.lines().filter_map(|line| line.split_once(' ')).collect();
    if lines.len() != targets.len() {
        return Ok(None);
    }
    let mut left = Vec::new();
    for (target, (word, why)) in targets.iter().zip(lines) {
        match word {
            DONE => debug!(pid = target.pid, "parked: {why}"),
            LATER => left.push((*target, why.to_owned())),
            NEVER => bail!(
                "process {} cannot be given a descriptor that keeps its memory waiting, and would read zeros \
                 if this streamer were killed: {why}",
                target.pid
            ),
            other => bail!("rewake park: expected {DONE}, {LATER} or {NEVER}, found {other:?}"),
        }
    }
    Ok(Some(left))
}

/// Makes a `rewake park` command: in its own process group, with all signals blocked.
fn park_command() -> anyhow::Result<Command> {
    let mut command = Command::new(launch::program()?);
    command.arg("park").process_group(0).stderr(Stdio::null());
    sys::leave_descriptors(&mut command);
    sys::block_signals(&mut command);
    Ok(command)
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;

    use super::*;

    #[test]
    fn stores_are_kept_unless_the_command_looked_at_all_of_them() {
        let stores = [1, 2].map(|inode| (StoreId { inode, cookie: None }, Path::new("images")));
        let kept = |status, text| {
            let lines = kept_by(&stores, ExitStatus::from_raw(status), text);
            lines.iter().map(Option::is_some).collect::<Vec<_>>()
        };
        assert_eq!(kept(0, ""), [false, false]);
        assert_eq!(kept(1 << 8, "2 process 5 is frozen by its cgroup\n"), [false, true]);
        assert_eq!(kept(libc::SIGKILL, "2 process 5 is frozen by its cgroup\n"), [true, true]);
        assert_eq!(kept(1 << 8, ""), [true, true]);
    }

    #[test]
    fn targets_that_may_be_parked_later_are_left() {
        let targets = [5, 6, 7].map(|pid| ProcessId { pid, started: 1 });
        let left = left_by(&targets, &format!("{DONE} 3\n{LATER} it is traced\n{DONE} 4\n")).unwrap();
        assert_eq!(left, Some(vec![(targets[1], "it is traced".to_owned())]));
        assert_eq!(left_by(&targets, &format!("{DONE} 3\n{DONE} 4\n")).unwrap(), None, "it was killed");
        let refused = left_by(&targets[..1], &format!("{NEVER} no descriptor is free\n")).unwrap_err();
        assert!(refused.to_string().contains("would read zeros"), "{refused}");
        assert!(left_by(&targets[..1], "maybe 3\n").is_err());
    }
}
