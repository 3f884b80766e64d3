// SPDX-License-Identifier: MIT OR Apache-2.0
//! Errors with the call, the thread and the remedy.

use std::fmt;
use std::io;
use std::path::PathBuf;

use crate::stuck::StuckThread;

/// A process could not be traced, stopped or changed. It continues unchanged, unless a variant says
/// otherwise.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The process has ended, or never existed.
    #[error("process or thread {pid} has ended")]
    Ended {
        /// The process, or the missing thread of it.
        pid: i32,
    },
    /// Another process traces it, and did until the timeout.
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
    /// The program is not an x86-64 program.
    #[error("process {pid} runs {what}: system calls are injected into x86-64 programs only")]
    Foreign {
        /// The process.
        pid: i32,
        /// The kind of program.
        what: &'static str,
    },
    /// A seccomp filter would check the injected call, and the kernel refuses to suspend it.
    #[error(
        "suspend the seccomp filter of thread {tid}: {source}; needs CAP_SYS_ADMIN and an unfiltered tracer"
    )]
    Seccomp {
        /// The thread.
        tid: i32,
        /// The kernel's answer.
        r#source: io::Error,
    },
    /// Other processes share the memory (vfork, CLONE_VM), and would not be stopped.
    #[error(
        "process {pid} shares its memory with processes {with:?}: retry when they have ended or called exec"
    )]
    SharedMemory {
        /// The process.
        pid: i32,
        /// The other processes.
        with: Vec<i32>,
    },
    /// Too many threads of the process do not stop.
    #[error("process {pid} cannot be stopped: {}", list(threads))]
    Unstoppable {
        /// The process.
        pid: i32,
        /// Threads that do not stop, and the reasons.
        threads: Vec<StuckThread>,
    },
    /// No stopped thread can make an injected call.
    #[error("process {pid} has no {what}: nothing can be injected")]
    NoEntry {
        /// The process.
        pid: i32,
        /// The missing requirement.
        what: &'static str,
    },
    /// The kernel refused the injected call.
    #[error("{call} in process {pid}: {source}")]
    Call {
        /// The process.
        pid: i32,
        /// The call.
        call: &'static str,
        /// The kernel's answer.
        r#source: io::Error,
    },
    /// An injected call did not end. **The process is killed** when the tracer ends, because its registers
    /// are changed.
    #[error("{call} in thread {tid} has not ended after {waited_ms} ms: the process is killed")]
    Hung {
        /// The thread.
        tid: i32,
        /// The call.
        call: &'static str,
        /// The time in milliseconds.
        waited_ms: u128,
    },
    /// The calling thread does not trace the thread, or the stop is of another kind.
    #[error(
        "thread {tid} is not stopped where a system call ends, by the calling thread: expected CRIU's stop \
         after rt_sigreturn; call this from CRIU's main thread in RESUME_DEVICES_LATE only"
    )]
    NotHeld {
        /// The thread.
        tid: i32,
    },
    /// The process has too few free descriptor numbers.
    #[error(
        "process {pid} has no room for two more descriptors: its limit is {limit} open files; raise it \
         (prlimit --nofile)"
    )]
    NoNumber {
        /// The process.
        pid: i32,
        /// Its limit of open files (RLIMIT_NOFILE).
        limit: u64,
    },
    /// The process has no descriptor of the device's file.
    #[error(
        "process {pid} has no descriptor of the device's file: it has closed it; serve the pages instead"
    )]
    NotOpen {
        /// The process.
        pid: i32,
    },
    /// A mapping could be neither swapped nor kept. **The process must be killed**, because it has lost
    /// memory.
    #[error("process {pid} has lost its mapping at {address:#x}, {length} bytes: {source}; kill it")]
    Lost {
        /// The process.
        pid: i32,
        /// The address in the process.
        address: u64,
        /// The length in bytes.
        length: u64,
        /// The kernel's answer.
        r#source: io::Error,
    },
    /// A ptrace request failed unexpectedly.
    #[error("{act} thread {tid}: {source}")]
    Ptrace {
        /// The request.
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
    /// No tracer thread could be started.
    #[error("start the tracer thread: {0}")]
    Spawn(io::Error),
}

impl Error {
    pub(crate) fn ptrace(act: &'static str, tid: i32) -> impl FnOnce(io::Error) -> Self {
        move |source| match source.raw_os_error() {
            // A stopped tracee of this thread disappears only by a kill.
            Some(libc::ESRCH) => Self::Ended { pid: tid },
            _ => Self::Ptrace { act, tid, source },
        }
    }

    pub(crate) fn read(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Read { path: path.into(), source }
    }
}

fn list(threads: &[StuckThread]) -> impl fmt::Display {
    threads.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}
