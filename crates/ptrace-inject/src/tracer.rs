// SPDX-License-Identifier: MIT OR Apache-2.0
//! Traces a process from a short-lived thread.
//!
//! A tracer is a thread, not a process. When it ends, the kernel detaches all its tracees, even running ones,
//! which PTRACE_DETACH cannot do (`kernel/ptrace.c: exit_ptrace`).

use std::io;
use std::panic::resume_unwind;
use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use rewake_process::names::printable;

use crate::abi::{self, Tid};
use crate::error::Error;
use crate::proc;
use crate::wait::Wait;

/// The most refusals of a thread without a tracer: the former tracer may have just ended.
const MAX_REFUSALS: u32 = 3;
/// The interval at which ended tracees are reaped, so that no exec waits for this process.
const REAP_INTERVAL: Duration = Duration::from_millis(5);
/// The time that the kernel gets to finish a thread that has returned.
const THREAD_EXIT_LIMIT: Duration = Duration::from_secs(5);

/// Runs `act` on a thread that traces process `pid`, which continues: KFD's CRIU operations require a tracer
/// (`kfd_chardev.c: kfd_ioctl_criu`). On return the process is not traced.
///
/// While another tracer is attached, it retries for up to `timeout`.
///
/// # Errors
/// [`Error::Ended`], also if the first thread has ended and others live, because the first cannot be traced
/// then. [`Error::Traced`], [`Error::NotAllowed`], [`Error::Spawn`].
pub fn with_tracer<T: Send>(pid: i32, timeout: Duration, act: impl FnOnce() -> T + Send) -> Result<T, Error> {
    on_own_thread(|_| {
        attach(pid, &mut Wait::of(timeout))?;
        Ok(act())
    })
}

/// The tracees of the tracer thread, except first threads.
///
/// An exec holds a lock that PTRACE_SEIZE needs, and waits until all other threads are reaped. If they are
/// tracees of this process, a tracer that seizes another thread waits for itself (`fs/exec.c: de_thread`,
/// `kernel/ptrace.c: ptrace_attach`). So another thread of this process reaps them, which the kernel permits.
#[derive(Debug, Default)]
pub(crate) struct TraceeList(Mutex<Vec<Tid>>);

impl TraceeList {
    fn add(&self, tid: Tid) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(tid);
    }

    fn reap_thread(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().for_each(|tid| abi::reap_thread(*tid));
    }
}

/// Runs `act` on a thread, and returns when the kernel has detached all its tracees.
pub(crate) fn on_own_thread<T: Send>(
    act: impl FnOnce(&TraceeList) -> Result<T, Error> + Send,
) -> Result<T, Error> {
    let traced = TraceeList::default();
    let (end, ended) = channel::<()>();
    thread::scope(|scope| {
        let body = || {
            // This is dropped last.
            let _end = end;
            (abi::this_thread(), act(&traced))
        };
        let thread = thread::Builder::new().name("rewake-tracer".to_owned());
        let thread = thread.spawn_scoped(scope, body).map_err(Error::Spawn)?;
        while ended.recv_timeout(REAP_INTERVAL) == Err(RecvTimeoutError::Timeout) {
            traced.reap_thread();
        }
        let (tid, result) = thread.join().unwrap_or_else(|panic| resume_unwind(panic));
        // A joined thread may still have tracees. It stays in /proc until they are detached.
        let mut wait = Wait::of(THREAD_EXIT_LIMIT);
        while Path::new(&format!("/proc/self/task/{tid}")).exists() {
            if wait.is_over() {
                tracing::error!(tid, "the tracer thread does not end");
                break;
            }
        }
        result
    })
}

/// Attaches to a thread of process `pid`.
pub(crate) fn attach_thread(pid: Tid, tid: Tid, traced: &TraceeList, wait: &mut Wait) -> Result<bool, Error> {
    if tid != pid {
        traced.add(tid);
    }
    attach(tid, wait)
}

/// Seizes a thread, which continues. Returns whether it was not a tracee of this thread before.
fn attach(tid: Tid, wait: &mut Wait) -> Result<bool, Error> {
    let mut refused = 0;
    loop {
        let Err(source) = abi::seize(tid, abi::TRACE_SYSGOOD) else { return Ok(true) };
        if source.raw_os_error() != Some(libc::EPERM) {
            return Err(failed(tid, source));
        }
        let status = proc::status(tid).filter(|status| !status.has_ended());
        let by = status.ok_or(Error::Ended { pid: tid })?.tracer;
        if by == abi::this_thread() {
            return Ok(false);
        }
        refused += u32::from(by == 0);
        if refused >= MAX_REFUSALS {
            return Err(Error::NotAllowed { tid, source });
        }
        if wait.is_over() {
            return Err(Error::Traced { tid, by, name: printable(&proc::name(by)) });
        }
    }
}

fn failed(tid: Tid, source: io::Error) -> Error {
    match source.raw_os_error() {
        Some(libc::ESRCH) => Error::Ended { pid: tid },
        _ => Error::Ptrace { act: "begin to trace", tid, source },
    }
}
