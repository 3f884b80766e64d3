// SPDX-License-Identifier: MIT OR Apache-2.0
//! Resumes a process's GPUs one after the other. The gate is opened while the queues of GPUs that must wait
//! have a queue percentage of 0. Each GPU gets its percentage back when its reach is resident.
//!
//! The driver accepts UPDATE_QUEUE from the process alone. So one of its threads makes the call, while all
//! are stopped.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context as _, bail};
use rewake_amdgpu_uapi::abi::share::update_queue;
use rewake_amdgpu_uapi::criu;
use rewake_ptrace_inject::{Error, Stopped, Stuck, with_stopped};
use tracing::info;

use super::gate::Gate;
use super::reachability::{GpuReach, QueueSettings};
use crate::sys;

/// How long threads may take to stop.
const PATIENCE: Duration = Duration::from_secs(1);
/// The number of checks for the end of a process to which a call has just failed: a quarter of a second.
const ENDING: u32 = 250;
/// The driver's error for a queue that does not exist, or whose ring does not.
const NO_QUEUE: Option<i32> = Some(libc::EFAULT);

/// The result of one step.
#[derive(Debug)]
pub(super) enum ResumeStep {
    Done,
    /// The process does not stop: nothing has changed for good.
    NotNow(String),
    /// The step is impossible: everything is as before.
    Never(anyhow::Error),
}

impl Gate<'_> {
    /// Opens the gate for the GPUs in `ready`, whose reach is resident. The queues of the others get a
    /// percentage of 0 before.
    ///
    /// # Errors
    /// The step was done in part, and can be neither completed nor undone: the process must be killed.
    pub(super) fn resume_first_gpus(&self, ready: &BTreeSet<usize>) -> anyhow::Result<ResumeStep> {
        let must_wait = |(place, _): &(usize, &GpuReach)| !ready.contains(place);
        let others = self.reach.iter().enumerate().filter(must_wait);
        let queues: Vec<QueueSettings> = others.flat_map(|(_, set)| set.queues.iter().copied()).collect();
        let step = self.with_process_stopped(|gate, stopped| {
            for (done, queue) in queues.iter().enumerate() {
                if let Err(error) = gate.set_percentage(stopped, queue, false) {
                    // A call that was made and failed may have had its effect.
                    let unknown = matches!(error, Error::Call { .. }) && !is_no_queue(&error);
                    gate.undo(stopped, &queues[..done], Some(queue).filter(|_| unknown))?;
                    return Ok(ResumeStep::of(error));
                }
            }
            // The thread that runs this traces the process.
            if let Err(error) = criu::unpause(gate.kfd) {
                gate.undo(stopped, &queues, None)?;
                return Ok(ResumeStep::Never(error.into()));
            }
            Ok(ResumeStep::Done)
        })?;
        if matches!(step, ResumeStep::Done) {
            self.report_resumed(ready);
        }
        Ok(step)
    }

    /// Restores the queue percentage of GPUs whose reach is resident, where the gate is open for others.
    ///
    /// # Errors
    /// A percentage cannot be restored: the process must be killed.
    pub(super) fn restore_queue_percentage(&self, ready: &BTreeSet<usize>) -> anyhow::Result<ResumeStep> {
        let queues: Vec<QueueSettings> =
            ready.iter().flat_map(|place| self.reach[*place].queues.iter().copied()).collect();
        let step = self.with_process_stopped(|gate, stopped| {
            for queue in &queues {
                match gate.set_percentage(stopped, queue, true) {
                    Ok(()) => {}
                    // The driver keeps the ring of a queue that exists: the program has destroyed this queue
                    // since.
                    Err(error) if is_no_queue(&error) => {}
                    // The driver was busy, or short of a resource: another try loses nothing.
                    Err(error @ Error::Call { .. }) => return Ok(ResumeStep::NotNow(error.to_string())),
                    Err(error) => return Ok(ResumeStep::of(error)),
                }
            }
            Ok(ResumeStep::Done)
        })?;
        if let ResumeStep::Never(error) = step {
            if self.ends_soon() {
                return Ok(ResumeStep::NotNow(error.to_string()));
            }
            return Err(error.context("giving queues their share of time back"));
        }
        if matches!(step, ResumeStep::Done) {
            self.report_resumed(ready);
        }
        Ok(step)
    }

    fn report_resumed(&self, ready: &BTreeSet<usize>) {
        let pid = sys::pidfd_pid(self.process).unwrap_or_default();
        for set in ready.iter().map(|place| &self.reach[*place]) {
            self.blocked_calls.iter().for_each(|blocked_calls| blocked_calls.unblock_gpu(set.gpu));
            info!("GPU renderD{} of process {pid} goes on", set.minor);
        }
    }

    /// Runs `act` while the whole process is stopped and its queues may be updated.
    fn with_process_stopped(
        &self,
        act: impl FnOnce(&Self, &mut Stopped<'_>) -> anyhow::Result<ResumeStep> + Send,
    ) -> anyhow::Result<ResumeStep> {
        let blocked_calls = self.blocked_calls.as_ref().context("calls of the process are not kept away")?;
        let pid = sys::pidfd_pid(self.process).context("finding the process")?;
        let done = with_stopped(pid, PATIENCE, |stopped| {
            let stuck = stopped.stuck();
            if stopped.threads().is_empty() || !stuck.iter().all(Stuck::is_harmless) {
                return Ok(ResumeStep::of(Error::Unstoppable { pid, threads: stuck }));
            }
            let done = blocked_calls.with_update_queue_allowed(|| act(self, stopped));
            if done.is_err() {
                // Killed before it runs with queues in an unknown state.
                let _ = sys::pidfd_kill(self.process);
            }
            done
        });
        done.unwrap_or_else(|error| Ok(ResumeStep::of(error)))
    }

    fn ends_soon(&self) -> bool {
        (0..ENDING).any(|_| {
            self.has_ended() || {
                sys::nap();
                false
            }
        })
    }

    fn set_percentage(
        &self,
        stopped: &mut Stopped<'_>,
        queue: &QueueSettings,
        runs: bool,
    ) -> Result<(), Error> {
        let (request, argument) = update_queue(queue.argument(runs));
        stopped.ioctl("UPDATE_QUEUE", self.kfd, request, &argument)
    }

    /// Restores the percentage of `queues`, and of one more whose state is unknown.
    fn undo(
        &self,
        stopped: &mut Stopped<'_>,
        queues: &[QueueSettings],
        unknown: Option<&QueueSettings>,
    ) -> anyhow::Result<()> {
        for queue in queues.iter().chain(unknown) {
            match self.set_percentage(stopped, queue, true) {
                Ok(()) | Err(Error::Ended { .. }) => {}
                Err(error) => bail!("queues had their share of time taken, and do not get it back: {error}"),
            }
        }
        Ok(())
    }
}

fn is_no_queue(error: &Error) -> bool {
    matches!(error, Error::Call { source, .. } if source.raw_os_error() == NO_QUEUE)
}

impl ResumeStep {
    fn of(error: Error) -> Self {
        match error {
            Error::Unstoppable { .. }
            | Error::SharedMemory { .. }
            | Error::Traced { .. }
            // The next try sees that the process has ended.
            | Error::Ended { .. } => Self::NotNow(error.to_string()),
            error => Self::Never(error.into()),
        }
    }
}
