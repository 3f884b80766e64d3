// SPDX-License-Identifier: MIT OR Apache-2.0
//! Transfers with io_uring: one system call starts many, and an eventfd is signalled when one is over.
//!
//! The backend does not poll the ring's own descriptor. A ring with deferred completions wakes its eventfd
//! when a completion waits to be run. It wakes a poller of the ring only when the completion has been run,
//! and no thread runs it while the poller sleeps (seen on Linux 6.18).

use std::io;
use std::marker::PhantomData;
use std::os::fd::AsRawFd as _;
use std::time::{Duration, Instant};

use io_uring::{IoUring, Probe, opcode, squeue, types};
use rewake_process::Notifier;

use super::backend::{Backend, Call, DEPTH, Flight};
use super::request::{Completion, Direction};
use super::ring::{CompletionPoller, Flavour, build, flush, push, wait_readable};
use super::transfer::TransferStep;
use crate::error::StoreError;
use crate::memory::Memory;

/// The most kernel threads that copy from the page cache, because more would exceed the bandwidth of memory.
const MAX_WORKERS: usize = 8;

/// How long a dropped ring waits for the kernel to finish its transfers before it leaks their memory.
const DROP_LIMIT: Duration = Duration::from_secs(10);

/// Number of kernel threads that copy from the page cache.
fn workers() -> u32 {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    u32::try_from(processors.min(MAX_WORKERS)).unwrap_or(1)
}

/// It belongs to the thread that made it and is not `Send`: the kernel runs a ring's deferred work in that
/// thread only.
pub(super) struct Uring<M: Memory> {
    ring: IoUring,
    /// The transfers by slot: [`DEPTH`] of them. The submission queue has room for all, and the completion
    /// queue for twice as many, so neither overflows.
    flights: Vec<Option<Flight<M>>>,
    vacant: Vec<usize>,
    finished: Notifier,
    poller: CompletionPoller,
    one_thread: PhantomData<*mut ()>,
}

impl<M: Memory> Uring<M> {
    /// Sets up a ring on this thread. Returns what the ring lacks, too.
    ///
    /// No memory is registered with it: the kernel would allocate all of a cache before a restore's first
    /// read. Most restores read from the page cache, without the ring (docs/history.md).
    pub(super) fn new() -> Result<(Self, Option<String>), StoreError> {
        let setup = |act| move |error| StoreError::Setup { act, error };
        let (ring, finished, flavour) = build(DEPTH).map_err(setup("setting up an io_uring"))?;
        let mut probe = Probe::new();
        let probed = ring.submitter().register_probe(&mut probe);
        probed.map_err(setup("querying io_uring's operations"))?;
        if ![opcode::Read::CODE, opcode::Write::CODE].into_iter().all(|code| probe.is_supported(code)) {
            let error = io::Error::from_raw_os_error(libc::EOPNOTSUPP);
            return Err(setup("looking for io_uring's read and write operations")(error));
        }
        // An older kernel has no such limit.
        let _ = ring.submitter().register_iowq_max_workers(&mut [workers(), 0]);
        Ok((Self::assemble(ring, finished), note(flavour)))
    }

    fn assemble(ring: IoUring, finished: Notifier) -> Self {
        Self {
            ring,
            flights: (0..DEPTH).map(|_| None).collect(),
            vacant: (0..DEPTH).rev().collect(),
            finished,
            poller: CompletionPoller::default(),
            one_thread: PhantomData,
        }
    }

    /// Queues the next system call of the transfer in `slot`. The submission queue has room: it is as long as
    /// the number of slots, and each slot has at most one call queued or running.
    fn queue(&mut self, slot: usize) {
        let Some(flight) = self.flights[slot].as_ref() else { return };
        let Call { fd, direction, offset, start, len } = flight.next();
        // More than any transfer has: the kernel does less, and the transfer is continued.
        let len = u32::try_from(len).unwrap_or(1 << 30);
        let fd = types::Fd(fd);
        let entry = match direction {
            Direction::Write => opcode::Write::new(fd, start, len).offset(offset).build(),
            Direction::Read => opcode::Read::new(fd, start, len).offset(offset).build(),
        };
        let flags = if flight.by_worker { squeue::Flags::ASYNC } else { squeue::Flags::empty() };
        // SAFETY: `Flight::new` has checked that the bytes lie in the memory. The slot in `flights` owns the
        // memory and the file until the call is over (see Drop).
        unsafe { push(&mut self.ring, &entry.flags(flags).user_data(slot as u64)) };
    }

    /// Takes completions from the ring, and queues transfers again that are not over yet.
    fn collect(&mut self, done: &mut Vec<Completion<M>>) {
        loop {
            let Some(completion) = self.ring.completion().next() else { return };
            let Ok(slot) = usize::try_from(completion.user_data()) else { continue };
            let Some(flight) = self.flights.get_mut(slot).and_then(Option::as_mut) else { continue };
            let got = usize::try_from(completion.result())
                .map_err(|_| io::Error::from_raw_os_error(-completion.result()));
            match flight.step(got) {
                TransferStep::Again => self.queue(slot),
                TransferStep::Finished(result) => {
                    let Some(flight) = self.flights[slot].take() else { continue };
                    self.vacant.push(slot);
                    done.push(flight.done(result));
                }
            }
        }
    }
}

impl<M: Memory> Backend<M> for Uring<M> {
    fn start(&mut self, flight: Flight<M>) {
        let Some(slot) = self.vacant.pop() else { unreachable!("the engine keeps to {DEPTH} transfers") };
        self.flights[slot] = Some(flight);
        self.queue(slot);
    }

    fn flush(&mut self) {
        flush(&mut self.ring);
    }

    fn reap(&mut self, done: &mut Vec<Completion<M>>) {
        // It ends: each round takes a completion, and every transfer has a bounded number of them.
        while self.poller.look(&mut self.ring, &self.finished, DEPTH - self.vacant.len()) {
            self.collect(done);
        }
    }

    fn event(&self) -> Option<&Notifier> {
        Some(&self.finished)
    }

    fn patience(&self) -> Duration {
        self.poller.patience(DEPTH - self.vacant.len())
    }
}

impl<M: Memory> Drop for Uring<M> {
    fn drop(&mut self) {
        // The kernel may still be writing to the memory, which must outlive its reads.
        let give_up = Instant::now() + DROP_LIMIT;
        let mut done = Vec::new();
        while self.vacant.len() < DEPTH && Instant::now() < give_up {
            self.reap(&mut done);
            done.clear();
            if self.vacant.len() < DEPTH {
                wait_readable(self.finished.as_raw_fd(), Duration::from_millis(100));
            }
        }
        for flight in self.flights.iter_mut().filter_map(Option::take) {
            // The storage does not answer: losing memory is better than a write to it after its reuse.
            flight.leak();
        }
    }
}

/// For the log: what a ring lacks.
fn note(flavour: Flavour) -> Option<String> {
    (flavour != Flavour::Deferred).then(|| "deferred completions are not available".to_owned())
}

#[cfg(test)]
mod tests;
