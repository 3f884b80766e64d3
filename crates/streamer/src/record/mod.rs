// SPDX-License-Identifier: MIT OR Apache-2.0
//! Records a restore that loads memory in the background: what was resident when, how long threads waited,
//! and when GPUs were resumed.
//!
//! * [`Timeline`]: receives the streamer's events from any thread, and samples the counts of CPU memory.
//!   [`follow`] samples it often.
//! * `recorder`: holds the events so far; `samples` and `top_n` bound its memory.
//! * [`text`] and `trace` show the record to users. [`files`] keeps it beside CRIU's own logs.

mod cpu_progress;
#[cfg(test)]
pub(crate) mod example;
pub mod files;
mod follow;
pub mod model;
mod recorder;
mod samples;
pub mod text;
mod top_n;
mod trace;

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use rewake_bo_contents::LoadHandle;

use self::cpu_progress::Cpus;
pub use self::follow::follow;
use self::model::{Record, State};
use self::recorder::Recorder;
use crate::failure::Failure;
use crate::session::Session;
use crate::session::root::ProgramState;
use crate::units;

/// Processes that one line names.
const MOST_NAMED: usize = 4;

/// Records the events of one restore; clones share it. Processes have the numbers of their load's
/// [`LoadHandle`], and buffers have the image's numbers. No call waits longer than for a reader that copies
/// at most 600 KiB. [`samples`] and [`top_n`] bound the memory. CPU memory sends no events: its counts are
/// sampled.
#[derive(Debug, Clone, Default)]
pub struct Timeline(Arc<TimelineState>);

#[derive(Debug, Default)]
struct TimelineState {
    recorder: Mutex<Recorder>,
    gpus: OnceLock<LoadHandle>,
    cpus: OnceLock<Cpus>,
}

impl Timeline {
    /// Notes that the plugin has handed over the processes. Time counts from here, unless the load of CPU
    /// memory began earlier. Earlier events get time 0.
    pub fn handed_over(&self) {
        self.recorder().begin(Duration::ZERO);
    }

    /// Sets the load of the GPU memory.
    pub fn loads(&self, load: LoadHandle) {
        // Only one load exists.
        let _ = self.0.gpus.set(load);
    }

    /// Sets the session that loads the CPU memory.
    pub fn brings(&self, session: &Arc<Session>) {
        // Only one session exists.
        let _ = self.0.cpus.set(Cpus::new(Arc::clone(session)));
    }

    /// Notes that a process runs with a closed gate, and looks up its name.
    pub fn runs(&self, process: usize, pid: i32) {
        let name = cpu_progress::name(pid);
        self.recorder().note(process, |of, now| {
            of.pid = pid;
            of.name = name;
            of.runs_us = Some(now);
        });
    }

    /// Takes a sample of the progress. Returns whether the restore has not ended.
    pub fn look(&self) -> bool {
        let mut recorder = self.recorder();
        self.look_into(&mut recorder);
        !matches!(recorder.state, State::Complete | State::Failed | State::Ended)
    }

    /// Samples under the lock: an earlier sample is never recorded later.
    fn look_into(&self, recorder: &mut Recorder) {
        let gpus = self.0.gpus.get().map(LoadHandle::progress).unwrap_or_default();
        recorder.sample(&gpus, self.0.cpus.get().and_then(Cpus::look));
    }

    /// Notes a page fault in GPU memory that was served: at this address of a process, in this buffer, after
    /// this wait.
    pub fn fault(&self, process: usize, buffer: usize, address: u64, waited: Duration) {
        self.recorder().fault(process, buffer, address, waited);
    }

    /// Notes that a buffer's placeholders were swapped, for which the process was stopped this long: the
    /// buffer's share of a stop.
    pub fn swapped(&self, process: usize, buffer: usize, stopped: Duration) {
        self.recorder().swapped(process, buffer, stopped);
    }

    /// Notes that the buffers of the working set are resident.
    pub fn first_buffers_are_resident(&self) {
        self.0.cpus.get().into_iter().for_each(Cpus::first_buffers_are_resident);
    }

    /// Notes that a process's gate was opened: all its GPUs are resumed.
    pub fn gate_opened(&self, process: usize) {
        self.recorder().note(process, |of, now| of.gate_open_us = Some(now));
    }

    /// Notes that a process ended before its gate was opened.
    pub fn gone(&self, process: usize) {
        self.recorder().note(process, |of, now| of.gone_us = Some(now));
    }

    /// Notes that no memory is to be loaded any more, and no gate to be opened: all are resident and open, or
    /// the program has ended. It blocks while the program is ending.
    pub fn ended(&self) {
        if !self.look() {
            return;
        }
        let record = self.record();
        let program =
            if record.ended_early().is_empty() { ProgramState::Runs } else { self.program(&record) };
        let (state, failure) = match program {
            ProgramState::Runs | ProgramState::Finished => (State::Complete, None),
            ProgramState::Ended(_) => (State::Ended, Some(ended_early(&record, program).into())),
        };
        self.recorder().end(state, failure);
    }

    /// Returns what has become of a program of which processes ended early.
    fn program(&self, record: &Record) -> ProgramState {
        let has_all = |of: &model::ProcessMemory| of.bytes > 0 && of.resident >= of.bytes;
        match self.0.cpus.get().and_then(Cpus::program) {
            Some(state) => state,
            None if record.memory.iter().any(has_all) => ProgramState::Runs,
            None => ProgramState::Ended(None),
        }
    }

    /// Notes that the restore was given up.
    pub fn failed(&self, failure: impl Into<Failure>) {
        let mut recorder = self.recorder();
        self.look_into(&mut recorder);
        recorder.end(State::Failed, Some(failure.into()));
    }

    /// Returns the record so far.
    #[must_use]
    pub fn record(&self) -> Record {
        self.recorder().record()
    }

    fn recorder(&self) -> MutexGuard<'_, Recorder> {
        self.0.recorder.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Says which processes ended early.
fn ended_early(record: &Record, program: ProgramState) -> String {
    let early = record.ended_early();
    let one =
        |(of, missing): &(&model::Process, u64)| format!("{} lacked {}", of.label(), units::bytes(*missing));
    let mut list = early.iter().take(MOST_NAMED).map(one).collect::<Vec<_>>().join(", ");
    if early.len() > MOST_NAMED {
        list.push_str(&format!(", and {} more", early.len() - MOST_NAMED));
    }
    format!("the program ended{} before all its memory was resident: {list}", program.how())
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use rewake_bo_contents::Progress;

    use super::*;
    use crate::cpu::stats::add;

    fn part(resident: u64) -> Progress {
        Progress { process: 0, minor: 128, resident, all: 100 }
    }

    #[test]
    fn a_restore_is_recorded_from_its_handoff_to_its_end() {
        let timeline = Timeline::default();
        assert_eq!(timeline.record().state, State::Waiting);
        timeline.handed_over();
        timeline.runs(0, nix::unistd::getpid().as_raw());
        timeline.recorder().sample(&[part(0)], None);
        timeline.fault(0, 7, 0x1000, Duration::from_millis(3));
        timeline.fault(0, 8, 0x2000, Duration::from_millis(1));
        timeline.swapped(0, 7, Duration::from_micros(200));
        assert_eq!((timeline.record().state, timeline.record().gates()), (State::Loading, (0, 1)));
        timeline.recorder().sample(&[part(100)], None);
        timeline.gate_opened(0);
        timeline.ended();
        let record = timeline.record();
        assert_eq!((record.state, record.gates()), (State::Complete, (1, 1)));
        assert_eq!((record.totals(), record.memory[0].samples.clone()), ((100, 100), vec![0, 100, 100]));
        assert_eq!((record.faults(), record.sampled_faults.clone()), ((2, 4000, 3000), vec![0, 2, 2]));
        let process = &record.processes[0];
        assert_eq!((process.swaps, process.stopped_us, process.name.is_empty()), (1, 200, false));
        let times = [process.runs_us, record.resident_us(), process.gate_open_us, Some(record.elapsed_us)];
        assert!(times.is_sorted() && times[0].is_some(), "{times:?}");
        assert_eq!(timeline.record(), record, "an end is one");
    }

    #[test]
    fn the_first_end_is_the_end() {
        let timeline = Timeline::default();
        timeline.failed("nothing was handed over");
        assert_eq!(timeline.record().state, State::Waiting);
        timeline.handed_over();
        timeline.failed("a disk");
        timeline.ended();
        let record = timeline.record();
        assert_eq!((record.state, record.reason.as_deref()), (State::Failed, Some("a disk")));
    }

    #[test]
    fn a_million_faults_take_bounded_memory_and_all_are_counted() {
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
    fn cpu_memory_belongs_to_its_process_with_or_without_a_gate() {
        let (timeline, session) = (Timeline::default(), Arc::new(Session::new(PathBuf::new())));
        timeline.brings(&session);
        // A pid of no process here, and one that the kernel did not report.
        let [own, _other, _unknown] =
            [nix::unistd::getpid().as_raw(), 1 << 23, 0].map(|pid| session.task_arrived(pid, 4));
        session.release();
        timeline.look();
        timeline.runs(0, own.pid);
        timeline.recorder().sample(&[part(0)], None);
        add(&own.pages_back, 1);
        own.fault(Duration::from_micros(60));
        timeline.fault(0, 7, 0x1000, Duration::from_millis(3));
        timeline.look();
        let record = timeline.record();
        let of = |of: &model::ProcessMemory| (of.process, of.minor, of.bytes, of.resident);
        assert_eq!(record.processes[1].runs_us, record.processes[0].runs_us, "CRIU resumes all at once");
        let wanted =
            [(0, None, 16384, 4096), (0, Some(128), 100, 0), (1, None, 16384, 0), (2, None, 16384, 0)];
        assert_eq!(record.memory.iter().map(of).collect::<Vec<_>>(), wanted);
        assert_eq!(record.memory[0].samples, [0, 0, 4096]);
        assert_eq!((record.processes.len(), record.gates()), (3, (0, 1)));
        assert_eq!((record.faults().0, record.page_faults()), (1, (1, 60, 60)));
        assert_eq!(record.sampled_faults, [0, 0, 2]);
    }

    #[test]
    fn where_nothing_is_handed_over_time_counts_from_when_processes_are_in_place() {
        let (timeline, session) = (Timeline::default(), Arc::new(Session::new(PathBuf::new())));
        timeline.brings(&session);
        let task = session.task_arrived(0, 1);
        assert!(timeline.look());
        assert_eq!(timeline.record().state, State::Waiting);
        session.release();
        std::thread::sleep(Duration::from_millis(3));
        timeline.look();
        add(&task.pages_back, 1);
        timeline.ended();
        let record = timeline.record();
        assert_eq!((record.state, record.totals(), record.gates()), (State::Complete, (4096, 4096), (0, 0)));
        let runs = record.processes[0].runs_us.unwrap();
        assert!(record.sampled_us[0] >= runs + 3000, "{record:?}");
        assert!(record.resident_us() >= Some(3000) && !timeline.look(), "{record:?}");
        assert_eq!(timeline.record(), record, "an end is one");
    }

    #[test]
    fn missing_memory_of_a_forked_child_counts_again() {
        let (timeline, session) = (Timeline::default(), Arc::new(Session::new(PathBuf::new())));
        timeline.brings(&session);
        let task = session.task_arrived(0, 1);
        session.release();
        add(&task.pages_back, 1);
        timeline.look();
        assert!(timeline.record().resident_us().is_some());
        add(&task.pages_total, 1);
        timeline.look();
        assert_eq!((timeline.record().resident_us(), timeline.record().totals()), (None, (8192, 4096)));
    }

    #[test]
    fn memory_that_was_missing_when_its_program_was_killed_is_not_resident() {
        let mut program = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let (timeline, session) = (Timeline::default(), Arc::new(Session::new(PathBuf::new())));
        timeline.brings(&session);
        let task = session.task_arrived(program.id().cast_signed(), 4);
        session.find_root();
        session.release();
        add(&task.pages_back, 1);
        timeline.look();
        program.kill().unwrap();
        crate::uffd_child::until(|| rewake_process::proc::is_ending(program.id().cast_signed()));
        add(&task.pages_ended, 3);
        timeline.ended();
        let record = timeline.record();
        assert_eq!(
            (record.state, record.totals(), record.resident_us()),
            (State::Ended, (16384, 4096), None)
        );
        assert_eq!(record.ended_early()[0].1, 12288);
        let reason = record.reason.unwrap();
        let line = "the program ended (killed by SIGKILL) before all its memory was resident: ";
        assert!(reason.starts_with(line) && reason.ends_with(" lacked 12.0 KiB"), "{reason}");
        program.wait().unwrap();
    }

    #[test]
    fn a_process_that_ends_early_in_a_tree_that_runs_is_no_failure() {
        let (timeline, session) = (Timeline::default(), Arc::new(Session::new(PathBuf::new())));
        timeline.brings(&session);
        session.task_arrived(nix::unistd::getpid().as_raw(), 1);
        let worker = session.task_arrived(1 << 23, 2);
        session.find_root();
        session.release();
        add(&worker.pages_ended, 2);
        timeline.ended();
        let record = timeline.record();
        assert_eq!((record.state, record.ended_early().len()), (State::Complete, 1));
    }

    #[test]
    fn processes_beyond_those_with_gates_are_not_kept() {
        let timeline = Timeline::default();
        timeline.handed_over();
        timeline.gate_opened(usize::MAX);
        timeline.recorder().sample(&[Progress { process: 1 << 40, ..part(0) }], None);
        assert_eq!((timeline.record().processes.len(), timeline.record().memory.len()), (0, 0));
    }

    #[test]
    fn a_gpu_without_memory_to_load_is_not_shown() {
        let timeline = Timeline::default();
        timeline.handed_over();
        let none = Progress { process: 0, minor: 129, resident: 0, all: 0 };
        for resident in [0, 100] {
            timeline.recorder().sample(&[none, part(resident)], None);
        }
        let record = timeline.record();
        assert_eq!(record.memory.iter().map(|of| of.minor).collect::<Vec<_>>(), [Some(128)]);
        assert_eq!(record.memory[0].samples, [0, 100]);
    }
}
