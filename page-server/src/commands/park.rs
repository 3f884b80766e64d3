// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake park`: gives processes a descriptor of their fd store, or takes it from them. A streamer
//! runs it (`rewake_streamer::supervise::parking`); it is no command for users.
//!
//! One line for each target, in order: [`DONE`], [`LATER`] or [`NEVER`], and a reason.

use std::io::Write as _;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use nix::sys::stat::fstat;
use rewake_plugin_protocol::ProcessId;
use rewake_process::pidfd::{pidfd_getfd, pidfd_open};
use rewake_ptrace_inject::{Error, with_stopped};

use crate::cli::ParkArgs;
use rewake_streamer::supervise::parking::{DONE, LATER, NEVER, ParkTarget};
use rewake_streamer::supervise::processes;
use rewake_streamer::supervise::store_id::StoreId;

/// Time limit for another tracer, mostly CRIU, to release a process, and for its threads to stop.
const STOP_LIMIT: Duration = Duration::from_secs(1);
/// The same, of the first try to take descriptors away: a process that waits for a disk takes all of it, and
/// may be one of hundreds before a process that can be stopped.
const FIRST_STOP_LIMIT: Duration = Duration::from_millis(20);
/// Tries to take a descriptor away, and time between them.
const TRIES: u32 = 5;
/// Pause between two of these tries, in which a process may leave the call that it cannot be stopped in.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);
/// Time for all tries together, because there may be hundreds of processes.
const TOTAL_LIMIT: Duration = Duration::from_secs(15);

/// Runs the command; gives the exit code.
///
/// # Errors
/// A target is not spelled `PID-START=NUMBER`, its store is not open, or standard output is closed.
pub fn run(options: &ParkArgs) -> anyhow::Result<u8> {
    if !options.unpark.is_empty() {
        let parse =
            |text: &String| StoreId::parse(text).with_context(|| format!("{text:?}: expected INODE-COOKIE"));
        return unpark(&options.unpark.iter().map(parse).collect::<anyhow::Result<Vec<_>>>()?);
    }
    let own = pidfd_open(std::process::id().cast_signed()).context("opening this process")?;
    for target in &options.targets {
        let target =
            ParkTarget::parse(target).with_context(|| format!("{target:?}: expected PID-START=NUMBER"))?;
        let store = pidfd_getfd(own.as_fd(), target.store).context("the fd store")?;
        let (word, why) = match give(target.process, store.as_fd()) {
            Ok(why) => (DONE, why),
            Err(error) if may_pass(&error) => (LATER, error.to_string()),
            Err(error) => (NEVER, error.to_string()),
        };
        say(&format!("{word} {why}"))?;
    }
    Ok(0)
}

/// The result.
fn give(target: ProcessId, store: BorrowedFd<'_>) -> Result<String, Error> {
    let pid = target.pid;
    // A store of which nothing is known is no process's.
    let inode = fstat(store).map_or(0, |status| status.st_ino);
    // A process that cannot be inspected is tried.
    let has_ended = || ProcessId::of(pid).is_ok_and(|of| of != Some(target));
    let parked = || processes::number_of_socket(pid, inode).map(|number| format!("has descriptor {number}"));
    if has_ended() {
        return Ok("has ended".to_owned());
    }
    if let Some(number) = parked() {
        return Ok(number);
    }
    let given = with_stopped(pid, STOP_LIMIT, |stopped| match parked() {
        // As long as the process has not ended its number is its own.
        _ if has_ended() => Ok("has ended".to_owned()),
        // The plugin was quicker.
        Some(number) => Ok(number),
        None => stopped.give(store).map(|number| format!("was given descriptor {number}")),
    });
    match given.and_then(|given| given) {
        Err(_) if has_ended() => Ok("has ended".to_owned()),
        given => given,
    }
}

/// Takes the stores from every process that has one. A line for each that keeps one: the store and the
/// reason.
fn unpark(stores: &[StoreId]) -> anyhow::Result<u8> {
    let start = Instant::now();
    let mut patience = FIRST_STOP_LIMIT;
    let mut left = Vec::new();
    for _ in 0..TRIES {
        left.clear();
        // Children may have inherited it since the last look.
        for (pid, store) in holders(stores) {
            if start.elapsed() > TOTAL_LIMIT {
                left.push((
                    store,
                    format!("process {pid} was not stopped within {} s", TOTAL_LIMIT.as_secs()),
                ));
            } else if let Some(why) = take_back(pid, store, patience) {
                left.push((store, why));
            }
        }
        if left.is_empty() || start.elapsed() > TOTAL_LIMIT {
            break;
        }
        std::thread::sleep(RETRY_INTERVAL);
        patience = (patience * 5).min(STOP_LIMIT);
    }
    for (store, why) in &left {
        say(&format!("{store} {}", why.replace(['\n', '\r'], " ")))?;
    }
    Ok(u8::from(!left.is_empty()))
}

/// The processes that have a descriptor of one of these stores.
fn holders(stores: &[StoreId]) -> Vec<(i32, StoreId)> {
    let of_process = |pid: i32| {
        let sockets = rewake_plugin_protocol::sockets_of(pid).unwrap_or_default();
        let has = move |store: &&StoreId| sockets.iter().any(|(_, inode)| *inode == store.inode);
        stores.iter().filter(has).map(move |store| (pid, *store))
    };
    processes::all().flat_map(of_process).collect()
}

/// Why it failed.
fn take_back(pid: i32, store: StoreId, patience: Duration) -> Option<String> {
    store.number_in(pid)?;
    // It can be stopped, but the call that closes the descriptor would wait.
    if processes::is_frozen(pid) {
        return Some(format!("process {pid} is frozen by its cgroup"));
    }
    let closed = with_stopped(pid, patience, |stopped| -> Result<(), Error> {
        store.number_in(pid).map_or(Ok(()), |number| stopped.close(number))
    });
    match closed.and_then(|closed| closed) {
        Ok(()) | Err(Error::Ended { .. }) => None,
        Err(error) => Some(error.to_string()),
    }
}

/// Whether a later try may succeed.
fn may_pass(error: &Error) -> bool {
    !matches!(
        error,
        Error::NotAllowed { .. } | Error::Foreign { .. } | Error::Seccomp { .. } | Error::NoEntry { .. }
    )
}

fn say(line: &str) -> anyhow::Result<()> {
    writeln!(std::io::stdout(), "{line}").context("writing to the streamer")
}
