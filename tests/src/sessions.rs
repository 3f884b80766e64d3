// SPDX-License-Identifier: MIT OR Apache-2.0
//! Sessions whose streamer's processes were all killed, and `rewake recover`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use anyhow::Context;
use nix::unistd::Pid;
use rewake_process::proc;
use rewake_testkit::hosts::own_tmpfs;

pub use crate::process::waits_in_a_page_fault;
use crate::process::{session, until};
use crate::scene::{ACT, Scene};
use crate::server::{Server, rewake};

const FOLDER: &str = "/run/rewake";
/// A target that reads all of its memory meets a missing page within this time.
const FAULT: Duration = Duration::from_secs(5);

/// Gives the calling thread, and all that it starts from now on, a `/run/rewake` of its own: `rewake recover`
/// serves every session that it finds there, including sessions of other tests.
///
/// # Errors
/// The kernel has no mount namespaces, or `mount` is missing.
pub fn own_sessions() -> anyhow::Result<()> {
    fs::create_dir_all(FOLDER).context("create /run/rewake")?;
    own_tmpfs(FOLDER)
}

/// The folders of all streamers, dead or alive.
#[must_use]
pub fn folders() -> Vec<PathBuf> {
    let entries = fs::read_dir(Path::new(FOLDER).join("sessions"));
    let paths = entries.into_iter().flatten().flatten().map(|entry| entry.path());
    paths.filter(|path| path.join("ledger").exists()).collect()
}

/// Whether every task of a tree has a socket: its fd store, as no target of these tests opens one.
#[must_use]
pub fn are_parked(leader: Pid) -> bool {
    let tasks = session(leader);
    !tasks.is_empty() && tasks.into_iter().all(holds_a_socket)
}

/// Waits until the processes of a tree are parked, so that its session can be recovered: false when all
/// memory is resident before that, as `is_over` says. A process that is being parked has other sockets.
///
/// # Errors
/// Neither happens in time.
pub fn parked(leader: Pid, mut is_over: impl FnMut() -> bool) -> anyhow::Result<bool> {
    let has_ended = |task: Pid| {
        let mut threads = proc::threads(task.as_raw()).into_iter().filter_map(proc::status);
        threads.all(proc::Status::has_ended)
    };
    let is_parked = || {
        let tasks = session(leader);
        let is_parked = |task: Pid| has_ended(task) || holds_a_socket(task) && !is_traced(task);
        !tasks.is_empty() && tasks.into_iter().all(is_parked)
    };
    until(ACT, || (is_parked() || is_over()).then_some(())).context("it is never parked")?;
    Ok(is_parked() && !has_ended(leader))
}

/// Restores, and waits until the processes are parked: false when all memory was resident before that was
/// seen.
///
/// # Panics
/// The restore fails, or a process is not parked in time.
#[must_use]
pub fn restored_and_parked(scene: &Scene, server: &Server) -> bool {
    scene.go().unwrap();
    scene.restore().unwrap();
    parked(scene.pid(), || server.text().contains("all CPU memory is resident")).unwrap()
}

/// Whether a thread of a process has a tracer: a process that parks is killed with its target.
fn is_traced(pid: Pid) -> bool {
    let mut statuses = proc::threads(pid.as_raw()).into_iter().filter_map(proc::status);
    statuses.any(|status| status.tracer != 0)
}

/// Whether a process has a socket.
pub(crate) fn holds_a_socket(task: Pid) -> bool {
    rewake_plugin_protocol::sockets_of(task.as_raw()).is_ok_and(|sockets| !sockets.is_empty())
}

/// Waits until a target that reads all of its memory meets a missing page: false when all is resident.
#[must_use]
pub fn meets_a_missing_page(pid: Pid) -> bool {
    until(FAULT, || waits_in_a_page_fault(pid).then_some(())).is_some()
}

/// `rewake recover`, not yet started.
///
/// # Errors
/// No program to start.
pub fn recover() -> anyhow::Result<Command> {
    let mut command = Command::new(rewake()?);
    command.arg("recover").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    Ok(command)
}

/// How many sessions a `rewake recover` has served again, from its log.
#[must_use]
pub fn served_again(output: &Output) -> usize {
    let text = String::from_utf8_lossy(&output.stderr);
    text.lines().filter(|line| line.contains("serving ") && line.contains("streamer was killed")).count()
}
