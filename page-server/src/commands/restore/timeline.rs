// SPDX-License-Identifier: MIT OR Apache-2.0
//! What `rewake restore --json` writes: the streamer's record on the clock of this command.

use std::time::Instant;

use serde::Serialize;

use rewake_streamer::control::proto::Streaming;
use rewake_streamer::record::model::{ProcessMemory, Record, State};

/// A process that ended before all its memory was resident.
#[derive(Debug, Serialize, PartialEq, Eq)]
pub(super) struct EndedEarly {
    /// Its pid.
    pub(super) pid: i32,
    /// Its name.
    pub(super) name: String,
    /// The bytes that were missing then.
    pub(super) missing_bytes: u64,
}

/// One restore. Times are milliseconds since CRIU was started.
#[derive(Debug, Default, Serialize, PartialEq)]
pub(super) struct RestoreTimeline {
    /// Number of the session, if the agent serves it.
    pub(super) session: Option<u64>,
    /// What differs between restores of one image.
    pub(super) generation_id: String,
    /// All memory is resident, or the processes dropped it, and all gates are open; or the program finished
    /// its work before. With `--wait=alive` or `--wait=working-set`: the processes run.
    pub(super) ok: bool,
    /// Why not.
    pub(super) reason: Option<String>,
    /// CRIU's exit code; None when it was killed, or was not reaped.
    pub(super) criu_exit_code: Option<i32>,
    /// CRIU ended, with its status.
    pub(super) criu_ended_ms: Option<f64>,
    /// The restored processes ran.
    pub(super) alive_ms: Option<f64>,
    /// Missing memory that was resident at that time.
    pub(super) alive_resident_bytes: u64,
    /// The first page fault on CPU memory was served.
    pub(super) first_fault_ms: Option<f64>,
    /// The last.
    pub(super) last_fault_ms: Option<f64>,
    /// The recorded working set was resident.
    pub(super) working_set_ms: Option<f64>,
    /// All memory was resident, and all gates were open.
    pub(super) all_resident_ms: Option<f64>,
    /// From `alive_ms` to `all_resident_ms`, in 10^9 bytes a second.
    pub(super) gb_per_s: Option<f64>,
    /// Processes that had missing memory or a gate.
    pub(super) tasks: u64,
    /// Memory that was missing when the processes ran, without what they dropped.
    pub(super) lazy_bytes: u64,
    /// The processes that ended before all their memory was resident.
    pub(super) ended_early: Vec<EndedEarly>,
    /// Of it, loaded from the image.
    pub(super) copied_bytes: u64,
    /// Of it, filled with zeros.
    pub(super) zero_bytes: u64,
    /// Page faults served, on CPU memory and by CPUs on GPU memory.
    pub(super) faults: u64,
    /// Median latency of a page fault on CPU memory, in microseconds.
    pub(super) fault_p50_us: Option<f64>,
    /// 99 % of them were faster.
    pub(super) fault_p99_us: Option<f64>,
}

/// Maps a record's clock to milliseconds since `started` here.
#[derive(Debug, Clone, Copy)]
pub(super) struct Clock {
    offset_ms: f64,
}

impl Clock {
    /// From a report that has just arrived.
    pub(super) fn new(started: Instant, report: &Streaming) -> Self {
        Self { offset_ms: started.elapsed().as_secs_f64() * 1e3 - millis(report.elapsed_us) }
    }

    /// Microseconds of the record as milliseconds here.
    pub(super) fn at(self, micros: u64) -> f64 {
        (millis(micros) + self.offset_ms).max(0.0)
    }

    /// How long before the record's beginning this command started CRIU, in microseconds.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "not negative, and far below 2^53"
    )]
    pub(super) fn before_us(self) -> u64 {
        (self.at(0) * 1e3) as u64
    }
}

#[expect(clippy::cast_precision_loss, reason = "far less than 2^53 is measured")]
fn millis(micros: u64) -> f64 {
    micros as f64 / 1e3
}

impl RestoreTimeline {
    /// Adds the streamer's record. `alive_ms` is set already when CRIU's end is known to be the time.
    pub(super) fn add(&mut self, record: &Record, clock: Clock) {
        let runs = record.processes.iter().filter_map(|of| of.runs_us).min();
        self.alive_ms = self.alive_ms.or_else(|| runs.map(|at| clock.at(at)));
        let faults = record.page_fault_stats;
        self.first_fault_ms = faults.first_us.map(|at| clock.at(at));
        self.last_fault_ms = faults.last_us.map(|at| clock.at(at));
        self.working_set_ms = record.working_set_us.map(|at| clock.at(at));
        let gates = record.processes.iter().filter_map(|of| of.gate_open_us);
        let resident = record.resident_us().into_iter().chain(gates).max();
        let complete = record.state == State::Complete;
        self.all_resident_ms = resident.filter(|_| complete).map(|at| clock.at(at));
        self.tasks = record.processes.len() as u64;
        let early = record.ended_early().into_iter();
        let early =
            early.map(|(of, missing_bytes)| EndedEarly { pid: of.pid, name: of.name.clone(), missing_bytes });
        self.ended_early = early.collect();
        let (all, loaded) = record.totals();
        self.lazy_bytes = all;
        self.zero_bytes = faults.zero_bytes;
        self.copied_bytes = loaded.saturating_sub(faults.zero_bytes);
        self.faults = record.faults().0 + record.page_faults().0;
        let micros = |nanos: u64| (nanos > 0).then(|| millis(nanos));
        (self.fault_p50_us, self.fault_p99_us) = (micros(faults.p50_ns), micros(faults.p99_ns));
        if let Some(alive) = self.alive_ms {
            self.alive_resident_bytes =
                record.memory.iter().map(|of| resident_at(record, of, clock, alive)).sum();
            let took = self.all_resident_ms.map(|end| end - alive).filter(|took| *took > 0.0);
            #[expect(clippy::cast_precision_loss, reason = "a rate")]
            let rate = took.map(|took| loaded.saturating_sub(self.alive_resident_bytes) as f64 / took / 1e6);
            self.gb_per_s = rate;
        }
    }
}

/// Resident bytes at the last sample before a time.
fn resident_at(record: &Record, memory: &ProcessMemory, clock: Clock, at_ms: f64) -> u64 {
    let before = record.sampled_us.partition_point(|sampled| clock.at(*sampled) <= at_ms);
    before.checked_sub(1).and_then(|last| memory.samples.get(last)).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rewake_streamer::record::model::Process;

    const GIB: u64 = 1 << 30;

    /// Two processes, of which one has a GPU. All memory is resident after 2.95 s, and was loaded evenly.
    fn record() -> Record {
        let process = |runs_us, gate_open_us: Option<u64>| Process {
            runs_us: Some(runs_us),
            gate: gate_open_us.is_some(),
            gate_open_us,
            faults: 6,
            page_faults: 250,
            ..Process::default()
        };
        let samples = (0..=10).map(|tenth| GIB / 10 * tenth).collect();
        let cpu = ProcessMemory {
            process: 0,
            minor: None,
            bytes: GIB,
            resident: GIB,
            missing_at_end: 0,
            resident_us: Some(2_950_000),
            samples,
        };
        let gpu = ProcessMemory { process: 1, minor: Some(128), ..cpu.clone() };
        Record {
            state: State::Complete,
            elapsed_us: 2_960_000,
            processes: vec![process(3400, None), process(1200, Some(2_952_000))],
            memory: vec![cpu, gpu],
            sampled_us: (0..=10).map(|tenth| 295_000 * tenth).collect(),
            ..Record::default()
        }
    }

    #[test]
    fn a_record_s_times_are_on_the_clock_of_the_command() {
        let mut record = record();
        record.page_fault_stats.first_us = Some(2000);
        record.page_fault_stats.p50_ns = 20_000;
        record.working_set_us = Some(9000);
        record.page_fault_stats.zero_bytes = GIB / 2;
        let mut timeline = RestoreTimeline::default();
        timeline.add(&record, Clock { offset_ms: 50.0 });
        assert_eq!((timeline.alive_ms, timeline.first_fault_ms), (Some(51.2), Some(52.0)));
        assert_eq!(timeline.working_set_ms, Some(59.0));
        assert_eq!(timeline.all_resident_ms, Some(3002.0), "the last gate opens after the last buffer");
        assert_eq!((timeline.fault_p50_us, timeline.fault_p99_us), (Some(20.0), None));
        assert_eq!((timeline.lazy_bytes, timeline.copied_bytes), (2 * GIB, 3 * GIB / 2));
        assert_eq!((timeline.tasks, timeline.faults), (2, 512));
        assert!((0.72..0.74).contains(&timeline.gb_per_s.unwrap()), "{timeline:?}");
    }

    #[test]
    fn a_failed_restore_has_no_end_of_memory() {
        let record = Record { state: State::Failed, ..record() };
        let mut timeline = RestoreTimeline::default();
        timeline.add(&record, Clock { offset_ms: 0.0 });
        assert_eq!((timeline.all_resident_ms, timeline.gb_per_s), (None, None));
    }
}
