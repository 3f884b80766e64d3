// SPDX-License-Identifier: MIT OR Apache-2.0
//! A restore of GPU memory as people see it: what was there when, who waited how long, when GPUs went on.
//!
//! * [`Timeline`]: what the streamer tells of, from any thread.
//! * [`record`]: what was told so far, for whoever asks. `samples`, `longest`: in bounded memory.
//! * [`text`], [`html`]: for people. [`files`]: kept beside CRIU's own logs.

#[cfg(test)]
mod example;
pub mod files;
pub mod html;
mod longest;
mod plot;
pub mod record;
mod samples;
pub mod text;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use rewake_contents::Progress;

use self::longest::Longest;
use self::record::{FORMAT, Fault, Memory, Process, Record, State, Swap};
use self::samples::{Sample, Samples};

/// Processes of one restore that are told of, as many as have gates: of more nothing is kept.
const MOST: usize = 1024;

/// What happens, told while it does. Clones are the same restore's. Processes have the numbers that their load's
/// [`Desk`](rewake_contents::Desk) calls them by, buffers those of the image. Nothing here waits for more than a reader that
/// copies at most 600 KiB; memory is bounded by [`samples`] and [`longest`], whatever the restore does.
#[derive(Debug, Clone, Default)]
pub struct Timeline(Arc<Mutex<Told>>);

#[derive(Debug, Default)]
struct Told {
    began: Option<(Instant, SystemTime)>,
    state: State,
    reason: Option<String>,
    over: Option<u64>,
    processes: Vec<Process>,
    memory: Vec<Memory>,
    samples: Samples,
    faults: u64,
    longest_faults: Longest<Fault>,
    longest_swaps: Longest<Swap>,
}

impl Timeline {
    /// The plugin has handed over what is to be loaded: time counts from here. Whatever is told before is told at 0.
    pub fn handed_over(&self) {
        let mut told = self.told();
        if told.began.is_none() {
            told.began = Some((Instant::now(), SystemTime::now()));
            told.state = State::Loading;
        }
    }

    /// A process runs, and its gate is shut. Its name is looked up.
    pub fn runs(&self, process: usize, pid: i32) {
        let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        self.told().note(process, |of, now| {
            of.pid = pid;
            of.name = printable(name.trim_end());
            of.runs_us = Some(now);
        });
    }

    /// How far it is: often, and once when all is there.
    pub fn sample(&self, progress: &[Progress]) {
        self.told().sample(progress);
    }

    /// A CPU's touch of what was not there was served: at this address of a process, in this buffer, after so long.
    pub fn fault(&self, process: usize, buffer: usize, address: u64, waited: Duration) {
        let mut told = self.told();
        let (at_us, waited_us) = (told.now(), micros(waited));
        told.faults += 1;
        told.longest_faults.push(waited_us, Fault { at_us, process, buffer, address, waited_us });
        told.note(process, |of, _| {
            of.faults += 1;
            of.fault_wait_us += waited_us;
            of.longest_fault_us = of.longest_fault_us.max(waited_us);
        });
    }

    /// The placeholders of a buffer became the device, for which the process stood still for so long: the buffer's share of a
    /// stop.
    pub fn swapped(&self, process: usize, buffer: usize, stopped: Duration) {
        let mut told = self.told();
        let (at_us, stopped_us) = (told.now(), micros(stopped));
        told.longest_swaps.push(stopped_us, Swap { at_us, process, buffer, stopped_us });
        told.note(process, |of, _| {
            of.swaps += 1;
            of.stopped_us += stopped_us;
        });
    }

    /// Its GPUs go on.
    pub fn gate_opened(&self, process: usize) {
        self.told().note(process, |of, now| of.gate_open_us = Some(now));
    }

    /// It ended before its gate was opened.
    pub fn gone(&self, process: usize) {
        self.told().note(process, |of, now| of.gone_us = Some(now));
    }

    /// All gates are open.
    pub fn ended(&self) {
        self.told().end(State::Complete, None);
    }

    /// It was given up.
    pub fn failed(&self, reason: &str) {
        self.told().end(State::Failed, Some(reason.to_owned()));
    }

    /// All that is known at this moment.
    #[must_use]
    pub fn record(&self) -> Record {
        self.told().record()
    }

    fn told(&self) -> MutexGuard<'_, Told> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Told {
    /// Since the memory was handed over.
    fn now(&self) -> u64 {
        self.began.map_or(0, |(began, _)| micros(began.elapsed()))
    }

    fn note(&mut self, process: usize, note: impl FnOnce(&mut Process, u64)) {
        let now = self.now();
        if process >= MOST {
            return;
        }
        if self.processes.len() <= process {
            self.processes.resize_with(process + 1, Process::default);
        }
        note(&mut self.processes[process], now);
    }

    fn sample(&mut self, progress: &[Progress]) {
        let at_us = self.now();
        // A GPU that a process has nothing on is nothing to see.
        let seen = progress.iter().filter(|part| part.process < MOST && part.all > 0);
        for (place, part) in seen.enumerate() {
            let &Progress { process, minor, resident, all } = part;
            self.note(process, |_, _| ());
            let this = |of: &Memory| (of.process, of.minor) == (process, minor);
            // They come in the same order each time.
            let known = self.memory.get(place).is_some_and(this).then_some(place);
            let place = known.or_else(|| self.memory.iter().position(this)).unwrap_or_else(|| {
                self.memory.push(Memory { process, minor, ..Memory::default() });
                self.memory.len() - 1
            });
            let of = &mut self.memory[place];
            (of.bytes, of.resident) = (all, resident);
            of.resident_us = of.resident_us.or_else(|| (resident >= all).then_some(at_us));
        }
        let resident = self.memory.iter().map(|of| of.resident).collect();
        self.samples.push(Sample { at_us, faults: self.faults, resident });
    }

    fn end(&mut self, state: State, reason: Option<String>) {
        if self.over.is_none() {
            self.over = Some(self.now());
            self.state = state;
            self.reason = reason;
        }
    }

    fn record(&self) -> Record {
        let since = |(_, at): (Instant, SystemTime)| at.duration_since(SystemTime::UNIX_EPOCH).ok();
        let unix = self.began.and_then(since).unwrap_or_default();
        let samples = |place: usize| {
            let at = |sample: &Sample| sample.resident.get(place).copied().unwrap_or_default();
            self.samples.iter().map(at).collect()
        };
        let memory = self.memory.iter().enumerate();
        Record {
            format: FORMAT,
            handed_over_unix_ms: u64::try_from(unix.as_millis()).unwrap_or(u64::MAX),
            elapsed_us: self.over.unwrap_or_else(|| self.now()),
            state: self.state,
            reason: self.reason.clone(),
            processes: self.processes.clone(),
            memory: memory.map(|(place, of)| Memory { samples: samples(place), ..of.clone() }).collect(),
            sampled_us: self.samples.iter().map(|sample| sample.at_us).collect(),
            sampled_faults: self.samples.iter().map(|sample| sample.faults).collect(),
            longest_faults: self.longest_faults.all(),
            longest_swaps: self.longest_swaps.all(),
        }
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// A process's name is what it likes: on a terminal it must be no command.
fn printable(name: &str) -> String {
    name.chars().map(|char| if char.is_control() { '?' } else { char }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(resident: u64) -> Progress {
        Progress { process: 0, minor: 128, resident, all: 100 }
    }

    #[test]
    fn a_restore_is_told_from_its_hand_over_to_its_end() {
        let timeline = Timeline::default();
        assert_eq!(timeline.record().state, State::Waiting);
        timeline.handed_over();
        timeline.runs(0, nix::unistd::getpid().as_raw());
        timeline.sample(&[part(0)]);
        timeline.fault(0, 7, 0x1000, Duration::from_millis(3));
        timeline.fault(0, 8, 0x2000, Duration::from_millis(1));
        timeline.swapped(0, 7, Duration::from_micros(200));
        assert_eq!((timeline.record().state, timeline.record().gates()), (State::Loading, (0, 1)));
        timeline.sample(&[part(100)]);
        timeline.gate_opened(0);
        timeline.ended();
        let record = timeline.record();
        assert_eq!((record.state, record.gates()), (State::Complete, (1, 1)));
        assert_eq!((record.totals(), record.memory[0].samples.clone()), ((100, 100), vec![0, 100]));
        assert_eq!((record.faults(), record.sampled_faults.clone()), ((2, 4000, 3000), vec![0, 2]));
        let process = &record.processes[0];
        assert_eq!((process.swaps, process.stopped_us, process.name.is_empty()), (1, 200, false));
        let times = [process.runs_us, record.resident_us(), process.gate_open_us, Some(record.elapsed_us)];
        assert!(times.is_sorted() && times[0].is_some(), "{times:?}");
        assert_eq!(timeline.record(), record, "an end is one");
    }

    #[test]
    fn the_first_end_is_the_end() {
        let timeline = Timeline::default();
        timeline.failed("a disk");
        timeline.ended();
        let record = timeline.record();
        assert_eq!((record.state, record.reason.as_deref()), (State::Failed, Some("a disk")));
    }

    #[test]
    fn what_a_million_faults_leave_is_bounded_and_none_is_uncounted() {
        let timeline = Timeline::default();
        for fault in 0..1_000_000 {
            timeline.fault(0, fault, 0, Duration::from_micros(u64::try_from(fault % 1000).unwrap()));
        }
        let record = timeline.record();
        assert_eq!((record.faults().0, record.faults().2), (1_000_000, 999));
        assert_eq!(record.longest_faults.len(), 256);
        assert!(record.longest_faults.iter().all(|fault| fault.waited_us == 999));
    }

    #[test]
    fn processes_beyond_those_with_gates_are_not_kept() {
        let timeline = Timeline::default();
        timeline.gate_opened(usize::MAX);
        timeline.sample(&[Progress { process: 1 << 40, ..part(0) }]);
        assert_eq!((timeline.record().processes.len(), timeline.record().memory.len()), (0, 0));
    }

    #[test]
    fn a_gpu_without_memory_to_load_is_not_shown() {
        let timeline = Timeline::default();
        let none = Progress { process: 0, minor: 129, resident: 0, all: 0 };
        for resident in [0, 100] {
            timeline.sample(&[none, part(resident)]);
        }
        let record = timeline.record();
        assert_eq!(record.memory.iter().map(|of| of.minor).collect::<Vec<_>>(), [128]);
        assert_eq!(record.memory[0].samples, [0, 100]);
    }

    #[test]
    fn a_name_is_no_command_to_a_terminal() {
        assert_eq!(printable("a\u{1b}[2Jb\nc é"), "a?[2Jb?c é");
    }
}
