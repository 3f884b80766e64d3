// SPDX-License-Identifier: MIT OR Apache-2.0
//! Processes: commands, waiting with a limit, what `/proc` shows, signals.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill, killpg};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use rewake_process::names::lines;
use rewake_process::proc;

/// How long to wait for what must happen: an emulated machine on a busy host takes one minute to restore
/// several programs. Only a test that fails waits so long.
pub const PATIENCE: Duration = Duration::from_secs(180);
/// Polling interval of a wait: a twentieth of its duration, within these limits.
const POLL: [Duration; 2] = [Duration::from_millis(2), Duration::from_millis(50)];

/// A number of a process, as the standard library or nix has it.
pub trait ProcessId: Copy {
    /// The number in nix's type.
    fn pid(self) -> Pid;
    /// The same number in this type.
    fn from_pid(pid: Pid) -> Self;
}

impl ProcessId for Pid {
    fn pid(self) -> Pid {
        self
    }

    fn from_pid(pid: Pid) -> Self {
        pid
    }
}

impl ProcessId for u32 {
    fn pid(self) -> Pid {
        Pid::from_raw(self.cast_signed())
    }

    fn from_pid(pid: Pid) -> Self {
        pid.as_raw().cast_unsigned()
    }
}

/// Polls `done` until it returns a value or `limit` has passed.
pub fn until<T>(limit: Duration, mut done: impl FnMut() -> Option<T>) -> Option<T> {
    let start = Instant::now();
    loop {
        if let Some(value) = done() {
            return Some(value);
        }
        let elapsed = start.elapsed();
        if elapsed >= limit {
            return None;
        }
        sleep((elapsed / 20).clamp(POLL[0], POLL[1]));
    }
}

/// Whether `done` becomes true within [`PATIENCE`].
#[must_use]
pub fn soon(mut is_so: impl FnMut() -> bool) -> bool {
    until(PATIENCE, || is_so().then_some(())).is_some()
}

/// Runs a command to its end; kills it at the limit.
///
/// # Errors
/// It cannot be started, or did not end in time.
pub fn run(command: &mut Command, limit: Duration) -> anyhow::Result<ExitStatus> {
    let mut child = command.spawn().with_context(|| format!("start {command:?}"))?;
    if let Some(status) = wait_child(&mut child, limit) {
        return Ok(status);
    }
    child.kill().context("kill what did not end")?;
    child.wait().context("collect what did not end")?;
    bail!("{command:?} did not end within {limit:?}")
}

/// Runs a command that must succeed, and returns its standard output.
///
/// # Errors
/// It cannot be started, or fails; with its standard error.
pub fn output(command: &mut Command) -> anyhow::Result<String> {
    let output = command.output().with_context(|| format!("start {command:?}"))?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?}: {}: {}", output.status, errors.trim());
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Writes a program. A shell writes it: a program that this process has open for writing in one thread cannot
/// be run by a child of another.
///
/// # Errors
/// The shell fails.
pub fn write_program(path: &Path, text: &str) -> anyhow::Result<()> {
    let mut write = Command::new("sh");
    write.args(["-c", "printf %s \"$1\" > \"$0\" && chmod 755 \"$0\""]).arg(path).arg(text);
    output(&mut write).map(drop)
}

/// A shell command that stops processes, and waits until all their threads are stopped.
#[must_use]
pub fn stop_command<P: ProcessId>(processes: &[P]) -> String {
    let pids: Vec<String> = processes.iter().map(|process| process.pid().to_string()).collect();
    let threads: Vec<String> = pids.iter().map(|pid| format!("/proc/{pid}/task/*/status")).collect();
    format!(
        "kill -STOP {} && while grep -h '^State:' {} | grep -qv 'T (stopped)'; do sleep 0.01; done",
        pids.join(" "),
        threads.join(" ")
    )
}

/// Waits for a child of this process; none when it still runs at the limit.
pub fn wait_child(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    // An error means that it is no child any more; the caller's time limit reports that.
    until(limit, || child.try_wait().ok().flatten())
}

/// Waits for a restored process, which has become a child of this one (a subreaper); none when it still runs
/// at the limit.
///
/// # Errors
/// It is not a child of this process.
pub fn wait_pid(pid: Pid, limit: Duration) -> Result<Option<WaitStatus>, Errno> {
    until(limit, || match waitpid(pid, Some(WaitPidFlag::WNOHANG)) {
        Ok(WaitStatus::StillAlive) => None,
        other => Some(other),
    })
    .transpose()
}

/// Makes this process the parent of its descendants' orphans (subreaper), so that it can wait for restored
/// targets.
///
/// # Errors
/// The kernel refuses, which it does not.
pub fn adopt_orphans() -> anyhow::Result<()> {
    nix::sys::prctl::set_child_subreaper(true).context("become a subreaper")
}

/// The parent of a process; none when it has ended.
#[must_use]
pub fn parent(pid: Pid) -> Option<Pid> {
    proc::status(pid.as_raw()).map(|status| Pid::from_raw(status.parent))
}

/// Whether all threads of a process have ended, so that its descriptors are closed: it has ended or is a
/// zombie.
#[must_use]
pub fn has_ended<P: ProcessId>(process: P) -> bool {
    let pid = process.pid().as_raw();
    proc::status(pid).is_none_or(|status| status.has_ended()) && proc::threads(pid).len() <= 1
}

/// Whether a process sleeps until a signal arrives, or is stopped.
#[must_use]
pub fn sleeps_or_is_stopped<P: ProcessId>(process: P) -> bool {
    proc::status(process.pid().as_raw()).is_some_and(|status| "STt".contains(status.state))
}

/// The children of all threads of a process, zombies included.
#[must_use]
pub fn children<P: ProcessId>(parent: P) -> Vec<P> {
    let pids = proc::children(parent.pid().as_raw());
    pids.into_iter().map(|pid| P::from_pid(Pid::from_raw(pid))).collect()
}

/// The processes that `wanted` chooses.
fn processes<P: ProcessId>(wanted: impl Fn(i32) -> bool) -> Vec<P> {
    let pids = proc::processes().unwrap_or_default().into_iter().filter(|pid| wanted(*pid));
    pids.map(|pid| P::from_pid(Pid::from_raw(pid))).collect()
}

/// The members of a session, zombies included.
#[must_use]
pub fn session(leader: Pid) -> Vec<Pid> {
    let leader = leader.to_string();
    processes(|pid| proc::stat(pid).is_ok_and(|fields| fields.get(3) == Some(&leader)))
}

/// The processes of a name.
#[must_use]
pub fn named(name: impl AsRef<[u8]>) -> Vec<u32> {
    processes(|pid| proc::name(pid) == name.as_ref())
}

/// The processes whose command line has `text`.
#[must_use]
pub fn processes_naming(text: &str) -> Vec<Pid> {
    processes(|pid| command_line(pid).contains(text))
}

/// The arguments of a process, with spaces between them.
fn command_line(pid: i32) -> String {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&line).replace('\0', " ")
}

/// The processes that are in a control group of that name.
#[must_use]
pub fn in_group(name: &str) -> Vec<Pid> {
    let name = format!("/{name}");
    processes(|pid| {
        let groups = fs::read(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        lines(&groups).any(|group| group.ends_with(name.as_bytes()))
    })
}

/// Whether a thread of a process sleeps in a page fault that no streamer has served. A thread that waits
/// because the streamer has not read of its mremap(2) or fork(2) yet sleeps elsewhere.
#[must_use]
pub fn waits_in_a_page_fault<P: ProcessId>(process: P) -> bool {
    let pid = process.pid().as_raw();
    let place = |thread| fs::read_to_string(format!("/proc/{pid}/task/{thread}/wchan")).unwrap_or_default();
    proc::threads(pid).into_iter().any(|thread| place(thread).contains("handle_userfault"))
}

/// The supervisor of the streamer that is a child of this process, and its workers, at least one.
///
/// # Panics
/// No streamer runs.
#[must_use]
pub fn streamer_of<P: ProcessId>(parent: P) -> (P, Vec<P>) {
    let is_one =
        |child: &P| command_line(child.pid().as_raw()).contains("streamer") && !children(*child).is_empty();
    let supervisor = until(PATIENCE, || children(parent).into_iter().find(is_one)).expect("a streamer");
    (supervisor, children(supervisor))
}

/// Kills a process that runs.
///
/// # Panics
/// It does not.
pub fn dies<P: ProcessId>(process: P) {
    signal(&[process], Signal::SIGKILL);
}

/// Sends a signal to processes that run.
///
/// # Panics
/// One does not.
pub fn signal<P: ProcessId>(processes: &[P], signal: Signal) {
    processes.iter().for_each(|process| kill(process.pid(), signal).unwrap());
}

/// Sends signals to a process group, one after the other. The first may end it.
pub fn signal_group<P: ProcessId>(leader: P, signals: &[Signal]) {
    for signal in signals {
        let _ = killpg(leader.pid(), *signal);
    }
}

/// Kills every process of the list and collects those that fall to this one.
pub fn kill_all(pids: &[Pid]) {
    let pids: BTreeSet<Pid> = pids.iter().copied().collect();
    for pid in &pids {
        // It may have ended already.
        let _ = kill(*pid, Signal::SIGKILL);
    }
    for pid in &pids {
        // Not our child (yet): its parent is in the list too, and is collected by the next call or by init.
        let _ = wait_pid(*pid, Duration::from_secs(2));
    }
}

/// The last lines of a text.
#[must_use]
pub fn last_lines(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}

/// The last lines of a file, for failure reports.
#[must_use]
pub fn tail(path: &Path, lines: usize) -> String {
    let Ok(bytes) = fs::read(path) else { return format!("--- {}: missing\n", path.display()) };
    let text = String::from_utf8_lossy(&bytes);
    format!("--- {} ({} lines)\n{}\n", path.display(), text.lines().count(), last_lines(&text, lines))
}
