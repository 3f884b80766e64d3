// SPDX-License-Identifier: MIT OR Apache-2.0
//! What keeps a process's GPUs still: the driver's CRIU operations PROCESS_INFO, by the plugin, and UNPAUSE, here.

use std::os::fd::{BorrowedFd, RawFd};
use std::time::Duration;

use anyhow::Context as _;
use rewake_amdgpu_uapi::criu;
use rewake_ptrace_inject::with_tracer;

use super::blocked_calls::BlockedCalls;
use super::reachability::GpuReach;
use crate::supervise::processes::{self, Layout};
use crate::sys;

/// How long CRIU may take to let go of a process that it has restored.
const PATIENCE: Duration = Duration::from_secs(60);

/// The gate of a process.
#[derive(Debug)]
pub(super) struct Gate<'a> {
    /// Its process descriptor, in the ledger.
    pub(super) process: RawFd,
    /// Its `/dev/kfd`.
    pub(super) kfd: BorrowedFd<'a>,
    /// What it may not do before; none where calls cannot be kept away.
    pub(super) kept: Option<BlockedCalls<'a>>,
    /// Its GPUs that go on one by one; none if they go on together.
    pub(super) sets: &'a [GpuReach],
}

impl Gate<'_> {
    /// Opens it: once, when all memory of the process is loaded. The process's number.
    ///
    /// # Errors
    /// The process cannot be traced, or the driver refuses: it stands still.
    pub(super) fn open(&self) -> anyhow::Result<i32> {
        let pid = sys::pidfd_pid(self.process).context("finding the process")?;
        let done = with_tracer(pid, PATIENCE, || criu::unpause(self.kfd));
        let done = done.with_context(|| format!("tracing process {pid}"))?;
        done.with_context(|| format!("letting the GPUs of process {pid} go on"))?;
        self.kept.iter().for_each(BlockedCalls::process_goes_on);
        Ok(pid)
    }

    /// It was opened for each GPU, one by one. The process's number.
    ///
    /// # Errors
    /// The process has ended.
    pub(super) fn is_open(&self) -> anyhow::Result<i32> {
        let pid = sys::pidfd_pid(self.process).context("finding the process")?;
        self.kept.iter().for_each(BlockedCalls::process_goes_on);
        Ok(pid)
    }

    /// How its program's memory is laid out.
    pub(super) fn layout(&self) -> Option<Layout> {
        processes::layout(sys::pidfd_pid(self.process).ok()?)
    }

    /// Whether there is nobody behind it.
    pub(super) fn has_ended(&self) -> bool {
        sys::has_ended(self.process)
    }
}
