// SPDX-License-Identifier: MIT OR Apache-2.0
//! Collects the events of a timeline, and builds the record.

use std::time::{Duration, Instant, SystemTime};

use rewake_bo_contents::Progress;

use super::cpu_progress::{CpuProgress, CpuSnapshot};
use super::model::{
    FORMAT, Fault, LoadedBytes, MemoryOrigin, PageFaults, Process, ProcessMemory, Record, State, SwapEvent,
};
use super::samples::{Sample, Samples};
use super::top_n::Longest;
use crate::failure::Failure;
use crate::fault_latencies::{LatencyCounts, LatencyHistogram};

/// The most processes of a restore that are recorded, as many as can have gates.
const MOST: usize = 1024;

#[derive(Debug, Default)]
pub(super) struct Recorder {
    began: Option<(Instant, SystemTime)>,
    pub(super) state: State,
    failure: Option<Failure>,
    over: Option<u64>,
    /// The processes with gates, by their load's numbers.
    processes: Vec<Process>,
    gpus: Vec<ProcessMemory>,
    /// The CPU memory of all processes that have some to load.
    cpus: Vec<CpuMemory>,
    page_faults: PageFaults,
    page_fault_latencies: LatencyCounts,
    loaded: LoadedBytes,
    source: MemoryOrigin,
    working_set_us: Option<u64>,
    samples: Samples,
    faults: u64,
    fault_latencies: LatencyHistogram,
    longest_faults: Longest<Fault>,
    longest_swaps: Longest<SwapEvent>,
}

/// The CPU memory of one process.
#[derive(Debug)]
struct CpuMemory {
    of: CpuProgress,
    begun_us: u64,
    resident_us: Option<u64>,
}

impl Recorder {
    /// Returns the microseconds since the beginning.
    pub(super) fn now(&self) -> u64 {
        self.began.map_or(0, |(began, _)| micros(began.elapsed()))
    }

    /// Starts the clock, `ago` before now, unless it runs.
    pub(super) fn begin(&mut self, ago: Duration) {
        if self.began.is_none() {
            let now = (Instant::now(), SystemTime::now());
            self.began = Some((now.0.checked_sub(ago).unwrap_or(now.0), now.1 - ago));
            self.state = State::Loading;
        }
    }

    /// Notes an event of a process with a gate.
    pub(super) fn note(&mut self, process: usize, note: impl FnOnce(&mut Process, u64)) {
        let now = self.now();
        if process >= MOST {
            return;
        }
        if self.processes.len() <= process {
            self.processes.resize_with(process + 1, || Process { gate: true, ..Process::default() });
        }
        note(&mut self.processes[process], now);
    }

    pub(super) fn fault(&mut self, process: usize, buffer: usize, address: u64, waited: Duration) {
        let (at_us, waited_us) = (self.now(), micros(waited));
        self.faults += 1;
        self.fault_latencies.add(waited);
        self.longest_faults.push(waited_us, Fault { at_us, process, buffer, address, waited_us });
        self.note(process, |of, _| {
            of.faults += 1;
            of.fault_wait_us += waited_us;
            of.longest_fault_us = of.longest_fault_us.max(waited_us);
        });
    }

    pub(super) fn swapped(&mut self, process: usize, buffer: usize, stopped: Duration) {
        let (at_us, stopped_us) = (self.now(), micros(stopped));
        self.longest_swaps.push(stopped_us, SwapEvent { at_us, process, buffer, stopped_us });
        self.note(process, |of, _| {
            of.swaps += 1;
            of.stopped_us += stopped_us;
        });
    }

    /// Takes a sample of the progress; `cpus` is `None` while it is unknown.
    pub(super) fn sample(&mut self, gpus: &[Progress], cpus: Option<CpuSnapshot>) {
        if let Some(seen) = &cpus {
            self.begin(seen.begun);
        }
        if self.began.is_none() || self.over.is_some() {
            return;
        }
        let at_us = self.now();
        self.sample_gpus(gpus, at_us);
        if let Some(seen) = cpus {
            self.sample_cpus(seen, at_us);
        }
        let faults = self.faults + self.cpus.iter().map(|cpu_memory| cpu_memory.of.faults).sum::<u64>();
        let gpus = self.gpus.iter().map(|of| of.resident).collect();
        let cpus = self.cpus.iter().map(|cpu_memory| cpu_memory.of.resident).collect();
        self.samples.push(Sample { at_us, faults, loaded: self.loaded, gpus, cpus });
    }

    fn sample_gpus(&mut self, progress: &[Progress], at_us: u64) {
        // A GPU on which a process has no memory is not shown.
        let seen = progress.iter().filter(|part| part.process < MOST && part.all > 0);
        for (place, part) in seen.enumerate() {
            let &Progress { process, minor, resident, all } = part;
            self.note(process, |_, _| ());
            // The load reports them in the same order each time.
            if self.gpus.len() <= place {
                self.gpus.push(ProcessMemory { process, minor: Some(minor), ..ProcessMemory::default() });
            }
            let of = &mut self.gpus[place];
            (of.bytes, of.resident) = (all, resident);
            of.resident_us = of.resident_us.or_else(|| (resident >= all).then_some(at_us));
        }
    }

    fn sample_cpus(&mut self, seen: CpuSnapshot, at_us: u64) {
        let at = |ago: Duration| at_us.saturating_sub(micros(ago));
        let begun_us = at(seen.begun);
        self.working_set_us = seen.working_set.map(at);
        self.page_faults = PageFaults {
            first_us: seen.first_fault.map(at),
            last_us: seen.last_fault.map(at),
            p50_ns: nanos(seen.p50),
            p99_ns: nanos(seen.p99),
            zero_bytes: seen.zero_bytes,
        };
        (self.loaded, self.page_fault_latencies) = (seen.loaded, seen.latencies);
        self.source = seen.source;
        for (place, of) in seen.processes.into_iter().take(MOST).enumerate() {
            if self.cpus.len() <= place {
                self.cpus.push(CpuMemory { of: CpuProgress::default(), begun_us, resident_us: None });
            }
            let cpu_memory = &mut self.cpus[place];
            // A forked child can have missing pages again.
            let there = of.resident >= of.bytes;
            cpu_memory.resident_us = there.then(|| cpu_memory.resident_us.unwrap_or(at_us));
            cpu_memory.of = of;
        }
    }

    /// Ends the restore, if it has begun and not ended.
    pub(super) fn end(&mut self, state: State, failure: Option<Failure>) {
        if self.began.is_some() && self.over.is_none() {
            self.over = Some(self.now());
            self.state = state;
            self.failure = failure;
        }
    }

    pub(super) fn record(&self) -> Record {
        let since = |(_, at): (Instant, SystemTime)| at.duration_since(SystemTime::UNIX_EPOCH).ok();
        let unix = self.began.and_then(since).unwrap_or_default();
        let (processes, memory) = self.processes_and_memory();
        Record {
            format: FORMAT,
            handed_over_unix_ms: u64::try_from(unix.as_millis()).unwrap_or(u64::MAX),
            elapsed_us: self.over.unwrap_or_else(|| self.now()),
            state: self.state,
            reason: self.failure.as_ref().map(|failure| failure.reason.clone()),
            cause: self.failure.as_ref().map(|failure| failure.cause).unwrap_or_default(),
            processes,
            memory,
            page_fault_stats: self.page_faults,
            working_set_us: self.working_set_us,
            sampled_us: self.samples.iter().map(|sample| sample.at_us).collect(),
            sampled_faults: self.samples.iter().map(|sample| sample.faults).collect(),
            source: self.source,
            loaded: self.loaded,
            sampled_loads: self.samples.iter().map(|sample| sample.loaded).collect(),
            page_fault_latencies: self.page_fault_latencies.clone(),
            gpu_fault_latencies: self.fault_latencies.counts(),
            worker: std::process::id(),
            longest_faults: self.longest_faults.all(),
            longest_swaps: self.longest_swaps.all(),
        }
    }

    /// Returns the processes, those with gates first, and each process's CPU memory before its GPU memory.
    fn processes_and_memory(&self) -> (Vec<Process>, Vec<ProcessMemory>) {
        let samples = |of: &dyn Fn(&Sample) -> Option<u64>| {
            self.samples.iter().map(|sample| of(sample).unwrap_or_default()).collect()
        };
        let (mut processes, mut memory) = (self.processes.clone(), Vec::new());
        for (place, of) in self.gpus.iter().enumerate() {
            let samples = samples(&|at| at.gpus.get(place).copied());
            let is_gone =
                processes.get(of.process).is_some_and(|process: &Process| process.gone_us.is_some());
            let missing_at_end = if is_gone { of.bytes.saturating_sub(of.resident) } else { 0 };
            memory.push(ProcessMemory { samples, missing_at_end, ..of.clone() });
        }
        for (place, cpu_memory) in self.cpus.iter().enumerate() {
            let process = whose(&mut processes, self.processes.len(), cpu_memory);
            memory.push(ProcessMemory {
                process,
                minor: None,
                bytes: cpu_memory.of.bytes,
                resident: cpu_memory.of.resident,
                missing_at_end: cpu_memory.of.missing_at_end,
                resident_us: cpu_memory.resident_us,
                samples: samples(&|at| at.cpus.get(place).copied()),
            });
        }
        memory.sort_by_key(|of| (of.process, of.minor));
        (processes, memory)
    }
}

/// Returns the index of the process that has this memory: one with a gate, or a new one.
fn whose(processes: &mut Vec<Process>, gates: usize, cpu_memory: &CpuMemory) -> usize {
    let of = &cpu_memory.of;
    let known = processes[..gates].iter().position(|process| of.pid != 0 && process.pid == of.pid);
    let place = known.unwrap_or_else(|| {
        // CRIU resumes all processes at one time.
        let with_them = processes[..gates].iter().map(|process| process.runs_us).max();
        let runs_us = with_them.unwrap_or(Some(cpu_memory.begun_us));
        processes.push(Process { pid: of.pid, name: of.name.clone(), runs_us, ..Process::default() });
        processes.len() - 1
    });
    let process = &mut processes[place];
    process.page_faults = of.faults;
    process.page_fault_wait_us = of.fault_wait_us;
    process.longest_page_fault_us = of.longest_fault_us;
    place
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
