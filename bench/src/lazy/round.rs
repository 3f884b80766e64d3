// SPDX-License-Identifier: MIT OR Apache-2.0
//! One restore through one server.

use std::io::{PipeReader, Read as _};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::signal::Signal;
use serde::Serialize;

use super::Server;
use super::image::{Image, log_tail, quiet};
use crate::processes::{Exit, PeakMemory, Process, Sampler, check_interrupted};
use crate::touch;

const DAEMON_READY: Duration = Duration::from_secs(30);
/// How long an interruption may go unnoticed.
const SLICE_MS: u8 = 200;

/// What one restore took. Times in seconds; GB is 10^9 bytes of the touched memory.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Sample {
    pub(crate) server: Server,
    pub(crate) round: u64,
    /// Start of `criu restore` until it returned: the process runs.
    pub(crate) restore_s: f64,
    /// Start of `criu restore` until the daemon ended: all is resident.
    pub(crate) resident_s: f64,
    /// Rate from the restore's start to the daemon's end.
    pub(crate) rate_from_start: f64,
    /// Rate from the restore's return to the daemon's end; none if the daemon ended first.
    pub(crate) rate_from_return: Option<f64>,
    /// User and system seconds of the daemon and the processes that it waited for, per GB.
    pub(crate) cpu_s_per_gb: f64,
    pub(crate) memory: PeakMemory,
    pub(crate) touched: touch::Report,
}

/// Restores the image through `program lazy-pages`, the process touching its memory meanwhile.
pub(crate) fn run(
    image: &Image,
    criu: &Path,
    server: Server,
    program: &Path,
    work: &Path,
    round: u64,
) -> anyhow::Result<Sample> {
    let mut daemon = start_daemon(program, image, work)?;
    let sampler = Sampler::start(daemon.pid());
    let began = Instant::now();
    let (mut target, restored) = restore(criu, image, work)
        .with_context(|| format!("the server's log:\n{}", log_tail(&work.join("lazy.log"))))?;
    target.signal(Signal::SIGUSR1)?;
    let served = daemon.wait(image.time_limit())?;
    let memory = sampler.finish();
    if !served.success {
        bail!("the server failed: {}\n{}", served.status, log_tail(&work.join("lazy.log")));
    }
    let touched = stop(&mut target, image)?;
    let gb = image.bytes() as f64 / 1e9;
    let resident_s = (served.at - began).as_secs_f64();
    let after_return = served.at.checked_duration_since(restored.at).filter(|time| !time.is_zero());
    Ok(Sample {
        server,
        round,
        restore_s: (restored.at - began).as_secs_f64(),
        resident_s,
        rate_from_start: gb / resident_s,
        rate_from_return: after_return.map(|time| gb / time.as_secs_f64()),
        cpu_s_per_gb: served.cpu_seconds / gb,
        memory,
        touched,
    })
}

/// Starts the daemon and waits until it listens.
fn start_daemon(program: &Path, image: &Image, work: &Path) -> anyhow::Result<Process> {
    let (mut status, ready) = std::io::pipe().context("status pipe")?;
    fcntl(ready.as_fd(), FcntlArg::F_SETFD(FdFlag::empty())).context("F_SETFD")?;
    let mut command = Command::new(program);
    command.args(["lazy-pages", "-o", "lazy.log", "--status-fd", &ready.as_raw_fd().to_string()]);
    command.arg("-D").arg(image.directory()).arg("-W").arg(work).current_dir(work);
    let daemon = Process::spawn(quiet(&mut command))?;
    drop(ready);
    let mut byte = [0xff];
    if !readable(&status, DAEMON_READY)? || status.read(&mut byte)? != 1 || byte[0] != 0 {
        let log = log_tail(&work.join("lazy.log"));
        bail!("{} did not say that it listens within {DAEMON_READY:?}\n{log}", program.display());
    }
    Ok(daemon)
}

/// True when the pipe can be read, or is at its end, within `limit`.
fn readable(pipe: &PipeReader, limit: Duration) -> anyhow::Result<bool> {
    let deadline = Instant::now() + limit;
    while Instant::now() < deadline {
        check_interrupted()?;
        let ready = poll(&mut [PollFd::new(pipe.as_fd(), PollFlags::POLLIN)], SLICE_MS);
        if ready.is_ok_and(|count| count > 0) {
            return Ok(true);
        }
    }
    Ok(false)
}

fn restore(criu: &Path, image: &Image, work: &Path) -> anyhow::Result<(Process, Exit)> {
    let mut command = Command::new(criu);
    command.args(["restore", "-d", "--lazy-pages", "-o", "restore.log", "-D"]).arg(image.directory());
    command.arg("-W").arg(work).current_dir(work);
    let exit = Process::spawn(quiet(&mut command))?.wait(image.time_limit())?;
    if !exit.success {
        bail!("criu restore: {}\n{}", exit.status, log_tail(&work.join("restore.log")));
    }
    let target = Process::adopt(image.pid(), "the restored process")?;
    Ok((target, exit))
}

/// Stops the touching and reads what the process found.
fn stop(target: &mut Process, image: &Image) -> anyhow::Result<touch::Report> {
    target.signal(Signal::SIGUSR2)?;
    let exit = target.wait(image.time_limit())?;
    if !exit.success {
        bail!("the restored process did not survive: {}", exit.status);
    }
    let text = std::fs::read(image.report()).with_context(|| image.report().display().to_string())?;
    std::fs::remove_file(image.report())?;
    let report: touch::Report = serde_json::from_slice(&text).context("the restored process's report")?;
    if report.wrong_touches > 0 || report.wrong_words > 0 {
        bail!("the server gave wrong bytes: {report:?}");
    }
    Ok(report)
}
