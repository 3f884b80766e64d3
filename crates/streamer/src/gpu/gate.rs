// SPDX-License-Identifier: MIT OR Apache-2.0
//! Opens a process's gate. The plugin closes it with the driver's CRIU operation PROCESS_INFO; UNPAUSE here
//! opens it.

use std::os::fd::{BorrowedFd, RawFd};
use std::time::Duration;

use anyhow::Context as _;
use rewake_amdgpu_uapi::criu;
use rewake_ptrace_inject::with_tracer;

use super::blocked_calls::BlockedCalls;
use super::reachability::GpuReach;
use crate::supervise::processes::{self, Layout};
use crate::sys;

/// How long CRIU may take to detach from a process that it has restored.
const PATIENCE: Duration = Duration::from_secs(60);

/// The gate of a process.
#[derive(Debug)]
pub(super) struct Gate<'a> {
    /// The process descriptor, which the ledger owns.
    pub(super) process: RawFd,
    /// The process's `/dev/kfd`.
    pub(super) kfd: BorrowedFd<'a>,
    /// The calls that the process cannot make while its gate is closed; `None` where calls cannot be
    /// blocked.
    pub(super) blocked_calls: Option<BlockedCalls<'a>>,
    /// The reach of each GPU that is resumed alone; empty if all are resumed together.
    pub(super) reach: &'a [GpuReach],
}

impl Gate<'_> {
    /// Opens the gate, once, when all memory of the process is resident. Returns the process's number.
    ///
    /// # Errors
    /// The process cannot be traced, or the driver refuses: its queues stay evicted.
    pub(super) fn open(&self) -> anyhow::Result<i32> {
        let pid = sys::pidfd_pid(self.process).context("finding the process")?;
        let done = with_tracer(pid, PATIENCE, || criu::unpause(self.kfd));
        let done = done.with_context(|| format!("tracing process {pid}"))?;
        done.with_context(|| format!("letting the GPUs of process {pid} go on"))?;
        self.blocked_calls.iter().for_each(BlockedCalls::unblock_process);
        Ok(pid)
    }

    /// Unblocks the process's calls after each GPU was resumed alone. Returns the process's number.
    ///
    /// # Errors
    /// The process has ended.
    pub(super) fn is_open(&self) -> anyhow::Result<i32> {
        let pid = sys::pidfd_pid(self.process).context("finding the process")?;
        self.blocked_calls.iter().for_each(BlockedCalls::unblock_process);
        Ok(pid)
    }

    /// Returns the layout of the program's memory.
    pub(super) fn layout(&self) -> Option<Layout> {
        processes::layout(sys::pidfd_pid(self.process).ok()?)
    }

    /// Returns whether the process has ended.
    pub(super) fn has_ended(&self) -> bool {
        sys::has_ended(self.process)
    }
}
