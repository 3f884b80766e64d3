// SPDX-License-Identifier: MIT OR Apache-2.0
//! Dispatches on several queues and GPUs, each after the one before it.

use std::sync::Arc;

use anyhow::{bail, ensure};

use crate::gpu::{Gpus, PATIENCE};
use crate::kernel::{ARGUMENTS, Kernel};
use crate::kfd::aql::{Aql, Signal};
use crate::kfd::{Buffer, ComputeQueue, Event, QueueSpec, WaitOutcome};

/// Space for dispatches in a lane at a time.
pub const SLOTS: u64 = 8192;
/// Milliseconds of one sleep.
const SLEEP: u32 = 1000;
/// Sleeps, and spurious wake-ups, in a row, after which a GPU counts as stuck.
const SLEEPS: u32 = 300;

/// One dispatch, and where it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    /// Which GPU.
    pub gpu: usize,
    /// Which of its queues.
    pub queue: usize,
    /// The kernel.
    pub kernel: Kernel,
}

/// Queues on every GPU, with memory for arguments and signals.
#[derive(Debug)]
pub struct Lane {
    gpus: Arc<Gpus>,
    queues: Vec<Vec<ComputeQueue>>,
    arguments: Buffer,
    signals: Buffer,
    done: Event,
}

impl Lane {
    /// Makes `queues` queues on each of the first `count` GPUs.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn new(gpus: &Arc<Gpus>, count: usize, queues: usize) -> anyhow::Result<Self> {
        let mut all = Vec::new();
        for gpu in 0..count {
            let mut own = Vec::new();
            for _ in 0..queues {
                own.push(ComputeQueue::new(gpus.device(gpu), gpus.doorbells(gpu), QueueSpec::default())?);
            }
            all.push(own);
        }
        Ok(Self {
            gpus: Arc::clone(gpus),
            queues: all,
            arguments: gpus.host(SLOTS * ARGUMENTS)?,
            signals: gpus.host(SLOTS * Signal::SIZE)?,
            done: gpus.events().signal()?,
        })
    }

    /// The GPUs.
    #[must_use]
    pub fn gpus(&self) -> &Arc<Gpus> {
        &self.gpus
    }

    /// Queues on one GPU.
    #[must_use]
    pub fn queues(&self, gpu: usize) -> &[ComputeQueue] {
        &self.queues[gpu]
    }

    /// Runs steps one after the other, and waits for the last.
    ///
    /// # Errors
    /// A GPU faults or does not finish.
    pub fn run(&mut self, steps: &[Step]) -> anyhow::Result<()> {
        self.launch(steps)?;
        self.wait(steps.len())
    }

    /// Dispatches all steps; no other dispatch of this lane may be unfinished.
    ///
    /// # Errors
    /// There are more than [`SLOTS`], or a queue takes none.
    pub fn launch(&mut self, steps: &[Step]) -> anyhow::Result<()> {
        ensure!(steps.len() as u64 <= SLOTS, "{} dispatches at once, at most {SLOTS}", steps.len());
        for (slot, step) in (0_u64..).zip(steps) {
            self.arguments.cpu().write(slot * ARGUMENTS, &step.kernel.arguments());
            let last = slot + 1 == steps.len() as u64;
            let (mailbox, event) = if last { (self.done.mailbox(), self.done.id()) } else { (0, 0) };
            self.signals.cpu().write(slot * Signal::SIZE, &Signal::bytes(1, mailbox, event));
        }
        let mut before: Option<&Step> = None;
        for (slot, step) in (0_u64..).zip(steps) {
            let mut packets = Vec::new();
            if before.is_some_and(|before| (before.gpu, before.queue) != (step.gpu, step.queue)) {
                let signal = self.signals.address() + (slot - 1) * Signal::SIZE;
                packets.push(Aql::barrier(&[signal, 0, 0, 0, 0], false, 0));
            }
            packets.push(Aql::dispatch(
                self.gpus.code(step.gpu) + step.kernel.code_offset(),
                self.arguments.address() + slot * ARGUMENTS,
                self.signals.address() + slot * Signal::SIZE,
            ));
            self.queues[step.gpu][step.queue].submit(&packets, PATIENCE)?;
            before = Some(step);
        }
        Ok(())
    }

    /// Waits for the last of this number of launched steps.
    ///
    /// # Errors
    /// A GPU faults or does not finish.
    pub fn wait(&self, steps: usize) -> anyhow::Result<()> {
        let Some(last) = (steps as u64).checked_sub(1) else { return Ok(()) };
        for _ in 0..SLEEPS {
            if self.signals.cpu().load64(last * Signal::SIZE + Signal::VALUE) == 0 {
                return Ok(());
            }
            match self.gpus.events().wait(&[&self.done, self.gpus.fault()], SLEEP)? {
                WaitOutcome::Signalled | WaitOutcome::Timeout => {}
                WaitOutcome::Fault { gpu, address } => bail!("GPU {gpu:#x} has a page fault at {address:#x}"),
            }
        }
        let done =
            (0..=last).filter(|slot| self.signals.cpu().load64(slot * Signal::SIZE + Signal::VALUE) == 0);
        bail!("{} of {steps} dispatches done, and none for a long time", done.count())
    }
}
