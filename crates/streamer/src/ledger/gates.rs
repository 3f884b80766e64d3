// SPDX-License-Identifier: MIT OR Apache-2.0
//! Processes whose GPUs stand still until a worker opens their gates: one that dies before that leaves nobody who would.
//! Whoever would dump one of them is told of it ([`ProcessId`]), and whoever waits for this restore of what becomes of them all
//! ([`StatusByte`]): by the worker, or by who takes its place, as one must not say what only the other one knows.

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, IntoRawFd as _, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

use rewake_plugin_protocol::{DUMP_BLOCKS, ProcessId};

use crate::sys;

/// Processes of one restore with GPUs.
pub(super) const MAX_GATES: usize = 1024;

/// What becomes of processes before gates, in one byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum StatusByte {
    /// They run, and their GPUs stand still.
    Shut = b's',
    /// All gates are open.
    Open = b'o',
    /// Those before gates were killed.
    Killed = b'k',
    /// All memory of CPUs is back, where it comes from here.
    Back = b'b',
}

impl StatusByte {
    /// None for any other byte.
    #[must_use]
    pub fn read(byte: u8) -> Option<Self> {
        [Self::Shut, Self::Open, Self::Killed, Self::Back].into_iter().find(|word| *word as u8 == byte)
    }
}

/// A gate could not be shut.
#[derive(Debug, thiserror::Error)]
pub enum NotShut {
    /// There is no room.
    #[error("one restore has more than {MAX_GATES} processes that use GPUs")]
    TooMany,
    /// Who would dump it could not be told.
    #[error("note in {DUMP_BLOCKS} that a process is not to be dumped yet")]
    NotTold(#[source] io::Error),
}

/// Up to [`MAX_GATES`] of them. All-zero memory is none.
#[derive(Debug)]
#[repr(C)]
pub struct Gates {
    /// Who is told what becomes of them: a descriptor, one more than its number. 0 is none.
    told: AtomicI32,
    /// 1 when a gate was shut.
    any_was: AtomicU32,
    gates: [Gate; MAX_GATES],
}

/// A process before its gate.
#[derive(Debug)]
#[repr(C)]
struct Gate {
    /// Its descriptor, one more than its number: 0 is none. Written last.
    process: AtomicI32,
    /// As [`ProcessId`] has it; 0 of one that had ended.
    pid: AtomicI32,
    started: AtomicU64,
}

impl Gates {
    /// Whoever has the other end of this is told a [`StatusByte`] whenever there is one. It stays open as long as a process of this
    /// server lives, and whoever takes a dead one's place tells on: its end without a last word means that nobody is left.
    pub fn tell(&self, whom: BorrowedFd<'_>) {
        self.told.store(whom.as_raw_fd() + 1, Ordering::Release);
    }

    /// One more process. Its descriptor stays open as long as the table of descriptors lives.
    ///
    /// # Errors
    /// There are too many, or nobody else could be told of it.
    pub fn shut(&self, process: OwnedFd) -> Result<RawFd, NotShut> {
        let free = self.gates.iter().find(|gate| gate.process.load(Ordering::Acquire) == 0);
        let free = free.ok_or(NotShut::TooMany)?;
        let gated = gated(&process).map_err(NotShut::NotTold)?;
        if let Some(gated) = gated {
            gated.block_dump().map_err(NotShut::NotTold)?;
        }
        free.pid.store(gated.map_or(0, |gated| gated.pid), Ordering::Relaxed);
        free.started.store(gated.map_or(0, |gated| gated.started), Ordering::Relaxed);
        let number = process.into_raw_fd();
        free.process.store(number + 1, Ordering::Release);
        self.any_was.store(1, Ordering::Release);
        self.say(StatusByte::Shut);
        Ok(number)
    }

    /// Its gate is open, or it has ended.
    pub fn opened(&self, process: RawFd) {
        let gate = self.gates.iter().find(|gate| gate.process.load(Ordering::Acquire) == process + 1);
        let Some(gate) = gate else { return };
        gate.forget();
        gate.process.store(0, Ordering::Release);
        if !self.any() {
            self.say(StatusByte::Open);
        }
    }

    /// All memory of CPUs is back.
    pub fn back(&self) {
        self.say(StatusByte::Back);
    }

    /// The processes behind closed gates, when all that served them have ended: their numbers in that table of
    /// descriptors are gone. No gate is left.
    pub fn forget(&self) -> Vec<ProcessId> {
        self.told.store(0, Ordering::Release);
        let mut left = Vec::new();
        for gate in &self.gates {
            if gate.process.swap(0, Ordering::AcqRel) != 0 {
                let (pid, started) = (gate.pid.load(Ordering::Relaxed), gate.started.load(Ordering::Relaxed));
                left.push(ProcessId { pid, started });
                gate.forget();
            }
        }
        left
    }

    /// Whether any is shut.
    #[must_use]
    pub fn any(&self) -> bool {
        self.gates.iter().any(|gate| gate.process.load(Ordering::Acquire) != 0)
    }

    /// Kills all that are left, says so, and waits until they are dead: one that is still on its way out of a system call would read zeros
    /// when the last userfaultfd closes. How many. Only system calls.
    pub fn end_all(&self) -> usize {
        let mut killed = 0;
        let any = self.any();
        for gate in &self.gates {
            let process = gate.process.load(Ordering::Acquire);
            if process != 0 {
                killed += usize::from(sys::pidfd_kill(process - 1).is_ok());
                gate.forget();
            }
        }
        if any {
            self.say(StatusByte::Killed);
        } else if self.any_was.load(Ordering::Acquire) == 1 {
            // The worker may have died between its last gate and its last word.
            self.say(StatusByte::Open);
        }
        for gate in &self.gates {
            let process = gate.process.load(Ordering::Acquire);
            if process != 0 {
                sys::wait_for_end(process - 1);
            }
        }
        killed
    }

    /// Only a system call.
    fn say(&self, word: StatusByte) {
        let whom = self.told.load(Ordering::Acquire);
        if whom != 0 {
            sys::write_byte(whom - 1, word as u8);
        }
    }
}

impl Gate {
    /// It may be dumped, or is none any more. Only a system call.
    fn forget(&self) {
        let (pid, started) = (self.pid.load(Ordering::Relaxed), self.started.load(Ordering::Relaxed));
        if pid != 0 {
            ProcessId { pid, started }.allow_dump();
        }
    }
}

/// None if it has ended.
fn gated(process: &OwnedFd) -> io::Result<Option<ProcessId>> {
    let pid = match sys::pidfd_pid(process.as_raw_fd()) {
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => return Ok(None),
        pid => pid?,
    };
    // If it has not ended by now, nobody else had its number until then.
    Ok(ProcessId::of(pid)?.filter(|_| !sys::has_ended(process.as_raw_fd())))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read as _;
    use std::os::fd::AsFd as _;
    use std::process::{Child, Command};

    use rewake_skip::need;

    use super::super::Ledger;
    use super::*;

    /// Its words so far.
    struct Listener(File);

    impl Listener {
        fn of(gates: &Gates) -> Self {
            let (ours, theirs) = nix::unistd::pipe2(nix::fcntl::OFlag::O_NONBLOCK).unwrap();
            gates.tell(theirs.as_fd());
            // It is the table's from now on.
            let _ = theirs.into_raw_fd();
            Self(ours.into())
        }

        fn said(&mut self) -> String {
            let mut bytes = [0; 64];
            let count = self.0.read(&mut bytes).unwrap_or(0);
            String::from_utf8(bytes[..count].to_vec()).unwrap()
        }
    }

    fn sleeper() -> (Child, ProcessId) {
        let child = Command::new("sleep").arg("100").spawn().unwrap();
        let gated = ProcessId::of(child.id().cast_signed()).unwrap().unwrap();
        (child, gated)
    }

    fn ends(mut child: Child) {
        let _ = child.kill();
        child.wait().unwrap();
    }

    /// The reason where the folder cannot be made.
    fn ready() -> Result<(), String> {
        ProcessId::prepare().map_err(|error| format!("{DUMP_BLOCKS}: {error}"))
    }

    #[test]
    fn it_is_told_when_the_first_gate_is_shut_and_when_the_last_one_is_open() {
        need!(ready());
        let gates = Ledger::new().unwrap().gates();
        let mut listener = Listener::of(gates);
        let ((one, first), (two, second)) = (sleeper(), sleeper());
        let [one_s, two_s] =
            [&one, &two].map(|child| gates.shut(sys::pidfd_open(child.id().cast_signed()).unwrap()).unwrap());
        assert_eq!(listener.said(), "ss");
        assert!(first.is_dump_blocked().unwrap() && second.is_dump_blocked().unwrap());
        gates.opened(one_s);
        assert_eq!(listener.said(), "");
        assert!(!first.is_dump_blocked().unwrap() && second.is_dump_blocked().unwrap());
        gates.opened(two_s);
        assert_eq!(listener.said(), "o");
        assert!(!second.is_dump_blocked().unwrap() && !gates.any());
        [one, two].into_iter().for_each(ends);
    }

    #[test]
    fn who_takes_a_dead_worker_s_place_says_what_it_finds() {
        need!(ready());
        let gates = Ledger::new().unwrap().gates();
        let mut listener = Listener::of(gates);
        assert_eq!((gates.end_all(), listener.said().as_str()), (0, ""), "nothing was taken over");
        let (child, gated) = sleeper();
        let process = gates.shut(sys::pidfd_open(child.id().cast_signed()).unwrap()).unwrap();
        assert_eq!((gates.end_all(), listener.said().as_str()), (1, "sk"));
        assert!(!gated.is_dump_blocked().unwrap());
        ends(child);
        gates.opened(process);
        listener.said();
        assert_eq!((gates.end_all(), listener.said().as_str()), (0, "o"), "it died before its last word");
    }

    #[test]
    fn a_process_that_has_ended_is_nobody_s_to_dump() {
        let gates = Ledger::new().unwrap().gates();
        let (mut child, gated) = sleeper();
        let process = sys::pidfd_open(child.id().cast_signed()).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        gates.shut(process).unwrap();
        assert!(!gated.is_dump_blocked().unwrap());
    }
}
