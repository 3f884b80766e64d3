// SPDX-License-Identifier: MIT OR Apache-2.0
//! Moves bytes between files and memory, many transfers at a time. All backends follow the same rules about
//! short calls, errors and retries (module `transfer`), so that they differ only in speed.

mod backend;
mod request;
mod ring;
mod sim;
mod threads;
mod transfer;
mod uring;

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

pub use backend::DEPTH;
pub use request::{Completion, Direction, Request};
pub use sim::SimPlan;
pub use transfer::{MAX_EIO_RETRIES, MAX_INTERRUPTIONS, MAX_SHORT_CALLS};

use crate::class::Class;
use crate::error::{StoreError, TransferError};
use crate::file::{ImageFile, ReadMode};
use crate::io_budget::{IoBudget, Lane, PIECE, Permit};
use crate::memory::Memory;
use crate::slots::DEMAND_BUFFERS;
use backend::{Backend, Flight, PARALLEL_BYTES};
use transfer::{FileTransfer, TransferStep};

/// Transfers in flight that only demand reads may have: background reads never cause the refusal of one.
pub const DEMAND_RESERVE: usize = DEMAND_BUFFERS as usize;

/// Transfers between files and `M`. It belongs to the thread that made it.
pub struct Engine<M: Memory> {
    backend: Box<dyn Backend<M>>,
    in_flight: usize,
    /// Transfers that ended when they were submitted.
    over: Vec<Completion<M>>,
    /// The budget of all readers of the disk. None: there is no other reader.
    budget: Option<(Arc<IoBudget>, Lane)>,
    note: Option<String>,
}

impl<M: Memory> Engine<M> {
    /// Makes an engine that uses io_uring where the kernel allows it, else threads. Background reads of
    /// `lane` keep to the budget.
    ///
    /// # Errors
    /// [`StoreError::Setup`] when neither can be set up.
    pub fn new(budget: Option<(Arc<IoBudget>, Lane)>) -> Result<Self, StoreError> {
        let (backend, note): (Box<dyn Backend<M>>, _) = match uring::Uring::new() {
            Ok((ring, note)) => (Box::new(ring), note),
            Err(error) => {
                let note = format!("io_uring is not available ({error}); reading with threads instead");
                (Box::new(threads::Threads::new()?), Some(note))
            }
        };
        Ok(Self { budget, note, ..Self::with(backend) })
    }

    /// Makes an engine that uses threads: the one that [`Engine::new`] makes where io_uring is refused.
    ///
    /// # Errors
    /// [`StoreError::Setup`] when the threads are refused.
    pub fn with_threads() -> Result<Self, StoreError> {
        Ok(Self::with(Box::new(threads::Threads::new()?)))
    }

    /// Makes an engine for tests, which follows `plan`. It has no descriptor to poll.
    #[must_use]
    pub fn simulated(plan: SimPlan) -> Self {
        Self::with(Box::new(sim::Sim::new(plan)))
    }

    fn with(backend: Box<dyn Backend<M>>) -> Self {
        Self { backend, in_flight: 0, over: Vec::new(), budget: None, note: None }
    }

    /// For the log: why io_uring is not used, or what it lacks. None: nothing is missing.
    #[must_use]
    pub fn note(&self) -> Option<&str> {
        self.note.as_deref()
    }

    /// Number of transfers that were submitted and not reaped.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Whether `count` transfers more can be submitted.
    #[must_use]
    pub fn has_room(&self, count: usize) -> bool {
        self.in_flight + count <= DEPTH - DEMAND_RESERVE
    }

    /// Whether the budget allows background reads of another `bytes` bytes.
    #[must_use]
    pub fn allows(&self, bytes: usize) -> bool {
        self.budget.as_ref().is_none_or(|(budget, lane)| budget.allows(*lane, bytes))
    }

    /// Starts a transfer, at the next [`Engine::flush`] or [`Engine::reap`] if not at once, and returns its
    /// bytes. A background read may be cut to [`PIECE`], so that it delays no demand read for long. A small
    /// read of bytes in the page cache is done at once.
    ///
    /// # Errors
    /// Gives the request back when too many transfers are in flight ([`DEPTH`], [`DEMAND_RESERVE`]), or the
    /// budget has no room for it.
    // The request itself is the error value: boxing it would allocate on the path that is busiest.
    #[allow(clippy::result_large_err)]
    pub fn submit(&mut self, mut request: Request<M>) -> Result<usize, Request<M>> {
        let has_room = match request.class {
            Class::Demand => self.in_flight < DEPTH,
            Class::Background => self.has_room(1),
        };
        if !has_room {
            return Err(request);
        }
        // A thread waits for this read, or did for one just now: readahead would be in its way.
        let is_busy = || self.budget.as_ref().is_some_and(|(budget, _)| budget.is_busy());
        let ahead = request.class == Class::Background && !is_busy();
        let mode = match request.direction {
            Direction::Read => request.file.mode(request.offset, request.bytes, ahead),
            Direction::Write => ReadMode::Direct,
        };
        let from_disk = request.direction == Direction::Read && mode != ReadMode::Cached;
        let Ok(permit) = self.permit(&mut request, from_disk) else { return Err(request) };
        let bytes = request.bytes;
        let mut flight = Flight::new(request, mode, permit);
        self.in_flight += 1;
        if mode == ReadMode::Cached && bytes < PARALLEL_BYTES {
            // If bytes have been evicted since, the rest is read from the disk.
            if let Ok(got @ 1..) = flight.call_cached()
                && let TransferStep::Finished(result) = flight.step(Ok(got))
            {
                self.over.push(flight.done(result));
                self.backend.event().into_iter().for_each(rewake_process::Notifier::wake);
                return Ok(bytes);
            }
        }
        self.backend.start(flight);
        Ok(bytes)
    }

    /// Takes the request's part of the budget. `Err`: there is no room now.
    fn permit(&self, request: &mut Request<M>, from_disk: bool) -> Result<Option<Permit>, ()> {
        let Some((budget, lane)) = self.budget.as_ref().filter(|_| from_disk) else { return Ok(None) };
        if request.class == Class::Demand {
            return Ok(Some(budget.demand()));
        }
        if request.file.is_remote() {
            budget.set_remote_fs();
        }
        if budget.is_busy() {
            request.bytes = request.bytes.min(PIECE);
            request.needed = request.needed.min(request.bytes);
        }
        budget.background(*lane, request.bytes).map(Some).ok_or(())
    }

    /// Starts the transfers submitted since the last call, without waiting for them. They are submitted
    /// together: the kernel makes one request of adjacent reads.
    pub fn flush(&mut self) {
        self.backend.flush();
    }

    /// Whether transfers have ended that [`Engine::reap`] has not returned: reads from the page cache.
    #[must_use]
    pub fn has_finished(&self) -> bool {
        !self.over.is_empty()
    }

    /// Appends the transfers that are over to `done`, without waiting.
    pub fn reap(&mut self, done: &mut Vec<Completion<M>>) {
        let first = done.len();
        done.append(&mut self.over);
        self.backend.reap(done);
        self.in_flight -= done.len() - first;
    }

    /// A descriptor that is readable (level-triggered) when `reap` has work; do not read from it. None: call
    /// `reap` again and again while transfers are in flight.
    ///
    /// Wait for it no longer than [`Engine::patience`], and with transfers in flight no longer than a second:
    /// a kernel without memory may have delayed a submission until the next call. Take EINTR for a wake-up:
    /// io_uring's own work in this thread interrupts waits.
    #[must_use]
    pub fn event(&self) -> Option<BorrowedFd<'_>> {
        self.backend.event().map(|event| event.as_fd())
    }

    /// How long to wait for `event` at most before the next `reap`: it may not be signalled for a transfer
    /// that is over.
    #[must_use]
    pub fn patience(&self) -> Duration {
        self.backend.patience()
    }
}

impl<M: Memory> std::fmt::Debug for Engine<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { in_flight, note, .. } = self;
        f.debug_struct("Engine").field("in_flight", in_flight).field("note", note).finish_non_exhaustive()
    }
}

/// Reads at once, through the page cache, on the calling thread. It is for bytes that
/// [`ImageFile::is_cached`]: for uncached bytes the caller waits for the disk.
///
/// # Errors
/// The errors of an engine's read. The buffer is filled when `Ok`, else its contents must not be used.
pub fn read_now(file: &ImageFile, offset: u64, dst: &mut [u8]) -> Result<(), TransferError> {
    use std::os::unix::fs::FileExt as _;
    let mut transfer = FileTransfer::new(Direction::Read, offset, dst.len(), dst.len(), ReadMode::Buffered);
    loop {
        let next = transfer.next(file);
        let got: io::Result<usize> = next.file.read_at(&mut dst[next.at..next.at + next.len], next.offset);
        if let TransferStep::Finished(result) = transfer.step(file, got) {
            return result;
        }
    }
}
