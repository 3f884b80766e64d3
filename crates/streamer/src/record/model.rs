// SPDX-License-Identifier: MIT OR Apache-2.0
//! Defines the record of a restore, at one moment or at its end. Its JSON is the file `rewake-timeline.json`
//! (docs/streaming.md). Times are microseconds since the beginning: GPU memory was handed over. If CRIU
//! reported earlier that all tasks are in place, loading of CPU memory began then.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::failure::{Failure, FailureCause};
use crate::fault_latencies::LatencyCounts;

/// Version of the JSON: increased when a reader of the old one would misread it.
pub(crate) const FORMAT: u32 = 2;

/// The time before the newest sample that counts as "lately".
const LATELY_US: u64 = 1_000_000;

/// The state of a restore.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// No handoff has happened yet.
    #[default]
    Waiting,
    /// Memory is loaded, or gates are closed.
    Loading,
    /// All gates are open, and all memory is resident.
    Complete,
    /// The restore was given up.
    Failed,
    /// The program ended before all its memory was resident, and not with exit code 0.
    Ended,
}

/// Where missing memory comes from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MemoryOrigin {
    /// The files of the image directory.
    #[default]
    Image,
    /// An image of the node's cache, while it arrives.
    Cache,
    /// A page server or an image server.
    Peer,
}

/// Bytes of CPU memory that were filled, by the reason.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadedBytes {
    /// For page faults, with the neighbours that are filled in the same step.
    pub fault: u64,
    /// In the background, as part of the working set.
    pub working_set: u64,
    /// In the background.
    pub background: u64,
}

/// A restore.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Version of this format: 2.
    pub format: u32,
    /// When the restore began: milliseconds since 1970.
    pub handed_over_unix_ms: u64,
    /// Time since then, or the duration of the restore.
    pub elapsed_us: u64,
    /// The state of the restore.
    pub state: State,
    /// Why it failed, or how the program ended.
    pub reason: Option<String>,
    /// The cause of a failure.
    pub cause: FailureCause,
    /// The processes; the rest of the record uses their indexes.
    pub processes: Vec<Process>,
    /// Memory: each process's CPU memory, and its memory of each GPU.
    pub memory: Vec<ProcessMemory>,
    /// The page faults on CPU memory, of all processes.
    pub page_fault_stats: PageFaults,
    /// When the recorded working set was resident; none: it was not, or there is none.
    pub working_set_us: Option<u64>,
    /// When samples were taken.
    pub sampled_us: Vec<u64>,
    /// Faults served until each sample, in both kinds of memory.
    pub sampled_faults: Vec<u64>,
    /// Where missing memory comes from.
    pub source: MemoryOrigin,
    /// What filled CPU memory, since the worker took over.
    pub loaded: LoadedBytes,
    /// The same at each sample.
    pub sampled_loads: Vec<LoadedBytes>,
    /// How long page faults on CPU memory waited, since the worker took over.
    pub page_fault_latencies: LatencyCounts,
    /// How long page faults on GPU memory waited.
    pub gpu_fault_latencies: LatencyCounts,
    /// The pid of the worker that has counted.
    pub worker: u32,
    /// The page faults in GPU memory that waited longest, in the order of their ends.
    pub longest_faults: Vec<Fault>,
    /// The swaps that stopped a process longest, in their order.
    pub longest_swaps: Vec<SwapEvent>,
}

/// The page faults on CPU memory that were served, and the bytes that became zeros without a read. Counts are
/// since the streamer's present worker took over.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageFaults {
    /// When the first was served; 0 if that was before all processes were in place.
    pub first_us: Option<u64>,
    /// When the last was served.
    pub last_us: Option<u64>,
    /// The latency of the median, within 25 %; 0 without any.
    pub p50_ns: u64,
    /// The latency that 99 % did not exceed, within 25 %.
    pub p99_ns: u64,
    /// Bytes of CPU memory that were filled with zeros.
    pub zero_bytes: u64,
}

/// A process.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// Its pid; 0: not known yet.
    pub pid: i32,
    /// Its name (`/proc/PID/comm`), for users.
    pub name: String,
    /// Whether it uses GPUs, which are resumed when its gate is opened.
    pub gate: bool,
    /// When it ran.
    pub runs_us: Option<u64>,
    /// When its gate was opened.
    pub gate_open_us: Option<u64>,
    /// When it ended, if that was before its gate was opened.
    pub gone_us: Option<u64>,
    /// Page faults in GPU memory that were served.
    pub faults: u64,
    /// The sum of their waits.
    pub fault_wait_us: u64,
    /// The longest of their waits.
    pub longest_fault_us: u64,
    /// Page faults in CPU memory that were served, including page faults of its forked children.
    pub page_faults: u64,
    /// The sum of their waits.
    pub page_fault_wait_us: u64,
    /// The longest of their waits.
    pub longest_page_fault_us: u64,
    /// Buffers whose placeholders were swapped for the device.
    pub swaps: u64,
    /// The sum of its stops for that, from the request to its threads, without the microseconds of resuming.
    pub stopped_us: u64,
}

/// A process's CPU memory, or its memory on one GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessMemory {
    /// The process's index in [`Record::processes`].
    pub process: usize,
    /// N of the GPU's `/dev/dri/renderDN`; none: CPU memory.
    pub minor: Option<u32>,
    /// Bytes that were missing. CPU memory counts without what the process has unmapped, and with what its
    /// forked children lacked, and what was missing when it ended.
    pub bytes: u64,
    /// How many of them are resident.
    pub resident: u64,
    /// How many of them were missing when the process ended.
    pub missing_at_end: u64,
    /// When all were resident.
    pub resident_us: Option<u64>,
    /// The resident bytes at each sample.
    pub samples: Vec<u64>,
}

/// A page fault of a CPU in missing GPU memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// When it was served.
    pub at_us: u64,
    /// The process's index in [`Record::processes`].
    pub process: usize,
    /// The image's number of the buffer.
    pub buffer: usize,
    /// The address in the process.
    pub address: u64,
    /// How long its thread waited.
    pub waited_us: u64,
}

/// A swap of a buffer's placeholders.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SwapEvent {
    /// When it was done.
    pub at_us: u64,
    /// The process's index in [`Record::processes`].
    pub process: usize,
    /// The image's number of the buffer.
    pub buffer: usize,
    /// How long the process was stopped; if one stop swapped several buffers, an equal share of it.
    pub stopped_us: u64,
}

impl MemoryOrigin {
    /// For users: memory from the ...
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Image => "image",
            Self::Cache => "cache",
            Self::Peer => "peer",
        }
    }
}

impl Process {
    /// For users: `4711 python3`.
    #[must_use]
    pub fn label(&self) -> String {
        if self.pid == 0 { "process".to_owned() } else { format!("{} {}", self.pid, self.name) }
    }
}

impl ProcessMemory {
    /// For users: `CPUs` or `renderD128`.
    #[must_use]
    pub fn whose(&self) -> String {
        self.minor.map_or_else(|| "CPUs".to_owned(), |minor| format!("renderD{minor}"))
    }
}

/// The share in percent, rounded down, so that 100 is all of it; all of nothing is 100.
#[must_use]
pub fn percent(part: u64, all: u64) -> u64 {
    let percent = u128::from(part) * 100 / u128::from(all.max(1));
    if part >= all { 100 } else { u64::try_from(percent).unwrap_or(100) }
}

impl Record {
    /// Returns why the restore failed, or how its program ended early; `None` while neither is so.
    #[must_use]
    pub fn failure(&self) -> Option<Failure> {
        let reason = || self.reason.clone().unwrap_or_else(|| "the reason is not known".to_owned());
        let has_failed = matches!(self.state, State::Failed | State::Ended);
        has_failed.then(|| Failure { cause: self.cause, reason: reason() })
    }

    /// Bytes that were missing at first, and how many of them are resident.
    #[must_use]
    pub fn totals(&self) -> (u64, u64) {
        self.memory.iter().fold((0, 0), |(all, there), of| (all + of.bytes, there + of.resident))
    }

    /// Returns the processes that ended before all their memory was resident, with the bytes that were
    /// missing then.
    #[must_use]
    pub fn ended_early(&self) -> Vec<(&Process, u64)> {
        let missing = |place| -> u64 {
            self.memory.iter().filter(|of| of.process == place).map(|of| of.missing_at_end).sum()
        };
        let all = self.processes.iter().enumerate().map(|(place, of)| (of, missing(place)));
        all.filter(|(of, missing)| *missing > 0 || of.gone_us.is_some()).collect()
    }

    /// The process's index.
    #[must_use]
    pub fn process_of(&self, memory: &ProcessMemory) -> Option<&Process> {
        self.processes.get(memory.process)
    }

    /// When all memory was resident.
    #[must_use]
    pub fn resident_us(&self) -> Option<u64> {
        let times = self.memory.iter().map(|of| of.resident_us).collect::<Option<Vec<u64>>>()?;
        times.into_iter().max()
    }

    /// The load of GPU memory began when the first process ran; the load of CPU memory, where it is lazy, at
    /// the beginning.
    #[must_use]
    pub fn began_us(&self, of_cpus: bool) -> u64 {
        if of_cpus {
            return 0;
        }
        self.processes.iter().filter_map(|of| of.runs_us).min().unwrap_or_default()
    }

    /// Returns the rate of one memory lately, in bytes a second.
    #[must_use]
    pub fn rate_of(&self, memory: &ProcessMemory) -> u64 {
        self.since_lately(|sample| memory.samples.get(sample).copied().unwrap_or_default())
    }

    /// Returns the rate of all memory lately, in bytes a second.
    #[must_use]
    pub fn rate(&self) -> u64 {
        self.since_lately(|sample| self.memory.iter().filter_map(|of| of.samples.get(sample)).sum())
    }

    /// Growth of each series a second, from the last sample that is a second older than the newest, or the
    /// first.
    fn since_lately(&self, value: impl Fn(usize) -> u64) -> u64 {
        let Some((&newest, older)) = self.sampled_us.split_last() else { return 0 };
        let since = older.iter().rposition(|at| newest - at >= LATELY_US).unwrap_or(0);
        let (grown, took) =
            (value(older.len()).saturating_sub(value(since)), newest - self.sampled_us[since]);
        let rate = u128::from(grown) * 1_000_000 / u128::from(took.max(1));
        if took == 0 { 0 } else { u64::try_from(rate).unwrap_or(u64::MAX) }
    }

    /// Returns how long it takes until all is resident, at this rate; `None` where nothing is loaded.
    #[must_use]
    pub fn left(&self) -> Option<Duration> {
        let (all, there) = self.totals();
        left(all.saturating_sub(there), self.rate())
    }

    /// Page faults in GPU memory that were served: their number, the sum of their waits, and the longest, in
    /// microseconds.
    #[must_use]
    pub fn faults(&self) -> (u64, u64, u64) {
        self.processes.iter().fold((0, 0, 0), |(count, wait, longest), of| {
            (count + of.faults, wait + of.fault_wait_us, longest.max(of.longest_fault_us))
        })
    }

    /// The same for CPU memory.
    #[must_use]
    pub fn page_faults(&self) -> (u64, u64, u64) {
        self.processes.iter().fold((0, 0, 0), |(count, wait, longest), of| {
            let longest = longest.max(of.longest_page_fault_us);
            (count + of.page_faults, wait + of.page_fault_wait_us, longest)
        })
    }

    /// Returns how many gates are open or of ended processes, and how many exist.
    #[must_use]
    pub fn gates(&self) -> (usize, usize) {
        let open = |of: &&Process| of.gate_open_us.or(of.gone_us).is_some();
        let gates = || self.processes.iter().filter(|of| of.gate);
        (gates().filter(open).count(), gates().count())
    }
}

/// Returns how long bytes take at a rate; `None` where some are missing and nothing is loaded.
#[must_use]
pub fn left(bytes: u64, rate: u64) -> Option<Duration> {
    if bytes == 0 {
        return Some(Duration::ZERO);
    }
    let micros = u128::from(bytes) * 1_000_000;
    (rate > 0).then(|| Duration::from_micros(u64::try_from(micros / u128::from(rate)).unwrap_or(u64::MAX)))
}

#[cfg(test)]
mod tests {
    use super::super::example;
    use super::*;

    #[test]
    fn the_json_is_the_record() {
        let record = example::record();
        let text = serde_json::to_string(&record).unwrap();
        assert_eq!(serde_json::from_str::<Record>(&text).unwrap(), record);
    }

    #[test]
    fn the_rate_is_that_of_the_last_second() {
        let sampled_us = vec![0, 1_000_000, 2_000_000, 2_500_000, 3_000_000];
        let samples = vec![0, 0, 100, 400, 500];
        let record = Record {
            memory: vec![ProcessMemory { bytes: 900, resident: 500, samples, ..ProcessMemory::default() }],
            sampled_us,
            ..Record::default()
        };
        assert_eq!(record.rate_of(&record.memory[0]), 400);
        assert_eq!((record.rate(), record.left()), (400, Some(Duration::from_secs(1))));
    }

    #[test]
    fn without_a_load_the_time_left_is_unknown() {
        let record = Record {
            memory: vec![ProcessMemory { bytes: 9, samples: vec![0], ..ProcessMemory::default() }],
            sampled_us: vec![5],
            ..Record::default()
        };
        assert_eq!((record.rate(), record.left()), (0, None));
        assert_eq!((Record::default().rate(), Record::default().left()), (0, Some(Duration::ZERO)));
    }

    #[test]
    fn percent_are_100_only_when_all_memory_is_resident() {
        assert_eq!((percent(999, 1000), percent(1000, 1000)), (99, 100));
        assert_eq!((percent(u64::MAX - 1, u64::MAX), percent(0, 0)), (99, 100));
    }

    #[test]
    fn all_is_resident_when_the_last_byte_is() {
        let mut record = example::record();
        assert_eq!(record.resident_us(), Some(2_950_100));
        record.memory[0].resident_us = None;
        assert_eq!(record.resident_us(), None);
    }
}
