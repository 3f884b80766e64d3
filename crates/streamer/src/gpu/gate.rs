// SPDX-License-Identifier: MIT OR Apache-2.0
//! Opens a process's gate. The plugin closes it with the driver's CRIU operation PROCESS_INFO; UNPAUSE here
//! opens it.
//!
//! A process's GPUs can access its own buffers, and those that other processes have exported to it. Buffers
//! that were exported before the dump are loaded before anything runs. Buffers that are exported now are
//! resident, where such calls are blocked for missing ones (`docs/decisions/0011-registered-memory.md`).

use std::os::fd::{BorrowedFd, RawFd};
use std::thread;
use std::time::Duration;

use anyhow::Context as _;
use rewake_amdgpu_uapi::criu;
use rewake_ptrace_inject::with_tracer;
use tracing::warn;

use super::REFUSAL_LIMIT;
use super::blocked_calls::BlockedCalls;
use super::queue_monitor::Opened;
use crate::supervise::processes;
use crate::sys;

/// The time between two checks whether a process that cannot be traced is ending.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);
/// The number of these checks: a second.
const ENDING: u32 = 50;

/// The gate of a process.
#[derive(Debug)]
pub(super) struct Gate<'a> {
    /// The process descriptor, which the ledger owns.
    pub(super) process: RawFd,
    /// The process's `/dev/kfd`.
    pub(super) kfd: BorrowedFd<'a>,
    /// N of the `/dev/dri/renderDN` of the process's GPUs.
    pub(super) minors: Vec<u32>,
    /// The calls that the process cannot make while its gate is closed; `None` where calls cannot be
    /// blocked.
    pub(super) blocked_calls: Option<BlockedCalls<'a>>,
}

impl Gate<'_> {
    /// Opens the gate, once, when all memory of the process is resident. Returns `None` if the process has
    /// ended. It waits for CRIU, or another program, to detach from the process.
    ///
    /// # Errors
    /// The process cannot be traced, or the driver refuses: its queues stay evicted.
    pub(super) fn open(&self) -> anyhow::Result<Option<Opened>> {
        match self.resume_queues() {
            Ok(pid) => {
                self.blocked_calls.iter().for_each(BlockedCalls::unblock_process);
                let numbers = [pid, processes::own_number(pid).unwrap_or(pid)].map(i32::unsigned_abs);
                Ok(Some(Opened { numbers, process: self.process, minors: self.minors.clone() }))
            }
            Err(error) if self.ends_soon() => {
                warn!("a process ended before its GPUs were resumed: {error:#}");
                Ok(None)
            }
            Err(error) => Err(error.context("opening a gate")),
        }
    }

    /// Returns the process's number.
    fn resume_queues(&self) -> anyhow::Result<i32> {
        let pid = sys::pidfd_pid(self.process).context("finding the process")?;
        let done = with_tracer(pid, REFUSAL_LIMIT, || criu::unpause(self.kfd));
        let done = done.with_context(|| format!("tracing process {pid}"))?;
        done.with_context(|| format!("resuming the GPUs of process {pid}"))?;
        Ok(pid)
    }

    /// Returns whether the process ends within [`ENDING`] checks: a killed process has no thread to trace
    /// some time before its end.
    fn ends_soon(&self) -> bool {
        (0..ENDING).any(|_| {
            sys::has_ended(self.process) || {
                thread::sleep(RETRY_INTERVAL);
                false
            }
        })
    }
}
