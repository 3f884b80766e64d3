// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where other threads ask a load for buffers, and how far it is.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::pipeline::Process;

/// A handle to a load that another thread runs. Clones are the same load's. After its end nothing comes of demands.
#[derive(Debug, Clone)]
pub struct LoadHandle(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// By process and buffer: whether it was ever demanded. Each is queued once, so that the queue is no longer than the image.
    asked: Vec<Vec<AtomicBool>>,
    /// Demands that the load has not seen.
    queue: Mutex<Vec<(usize, usize)>>,
    /// Wakes the load.
    event: EventFd,
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

/// How far a process's memory of one GPU is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Its place among the load's processes.
    pub process: usize,
    /// N of the GPU's `/dev/dri/renderDN`.
    pub minor: u32,
    /// Bytes of buffers that are there.
    pub resident: u64,
    /// Bytes of buffers that are loaded in all.
    pub all: u64,
}

impl LoadHandle {
    pub(crate) fn new(processes: &[Process<'_>]) -> io::Result<Self> {
        let asked = |process: &Process<'_>| process.dmabufs.iter().map(|_| AtomicBool::new(false)).collect();
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
        Ok(Self(Arc::new(Shared {
            asked: processes.iter().map(asked).collect(),
            queue: Mutex::new(Vec::new()),
            event: EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?,
            counts,
            given_up: AtomicBool::new(false),
        })))
    }

    /// Wants a buffer, by the image's number of it in a process of the load, before all that nobody has demanded and after
    /// what was demanded before. What is under way already comes first: see [`BackgroundLoad`](crate::Loading). Nothing comes of
    /// it if the buffer is resident, was demanded before, is not loaded or is unknown. Does not wait.
    pub fn demand(&self, process: usize, buffer: usize) {
        let asked = self.0.asked.get(process).and_then(|asked| asked.get(buffer));
        if asked.is_none_or(|asked| asked.swap(true, Ordering::Relaxed)) {
            return;
        }
        self.0.queue.lock().unwrap_or_else(PoisonError::into_inner).push((process, buffer));
        // It fails where it would count too far: then the load is woken anyway.
        let _ = self.0.event.write(1);
    }

    /// Nobody needs it any more: it ends with an error as soon as it looks. Does not wait.
    pub fn give_up(&self) {
        self.0.given_up.store(true, Ordering::Release);
        // As above.
        let _ = self.0.event.write(1);
    }

    /// Whether it is to end.
    #[must_use]
    pub fn is_given_up(&self) -> bool {
        self.0.given_up.load(Ordering::Acquire)
    }

    /// How far the load is, for each process and GPU. What it says is resident may be read.
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

    /// For the load: so many bytes more are resident.
    pub(crate) fn count(&self, process: usize, minor: u32, bytes: u64) {
        let count = self.0.counts.iter().find(|count| (count.process, count.minor) == (process, minor));
        if let Some(count) = count {
            count.resident.fetch_add(bytes, Ordering::Release);
        }
    }

    /// For the load: demands that it has not seen, in their order.
    pub(crate) fn take_requests(&self) -> Vec<(usize, usize)> {
        std::mem::take(&mut self.0.queue.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// For the load: can be read when there are demands.
    pub(crate) fn event(&self) -> BorrowedFd<'_> {
        self.0.event.as_fd()
    }

    /// For the load, when it has slept, and before it looks at demands: one that comes later wakes it again.
    pub(crate) fn drain_wakeup(&self) {
        // Nothing to read is no error: something else woke it.
        let _ = self.0.event.read();
    }
}

#[cfg(test)]
mod tests {
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

    use super::*;

    fn desk(buffers: usize) -> LoadHandle {
        let dmabufs: Vec<_> = (0..buffers).map(|_| None).collect();
        LoadHandle::new(&[Process { files: &[], dmabufs: &dmabufs }]).unwrap()
    }

    fn wakes(desk: &LoadHandle) -> bool {
        let mut fds = [PollFd::new(desk.event(), PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::ZERO).unwrap() == 1
    }

    #[test]
    fn demands_are_queued_once_and_in_their_order() {
        let desk = desk(4);
        let other = desk.clone();
        desk.demand(0, 3);
        other.demand(0, 1);
        desk.demand(0, 1);
        assert_eq!(desk.take_requests(), [(0, 3), (0, 1)]);
        other.demand(0, 3);
        desk.demand(0, 0);
        assert_eq!(desk.take_requests(), [(0, 0)]);
        assert_eq!(desk.take_requests(), []);
    }

    #[test]
    fn what_is_unknown_is_nobodys_demand() {
        let desk = desk(2);
        desk.demand(0, 2);
        desk.demand(1, 0);
        desk.demand(usize::MAX, usize::MAX);
        assert!(!wakes(&desk));
        assert_eq!(desk.take_requests(), []);
    }

    #[test]
    fn a_demand_wakes_the_load_once() {
        let desk = desk(2);
        assert!(!wakes(&desk));
        desk.demand(0, 1);
        assert!(wakes(&desk));
        desk.drain_wakeup();
        assert!(!wakes(&desk));
        assert_eq!(desk.take_requests(), [(0, 1)]);
    }
}
