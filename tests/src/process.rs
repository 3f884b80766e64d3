// SPDX-License-Identifier: MIT OR Apache-2.0
//! Processes: waiting with a limit, finding relatives, killing by pid.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use rewake_process::proc::{self, Status};

/// How often waits look again.
const POLL: Duration = Duration::from_millis(2);

/// Looks at `done` until it gives something or `limit` has passed.
pub fn until<T>(limit: Duration, mut done: impl FnMut() -> Option<T>) -> Option<T> {
    let end = Instant::now() + limit;
    loop {
        if let Some(value) = done() {
            return Some(value);
        }
        if Instant::now() >= end {
            return None;
        }
        sleep(POLL);
    }
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

/// Writes a program: by a shell, as one that this process writes cannot be run while a child of another test has it open too.
///
/// # Errors
/// The shell fails.
pub fn write_program(path: &Path, text: &str) -> anyhow::Result<()> {
    let mut write = Command::new("sh");
    write.args(["-c", "printf %s \"$1\" > \"$0\" && chmod 755 \"$0\""]).arg(path).arg(text);
    let status = write.status().context("start a shell")?;
    ensure!(status.success(), "write {}: {status}", path.display());
    Ok(())
}

/// Waits for a child of this process; none when it is still there at the limit.
pub fn wait_child(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    // An error means that it is no child any more: nothing to wait for, the caller's time limit reports it.
    until(limit, || child.try_wait().ok().flatten())
}

/// Waits for a restored process, which has become a child of this one (a subreaper); none when it is still there
/// at the limit. A process that is no child and does not exist counts as `Err`.
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

/// Makes this process the one that orphans of its children fall to, so that restored targets can be waited for.
///
/// # Errors
/// The kernel refuses, which it does not.
pub fn adopt_orphans() -> anyhow::Result<()> {
    nix::sys::prctl::set_child_subreaper(true).context("become a subreaper")
}

/// The parent of a process; none when it has ended.
#[must_use]
pub fn parent(pid: Pid) -> Option<Pid> {
    relations(pid).map(|(parent, _)| Pid::from_raw(parent))
}

/// Whether all threads of a process have ended, so that its descriptors are closed: it is gone or a zombie.
#[must_use]
pub fn has_ended(pid: Pid) -> bool {
    proc::status(pid.as_raw()).is_none_or(Status::has_ended) && proc::threads(pid.as_raw()).len() <= 1
}

/// Parent and session of a process, from `/proc`; none when it is gone.
fn relations(pid: Pid) -> Option<(i32, i32)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let parent = fields.nth(1)?.parse().ok()?;
    let session = fields.nth(1)?.parse().ok()?;
    Some((parent, session))
}

fn matching(wanted: impl Fn((i32, i32)) -> bool) -> Vec<Pid> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.map(Pid::from_raw).filter(|pid| relations(*pid).is_some_and(&wanted)).collect()
}

/// The children of a process, zombies included.
#[must_use]
pub fn children(parent: Pid) -> Vec<Pid> {
    matching(|(found, _)| found == parent.as_raw())
}

/// The members of a session, zombies included.
#[must_use]
pub fn session(leader: Pid) -> Vec<Pid> {
    matching(|(_, found)| found == leader.as_raw())
}

/// The processes that are in a control group of that name.
#[must_use]
pub fn in_group(name: &str) -> Vec<Pid> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let name = format!("/{name}");
    let is_in = |pid: &i32| {
        let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        groups.lines().any(|group| group.ends_with(&name))
    };
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(is_in).map(Pid::from_raw).collect()
}

/// Kills every process of the list and collects those that fall to this one.
pub fn kill_all(pids: &[Pid]) {
    let pids: BTreeSet<Pid> = pids.iter().copied().collect();
    for pid in &pids {
        // Already gone is as good.
        let _ = kill(*pid, Signal::SIGKILL);
    }
    for pid in &pids {
        // Not our child (yet): its parent is in the list too, and is collected by the next call or by init.
        let _ = wait_pid(*pid, Duration::from_secs(2));
    }
}

/// The last lines of a file, for failure reports.
#[must_use]
pub fn tail(path: &Path, lines: usize) -> String {
    let Ok(bytes) = fs::read(path) else { return format!("--- {}: not there\n", path.display()) };
    let text = String::from_utf8_lossy(&bytes);
    let all: Vec<&str> = text.lines().collect();
    let last = all[all.len().saturating_sub(lines)..].join("\n");
    format!("--- {} ({} lines)\n{last}\n", path.display(), all.len())
}
