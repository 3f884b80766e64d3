// SPDX-License-Identifier: MIT OR Apache-2.0
//! One restore through one server.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, bail};
use nix::sys::signal::Signal;
use serde::Serialize;

use super::image::Image;
use crate::criu::server_log;
use crate::processes::{Process, Watch, high_water_mark};
use crate::touch;

/// The figures of one restore. Times in seconds; GB is 10^9 bytes of the touched memory.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Sample {
    /// Start of `criu restore` until it returned: the process runs.
    pub(crate) restore_s: f64,
    /// Start of `criu restore` until the daemon ended: all is resident.
    pub(crate) resident_s: f64,
    /// Rate from the restore's start to the daemon's end.
    pub(crate) rate_from_start: f64,
    /// Rate from the restore's return to the daemon's end, or `None` if the daemon ended first.
    pub(crate) rate_from_return: Option<f64>,
    /// User and system seconds of the daemon and the processes that it reaped, per GB.
    pub(crate) cpu_s_per_gb: f64,
    pub(crate) memory: PeakMemory,
    pub(crate) touched: touch::Report,
}

/// Peak resident memory of a daemon's processes, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct PeakMemory {
    /// The peak of the largest process.
    pub(crate) largest: u64,
    /// Sum of every process's own peak; memory that two processes share counts twice.
    pub(crate) sum: u64,
    /// Number of processes seen.
    pub(crate) processes: usize,
}

/// Restores the image through `program lazy-pages`, while the process accesses its memory.
pub(crate) fn run(image: &Image, criu: &Path, program: &Path, work: &Path) -> anyhow::Result<Sample> {
    let dumped = &image.dumped;
    let mut daemon = dumped.serve(program, work)?;
    let watch = Watch::start(daemon.pid(), high_water_mark);
    let began = Instant::now();
    let (mut target, restored) = dumped
        .restore(criu, &["--lazy-pages"], work)
        .with_context(|| format!("the server's log:\n{}", server_log(work)))?;
    target.signal(Signal::SIGUSR1)?;
    let served = dumped.served(&mut daemon, work)?;
    let peaks = watch.finish();
    let touched = stop(&mut target, image)?;
    let gb = image.bytes() as f64 / 1e9;
    let resident_s = (served.at - began).as_secs_f64();
    let after_return = served.at.checked_duration_since(restored.at).filter(|time| !time.is_zero());
    Ok(Sample {
        restore_s: (restored.at - began).as_secs_f64(),
        resident_s,
        rate_from_start: gb / resident_s,
        rate_from_return: after_return.map(|time| gb / time.as_secs_f64()),
        cpu_s_per_gb: served.cpu_seconds / gb,
        memory: PeakMemory { largest: peaks.largest(), sum: peaks.sum(), processes: peaks.processes() },
        touched,
    })
}

/// Stops the accesses and reads the process's report.
pub(crate) fn stop(target: &mut Process, image: &Image) -> anyhow::Result<touch::Report> {
    target.signal(Signal::SIGUSR2)?;
    target.wait(image.dumped.limit)?.check("the restored process did not survive", String::new)?;
    let text = std::fs::read(&image.report).with_context(|| image.report.display().to_string())?;
    std::fs::remove_file(&image.report)?;
    let report: touch::Report = serde_json::from_slice(&text).context("the restored process's report")?;
    if report.wrong_touches > 0 || report.wrong_words > 0 {
        bail!("the server gave wrong bytes: {report:?}");
    }
    Ok(report)
}
