// SPDX-License-Identifier: MIT OR Apache-2.0
//! Parks the targets of the session: each gets a descriptor of its [fd store](crate::ledger::fd_store), and
//! loses it when all memory is resident.
//!
//! A CRIU plugin parks before the target runs (`docs/plugin.md`). Without one, the streamer parks as
//! soon as CRIU has detached from the process. A child that the target forks inherits the descriptor.
//!
//! A thread of the target makes some system calls for that (`rewake park`). If its tracer is killed during
//! such a call, the kernel kills the target, because its registers are not its own. So the tracer is a
//! short-lived process in a process group of its own, which no signal to the streamer's group reaches. A
//! service manager signals every process of a cgroup, so all signals are blocked in that process.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::os::fd::{AsRawFd as _, OwnedFd, RawFd};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use rewake_plugin_protocol::ProcessId;
use tracing::{debug, info, warn};

use crate::ledger::{Ledger, ParkedStore, SessionSlot, SpaceSlot, fd_store};
use crate::session::Session;
use crate::supervise::processes;
use crate::supervise::store_id::StoreId;
use crate::sys;

/// `rewake park` reports that the process has the descriptor, or needs none any more.
pub const DONE: &str = "done";
/// `rewake park` reports that a later try may succeed.
pub const LATER: &str = "later";
/// `rewake park` reports that no try can succeed.
pub const NEVER: &str = "never";

/// The pause before the second try to park. Each pause doubles, up to [`LONGEST_INTERVAL`].
const FIRST_INTERVAL: Duration = Duration::from_millis(5);
/// The longest of these pauses. When it is reached, the log has a warning.
const LONGEST_INTERVAL: Duration = Duration::from_secs(1);
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
    let mut pause = FIRST_INTERVAL;
    let mut warned = false;
    while !session.is_empty() && !session.has_failed() {
        let round = tokio::task::spawn_blocking(move || {
            let targets = targets(ledger, &done);
            let left = park_targets(ledger.session(), &targets)?;
            done.extend(targets.keys().filter(|target| left.iter().all(|(other, _)| other != *target)));
            anyhow::Ok((targets, left, done))
        });
        let (targets, left, parked) = round.await.context("parking")??;
        if targets.is_empty() {
            let slot = ledger.session();
            return tokio::task::spawn_blocking(move || forget_former(slot)).await.context("parking");
        }
        done = parked;
        let Some((first, why)) = left.first() else { continue };
        if pause >= LONGEST_INTERVAL && !warned {
            warned = true;
            warn!(
                pid = first.pid,
                "not parked yet, so its memory depends on this streamer's processes alone: {why}"
            );
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST_INTERVAL);
    }
    // Nothing is missing any more, and what is left is taken back when the session is closed.
    close_former(ledger.session());
    Ok(())
}

/// Takes the stores' descriptors out of every process that has one. The stores are empty by then. The ledger
/// has a store's inode until that has succeeded: a process that is frozen or traced keeps the descriptor.
pub async fn unpark(slot: &'static SessionSlot) {
    let _ = tokio::task::spawn_blocking(move || unpark_now(slot)).await;
}

/// Unparks as [`unpark`] does, in this thread.
pub fn unpark_now(slot: &SessionSlot) {
    for (_, place) in slot.stores.all() {
        let [store, writer] = place.take();
        drop(store);
        // The writer hangs up when the last copy of the store is closed: usually because the processes have
        // ended.
        if writer.is_some_and(|writer| sys::has_hung_up(writer.as_raw_fd())) {
            place.forget();
        }
    }
    if let Err(error) = unpark_slot(slot) {
        info!("{error:#}");
    }
}

/// Unparks the session of a streamer that has not done it. It may take seconds.
///
/// # Errors
/// A process keeps a descriptor.
pub fn unpark_slot(slot: &SessionSlot) -> anyhow::Result<()> {
    unpark_places(slot, &slot.stores.all().map(|(_, place)| place).collect::<Vec<_>>())
}

/// Takes stores back, and frees their places.
fn unpark_places(slot: &SessionSlot, places: &[&ParkedStore]) -> anyhow::Result<()> {
    let images = slot.paths().0;
    let id = |place: &&ParkedStore| (StoreId { inode: place.inode(), cookie: None }, &*images);
    let stores: Vec<_> = places.iter().map(id).collect();
    let kept = unpark_by(&stores)?;
    places.iter().zip(&kept).filter(|(_, kept)| kept.is_none()).for_each(|(place, _)| place.forget());
    kept.into_iter().flatten().next().map_or(Ok(()), |line| Err(anyhow!(line)))
}

/// Takes the former stores of a recovered session back, because every target has the new one.
///
/// Their userfaultfds close first: a process that keeps a descriptor, as it cannot be stopped, keeps nothing
/// else.
fn forget_former(slot: &SessionSlot) {
    close_former(slot);
    // What cannot be taken back is tried again at the session's end.
    if let Err(error) = unpark_places(slot, &slot.stores.former().collect::<Vec<_>>()) {
        info!("{error:#}");
    }
}

/// Empties and closes the former stores of a recovered session. A successor of a worker that dies here finds
/// those that are not empty yet.
pub(crate) fn close_former(slot: &SessionSlot) {
    for place in slot.stores.former() {
        if let Some(Err(error)) = place.descriptor().map(fd_store::empty) {
            warn!(%error, "emptying a former fd store");
        }
        drop(place.take());
    }
}

/// Unparks sessions that are over. Returns a line for each of which a process keeps the descriptor, in their
/// order.
///
/// # Errors
/// No process can be started.
pub fn unpark_by(stores: &[(StoreId, &Path)]) -> anyhow::Result<Vec<Option<String>>> {
    if stores.is_empty() {
        return Ok(Vec::new());
    }
    let mut command = park_command()?;
    command.arg("--unpark").args(stores.iter().map(|(id, _)| id.to_string())).stdin(Stdio::null());
    let output = command.output().context("starting rewake park")?;
    Ok(kept_by(stores, output.status, &String::from_utf8_lossy(&output.stdout)))
}

/// Reads what `rewake park --unpark` left: a line for each process that keeps a store. Returns a line for
/// each store that a process keeps.
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
                "a process keeps an empty descriptor of the restore of {}, and CRIU cannot dump that \
                 process: {}{more}; `rewake recover` takes the descriptor back when the process can be \
                 stopped",
                images.display(),
                if shown.is_empty() { status.to_string() } else { shown.join("; ") },
            )
        })
    };
    stores.iter().map(kept).collect()
}

/// Returns the session's tasks, the children that they forked before they had a store, and each process that
/// has a former store of a recovered session; without those in `done`. With each is the number of the store
/// that it gets.
fn targets(ledger: Ledger, done: &BTreeSet<ProcessId>) -> BTreeMap<ProcessId, u32> {
    let stores = &ledger.session().stores;
    let inodes: BTreeSet<u64> = stores.present().map(|(_, store)| store.inode()).collect();
    let has_any = |pid: i32| !processes::sockets_among(pid, &inodes).is_empty();
    let task = |(_, slot): (usize, &SpaceSlot)| {
        let (pid, started) = (slot.host_pid.load(Ordering::Acquire), slot.started.load(Ordering::Acquire));
        (pid > 0).then_some((ProcessId { pid, started }, slot.store_number()))
    };
    let tasks: BTreeMap<ProcessId, u32> = ledger.served_spaces().filter_map(task).collect();
    let mut targets = tasks.clone();
    let mut trees: Vec<_> =
        tasks.iter().map(|(task, store)| (processes::descendants(task.pid), task, store)).collect();
    // A child of a task that is a child of another task has the store of the nearer one: the smallest tree
    // comes last.
    trees.sort_by_key(|(descendants, ..)| Reverse(descendants.len()));
    for (descendants, task, store) in trees {
        let layout = processes::layout(task.pid);
        for pid in descendants {
            // A child with another layout has called exec: it has none of the session's memory.
            let forked = layout.is_some() && processes::layout(pid) == layout;
            let Ok(Some(child)) = ProcessId::of(pid) else { continue };
            if forked && !tasks.contains_key(&child) && !done.contains(&child) && !has_any(pid) {
                targets.insert(child, *store);
            }
        }
    }
    // A forked child has no pid in the ledger, and its parent may have ended.
    let former: BTreeMap<u64, i32> = stores.former().map(|store| (store.inode(), store.task())).collect();
    let all = if former.is_empty() { BTreeSet::new() } else { processes::all().collect() };
    for pid in all {
        let sockets = rewake_plugin_protocol::sockets_of(pid).unwrap_or_default();
        let Some(task) = sockets.iter().find_map(|(_, inode)| former.get(inode)) else { continue };
        let Some((number, store)) = stores.present().find(|(_, store)| store.task() == *task) else {
            continue;
        };
        let has_new = sockets.iter().any(|(_, inode)| *inode == store.inode());
        let Ok(Some(holder)) = ProcessId::of(pid) else { continue };
        if !has_new {
            targets.insert(holder, number);
        }
    }
    targets.retain(|target, _| !done.contains(target));
    targets
}

/// Tries to give each target the store of its number. Returns those that do not have it, with the reasons.
fn park_targets(
    slot: &SessionSlot,
    targets: &BTreeMap<ProcessId, u32>,
) -> anyhow::Result<Vec<(ProcessId, String)>> {
    // A process that cannot be started now may be started later, and the targets are served until then.
    let all_left = |why: String| Ok(targets.keys().map(|target| (*target, why.clone())).collect());
    let mut stores = BTreeMap::new();
    for number in targets.values() {
        let Some(store) = slot.stores.get(*number).and_then(ParkedStore::descriptor) else { continue };
        match store.try_clone_to_owned() {
            Ok(store) => drop(stores.insert(*number, store)),
            Err(error) => return all_left(format!("sharing an fd store: {error}")),
        }
    }
    let of_target = |(target, number): (&ProcessId, &u32)| {
        Some(ParkTarget { process: *target, store: stores.get(number)?.as_raw_fd() })
    };
    let wanted: Vec<ParkTarget> = targets.iter().filter_map(of_target).collect();
    if wanted.is_empty() {
        return Ok(Vec::new());
    }
    let mut command = park_command()?;
    sys::pass_descriptors(&mut command, stores.values().map(OwnedFd::as_raw_fd).collect());
    command.args(wanted.iter().map(ToString::to_string)).stdin(Stdio::null());
    let output = match command.output() {
        Ok(output) => output,
        Err(error) => return all_left(format!("starting rewake park: {error}")),
    };
    let text = String::from_utf8_lossy(&output.stdout);
    match left_by(&wanted, &text)? {
        Some(left) => Ok(left),
        // If a signal killed it, the kernel has killed the one target that it traced at that moment.
        None => all_left(format!("rewake park: {}: {}", output.status, text.trim_end())),
    }
}

/// What `rewake park` does, as its argument: the process gets the store with this number of the command's
/// table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParkTarget {
    /// The process.
    pub process: ProcessId,
    /// The number of the fd store.
    pub store: RawFd,
}

impl ParkTarget {
    /// Reads what [`fmt::Display`] writes: PID-START=NUMBER.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (process, store) = text.split_once('=')?;
        let (pid, started) = process.split_once('-')?;
        let process = ProcessId { pid: pid.parse().ok()?, started: started.parse().ok()? };
        Some(Self { process, store: store.parse().ok()? })
    }
}

impl fmt::Display for ParkTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.process, self.store)
    }
}

/// Reads the output of `rewake park`, which has a line for each target. Returns the targets that are not
/// parked yet, with the reasons, or `None` when lines are missing because the command was killed.
fn left_by(targets: &[ParkTarget], text: &str) -> anyhow::Result<Option<Vec<(ProcessId, String)>>> {
    let lines: Vec<(&str, &str)> = text.lines().filter_map(|line| line.split_once(' ')).collect();
    if lines.len() != targets.len() {
        return Ok(None);
    }
    let mut left = Vec::new();
    for (target, (word, why)) in targets.iter().zip(lines) {
        match word {
            DONE => debug!(pid = target.process.pid, "parked: {why}"),
            LATER => left.push((target.process, why.to_owned())),
            NEVER => bail!(
                "process {} cannot be given a descriptor that keeps its memory waiting, and would read zeros \
                 if this streamer were killed: {why}",
                target.process.pid
            ),
            other => bail!("rewake park: expected {DONE}, {LATER} or {NEVER}, found {other:?}"),
        }
    }
    Ok(Some(left))
}

/// Makes a `rewake park` command: in its own process group, with all signals blocked.
fn park_command() -> anyhow::Result<Command> {
    let mut command = Command::new(sys::program()?);
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
        let targets = [5, 6, 7].map(|pid| ParkTarget { process: ProcessId { pid, started: 1 }, store: 9 });
        assert_eq!(ParkTarget::parse(&targets[0].to_string()), Some(targets[0]));
        let left = left_by(&targets, &format!("{DONE} 3\n{LATER} it is traced\n{DONE} 4\n")).unwrap();
        assert_eq!(left, Some(vec![(targets[1].process, "it is traced".to_owned())]));
        assert_eq!(left_by(&targets, &format!("{DONE} 3\n{DONE} 4\n")).unwrap(), None, "it was killed");
        let refused = left_by(&targets[..1], &format!("{NEVER} no descriptor is free\n")).unwrap_err();
        assert!(refused.to_string().contains("would read zeros"), "{refused}");
        assert!(left_by(&targets[..1], "maybe 3\n").is_err());
    }
}
