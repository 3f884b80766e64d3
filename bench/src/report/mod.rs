// SPDX-License-Identifier: MIT OR Apache-2.0
//! Makes reports for users from samples.

mod figures;
mod text;

use serde::Serialize;

use crate::disk::DiskLimits;
use crate::lazy::{Sample, Server};
pub(crate) use figures::{Better, Figure, Spread};
pub(crate) use text::{markdown, number, spread, terminal};

/// All results of one run; this, as JSON, is the machine-readable result.
#[derive(Debug, Serialize)]
pub(crate) struct Comparison {
    pub(crate) setting: Setting,
    /// What the two columns compare.
    pub(crate) servers: [Server; 2],
    /// The image was dropped from the page cache before each restore; otherwise it was all cached.
    pub(crate) cold: bool,
    pub(crate) limits: Limits,
    pub(crate) samples: Vec<Sample>,
}

/// Where and how the samples were taken.
#[derive(Debug, Serialize)]
pub(crate) struct Setting {
    /// Each server's version text, stock first.
    pub(crate) versions: Vec<String>,
    pub(crate) kernel: String,
    pub(crate) cpu: String,
    pub(crate) cpus: usize,
    /// The memory of one process.
    pub(crate) size_mib: u64,
}

impl Setting {
    pub(crate) fn of_this_machine(versions: Vec<String>, size_mib: u64) -> Self {
        let line = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let cpuinfo = line("/proc/cpuinfo");
        let model = cpuinfo.lines().find_map(|entry| entry.strip_prefix("model name"));
        let model = model.and_then(|entry| entry.split_once(": ")).map(|(_, name)| name);
        Self {
            versions,
            kernel: line("/proc/sys/kernel/osrelease").trim().to_owned(),
            cpu: model.unwrap_or("unknown CPU").to_owned(),
            cpus: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            size_mib,
        }
    }
}

/// The machine's limits, measured in the same run. GB is 10^9 bytes.
#[derive(Debug, Serialize)]
pub(crate) struct Limits {
    /// UFFDIO_COPY from a cached buffer with one and with two threads.
    pub(crate) fill_gb_per_s: [f64; 2],
    /// Measured for cold runs only.
    pub(crate) disk: Option<DiskLimits>,
}
