// SPDX-License-Identifier: MIT OR Apache-2.0
//! Everyday events of a restore with GPUs: signals to a process group, `cgroup.kill`, a cgroup that runs out
//! of memory. [`TABLE`] is the specification.

use std::thread;
use std::time::Duration;

use nix::sys::signal::Signal;
use rewake_skip::{need, skip};
use rewake_testkit::cgroup::Cgroup;
use rewake_testkit::until;
use softgpu_tests::accessor::OWN_PARTS;
use softgpu_tests::criu::{Criu, Version, queues, wait_for_the_end_of};
use softgpu_tests::dumped::{
    Dumped, ONE_RING, Restoring, dies, gate_opens, is_paused, signal, signal_group, soon, streamer_of,
    unreached, waits_for_memory,
};
use softgpu_tests::streamer::recover;
use softgpu_tests::{
    Accessor, Daemon, DelayedCopies, Machine, REAL_GPUS, Streamer, gpus_retry_faults, isolated,
};

use Command::{Restore, Serve, StreamBoth, StreamGpus};
use Event::{CgroupKill, Group, OutOfMemory};
use Outcome::{KilledByRecover, Recovered, ServesThenEnds, StreamerServes};
use Phase::{GateClosed, MemoryMissing};

/// A command that receives an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Command {
    /// `rewake streamer` without `-D`: GPU memory only.
    StreamGpus,
    /// `rewake streamer -D`: CPU memory too.
    StreamBoth,
    /// `rewake serve`: its streamers have process groups of their own.
    Serve,
    /// `rewake restore`: its streamer has a process group of its own, too. CRIU has ended.
    Restore,
}

#[derive(Clone, Copy, Debug)]
enum Event {
    /// Signals to the command's process group, in quick succession.
    Group(&'static [Signal]),
    /// `cgroup.kill` to the cgroup of the command's processes.
    CgroupKill,
    /// That cgroup runs out of memory (`memory.oom.group`).
    OutOfMemory,
}

/// What becomes of the target, and of the command that received the event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// The command loads all memory and opens the gate. Then it ends with 0.
    ServesThenEnds,
    /// The command ends. Its streamer loads all memory and opens the gate.
    StreamerServes,
    /// No process of the streamer is left, and the target waits. `rewake recover` kills it, and reports it.
    KilledByRecover,
    /// No process of the streamer is left, and the target waits. `rewake recover` loads its memory.
    Recovered,
}

/// Signals that terminals, scripts and service managers send, and that no process of a streamer uses.
const UNUSED: Event = Group(&[
    Signal::SIGHUP,
    Signal::SIGQUIT,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
    Signal::SIGALRM,
    Signal::SIGPIPE,
    Signal::SIGPWR,
]);
/// Twice: a service manager sends it to every process, and a person repeats it.
const STOP: Event = Group(&[Signal::SIGTERM, Signal::SIGTERM]);
const INTERRUPT: Event = Group(&[Signal::SIGINT, Signal::SIGINT]);
const KILL: Event = Group(&[Signal::SIGKILL]);

/// How far the restore is when the event happens. The target runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// GPU memory is missing.
    GateClosed,
    /// Its gate is open, and CPU memory is missing.
    MemoryMissing,
}

/// Each event but the last leaves the command at work, without any effect. What `rewake serve` and `rewake
/// restore` do is the same in both phases, which share their rows.
#[rustfmt::skip]
const TABLE: [(Phase, Command, &[Event], Outcome); 16] = [
    (GateClosed,    StreamGpus, &[UNUSED, STOP, INTERRUPT], ServesThenEnds),
    (GateClosed,    StreamGpus, &[KILL],                    KilledByRecover),
    (GateClosed,    StreamBoth, &[UNUSED, STOP, INTERRUPT], ServesThenEnds),
    (GateClosed,    StreamBoth, &[KILL],                    KilledByRecover),
    (GateClosed,    StreamBoth, &[CgroupKill],              KilledByRecover),
    (GateClosed,    StreamBoth, &[OutOfMemory],             KilledByRecover),
    (GateClosed,    Serve,      &[UNUSED, STOP],            StreamerServes),
    (GateClosed,    Restore,    &[INTERRUPT],               StreamerServes),
    (MemoryMissing, StreamBoth, &[UNUSED, STOP, INTERRUPT], ServesThenEnds),
    (MemoryMissing, StreamBoth, &[KILL],                    Recovered),
    (MemoryMissing, StreamBoth, &[CgroupKill],              Recovered),
    (MemoryMissing, StreamBoth, &[OutOfMemory],             Recovered),
    (MemoryMissing, Serve,      &[UNUSED, INTERRUPT],       StreamerServes),
    (MemoryMissing, Serve,      &[KILL],                    StreamerServes),
    (MemoryMissing, Restore,    &[KILL],                    StreamerServes),
    (MemoryMissing, Restore,    &[STOP],                    StreamerServes),
];

/// Restores at most until an event happened while memory was missing.
const MOST: usize = 5;
/// A target that reads its memory from the end meets a missing page within this time.
const FAULT: Duration = Duration::from_secs(5);
/// How long the test watches a command, and a target whose gate must not open.
const WATCHED: Duration = Duration::from_millis(200);

/// A command that serves one restore.
enum Running {
    /// With the cgroup of its processes, where the event concerns that.
    Streams(Streamer, Option<Cgroup>),
    Serves(Daemon, Restoring),
    Restores(Restoring),
}

impl Running {
    /// Restores a process; CRIU has ended when this returns.
    fn start(command: Command, events: &[Event], criu: &Criu, pid: u32) -> Self {
        match command {
            StreamGpus => {
                let streamer = Streamer::start(criu.images()).unwrap();
                criu.restore().unwrap();
                Self::Streams(streamer, None)
            }
            StreamBoth => {
                let (streamer, group) = (Streamer::of_both(criu.images()).unwrap(), events[0].cgroup());
                if let Some(group) = &group {
                    streamer.processes().into_iter().for_each(|pid| group.take(pid).unwrap());
                }
                criu.restore_lazily().unwrap();
                Self::Streams(streamer, group)
            }
            Serve => {
                let daemon = Daemon::start().unwrap();
                let restoring = Restoring::by(&daemon, criu);
                restoring.has_restored(pid, criu);
                Self::Serves(daemon, restoring)
            }
            Restore => {
                let restoring = Restoring::start(criu);
                restoring.has_restored(pid, criu);
                Self::Restores(restoring)
            }
        }
    }

    /// The processes that load the target's memory.
    fn streamer(&self) -> Vec<u32> {
        let (supervisor, workers) = match self {
            Self::Streams(streamer, _) => return streamer.processes(),
            Self::Serves(daemon, _) => streamer_of(daemon.id()),
            Self::Restores(restoring) => restoring.streamer(),
        };
        [supervisor].into_iter().chain(workers).collect()
    }

    fn send(&self, event: Event) {
        let (leader, group) = match self {
            Self::Streams(streamer, group) => (streamer.pid(), group.as_ref()),
            Self::Serves(daemon, _) => (daemon.id(), None),
            Self::Restores(restoring) => (restoring.pid(), None),
        };
        match (event, group) {
            (Group(signals), _) => signal_group(leader, signals),
            (CgroupKill, Some(group)) => group.kill().unwrap(),
            (OutOfMemory, Some(group)) => {
                group.run_out_of_memory().unwrap();
                assert!(soon(|| group.processes().is_empty()), "the kernel kills the group");
                assert_eq!(group.group_kills(), 1);
            }
            (CgroupKill | OutOfMemory, None) => panic!("{event:?} is for a streamer's cgroup"),
        }
    }

    /// Whether the command has ended.
    fn has_ended(&mut self) -> bool {
        match self {
            Self::Streams(streamer, _) => streamer.has_ended().unwrap(),
            Self::Serves(daemon, _) => daemon.has_ended(),
            Self::Restores(restoring) => restoring.has_ended(),
        }
    }

    /// Sends events. The command must end at the last of them, or keep running, as the outcome says.
    fn gets(&mut self, events: &[Event], outcome: Outcome) {
        for (number, event) in events.iter().enumerate() {
            self.send(*event);
            if outcome != ServesThenEnds && number + 1 == events.len() {
                assert!(soon(|| self.has_ended()), "{event:?}: it does not end");
            } else {
                thread::sleep(WATCHED);
                assert!(!self.has_ended(), "{event:?}: it has ended before memory was resident");
            }
        }
    }

    /// Waits for the end of a restore that received no event.
    fn completes(self) {
        let well = match self {
            Self::Streams(mut streamer, _) => streamer.end().unwrap().success(),
            Self::Serves(_, restoring) | Self::Restores(restoring) => restoring.end().0,
        };
        assert!(well);
    }

    /// Waits until the target `pid` has all memory, or is killed. Then checks the command and its streamer
    /// against this outcome.
    fn has_outcome(self, outcome: Outcome, streamer: &[u32], pid: u32) {
        match (self, outcome) {
            (Self::Streams(mut streamer, _), ServesThenEnds) => {
                assert!(streamer.end().unwrap().success(), "{}", streamer.said());
            }
            (Self::Streams(..), KilledByRecover) => {
                let (well, said) = recover().unwrap();
                let report = format!("killed process {pid}: its GPUs were not resumed yet");
                assert!(!well && said.contains(&report), "{said}");
            }
            (Self::Streams(..), Recovered) => {
                let (well, said) = recover().unwrap();
                assert!(well && said.contains("after its streamer was killed"), "{said}");
            }
            (Self::Serves(_, restoring), StreamerServes) => {
                let (well, said) = restoring.end();
                assert!(well && said.contains("GPUs run; all memory resident"), "{said}");
                streamer.iter().for_each(|pid| wait_for_the_end_of(*pid).unwrap());
            }
            (Self::Restores(restoring), StreamerServes) => {
                assert!(!restoring.end().0);
                streamer.iter().for_each(|pid| wait_for_the_end_of(*pid).unwrap());
            }
            (_, outcome) => panic!("{outcome:?} is no outcome of this command"),
        }
    }
}

impl Event {
    /// The cgroup that receives the event, empty.
    fn cgroup(self) -> Option<Cgroup> {
        match self {
            Group(_) => None,
            CgroupKill => Some(Cgroup::new().unwrap()),
            OutOfMemory => Some(Cgroup::with_memory().unwrap()),
        }
    }
}

/// Plays every row of the table that has this phase.
fn table(phase: Phase, play: impl Fn(Command, &[Event], Outcome)) {
    for (_, command, events, outcome) in TABLE.into_iter().filter(|row| row.0 == phase) {
        eprintln!("{command:?}, {events:?}: {outcome:?}");
        play(command, events, outcome);
    }
}

#[test]
fn every_event_while_a_gate_is_closed() {
    isolated(1, |_| {
        let _machine = need!(Machine::with(&ONE_RING), REAL_GPUS);
        let dumped = need!(Dumped::of(&unreached(), Version::V4_2));
        let pid = dumped.server.pid;
        table(GateClosed, |command, events, outcome| {
            let delayed = DelayedCopies::streamers();
            let mut running = Running::start(command, events, &dumped.criu, pid);
            assert!(is_paused(pid), "{}", dumped.criu.log("restore"));
            let streamer = running.streamer();
            running.gets(events, outcome);
            assert!(is_paused(pid), "its gate opened while memory was missing");
            drop(delayed);
            running.has_outcome(outcome, &streamer, pid);
            if outcome != KilledByRecover {
                dumped.server.answers().unwrap();
                assert!(!is_paused(pid));
                dies(pid);
            }
            wait_for_the_end_of(pid).unwrap();
        });
    });
}

/// Whether a process waits for memory that no streamer loads.
fn waits(pid: u32) -> bool {
    until(FAULT, || waits_for_memory(pid).then_some(())).is_some() && {
        thread::sleep(WATCHED);
        waits_for_memory(pid)
    }
}

/// Plays a row; false when all memory was resident before the event.
fn comes(accessor: &Accessor, criu: &Criu, command: Command, events: &[Event], outcome: Outcome) -> bool {
    let pid = accessor.pid();
    accessor.ask("own 0").unwrap();
    let mut running = Running::start(command, events, criu, pid);
    let streamer = running.streamer();
    gate_opens(pid);
    signal(&streamer, Signal::SIGSTOP);
    let came = waits(pid);
    if came {
        running.gets(events, outcome);
        assert_eq!((accessor.answered(), is_paused(pid)), (None, false));
    }
    if !came || outcome != Recovered {
        signal(&streamer, Signal::SIGCONT);
    }
    if came {
        running.has_outcome(outcome, &streamer, pid);
    } else {
        running.completes();
    }
    accessor.answer().unwrap();
    ["check 0", "check 1"].into_iter().for_each(|order| accessor.asked(order).unwrap());
    accessor.ends();
    came
}

#[test]
fn every_event_while_memory_of_cpus_is_missing() {
    isolated(1, |_| {
        let _machine = need!(Machine::with(&ONE_RING), REAL_GPUS);
        need!(queues());
        if gpus_retry_faults() {
            skip!("GPUs that retry faults can access all CPU memory: it is resident before the gate opens");
        }
        let folder = tempfile::tempdir().unwrap();
        let mut accessor = Accessor::start(env!("CARGO_BIN_EXE_accessor"), folder.path(), None).unwrap();
        accessor.asked(&format!("allocate {OWN_PARTS}")).unwrap();
        let criu = accessor.dump(Version::V4_2).unwrap();
        table(MemoryMissing, |command, events, outcome| {
            let came = (0..MOST).any(|_| comes(&accessor, &criu, command, events, outcome));
            assert!(came, "in {MOST} restores all memory was resident before the event");
        });
    });
}
