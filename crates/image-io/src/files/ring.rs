// SPDX-License-Identifier: MIT OR Apache-2.0
//! The ring of transfers in flight, with io_uring or plain calls.

use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use io_uring::{IoUring, opcode, squeue, types};

use super::Memory;
use super::request::{Direction, Finished, Progress, Request, Step};
use crate::error::StoreError;
use crate::ring::{CompletionPoller, build, flush, push, wait_readable};
use rewake_process::Notifier;

/// How long a dropped ring waits for the kernel to finish its transfers before it leaks their memory.
const DROP_PATIENCE: Duration = Duration::from_secs(10);
/// Cached reads of at least so many bytes are given to kernel worker threads, which copy in parallel: one
/// copies more slowly than a GPU takes the bytes. Fewer bytes are copied sooner than a worker wakes up.
const WORKER_BYTES: usize = 128 << 10;
/// Kernel worker threads at most: more exceed the bandwidth of memory.
const MAX_WORKERS: usize = 8;

/// Number of kernel threads that copy from the page cache.
fn workers() -> u32 {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    u32::try_from(processors.min(MAX_WORKERS)).unwrap_or(1)
}

/// Transfers between files and `M`. It belongs to the thread that made it.
pub struct FileRing<M: Memory> {
    backend: Backend,
    /// The transfers by slot; the length is the bound on transfers in flight. They are leaked rather than
    /// dropped in flight: the kernel may write to their memory until then.
    flights: Vec<Option<Flight<M>>>,
    vacant: Vec<usize>,
    event: Notifier,
    poller: CompletionPoller,
    /// Transfers that ended without the ring: plain calls end at once.
    over: Vec<Finished>,
    one_thread: PhantomData<*mut ()>,
}

#[derive(Debug)]
struct Flight<M> {
    progress: Progress<M>,
    direct: bool,
    /// The page cache has the bytes, and a kernel worker thread copies them.
    by_worker: bool,
}

enum Backend {
    Uring(Box<IoUring>),
    Plain(io::Error),
}

impl<M: Memory> FileRing<M> {
    /// Makes a ring for at most `depth` transfers at once. Without io_uring ([`FileRing::note`]) each is done
    /// when it is submitted.
    ///
    /// # Errors
    /// [`StoreError::Setup`] when no descriptor is left.
    pub fn new(depth: usize) -> Result<Self, StoreError> {
        let (backend, event) = match build(depth) {
            Ok((ring, event, _)) => {
                // An older kernel has no such limit.
                let _ = ring.submitter().register_iowq_max_workers(&mut [workers(), 0]);
                (Backend::Uring(Box::new(ring)), event)
            }
            Err(error) => {
                let event = Notifier::new();
                let event = event.map_err(|error| StoreError::Setup { act: "making an eventfd", error })?;
                (Backend::Plain(error), event)
            }
        };
        let (flights, vacant) = ((0..depth).map(|_| None).collect(), (0..depth).rev().collect());
        let (poller, over) = (CompletionPoller::default(), Vec::new());
        Ok(Self { backend, flights, vacant, event, poller, over, one_thread: PhantomData })
    }

    /// For the log: why transfers are done one at a time, if they are.
    pub fn note(&self) -> Option<String> {
        match &self.backend {
            Backend::Uring(_) => None,
            Backend::Plain(error) => {
                Some(format!("no io_uring ({error}): files are read and written one piece at a time"))
            }
        }
    }

    /// Number of transfers in flight.
    pub fn in_flight(&self) -> usize {
        self.flights.len() - self.vacant.len()
    }

    /// Readable when a transfer may have ended.
    pub fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// Starts a transfer; the kernel gets it with [`FileRing::flush`]. A small read of bytes in the page
    /// cache is done at once.
    ///
    /// # Errors
    /// Returns the request when as many transfers as possible are in flight.
    ///
    /// # Panics
    /// The request exceeds the memory or has no bytes: a mistake of the program.
    pub fn submit(&mut self, request: Request<M>) -> Result<(), Request<M>> {
        let end = request.at.checked_add(request.bytes);
        let inside = end.is_some_and(|end| end <= request.memory.bytes());
        let few = request.bytes > 0 && request.needed <= request.bytes;
        assert!(inside && few, "{} at {}, {} needed", request.bytes, request.at, request.needed);
        let Some(slot) = self.vacant.pop() else { return Err(request) };
        let mut progress = Progress::new(request);
        let Request { file, direction, offset, bytes, .. } = &progress.request;
        // Checked before the read: RWF_NOWAIT alone would start readahead of missing bytes.
        let cached = *direction == Direction::Read && file.is_cached(*offset, *bytes);
        let by_worker = cached && *bytes >= WORKER_BYTES && matches!(self.backend, Backend::Uring(_));
        if cached
            && !by_worker
            && let Some(finished) = read_cached(&mut progress)
        {
            self.vacant.push(slot);
            self.over.push(finished);
            self.event.wake();
            return Ok(());
        }
        self.flights[slot] = Some(Flight { progress, direct: false, by_worker });
        match self.backend {
            Backend::Uring(_) => self.queue(slot),
            Backend::Plain(_) => self.do_now(slot),
        }
        Ok(())
    }

    /// Whether transfers have ended that [`FileRing::finished`] has not returned: reads from the page cache.
    pub fn has_finished(&self) -> bool {
        !self.over.is_empty()
    }

    /// Gives submitted transfers to the kernel.
    pub fn flush(&mut self) {
        if let Backend::Uring(ring) = &mut self.backend {
            flush(ring);
        }
    }

    /// Takes the transfers that are over, without waiting.
    pub fn finished(&mut self, into: &mut Vec<Finished>) {
        into.append(&mut self.over);
        // It ends: every round takes a completion, and each transfer has a bounded number of them.
        while self.look() {
            self.collect(into);
        }
    }

    /// How long to wait for [`FileRing::event`] at most before the next check: it may not be signalled for a
    /// transfer that is over.
    pub fn patience(&self) -> Duration {
        self.poller.patience(self.in_flight())
    }

    /// Whether the ring has completions to collect.
    fn look(&mut self) -> bool {
        let in_flight = self.in_flight();
        match &mut self.backend {
            Backend::Uring(ring) => self.poller.look(ring, &self.event, in_flight),
            Backend::Plain(_) => {
                self.event.drain();
                false
            }
        }
    }

    /// Takes completions from the ring, and queues transfers again that are not over yet.
    fn collect(&mut self, into: &mut Vec<Finished>) {
        loop {
            let Backend::Uring(ring) = &mut self.backend else { return };
            let Some(completion) = ring.completion().next() else { return };
            let Ok(slot) = usize::try_from(completion.user_data()) else { continue };
            let got = usize::try_from(completion.result())
                .map_err(|_| io::Error::from_raw_os_error(-completion.result()));
            let Some(flight) = self.flights.get_mut(slot).and_then(Option::as_mut) else { continue };
            match flight.progress.step(flight.direct, got) {
                Step::Again => self.queue(slot),
                Step::Over(finished) => {
                    self.flights[slot] = None;
                    self.vacant.push(slot);
                    into.push(finished);
                }
            }
        }
    }

    /// Queues the next call of the transfer in `slot`. The queue has room: one call for each slot.
    fn queue(&mut self, slot: usize) {
        let (Some(flight), Backend::Uring(ring)) = (self.flights[slot].as_mut(), &mut self.backend) else {
            return;
        };
        let (offset, _, bytes) = flight.progress.next();
        let request = &flight.progress.request;
        let (file, direct) =
            if flight.by_worker { (request.file.file(), false) } else { flight.progress.file() };
        flight.direct = direct;
        let start = flight.progress.start();
        // More than any transfer has: the kernel does less, and the transfer is continued.
        let length = u32::try_from(bytes).unwrap_or(1 << 30);
        let fd = types::Fd(file.as_raw_fd());
        let entry = match request.direction {
            Direction::Read => opcode::Read::new(fd, start, length).offset(offset).build(),
            Direction::Write => opcode::Write::new(fd, start, length).offset(offset).build(),
        };
        let flags = if flight.by_worker { squeue::Flags::ASYNC } else { squeue::Flags::empty() };
        // SAFETY: `submit` has checked that the bytes lie in the memory. This ring owns memory and file until
        // the call is over (see Drop).
        unsafe { push(ring, &entry.flags(flags).user_data(slot as u64)) };
    }

    /// Does a whole transfer at once, without io_uring.
    fn do_now(&mut self, slot: usize) {
        let Some(mut flight) = self.flights[slot].take() else { return };
        self.vacant.push(slot);
        loop {
            let (file, direct) = flight.progress.file();
            let got = plain(&flight.progress, file.as_raw_fd());
            if let Step::Over(finished) = flight.progress.step(direct, got) {
                self.over.push(finished);
                break;
            }
        }
        self.event.wake();
    }
}

/// Reads from the page cache, without waiting. Returns None if bytes were evicted meanwhile; then the rest is
/// read from the disk.
fn read_cached<M: Memory>(progress: &mut Progress<M>) -> Option<Finished> {
    let (offset, _, bytes) = progress.next();
    let part = libc::iovec { iov_base: progress.start().cast(), iov_len: bytes };
    let fd = progress.request.file.file().as_raw_fd();
    // SAFETY: `submit` has checked that the bytes lie in the memory, which is writable and not borrowed.
    let got = unsafe { libc::preadv2(fd, &raw const part, 1, offset.cast_signed(), libc::RWF_NOWAIT) };
    let got = usize::try_from(got).ok().filter(|got| *got > 0)?;
    match progress.step(false, Ok(got)) {
        Step::Over(finished) => Some(finished),
        Step::Again => None,
    }
}

/// Makes one positioned call.
fn plain<M: Memory>(progress: &Progress<M>, fd: i32) -> io::Result<usize> {
    let (offset, _, bytes) = progress.next();
    let (start, offset) = (progress.start(), offset.cast_signed());
    let got = match progress.request.direction {
        // SAFETY: `submit` has checked that the bytes lie in the memory, which is writable and not borrowed.
        Direction::Read => unsafe { libc::pread(fd, start.cast(), bytes, offset) },
        // SAFETY: as above, and the memory is only read.
        Direction::Write => unsafe { libc::pwrite(fd, start.cast(), bytes, offset) },
    };
    usize::try_from(got).map_err(|_| io::Error::last_os_error())
}

impl<M: Memory> Drop for FileRing<M> {
    fn drop(&mut self) {
        let give_up = Instant::now() + DROP_PATIENCE;
        let mut over = Vec::new();
        while self.in_flight() > 0 && Instant::now() < give_up {
            self.finished(&mut over);
            over.clear();
            if self.in_flight() > 0 {
                wait_readable(self.event.as_raw_fd(), Duration::from_millis(100));
            }
        }
        if self.in_flight() > 0 {
            // The storage does not answer: losing the memory is better than a write to it after its reuse.
            std::mem::forget(std::mem::take(&mut self.flights));
        }
    }
}

impl<M: Memory> std::fmt::Debug for FileRing<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FileRing")
            .field("in_flight", &self.in_flight())
            .field("note", &self.note())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
