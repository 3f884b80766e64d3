// SPDX-License-Identifier: MIT OR Apache-2.0
use std::fs::File;
use std::os::fd::{AsRawFd as _, IntoRawFd as _, OwnedFd};
use std::process::{Child, Command};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use anyhow::anyhow;
use rewake_bo_contents::{BackgroundLoad, ProcessBuffers};

use super::super::event::event_queue;
use super::super::process_state::BUFFERS_PER_STOP;
use super::super::program::{LAST, Program};
use super::*;
use crate::ledger::fd_store::FdStore;
use crate::sys;
use crate::uffd_child::until;

/// More than two stops can swap.
const BUFFERS: usize = 2 * BUFFERS_PER_STOP + 1;

/// The number of programs to try until one stops at once where it faults.
const PROGRAMS: u32 = 10;

/// How long a coordinator may take.
const TIMEOUT: Duration = Duration::from_secs(30);

/// A process without placeholders, killed when dropped.
struct Bystander(Child);

impl Bystander {
    fn start() -> Self {
        Self(Command::new("sleep").arg("1000").spawn().unwrap())
    }

    fn pidfd(&self) -> OwnedFd {
        sys::pidfd_open(self.0.id().cast_signed()).unwrap()
    }
}

impl Drop for Bystander {
    fn drop(&mut self) {
        self.0.kill().and_then(|()| self.0.wait()).unwrap();
    }
}

/// The gates of some processes, whose calls cannot be blocked. The driver refuses to open them.
fn gates<'a>(pidfds: &[OwnedFd], no_driver: &'a File) -> Vec<Gate<'a>> {
    let gate = |pidfd: &OwnedFd| Gate {
        process: pidfd.as_raw_fd(),
        kfd: no_driver.as_fd(),
        blocked_calls: None,
        minors: Vec::new(),
    };
    pidfds.iter().map(gate).collect()
}

/// Runs `act` with a coordinator of these gates, and a sender of events.
fn with_coordinator<'env, T>(
    gates: &'env [Gate<'env>],
    placeholders: Vec<Placeholders<'env>>,
    timeline: &'env Timeline,
    act: impl for<'scope> FnOnce(Coordinator<'scope, 'env>, EventSender<'env>) -> T,
) -> T {
    let loaded = [const { ProcessBuffers { files: &[], dmabufs: &[] } }];
    let handle = BackgroundLoad::new(&loaded, None).unwrap().handle();
    let (sender, events) = event_queue().unwrap();
    let queue = (sender.clone(), events);
    thread::scope(|scope| {
        let (ledger, late) = (Ledger::new().unwrap(), sender.clone());
        let (_end, ended) = channel::<()>();
        scope.spawn(move || {
            if ended.recv_timeout(TIMEOUT) == Err(RecvTimeoutError::Timeout) {
                late.send(CoordinatorEvent::Failed(anyhow!("the coordinator is not done after {TIMEOUT:?}")));
            }
        });
        act(Coordinator::new(scope, gates, placeholders, queue, handle, ledger, timeline), sender)
    })
}

fn store() -> FdStore {
    let (store, writer) = FdStore::create().unwrap();
    FdStore::of(store.into_raw_fd(), writer.into_raw_fd()).unwrap()
}

fn phase<'a>(coordinator: &'a Coordinator<'_, '_>, process: usize) -> &'a ProcessPhase {
    &coordinator.processes[process].phase
}

fn resident(process: usize) -> CoordinatorEvent<'static> {
    CoordinatorEvent::Resident(LoadEvent::Process { process })
}

#[test]
fn buffers_that_no_thread_waits_for_are_swapped_in_several_stops_and_page_faults_are_served_between_them() {
    assert!((0..PROGRAMS).any(|_| stopped_where_it_faulted()), "none of {PROGRAMS} stops");
}

/// Returns false where the page was copied instead.
fn stopped_where_it_faulted() -> bool {
    let program = Program::start(BUFFERS);
    let (handed, renders, timeline) = (program.handed(), program.renders(), Timeline::default());
    let store = store();
    let (pidfds, no_driver) = ([program.pidfd(), program.pidfd()], File::open("/dev/null").unwrap());
    let watched = handed.watch(0, pidfds[0].as_raw_fd(), program.buffers(), &renders, &store).unwrap();
    // The second process is never resident, so no gate is opened.
    let gates = gates(&pidfds, &no_driver);
    with_coordinator(&gates, vec![watched], &timeline, |mut coordinator, sender| {
        sender.send(resident(0));
        // One stop, and further tries where the program does not stop.
        until(|| {
            coordinator.turn().unwrap();
            program.mappings() != (BUFFERS, 0) && !coordinator.processes[0].is_busy()
        });
        assert_eq!(program.mappings(), (BUFFERS_PER_STOP + 1, BUFFERS_PER_STOP));

        program.access();
        let PlaceholderState::Watched(placeholders) = &coordinator.processes[0].placeholders else {
            panic!("{:?}", coordinator.processes[0])
        };
        let mut message = [PollFd::new(placeholders.uffd(), PollFlags::POLLIN)];
        assert_eq!(poll(&mut message, 60_000_u16), Ok(1));
        until(|| {
            coordinator.turn().unwrap();
            timeline.record().faults().0 == 1 && !coordinator.processes[0].is_busy()
        });
        until(|| program.read() == LAST);
        if program.mappings() != (BUFFERS_PER_STOP, BUFFERS_PER_STOP + 1) {
            return false;
        }
        assert!(matches!(phase(&coordinator, 0), ProcessPhase::Swapping(_)));

        until(|| {
            coordinator.turn().unwrap();
            coordinator.processes[0].is_resident()
        });
        assert_eq!(program.mappings(), (0, BUFFERS));
        assert!(matches!(phase(&coordinator, 0), ProcessPhase::Resident));
        let trace = &coordinator.trace;
        assert_eq!((trace.faults, trace.buffers.as_slice()), (1, [(0, BUFFERS - 1)].as_slice()));
        let of = &timeline.record().processes[0];
        assert_eq!((of.swaps, of.faults), (BUFFERS as u64, 1));
        assert!(of.stopped_us > 0);
        true
    })
}

#[test]
fn a_page_fault_in_a_missing_buffer_is_served_when_the_buffer_is_resident() {
    let program = Program::start(2);
    let (handed, renders, timeline) = (program.handed(), program.renders(), Timeline::default());
    let store = store();
    let (pidfds, no_driver) = ([program.pidfd()], File::open("/dev/null").unwrap());
    let watched = handed.watch(0, pidfds[0].as_raw_fd(), program.buffers(), &renders, &store).unwrap();
    let gates = gates(&pidfds, &no_driver);
    with_coordinator(&gates, vec![watched], &timeline, |mut coordinator, sender| {
        program.access();
        until(|| {
            coordinator.turn().unwrap();
            coordinator.trace.faults == 1
        });
        assert!(!coordinator.processes[0].is_busy());
        // Another buffer than the one that the program waits for.
        sender.send(CoordinatorEvent::Resident(LoadEvent::Buffer { process: 0, number: 0 }));
        coordinator.turn().unwrap();
        assert!(!coordinator.processes[0].is_busy());
        assert_eq!(program.mappings(), (2, 0));
        sender.send(CoordinatorEvent::Resident(LoadEvent::Buffer { process: 0, number: 1 }));
        until(|| {
            coordinator.turn().unwrap();
            timeline.record().faults().0 == 1 && !coordinator.processes[0].is_busy()
        });
        until(|| program.read() == LAST);
        assert_eq!(program.mappings(), (1, 1));
        assert!(matches!(phase(&coordinator, 0), ProcessPhase::Loading));
    });
}

#[test]
fn where_calls_cannot_be_blocked_no_gate_is_opened_before_all_processes_are_resident() {
    let (programs, timeline) = ([Bystander::start(), Bystander::start()], Timeline::default());
    let (pidfds, no_driver) = (programs.each_ref().map(Bystander::pidfd), File::open("/dev/null").unwrap());
    let gates = gates(&pidfds, &no_driver);
    let error = with_coordinator(&gates, Vec::new(), &timeline, |mut coordinator, sender| {
        sender.send(resident(1));
        coordinator.turn().unwrap();
        assert!(matches!(phase(&coordinator, 0), ProcessPhase::Loading));
        assert!(matches!(phase(&coordinator, 1), ProcessPhase::Resident));
        sender.send(resident(0));
        coordinator.turn().unwrap();
        for process in [0, 1] {
            assert!(matches!(phase(&coordinator, process), ProcessPhase::Opening));
        }
        coordinator.run().unwrap_err()
    });
    assert!(format!("{error:#}").contains("UNPAUSE"), "{error:#}");
}

#[test]
fn a_process_that_has_ended_has_no_gate_to_open() {
    let (program, timeline) = (Bystander::start(), Timeline::default());
    let (pidfds, no_driver) = ([program.pidfd()], File::open("/dev/null").unwrap());
    drop(program);
    let gates = gates(&pidfds, &no_driver);
    let (_, opened) = with_coordinator(&gates, Vec::new(), &timeline, |coordinator, sender| {
        sender.send(CoordinatorEvent::Loaded);
        coordinator.run().unwrap()
    });
    assert_eq!(opened.len(), 0);
    let process = &timeline.record().processes[0];
    assert!(process.gone_us.is_some() && process.gate_open_us.is_none(), "{process:?}");
}

#[test]
fn when_the_load_fails_no_gate_is_opened() {
    let (program, timeline) = (Bystander::start(), Timeline::default());
    let (pidfds, no_driver) = ([program.pidfd()], File::open("/dev/null").unwrap());
    let gates = gates(&pidfds, &no_driver);
    let (_, opened) = with_coordinator(&gates, Vec::new(), &timeline, |coordinator, sender| {
        sender.send(CoordinatorEvent::LoadFailed);
        sender.send(resident(0));
        coordinator.run().unwrap()
    });
    assert_eq!(opened.len(), 0);
}
