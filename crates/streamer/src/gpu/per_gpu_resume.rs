// SPDX-License-Identifier: MIT OR Apache-2.0
//! A process's GPUs go on one after the other: the gate is opened when the queues of those that must wait have no share of time, and each
//! gets it back when its set is there.
//!
//! The driver takes UPDATE_QUEUE from the process alone, so one of its threads makes the call, while all stand still.

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

/// For threads to stop.
const PATIENCE: Duration = Duration::from_secs(1);
/// Looks for the end of a process to which a call has just failed: a quarter of a second.
const ENDING: u32 = 250;
/// What the driver says of a queue that is not there, or whose ring is not.
const NO_QUEUE: Option<i32> = Some(libc::EFAULT);

/// What came of it.
#[derive(Debug)]
pub(super) enum ResumeStep {
    Done,
    /// It does not stand still: nothing has changed for good.
    NotNow(String),
    /// It cannot be: everything is as it was.
    Never(anyhow::Error),
}

impl Gate<'_> {
    /// Opens it for some of the GPUs that go on one by one, whose sets are there, by their places; the others have no share of time before.
    ///
    /// # Errors
    /// Some of it was done, and can be neither done nor undone: the process must be killed.
    pub(super) fn resume_first_gpus(&self, ready: &BTreeSet<usize>) -> anyhow::Result<ResumeStep> {
        let must_wait = |(place, _): &(usize, &GpuReach)| !ready.contains(place);
        let others = self.sets.iter().enumerate().filter(must_wait);
        let queues: Vec<QueueSettings> = others.flat_map(|(_, set)| set.queues.iter().copied()).collect();
        let step = self.standing(|gate, stopped| {
            for (done, queue) in queues.iter().enumerate() {
                if let Err(error) = gate.share(stopped, queue, false) {
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
            self.went_on(ready);
        }
        Ok(step)
    }

    /// GPUs whose sets are there have their share of time again, where the gate is open for others.
    ///
    /// # Errors
    /// They cannot: the process must be killed.
    pub(super) fn restore_queue_percentage(&self, ready: &BTreeSet<usize>) -> anyhow::Result<ResumeStep> {
        let queues: Vec<QueueSettings> =
            ready.iter().flat_map(|place| self.sets[*place].queues.iter().copied()).collect();
        let step = self.standing(|gate, stopped| {
            for queue in &queues {
                match gate.share(stopped, queue, true) {
                    Ok(()) => {}
                    // It was there, and the driver keeps its ring since: the program has ended it.
                    Err(error) if is_no_queue(&error) => {}
                    // The driver was busy, or out of something: nothing is lost by another try.
                    Err(error @ Error::Call { .. }) => return Ok(ResumeStep::NotNow(error.to_string())),
                    Err(error) => return Ok(ResumeStep::of(error)),
                }
            }
            Ok(ResumeStep::Done)
        })?;
        if let ResumeStep::Never(error) = step {
            if self.is_going() {
                return Ok(ResumeStep::NotNow(error.to_string()));
            }
            return Err(error.context("giving queues their share of time back"));
        }
        if matches!(step, ResumeStep::Done) {
            self.went_on(ready);
        }
        Ok(step)
    }

    fn went_on(&self, ready: &BTreeSet<usize>) {
        let pid = sys::pidfd_pid(self.process).unwrap_or_default();
        for set in ready.iter().map(|place| &self.sets[*place]) {
            self.kept.iter().for_each(|kept| kept.unblock_gpu(set.gpu));
            info!("GPU renderD{} of process {pid} goes on", set.minor);
        }
    }

    /// What is done while all of the process stands still, and its queues may be updated.
    fn standing(
        &self,
        act: impl FnOnce(&Self, &mut Stopped<'_>) -> anyhow::Result<ResumeStep> + Send,
    ) -> anyhow::Result<ResumeStep> {
        let kept = self.kept.as_ref().context("calls of the process are not kept away")?;
        let pid = sys::pidfd_pid(self.process).context("finding the process")?;
        let done = with_stopped(pid, PATIENCE, |stopped| {
            let stuck = stopped.stuck();
            if stopped.threads().is_empty() || !stuck.iter().all(Stuck::is_harmless) {
                return Ok(ResumeStep::of(Error::Unstoppable { pid, threads: stuck }));
            }
            let done = kept.with_update_queue_allowed(|| act(self, stopped));
            if done.is_err() {
                // Before it goes on, with queues of which nobody knows.
                let _ = sys::pidfd_kill(self.process);
            }
            done
        });
        done.unwrap_or_else(|error| Ok(ResumeStep::of(error)))
    }

    fn is_going(&self) -> bool {
        (0..ENDING).any(|_| {
            self.has_ended() || {
                sys::nap();
                false
            }
        })
    }

    fn share(&self, stopped: &mut Stopped<'_>, queue: &QueueSettings, runs: bool) -> Result<(), Error> {
        let (request, argument) = update_queue(queue.argument(runs));
        stopped.ioctl("UPDATE_QUEUE", self.kfd, request, &argument)
    }

    /// Gives them their share of time back, and one more of which it is not known whether it was taken.
    fn undo(
        &self,
        stopped: &mut Stopped<'_>,
        queues: &[QueueSettings],
        unknown: Option<&QueueSettings>,
    ) -> anyhow::Result<()> {
        for queue in queues.iter().chain(unknown) {
            match self.share(stopped, queue, true) {
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
            // Whoever tries again sees that it has.
            | Error::Ended { .. } => Self::NotNow(error.to_string()),
            error => Self::Never(error.into()),
        }
    }
}
