// SPDX-License-Identifier: MIT OR Apache-2.0
//! Lists processes whose GPU queues stay evicted until a worker opens their gates.
//!
//! A worker that dies before that leaves processes whose gates no successor can open. A note per process
//! makes CRIU's plugins refuse to dump it ([`ProcessId`]). The worker writes it, and after its death the
//! supervisor removes it.

use std::io;
use std::os::fd::{AsRawFd as _, IntoRawFd as _, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use rewake_plugin_protocol::{DUMP_BLOCKS, ProcessId};

use crate::sys;

/// Most processes of one restore that use GPUs.
pub(super) const MAX_GATES: usize = 1024;

/// Why a gate could not be closed.
#[derive(Debug, thiserror::Error)]
pub enum NotClosed {
    /// The table of gates is full.
    #[error("one restore has more than {MAX_GATES} processes that use GPUs")]
    TooMany,
    /// The note that forbids a dump could not be written.
    #[error("note in {DUMP_BLOCKS} that a process is not to be dumped yet")]
    NotNoted(#[source] io::Error),
}

/// The closed gates, at most [`MAX_GATES`]. All-zero memory has none.
#[derive(Debug)]
#[repr(C)]
pub struct Gates {
    gates: [GateSlot; MAX_GATES],
}

/// The closed gate of a process.
#[derive(Debug)]
#[repr(C)]
struct GateSlot {
    /// The process's descriptor: its number plus one. 0 is none. Written last.
    process: AtomicI32,
    /// As in [`ProcessId`]; 0 if the process had ended.
    pid: AtomicI32,
    started: AtomicU64,
}

impl Gates {
    /// Closes the gate of one more process. Its descriptor stays open as long as the descriptor table exists.
    ///
    /// # Errors
    /// Too many gates are closed, or the note that forbids a dump cannot be written.
    pub fn close(&self, process: OwnedFd) -> Result<RawFd, NotClosed> {
        let free = self.gates.iter().find(|gate| gate.process.load(Ordering::Acquire) == 0);
        let free = free.ok_or(NotClosed::TooMany)?;
        let id = process_id(&process).map_err(NotClosed::NotNoted)?;
        if let Some(id) = id {
            id.block_dump().map_err(NotClosed::NotNoted)?;
        }
        free.pid.store(id.map_or(0, |id| id.pid), Ordering::Relaxed);
        free.started.store(id.map_or(0, |id| id.started), Ordering::Relaxed);
        let number = process.into_raw_fd();
        free.process.store(number + 1, Ordering::Release);
        Ok(number)
    }

    /// Removes the gate of a process: it was opened, or the process has ended.
    pub fn opened(&self, process: RawFd) {
        let gate = self.gates.iter().find(|gate| gate.process.load(Ordering::Acquire) == process + 1);
        let Some(gate) = gate else { return };
        gate.allow_dump();
        gate.process.store(0, Ordering::Release);
    }

    /// Removes all gates, and returns the processes that had closed ones.
    ///
    /// It is for the time after every process of the streamer has ended: their descriptor table no longer
    /// exists.
    pub fn forget(&self) -> Vec<ProcessId> {
        let mut left = Vec::new();
        for gate in &self.gates {
            if gate.process.swap(0, Ordering::AcqRel) != 0 {
                let (pid, started) = (gate.pid.load(Ordering::Relaxed), gate.started.load(Ordering::Relaxed));
                left.push(ProcessId { pid, started });
                gate.allow_dump();
            }
        }
        left
    }

    /// Returns true if a gate is closed.
    #[must_use]
    pub fn any(&self) -> bool {
        self.gates.iter().any(|gate| gate.process.load(Ordering::Acquire) != 0)
    }

    /// Kills all processes with closed gates, and waits until they are dead. Returns how many it killed.
    ///
    /// A process that has not yet left a system call would read zeros when the last userfaultfd closes. The
    /// function makes only system calls.
    pub fn end_all(&self) -> usize {
        let mut killed = 0;
        for gate in &self.gates {
            let process = gate.process.load(Ordering::Acquire);
            if process != 0 {
                killed += usize::from(sys::pidfd_kill(process - 1).is_ok());
                gate.allow_dump();
            }
        }
        for gate in &self.gates {
            let process = gate.process.load(Ordering::Acquire);
            if process != 0 {
                sys::wait_for_end(process - 1);
            }
        }
        killed
    }
}

impl GateSlot {
    /// Removes the note that forbids a dump of the process. It makes only a system call.
    fn allow_dump(&self) {
        let (pid, started) = (self.pid.load(Ordering::Relaxed), self.started.load(Ordering::Relaxed));
        if pid != 0 {
            ProcessId { pid, started }.allow_dump();
        }
    }
}

/// Returns the identity of a process, or `None` if it has ended.
fn process_id(process: &OwnedFd) -> io::Result<Option<ProcessId>> {
    let pid = match sys::pidfd_pid(process.as_raw_fd()) {
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => return Ok(None),
        pid => pid?,
    };
    // If it has not ended by now, no other process can have had its number.
    Ok(ProcessId::of(pid)?.filter(|_| !sys::has_ended(process.as_raw_fd())))
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use rewake_skip::need;

    use super::super::Ledger;
    use super::*;

    fn sleeper() -> (Child, ProcessId) {
        let child = Command::new("sleep").arg("100").spawn().unwrap();
        let gated = ProcessId::of(child.id().cast_signed()).unwrap().unwrap();
        (child, gated)
    }

    fn ends(mut child: Child) {
        let _ = child.kill();
        child.wait().unwrap();
    }

    /// Makes the folder of the notes, or says why that is impossible.
    fn ready() -> Result<(), String> {
        ProcessId::prepare().map_err(|error| format!("{DUMP_BLOCKS}: {error}"))
    }

    #[test]
    fn a_process_is_not_dumped_until_its_gate_is_open() {
        need!(ready());
        let gates = Ledger::new().unwrap().gates();
        let ((one, first), (two, second)) = (sleeper(), sleeper());
        let [one_s, two_s] = [&one, &two]
            .map(|child| gates.close(sys::pidfd_open(child.id().cast_signed()).unwrap()).unwrap());
        assert!(first.is_dump_blocked().unwrap() && second.is_dump_blocked().unwrap());
        gates.opened(one_s);
        assert!(!first.is_dump_blocked().unwrap() && second.is_dump_blocked().unwrap() && gates.any());
        gates.opened(two_s);
        assert!(!second.is_dump_blocked().unwrap() && !gates.any());
        [one, two].into_iter().for_each(ends);
    }

    #[test]
    fn after_a_worker_s_death_the_processes_whose_gates_it_left_closed_are_killed() {
        need!(ready());
        let gates = Ledger::new().unwrap().gates();
        assert_eq!(gates.end_all(), 0, "no gate was closed");
        let (child, gated) = sleeper();
        let process = gates.close(sys::pidfd_open(child.id().cast_signed()).unwrap()).unwrap();
        assert_eq!(gates.end_all(), 1);
        assert!(!gated.is_dump_blocked().unwrap());
        ends(child);
        gates.opened(process);
        assert_eq!(gates.end_all(), 0, "all gates were opened");
    }

    #[test]
    fn no_note_is_written_for_a_process_that_has_ended() {
        let gates = Ledger::new().unwrap().gates();
        let (mut child, gated) = sleeper();
        let process = sys::pidfd_open(child.id().cast_signed()).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        gates.close(process).unwrap();
        assert!(!gated.is_dump_blocked().unwrap());
    }
}
