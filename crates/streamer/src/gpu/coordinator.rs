// SPDX-License-Identifier: MIT OR Apache-2.0
//! Brings each process from its first missing buffer to its open gate. One thread has the state of all
//! processes. It receives the events of other threads in one queue, and page faults from the processes'
//! userfaultfds.
//!
//! To stop or trace a process takes long, and other processes must not wait for that. So a thread does each
//! such task, one at a time for a process, and ends with an event.
//!
//! A gate is opened when all memory of its process is resident and no placeholder is left. Where calls cannot
//! be blocked, all gates are opened together (`docs/decisions/0012-gates-one-by-one.md`).

use std::collections::BTreeSet;
use std::os::fd::AsFd as _;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::thread::Scope;
use std::time::Instant;

use anyhow::Context as _;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rewake_bo_contents::{LoadEvent, LoadHandle};

use super::event::{CoordinatorEvent, EventQueue, EventSender};
use super::gate::Gate;
use super::placeholders::Placeholders;
use super::process_state::{PlaceholderState, ProcessPhase, ProcessState};
use super::queue_monitor::Opened;
use crate::ledger::Ledger;
use crate::record::Timeline;

/// Coordinates the load, the page faults and the gates of a restore.
#[derive(Debug)]
pub(super) struct Coordinator<'scope, 'env: 'scope> {
    scope: &'scope Scope<'scope, 'env>,
    /// By their indexes in the load, as `gates`.
    processes: Vec<ProcessState<'env>>,
    gates: &'env [Gate<'env>],
    sender: EventSender<'env>,
    events: EventQueue<'env>,
    handle: LoadHandle,
    has_load_failed: bool,
    ledger: Ledger,
    timeline: &'env Timeline,
    trace: AccessTrace,
}

/// The buffers that CPUs accessed while they were missing.
#[derive(Debug, Default)]
pub(super) struct AccessTrace {
    /// The number of page faults.
    pub(super) faults: u64,
    /// The buffers, by process and number, each once, in the order of their first page faults.
    pub(super) buffers: Vec<(usize, usize)>,
    seen: BTreeSet<(usize, usize)>,
}

impl AccessTrace {
    fn add(&mut self, process: usize, buffer: usize) {
        if self.seen.insert((process, buffer)) {
            self.buffers.push((process, buffer));
        }
    }
}

impl<'scope, 'env> Coordinator<'scope, 'env> {
    /// Builds a coordinator that starts its threads in `scope`. `gates` are the gates of all processes of the
    /// load, in its order.
    pub(super) fn new(
        scope: &'scope Scope<'scope, 'env>,
        gates: &'env [Gate<'env>],
        placeholders: Vec<Placeholders<'env>>,
        (sender, events): (EventSender<'env>, EventQueue<'env>),
        handle: LoadHandle,
        ledger: Ledger,
        timeline: &'env Timeline,
    ) -> Self {
        let mut of: Vec<Option<Placeholders<'env>>> = gates.iter().map(|_| None).collect();
        for placeholders in placeholders {
            let process = placeholders.process();
            of[process] = Some(placeholders);
        }
        Self {
            scope,
            processes: of.into_iter().map(ProcessState::new).collect(),
            gates,
            sender,
            events,
            handle,
            has_load_failed: false,
            ledger,
            timeline,
            trace: AccessTrace::default(),
        }
    }

    /// Serves until all gates are open, and returns the access trace and the opened gates. Returns early
    /// where the load fails: the processes with closed gates are killed then.
    ///
    /// # Errors
    /// The placeholders of a process cannot be served or swapped, or its gate cannot be opened.
    pub(super) fn run(mut self) -> anyhow::Result<(AccessTrace, Vec<Opened>)> {
        while !self.is_done() {
            self.turn()?;
        }
        let phases = self.processes.into_iter().map(|process| process.phase);
        let opened = phases.filter_map(|phase| match phase {
            ProcessPhase::Open(opened) => Some(opened),
            _ => None,
        });
        Ok((self.trace, opened.collect()))
    }

    fn is_done(&self) -> bool {
        if self.has_load_failed {
            // A gate that is being opened may be open already.
            return !self.processes.iter().any(ProcessState::is_busy);
        }
        self.processes.iter().all(ProcessState::is_done)
    }

    fn turn(&mut self) -> anyhow::Result<()> {
        self.wait()?;
        self.read_page_faults()?;
        for event in self.events.take().collect::<Vec<_>>() {
            self.handle_event(event)?;
        }
        if !self.has_load_failed {
            self.start_swaps();
            self.start_opening();
        }
        Ok(())
    }

    /// Waits for a page fault or an event, or until a process may be stopped again.
    fn wait(&self) -> anyhow::Result<()> {
        let next = self.processes.iter().filter_map(ProcessState::next_swap).min();
        let timeout = next.filter(|_| !self.has_load_failed).map_or(PollTimeout::NONE, |next| {
            let left = next.saturating_duration_since(Instant::now());
            // Rounded up: a wait of less than a millisecond would spin.
            u16::try_from(left.as_micros().div_ceil(1000)).unwrap_or(u16::MAX).into()
        });
        let mut fds = vec![PollFd::new(self.events.as_fd(), PollFlags::POLLIN)];
        fds.extend(self.processes.iter().filter_map(|process| match &process.placeholders {
            PlaceholderState::Watched(placeholders) => {
                Some(PollFd::new(placeholders.uffd(), PollFlags::POLLIN))
            }
            _ => None,
        }));
        match poll(&mut fds, timeout) {
            Ok(_) | Err(Errno::EINTR) => Ok(()),
            Err(errno) => Err(errno).context("waiting for page faults in GPU memory"),
        }
    }

    /// Reads the page faults of all processes, and demands the missing buffers.
    fn read_page_faults(&mut self) -> anyhow::Result<()> {
        for (index, process) in self.processes.iter_mut().enumerate() {
            let PlaceholderState::Watched(placeholders) = &mut process.placeholders else { continue };
            let mut found = Vec::new();
            for address in placeholders.accessed()? {
                match placeholders.at(address)? {
                    Some(accessed) => found.push((address, accessed.buffer)),
                    // The buffer has been swapped since the fault, or nothing is mapped.
                    None => placeholders.wake(address, rewake_uffd::PAGE_SIZE),
                }
            }
            for (address, buffer) in found {
                self.trace.faults += u64::from(process.faulted(address, buffer));
                self.trace.add(index, buffer);
                if process.is_missing(buffer) {
                    self.handle.demand(index, buffer);
                }
            }
        }
        Ok(())
    }

    fn handle_event(&mut self, event: CoordinatorEvent<'env>) -> anyhow::Result<()> {
        match event {
            CoordinatorEvent::Resident(LoadEvent::Buffer { process, number }) => {
                self.processes[process].buffer_is_resident(number);
            }
            CoordinatorEvent::Resident(LoadEvent::Process { process }) => {
                self.processes[process].all_is_resident();
            }
            CoordinatorEvent::Loaded => self.processes.iter_mut().for_each(ProcessState::all_is_resident),
            CoordinatorEvent::LoadFailed => self.has_load_failed = true,
            CoordinatorEvent::Swapped { process, placeholders, result } => {
                let loads_cpus = self.ledger.served_spaces().next().is_some();
                self.processes[process].take_back(placeholders, result, loads_cpus)?;
            }
            CoordinatorEvent::GateOpened { process, opened } => {
                self.processes[process].phase = opened.map_or(ProcessPhase::Ended, ProcessPhase::Open);
            }
            CoordinatorEvent::Failed(error) => return Err(error),
            CoordinatorEvent::Panicked(panic) => resume_unwind(panic),
        }
        Ok(())
    }

    fn start_swaps(&mut self) {
        let (now, timeline) = (Instant::now(), self.timeline);
        for process in 0..self.processes.len() {
            let Some((mut placeholders, task)) = self.processes[process].lend(now) else { continue };
            self.start(move || {
                let result = task.run(&mut placeholders, timeline)?;
                Ok(CoordinatorEvent::Swapped { process, placeholders, result })
            });
        }
    }

    /// Opens the gates of resident processes, or all gates together where calls cannot be blocked.
    fn start_opening(&mut self) {
        let alone = self.gates.iter().all(|gate| gate.blocked_calls.is_some());
        if !alone && !self.processes.iter().all(ProcessState::is_resident) {
            return;
        }
        let (ledger, timeline, gates) = (self.ledger, self.timeline, self.gates);
        for (process, gate) in gates.iter().enumerate() {
            let phase = &mut self.processes[process].phase;
            if matches!(phase, ProcessPhase::Resident) {
                *phase = ProcessPhase::Opening;
                self.start(move || {
                    // The timeline must show resident memory before the gate is open.
                    timeline.look();
                    let opened = gate.open()?;
                    match opened {
                        Some(_) => timeline.gate_opened(process),
                        None => timeline.gone(process),
                    }
                    ledger.gates().opened(gate.process);
                    Ok(CoordinatorEvent::GateOpened { process, opened })
                });
            }
        }
    }

    /// Starts a thread that ends with an event.
    fn start(&self, task: impl FnOnce() -> anyhow::Result<CoordinatorEvent<'env>> + Send + 'scope) {
        let sender = self.sender.clone();
        self.scope.spawn(move || {
            sender.send(match catch_unwind(AssertUnwindSafe(task)) {
                Ok(Ok(event)) => event,
                Ok(Err(error)) => CoordinatorEvent::Failed(error),
                Err(panic) => CoordinatorEvent::Panicked(panic),
            });
        });
    }
}

#[cfg(test)]
mod tests;
