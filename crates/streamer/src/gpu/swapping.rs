// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a thread does with the placeholders of one process: it serves page faults, or swaps resident buffers
//! that no thread waits for. Both stop the process.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use rewake_uffd::PAGE_SIZE;
use tracing::debug;

use super::placeholders::{Placeholders, SwapOutcome};
use crate::record::Timeline;

/// A page fault that a thread waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PageFault {
    pub(super) address: u64,
    /// The image's number of the buffer.
    pub(super) buffer: usize,
    pub(super) since: Instant,
}

/// A task of the thread.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum SwapTask {
    /// Serve page faults in resident buffers, in a stop for each.
    Faults(Vec<PageFault>),
    /// Swap the placeholders of these buffers in one stop.
    Buffers(BTreeSet<usize>),
}

/// The result of a task.
#[derive(Debug)]
pub(super) struct SwapResult {
    /// The result of the last stop, or `None` if no stop was needed.
    pub(super) outcome: Option<SwapOutcome>,
    /// The number of buffers that were swapped while no thread waited for them.
    pub(super) buffers: usize,
    /// The page faults that were not served.
    pub(super) unserved: Vec<PageFault>,
}

impl SwapTask {
    /// Does the task.
    ///
    /// # Errors
    /// The process's placeholders cannot be served, or not replaced.
    pub(super) fn run(
        self,
        placeholders: &mut Placeholders<'_>,
        timeline: &Timeline,
    ) -> anyhow::Result<SwapResult> {
        match self {
            Self::Faults(faults) => serve(&faults, placeholders, timeline),
            Self::Buffers(buffers) => {
                let outcome = placeholders.swap(&buffers)?;
                if let SwapOutcome::Done { stopped } = outcome {
                    let share = stopped / u32::try_from(buffers.len()).unwrap_or(u32::MAX);
                    let process = placeholders.process();
                    buffers.iter().for_each(|buffer| timeline.swapped(process, *buffer, share));
                }
                Ok(SwapResult { outcome: Some(outcome), buffers: buffers.len(), unserved: Vec::new() })
            }
        }
    }
}

/// Serves page faults until a stop fails. The page whose stop failed gets a copy: the process may be waiting
/// for its own messages to be read, so the others are tried again later.
fn serve(
    faults: &[PageFault],
    placeholders: &mut Placeholders<'_>,
    timeline: &Timeline,
) -> anyhow::Result<SwapResult> {
    let mut result = SwapResult { outcome: None, buffers: 0, unserved: Vec::new() };
    let (process, pid) = (placeholders.process(), placeholders.pid());
    for (place, &PageFault { address, buffer, since }) in faults.iter().enumerate() {
        let Some(accessed) = placeholders.at(address)? else {
            // The buffer has been swapped since the fault, or nothing is mapped any more. The thread has
            // waited all the same.
            placeholders.wake(address, PAGE_SIZE);
            timeline.fault(process, buffer, address, since.elapsed());
            continue;
        };
        let outcome = placeholders.swap(&BTreeSet::from([accessed.buffer]))?;
        match &outcome {
            SwapOutcome::Done { stopped } => {
                placeholders.wake(address, PAGE_SIZE);
                timeline.swapped(process, accessed.buffer, *stopped);
            }
            SwapOutcome::NotNow(why) => {
                debug!("a copy for process {pid}: {why}");
                placeholders.copy(address, accessed)?;
            }
            SwapOutcome::Ended => {}
        }
        let ended = outcome == SwapOutcome::Ended;
        let stopped = matches!(outcome, SwapOutcome::Done { .. });
        result.outcome = Some(outcome);
        if ended {
            break;
        }
        let waited: Duration = since.elapsed();
        timeline.fault(process, accessed.buffer, address, waited);
        debug!("process {pid} accessed buffer {} at {address:#x}, and waited {waited:?}", accessed.buffer);
        if !stopped {
            result.unserved = faults[place + 1..].to_vec();
            break;
        }
    }
    Ok(result)
}
