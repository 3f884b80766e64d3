// SPDX-License-Identifier: MIT OR Apache-2.0
//! Demands of other threads to a load, and the load's progress.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rewake_process::Notifier;

use crate::process::ProcessBuffers;

/// A handle of a load that another thread runs. Clones refer to the same load. Demands after its end have no
/// effect.
#[derive(Debug, Clone)]
pub struct LoadHandle(Arc<LoadState>);

#[derive(Debug)]
struct LoadState {
    /// Whether each buffer of each process was ever demanded. Each is queued once, so the queue is no longer
    /// than the image.
    demanded: Vec<Vec<AtomicBool>>,
    /// Demands that the load has not taken.
    queue: Mutex<Vec<(usize, usize)>>,
    /// Wakes the load.
    event: Notifier,
    counts: Vec<Count>,
    given_up: AtomicBool,
}

#[derive(Debug)]
struct Count {
    process: usize,
    minor: u32,
    resident: AtomicU64,
    all: u64,
}

/// The progress of a process's memory on one GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// The index of the process in the load.
    pub process: usize,
    /// The N of the GPU's `/dev/dri/renderDN`.
    pub minor: u32,
    /// Bytes of resident buffers.
    pub resident: u64,
    /// Bytes of all buffers that are loaded.
    pub all: u64,
}

impl LoadHandle {
    pub(crate) fn new(processes: &[ProcessBuffers<'_>]) -> io::Result<Self> {
        let demanded =
            |process: &ProcessBuffers<'_>| process.dmabufs.iter().map(|_| AtomicBool::new(false)).collect();
        let mut counts: Vec<Count> = Vec::new();
        for (process, of) in processes.iter().enumerate() {
            for file in of.files {
                let bytes = of.bytes_in(file);
                let minor = file.minor;
                match counts.iter_mut().find(|count| (count.process, count.minor) == (process, minor)) {
                    Some(count) => count.all += bytes,
                    None => counts.push(Count { process, minor, resident: AtomicU64::new(0), all: bytes }),
                }
            }
        }
        Ok(Self(Arc::new(LoadState {
            demanded: processes.iter().map(demanded).collect(),
            queue: Mutex::new(Vec::new()),
            event: Notifier::new()?,
            counts,
            given_up: AtomicBool::new(false),
        })))
    }

    /// Demands a buffer of a process, by the image's number of it. It precedes all buffers that were not
    /// demanded, and follows earlier demands. Chunks in flight precede it: see
    /// [`BackgroundLoad`](crate::BackgroundLoad). A buffer that is resident, was demanded before, is not
    /// loaded or is unknown is ignored. Does not wait.
    pub fn demand(&self, process: usize, buffer: usize) {
        let demanded = self.0.demanded.get(process).and_then(|demanded| demanded.get(buffer));
        if demanded.is_none_or(|demanded| demanded.swap(true, Ordering::Relaxed)) {
            return;
        }
        self.0.queue.lock().unwrap_or_else(PoisonError::into_inner).push((process, buffer));
        self.0.event.wake();
    }

    /// Makes the load end with an error soon, because nothing needs it. Does not wait.
    pub fn give_up(&self) {
        self.0.given_up.store(true, Ordering::Release);
        self.0.event.wake();
    }

    /// Returns whether the load shall end.
    #[must_use]
    pub fn is_given_up(&self) -> bool {
        self.0.given_up.load(Ordering::Acquire)
    }

    /// Returns the progress for each process and GPU. Bytes counted as resident may be read.
    #[must_use]
    pub fn progress(&self) -> Vec<Progress> {
        let progress = |count: &Count| Progress {
            process: count.process,
            minor: count.minor,
            resident: count.resident.load(Ordering::Acquire),
            all: count.all,
        };
        self.0.counts.iter().map(progress).collect()
    }

    /// Adds resident bytes. Called by the load.
    pub(crate) fn count(&self, process: usize, minor: u32, bytes: u64) {
        let count = self.0.counts.iter().find(|count| (count.process, count.minor) == (process, minor));
        if let Some(count) = count {
            count.resident.fetch_add(bytes, Ordering::Release);
        }
    }

    /// Takes the new demands, in their order. Called by the load.
    pub(crate) fn take_requests(&self) -> Vec<(usize, usize)> {
        std::mem::take(&mut self.0.queue.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns a descriptor that is readable when there are demands. Polled by the load.
    pub(crate) fn event(&self) -> BorrowedFd<'_> {
        self.0.event.as_fd()
    }

    /// Resets the wakeup. The load calls it after a sleep and before it takes demands, so later demands wake
    /// it again.
    pub(crate) fn drain_wakeup(&self) {
        self.0.event.drain();
    }
}

#[cfg(test)]
mod tests {
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

    use super::*;

    fn handle(buffers: usize) -> LoadHandle {
        let dmabufs: Vec<_> = (0..buffers).map(|_| None).collect();
        LoadHandle::new(&[ProcessBuffers { files: &[], dmabufs: &dmabufs }]).unwrap()
    }

    fn wakes(handle: &LoadHandle) -> bool {
        let mut fds = [PollFd::new(handle.event(), PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::ZERO).unwrap() == 1
    }

    #[test]
    fn demands_are_queued_once_and_in_their_order() {
        let handle = handle(4);
        let other = handle.clone();
        handle.demand(0, 3);
        other.demand(0, 1);
        handle.demand(0, 1);
        assert_eq!(handle.take_requests(), [(0, 3), (0, 1)]);
        other.demand(0, 3);
        handle.demand(0, 0);
        assert_eq!(handle.take_requests(), [(0, 0)]);
        assert_eq!(handle.take_requests(), []);
    }

    #[test]
    fn demands_of_unknown_buffers_are_ignored() {
        let handle = handle(2);
        handle.demand(0, 2);
        handle.demand(1, 0);
        handle.demand(usize::MAX, usize::MAX);
        assert!(!wakes(&handle));
        assert_eq!(handle.take_requests(), []);
    }

    #[test]
    fn a_demand_wakes_the_load_once() {
        let handle = handle(2);
        assert!(!wakes(&handle));
        handle.demand(0, 1);
        assert!(wakes(&handle));
        handle.drain_wakeup();
        assert!(!wakes(&handle));
        assert_eq!(handle.take_requests(), [(0, 1)]);
    }
}
