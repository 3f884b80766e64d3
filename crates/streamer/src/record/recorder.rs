// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a timeline was told so far, and the record of it.

use std::time::{Duration, Instant, SystemTime};

use rewake_bo_contents::Progress;

use super::cpu_progress::{OfCpus, Seen};
use super::model::{FORMAT, Fault, Memory, Process, Record, State, Swap};
use super::samples::{Sample, Samples};
use super::top_n::Longest;

/// Processes of one restore that are told of, as many as have gates: of more nothing is kept.
const MOST: usize = 1024;

#[derive(Debug, Default)]
pub(super) struct Recorder {
    began: Option<(Instant, SystemTime)>,
    pub(super) state: State,
    reason: Option<String>,
    over: Option<u64>,
    /// Those with gates, by their load's numbers.
    processes: Vec<Process>,
    gpus: Vec<Memory>,
    /// Of all processes, by their places among those that have such memory.
    cpus: Vec<Brought>,
    samples: Samples,
    faults: u64,
    longest_faults: Longest<Fault>,
    longest_swaps: Longest<Swap>,
}

/// A process's memory of CPUs.
#[derive(Debug)]
struct Brought {
    of: OfCpus,
    begun_us: u64,
    resident_us: Option<u64>,
}

impl Recorder {
    /// Since the beginning.
    pub(super) fn now(&self) -> u64 {
        self.began.map_or(0, |(began, _)| micros(began.elapsed()))
    }

    /// Time counts from so long ago.
    pub(super) fn begin(&mut self, ago: Duration) {
        if self.began.is_none() {
            let now = (Instant::now(), SystemTime::now());
            self.began = Some((now.0.checked_sub(ago).unwrap_or(now.0), now.1 - ago));
            self.state = State::Loading;
        }
    }

    /// Notes something of a process with a gate.
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
        self.longest_faults.push(waited_us, Fault { at_us, process, buffer, address, waited_us });
        self.note(process, |of, _| {
            of.faults += 1;
            of.fault_wait_us += waited_us;
            of.longest_fault_us = of.longest_fault_us.max(waited_us);
        });
    }

    pub(super) fn swapped(&mut self, process: usize, buffer: usize, stopped: Duration) {
        let (at_us, stopped_us) = (self.now(), micros(stopped));
        self.longest_swaps.push(stopped_us, Swap { at_us, process, buffer, stopped_us });
        self.note(process, |of, _| {
            of.swaps += 1;
            of.stopped_us += stopped_us;
        });
    }

    /// How far it is; what is not known yet is none.
    pub(super) fn sample(&mut self, gpus: &[Progress], cpus: Option<Seen>) {
        if let Some(seen) = &cpus {
            self.begin(seen.begun);
        }
        if self.began.is_none() || self.over.is_some() {
            return;
        }
        let at_us = self.now();
        self.of_gpus(gpus, at_us);
        if let Some(seen) = cpus {
            self.of_cpus(seen, at_us);
        }
        let faults = self.faults + self.cpus.iter().map(|brought| brought.of.faults).sum::<u64>();
        let gpus = self.gpus.iter().map(|of| of.resident).collect();
        let cpus = self.cpus.iter().map(|brought| brought.of.resident).collect();
        self.samples.push(Sample { at_us, faults, gpus, cpus });
    }

    /// GPUs of a process go on, whose memory was seen before.
    pub(super) fn gpus_go_on(&mut self, process: usize, minors: &[u32]) {
        let now = self.now();
        let is_one =
            |of: &&mut Memory| of.process == process && of.minor.is_some_and(|of| minors.contains(&of));
        self.gpus.iter_mut().filter(is_one).for_each(|of| of.goes_on_us = Some(now));
    }

    fn of_gpus(&mut self, progress: &[Progress], at_us: u64) {
        // A GPU that a process has nothing on is nothing to see.
        let seen = progress.iter().filter(|part| part.process < MOST && part.all > 0);
        for (place, part) in seen.enumerate() {
            let &Progress { process, minor, resident, all } = part;
            self.note(process, |_, _| ());
            // They come in the same order each time.
            if self.gpus.len() <= place {
                self.gpus.push(Memory { process, minor: Some(minor), ..Memory::default() });
            }
            let of = &mut self.gpus[place];
            (of.bytes, of.resident) = (all, resident);
            of.resident_us = of.resident_us.or_else(|| (resident >= all).then_some(at_us));
        }
    }

    fn of_cpus(&mut self, seen: Seen, at_us: u64) {
        let begun_us = at_us.saturating_sub(micros(seen.begun));
        for (place, of) in seen.processes.into_iter().take(MOST).enumerate() {
            if self.cpus.len() <= place {
                self.cpus.push(Brought { of: OfCpus::default(), begun_us, resident_us: None });
            }
            let brought = &mut self.cpus[place];
            // A child that it forks may want some again.
            let there = of.resident >= of.bytes;
            brought.resident_us = there.then(|| brought.resident_us.unwrap_or(at_us));
            brought.of = of;
        }
    }

    /// What has not begun does not end.
    pub(super) fn end(&mut self, state: State, reason: Option<String>) {
        if self.began.is_some() && self.over.is_none() {
            self.over = Some(self.now());
            self.state = state;
            self.reason = reason;
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
            reason: self.reason.clone(),
            processes,
            memory,
            sampled_us: self.samples.iter().map(|sample| sample.at_us).collect(),
            sampled_faults: self.samples.iter().map(|sample| sample.faults).collect(),
            longest_faults: self.longest_faults.all(),
            longest_swaps: self.longest_swaps.all(),
        }
    }

    /// Those with gates first; each process's memory of CPUs before that of its GPUs.
    fn processes_and_memory(&self) -> (Vec<Process>, Vec<Memory>) {
        let samples = |of: &dyn Fn(&Sample) -> Option<u64>| {
            self.samples.iter().map(|sample| of(sample).unwrap_or_default()).collect()
        };
        let (mut processes, mut memory) = (self.processes.clone(), Vec::new());
        for (place, of) in self.gpus.iter().enumerate() {
            let with_all = || self.processes.get(of.process).and_then(|of| of.gate_open_us);
            let goes_on_us = of.goes_on_us.or_else(with_all);
            let samples = samples(&|at| at.gpus.get(place).copied());
            memory.push(Memory { goes_on_us, samples, ..of.clone() });
        }
        for (place, brought) in self.cpus.iter().enumerate() {
            let process = whose(&mut processes, self.processes.len(), brought);
            memory.push(Memory {
                process,
                minor: None,
                bytes: brought.of.bytes,
                resident: brought.of.resident,
                resident_us: brought.resident_us,
                goes_on_us: None,
                samples: samples(&|at| at.cpus.get(place).copied()),
            });
        }
        memory.sort_by_key(|of| (of.process, of.minor));
        (processes, memory)
    }
}

/// The place of whom this memory is of: one of the first ones, which have gates, or else one more.
fn whose(processes: &mut Vec<Process>, gates: usize, brought: &Brought) -> usize {
    let of = &brought.of;
    let known = processes[..gates].iter().position(|process| of.pid != 0 && process.pid == of.pid);
    let place = known.unwrap_or_else(|| {
        // CRIU lets go of all at one time.
        let with_them = processes[..gates].iter().map(|process| process.runs_us).max();
        let runs_us = with_them.unwrap_or(Some(brought.begun_us));
        processes.push(Process { pid: of.pid, name: of.name.clone(), runs_us, ..Process::default() });
        processes.len() - 1
    });
    let process = &mut processes[place];
    process.page_faults = of.faults;
    process.page_fault_wait_us = of.fault_wait_us;
    process.longest_page_fault_us = of.longest_fault_us;
    place
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
