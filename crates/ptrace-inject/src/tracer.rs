// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tracing from a thread of its own that ends at once.
//!
//! A tracer is a thread, not a process, and all its tracees are let go when it ends, running ones too, which
//! PTRACE_DETACH cannot do (`kernel/ptrace.c: exit_ptrace`).

use std::io;
use std::panic::resume_unwind;
use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use crate::abi::{self, Tid};
use crate::error::Error;
use crate::proc;
use crate::wait::Wait;

/// Tries to trace a thread that has no tracer and is refused all the same: the former tracer may have just gone.
const REFUSALS: u32 = 3;
/// How often it is seen to that no exec waits for us.
const BURIALS: Duration = Duration::from_millis(5);
/// How long the kernel may take for the rest of a thread that has returned.
const END_OF_THREAD: Duration = Duration::from_secs(5);

/// Runs `act` while a thread of ours, the one that runs it, traces process `pid`, which is not stopped: so the KFD's
/// CRIU operations want it (`kfd_chardev.c: kfd_ioctl_criu`). On return the process is not traced any more.
///
/// While another tracer is there it is tried again, for `patience` at most.
///
/// # Errors
/// [`Error::Ended`] also when the first thread has ended and others live on: there is nothing to trace then;
/// [`Error::Traced`], [`Error::NotAllowed`], [`Error::Spawn`].
pub fn with_tracer<T: Send>(
    pid: i32,
    patience: Duration,
    act: impl FnOnce() -> T + Send,
) -> Result<T, Error> {
    on_own_thread(|_| {
        attach(pid, &mut Wait::of(patience))?;
        Ok(act())
    })
}

/// Threads that the tracer's thread traces, but for first ones.
///
/// An exec holds a lock that PTRACE_SEIZE wants, and waits until all other threads are buried, which are ours if we
/// trace them: a tracer that asks for one more thread then waits for itself (`fs/exec.c: de_thread`,
/// `kernel/ptrace.c: ptrace_attach`). So another thread of this process, which may, buries them.
#[derive(Debug, Default)]
pub(crate) struct Traced(Mutex<Vec<Tid>>);

impl Traced {
    fn add(&self, tid: Tid) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(tid);
    }

    fn bury(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().for_each(|tid| abi::bury(*tid));
    }
}

/// Runs `act` in a thread, and returns when the kernel has let go of all that it traced.
pub(crate) fn on_own_thread<T: Send>(
    act: impl FnOnce(&Traced) -> Result<T, Error> + Send,
) -> Result<T, Error> {
    let traced = Traced::default();
    let (end, ended) = channel::<()>();
    thread::scope(|scope| {
        let body = || {
            // Dropped last.
            let _end = end;
            (abi::this_thread(), act(&traced))
        };
        let thread = thread::Builder::new().name("rewake-ptrace-inject".to_owned());
        let thread = thread.spawn_scoped(scope, body).map_err(Error::Spawn)?;
        while ended.recv_timeout(BURIALS) == Err(RecvTimeoutError::Timeout) {
            traced.bury();
        }
        let (tid, result) = thread.join().unwrap_or_else(|panic| resume_unwind(panic));
        // A joined thread has yet to let go of its tracees; it is in /proc until it has.
        let mut wait = Wait::of(END_OF_THREAD);
        while Path::new(&format!("/proc/self/task/{tid}")).exists() {
            if wait.is_over() {
                tracing::error!(tid, "the tracer's thread does not end");
                break;
            }
        }
        result
    })
}

/// [`attach`], of a thread of process `pid`.
pub(crate) fn attach_thread(pid: Tid, tid: Tid, traced: &Traced, wait: &mut Wait) -> Result<bool, Error> {
    if tid != pid {
        traced.add(tid);
    }
    attach(tid, wait)
}

/// Begins to trace a thread, which runs on; true if it was not traced by this thread before.
fn attach(tid: Tid, wait: &mut Wait) -> Result<bool, Error> {
    let mut refused = 0;
    loop {
        let Err(source) = abi::seize(tid, abi::MARK_CALLS) else { return Ok(true) };
        if source.raw_os_error() != Some(libc::EPERM) {
            return Err(failed(tid, source));
        }
        let status = proc::status(tid).filter(|status| !status.has_ended());
        let by = status.ok_or(Error::Ended { pid: tid })?.tracer;
        if by == abi::this_thread() {
            return Ok(false);
        }
        refused += u32::from(by == 0);
        if refused >= REFUSALS {
            return Err(Error::NotAllowed { tid, source });
        }
        if wait.is_over() {
            return Err(Error::Traced { tid, by, name: proc::name(by) });
        }
    }
}

fn failed(tid: Tid, source: io::Error) -> Error {
    match source.raw_os_error() {
        Some(libc::ESRCH) => Error::Ended { pid: tid },
        _ => Error::Ptrace { act: "begin to trace", tid, source },
    }
}
