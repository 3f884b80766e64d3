// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake park`: gives processes a descriptor of a session's fd store, or takes it from them. A streamer runs it
//! (`rewake_streamer::supervise::parking`); it is no command for users.
//!
//! One line for each target, in order: [`DONE`], [`LATER`] or [`NEVER`], and a reason.

use std::io::Write as _;
use std::os::fd::{AsFd as _, RawFd};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use nix::sys::stat::fstat;
use rewake_plugin_protocol::ProcessId;
use rewake_ptrace_inject::{Error, with_stopped};

use crate::cli::ParkArgs;
use rewake_streamer::supervise::left::number_of_store;
use rewake_streamer::supervise::parking::{DONE, LATER, NEVER};
use rewake_streamer::supervise::processes;

/// Time limit for another tracer, mostly CRIU, to release a process, and for its threads to stop.
const PATIENCE: Duration = Duration::from_secs(1);
/// Tries to take a descriptor away, and time between them.
const TRIES: u32 = 5;
const PAUSE: Duration = Duration::from_millis(500);
/// Time for all tries together.
const LIMIT: Duration = Duration::from_secs(15);

/// Runs the command; gives the exit code.
///
/// # Errors
/// Standard input is no fd store, a target is not spelled `PID-START`, or standard output is closed.
pub fn run(options: &ParkArgs) -> anyhow::Result<u8> {
    if let Some(inode) = options.unpark {
        return unpark(inode, options.cookie);
    }
    let store = std::io::stdin();
    let inode = fstat(&store).context("looking at the fd store")?.st_ino;
    for target in &options.targets {
        let target: ProcessId = parse(target).with_context(|| format!("{target:?}: expected PID-START"))?;
        let (word, why) = match give(target, store.as_fd(), inode) {
            Ok(why) => (DONE, why),
            Err(error) if may_pass(&error) => (LATER, error.to_string()),
            Err(error) => (NEVER, error.to_string()),
        };
        say(&format!("{word} {why}"))?;
    }
    Ok(0)
}

fn parse(text: &str) -> Option<ProcessId> {
    let (pid, started) = text.split_once('-')?;
    Some(ProcessId { pid: pid.parse().ok()?, started: started.parse().ok()? })
}

/// The result.
fn give(target: ProcessId, store: std::os::fd::BorrowedFd<'_>, inode: u64) -> Result<String, Error> {
    let pid = target.pid;
    // A process that cannot be inspected is tried.
    let has_ended = || ProcessId::of(pid).is_ok_and(|of| of != Some(target));
    let parked = || processes::number_of_socket(pid, inode).map(|number| format!("has descriptor {number}"));
    if has_ended() {
        return Ok("has ended".to_owned());
    }
    if let Some(number) = parked() {
        return Ok(number);
    }
    let given = with_stopped(pid, PATIENCE, |stopped| match parked() {
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

/// Takes the descriptor from every process that has it.
fn unpark(inode: u64, cookie: Option<u64>) -> anyhow::Result<u8> {
    let start = Instant::now();
    let mut left = Vec::new();
    for _ in 0..TRIES {
        left.clear();
        for pid in processes::all() {
            // Each process of a frozen container takes its time.
            if start.elapsed() > LIMIT {
                left.push("more of its processes".to_owned());
                break;
            }
            left.extend(take_back(pid, inode, cookie));
        }
        if left.is_empty() {
            return Ok(0);
        }
        if start.elapsed() > LIMIT {
            break;
        }
        std::thread::sleep(PAUSE);
    }
    for why in left {
        say(&format!("{LATER} {why}"))?;
    }
    Ok(1)
}

/// Why it failed.
fn take_back(pid: i32, inode: u64, cookie: Option<u64>) -> Option<String> {
    number_of_store(pid, inode, cookie)?;
    let closed = with_stopped(pid, PATIENCE, |stopped| -> Result<(), Error> {
        let number: Option<RawFd> = number_of_store(pid, inode, cookie);
        number.map_or(Ok(()), |number| stopped.close(number))
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
