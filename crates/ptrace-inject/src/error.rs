// SPDX-License-Identifier: MIT OR Apache-2.0
//! Errors that name the act, the thread and the way out.

use std::fmt;
use std::io;
use std::path::PathBuf;

use crate::stuck::Stuck;

/// What goes wrong with a traced process. Unless said otherwise it goes on as if nothing had been.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The process has ended, or never was.
    #[error("process or thread {pid} has ended")]
    Ended {
        /// The process, or the thread of it that was missed.
        pid: i32,
    },
    /// Another process traces it, and did for as long as was waited.
    #[error("thread {tid} is traced by process {by} ({name}): a thread has one tracer; detach the other one")]
    Traced {
        /// The thread.
        tid: i32,
        /// Its tracer.
        by: i32,
        /// The tracer's name.
        name: String,
    },
    /// The kernel refuses to trace it.
    #[error("trace thread {tid}: {source}; needs CAP_SYS_PTRACE and a security module that allows it")]
    NotAllowed {
        /// The thread.
        tid: i32,
        /// The kernel's answer.
        r#source: io::Error,
    },
    /// The program is not one for x86-64.
    #[error("process {pid} runs {what}: system calls are injected into x86-64 programs only")]
    Foreign {
        /// The process.
        pid: i32,
        /// What it runs.
        what: &'static str,
    },
    /// A seccomp filter would judge the injected call, and the kernel does not let us suspend it.
    #[error(
        "suspend the seccomp filter of thread {tid}: {source}; needs CAP_SYS_ADMIN and no filter of our own"
    )]
    Seccomp {
        /// The thread.
        tid: i32,
        /// The kernel's answer.
        r#source: io::Error,
    },
    /// Other processes have the same memory (vfork, CLONE_VM), and would not be stopped.
    #[error(
        "process {pid} shares its memory with processes {with:?}: ask again when they have ended or called exec"
    )]
    SharedMemory {
        /// The process.
        pid: i32,
        /// The others.
        with: Vec<i32>,
    },
    /// Not enough of the process stands still.
    #[error("process {pid} does not stand still: {}", list(threads))]
    Unstoppable {
        /// The process.
        pid: i32,
        /// Threads that do not stop, and why.
        threads: Vec<Stuck>,
    },
    /// No thread that stands still can run a system call for us.
    #[error("process {pid} has no {what}: nothing can be injected")]
    NoEntry {
        /// The process.
        pid: i32,
        /// What is missing.
        what: &'static str,
    },
    /// The kernel refused the injected call.
    #[error("{call} in process {pid}: {source}")]
    Call {
        /// The process.
        pid: i32,
        /// What was called.
        call: &'static str,
        /// The kernel's answer.
        r#source: io::Error,
    },
    /// An injected call did not end. **The process is killed** when the tracer ends: its registers are not its own.
    #[error("{call} in thread {tid} has not ended after {waited_ms} ms: the process is killed")]
    Hung {
        /// The thread.
        tid: i32,
        /// What was called.
        call: &'static str,
        /// How long, in milliseconds.
        waited_ms: u128,
    },
    /// The calling thread does not trace the thread, or not in the stop that is needed.
    #[error(
        "thread {tid} is not stopped where a system call ends, by the calling thread: expected CRIU's stop after \
         rt_sigreturn; call this from CRIU's main thread in RESUME_DEVICES_LATE only"
    )]
    NotHeld {
        /// The thread.
        tid: i32,
    },
    /// The process has too few free numbers for descriptors.
    #[error(
        "process {pid} has no room for two more descriptors: its limit is {limit} open files; raise it (prlimit --nofile)"
    )]
    NoNumber {
        /// The process.
        pid: i32,
        /// Its limit of open files (RLIMIT_NOFILE).
        limit: u64,
    },
    /// The process has not, or not any more, a descriptor of the device's file.
    #[error(
        "process {pid} has no descriptor of the device's file: it has closed it; serve the pages instead"
    )]
    NotOpen {
        /// The process.
        pid: i32,
    },
    /// A mapping could be neither swapped nor kept. **The process must be killed**: it has a hole where memory was.
    #[error("process {pid} has lost its mapping at {address:#x}, {length} bytes: {source}; kill it")]
    Lost {
        /// The process.
        pid: i32,
        /// Where, in the process.
        address: u64,
        /// Bytes.
        length: u64,
        /// The kernel's answer.
        r#source: io::Error,
    },
    /// A request to the kernel failed that should not.
    #[error("{act} thread {tid}: {source}")]
    Ptrace {
        /// Which.
        act: &'static str,
        /// The thread.
        tid: i32,
        /// The kernel's answer.
        r#source: io::Error,
    },
    /// A file about the process cannot be read.
    #[error("read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The kernel's answer.
        r#source: io::Error,
    },
    /// No thread could be made to trace from.
    #[error("start the tracer's thread: {0}")]
    Spawn(io::Error),
}

impl Error {
    pub(crate) fn ptrace(act: &'static str, tid: i32) -> impl FnOnce(io::Error) -> Self {
        move |source| match source.raw_os_error() {
            // It was stopped and ours: only a kill takes it away.
            Some(libc::ESRCH) => Self::Ended { pid: tid },
            _ => Self::Ptrace { act, tid, source },
        }
    }

    pub(crate) fn read(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Read { path: path.into(), source }
    }
}

fn list(threads: &[Stuck]) -> impl fmt::Display {
    threads.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}
