// SPDX-License-Identifier: MIT OR Apache-2.0
//! Makes the record of a restore for tests: two processes with GPUs and one without. It has memory of
//! both kinds, and page faults.

use super::model::{
    FORMAT, Fault, LoadedBytes, MemoryOrigin, PageFaults, Process, ProcessMemory, Record, State, SwapEvent,
};
use crate::failure::FailureCause;
use crate::fault_latencies::LatencyCounts;

const GIB: u64 = 1 << 30;

/// All of `bytes` after `resident_us`, evenly.
fn memory(
    process: usize,
    minor: Option<u32>,
    bytes: u64,
    resident_us: u64,
    sampled_us: &[u64],
) -> ProcessMemory {
    let at = |at: &u64| u64::try_from(u128::from(bytes) * u128::from(*at) / u128::from(resident_us)).unwrap();
    let samples = sampled_us.iter().map(|time| at(time).min(bytes)).collect();
    let resident_us = Some(resident_us);
    ProcessMemory { process, minor, bytes, resident: bytes, missing_at_end: 0, resident_us, samples }
}

/// What has filled CPU memory at a sample: 768 MiB after the last.
fn loads(sample: u64) -> LoadedBytes {
    LoadedBytes {
        fault: sample.min(4) << 20,
        working_set: (sample * 16).min(128) << 20,
        background: sample.saturating_sub(8) * (GIB * 3 / 4 - (132 << 20)) / 22,
    }
}

/// Returns the record of that restore, which takes three seconds.
///
/// # Panics
/// Never: its numbers are small.
pub(crate) fn record() -> Record {
    let sampled_us: Vec<u64> = (0..=30).map(|tick| tick * 98_340).collect();
    let fault = |number: u64| Fault {
        at_us: 200_000 + number * 230_000,
        process: usize::from(number.is_multiple_of(3)),
        buffer: 40 + usize::try_from(number).unwrap(),
        address: 0x7f00_0000_0000 + number * 0x20_0000,
        waited_us: 900 + number * number * 350,
    };
    let process = |pid, name: &str, runs_us, gate_us| Process {
        pid,
        name: name.to_owned(),
        runs_us: Some(runs_us),
        gate: true,
        gate_open_us: Some(gate_us),
        faults: 6,
        fault_wait_us: 40_000,
        longest_fault_us: 43_250,
        page_faults: 250,
        page_fault_wait_us: 10_000,
        longest_page_fault_us: 85,
        swaps: 4,
        stopped_us: 800,
        ..Process::default()
    };
    Record {
        format: FORMAT,
        handed_over_unix_ms: 1_790_000_000_123,
        elapsed_us: 2_960_000,
        state: State::Complete,
        reason: None,
        cause: FailureCause::Other,
        processes: vec![
            process(4711, "python3", 1200, 2_951_000),
            process(4712, "<b>\"rank\" & 1", 3400, 2_952_000),
            Process { pid: 4713, name: "logger".to_owned(), runs_us: Some(3500), ..Process::default() },
        ],
        memory: vec![
            memory(0, Some(128), 2 * GIB, 2_950_100, &sampled_us),
            memory(1, None, GIB / 2, 2_500_000, &sampled_us),
            memory(1, Some(128), GIB, 1_400_000, &sampled_us),
            memory(1, Some(129), 3 * GIB / 2, 2_100_000, &sampled_us),
            memory(2, None, GIB / 4, 1_000_000, &sampled_us),
        ],
        page_fault_stats: PageFaults::default(),
        working_set_us: Some(700_000),
        source: MemoryOrigin::Cache,
        loaded: loads(30),
        sampled_loads: (0..31).map(loads).collect(),
        page_fault_latencies: LatencyCounts { counts: vec![0, 0, 400, 100], sum_ns: 20_000_000 },
        gpu_fault_latencies: LatencyCounts { counts: vec![0, 12], sum_ns: 80_000_000 },
        worker: 77,
        sampled_faults: (0..31).map(|tick| tick * 12 / 31).collect(),
        sampled_us,
        longest_faults: (0..12).map(fault).collect(),
        longest_swaps: vec![SwapEvent { at_us: 700_000, process: 0, buffer: 41, stopped_us: 210 }],
    }
}
