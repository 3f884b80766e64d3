// SPDX-License-Identifier: MIT OR Apache-2.0
//! Engines read from a file into a buffer. All three follow the same rules about short reads, errors and
//! retries (module `transfer`), so that they differ only in speed.

mod psync;
mod sim;
mod transfer;
mod uring;

use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use crate::buffer::BufferSlice;
use crate::cache::BlockCache;
use crate::error::{ReadError, StoreError};
use crate::file::PagesFile;
use crate::metrics::Metrics;

pub use psync::Psync;
pub use sim::{Sim, SimPlan};
pub use transfer::{MAX_EIO_RETRIES, MAX_INTERRUPTIONS, MAX_SHORT_READS};
pub use uring::Uring;

use transfer::{Step, Transfer};

/// Block reads in flight in one engine. 128 x 64 KiB = 8 MiB: several times an NVMe drive's bandwidth times
/// its latency (7 GB/s x 0.2 ms = 1.4 MB). It is still a small part of the default budget.
pub const DEPTH_BLOCKS: usize = 128;

/// Demand reads in flight in one engine: one for each demand buffer, so that background reads never cause the
/// refusal of a demand read.
pub const DEPTH_DEMAND: usize = crate::cache::DEMAND_BUFFERS as usize;

/// Whether a read passes the page cache or uses it; [`PagesFile::how`] decides by measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadMode {
    /// `O_DIRECT`: no copy and no page cache. The engine falls back to a buffered read where the file or the
    /// offset does not allow it.
    Direct,
    /// Through the page cache.
    Buffered,
}

/// A read to be done. It owns its buffer until a [`Done`] returns it.
#[derive(Debug)]
pub struct Read {
    /// The caller's number for the read, returned unchanged.
    pub ticket: u64,
    /// The file to read from.
    pub file: Arc<PagesFile>,
    /// Byte offset in the file.
    pub offset: u64,
    /// The buffer to fill; its length is the number of bytes wanted.
    pub dst: BufferSlice,
    /// Whether the read passes the page cache or uses it.
    pub how: ReadMode,
}

/// A read that is over. Reads end in any order.
#[derive(Debug)]
pub struct Done {
    /// The read's ticket.
    pub ticket: u64,
    /// The read's buffer: filled to its whole length when `result` is `Ok`, else not to be used as data.
    pub dst: BufferSlice,
    /// The outcome of the read.
    pub result: Result<(), ReadError>,
}

/// Reads files into buffers, several at a time. One thread owns it.
pub trait Engine {
    /// Takes a read; it starts at the next [`Engine::flush`] or [`Engine::reap`], if not at once.
    ///
    /// # Errors
    /// Gives the read back when [`DEPTH_BLOCKS`] block reads, or [`DEPTH_DEMAND`] demand reads, are in
    /// flight: reap, then submit again.
    // The read itself is the error value: boxing it would allocate on the path that is busiest.
    #[allow(clippy::result_large_err)]
    fn submit(&mut self, read: Read) -> Result<(), Read>;

    /// Starts the reads submitted since the last call, without waiting for them. They are submitted together:
    /// the kernel makes one request of adjacent reads.
    fn flush(&mut self);

    /// Appends the reads that are over to `done`, without waiting.
    fn reap(&mut self, done: &mut Vec<Done>);

    /// A descriptor that is readable (level-triggered) when `reap` has work; do not read from it. None: call
    /// `reap` again and again while reads are in flight.
    ///
    /// Wait for it no longer than [`Engine::patience`], and with reads in flight no longer than a second: a
    /// kernel without memory may have delayed a submission until the next call. Take EINTR for a wake-up:
    /// io_uring's own work in this thread interrupts waits.
    fn poll_fd(&self) -> Option<RawFd>;

    /// Reads submitted and not yet reaped.
    fn in_flight(&self) -> usize;

    /// How long to wait for `poll_fd` at most before the next `reap`: it may not be signalled for a read that
    /// is over.
    fn patience(&self) -> Duration {
        Duration::MAX
    }
}

/// The engine that suits this machine, and the reason when it is not io_uring.
pub struct DefaultEngine {
    /// The engine. Use and drop it on the thread that called [`default_engine`].
    pub engine: Box<dyn Engine>,
    /// For the log: why io_uring is not used, or what it lacks. None: nothing is missing.
    pub note: Option<String>,
}

impl std::fmt::Debug for DefaultEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DefaultEngine").field("note", &self.note).finish_non_exhaustive()
    }
}

/// Makes an io_uring engine where the kernel allows it, else one that reads with threads. Call it on the
/// thread that will use the engine: a ring belongs to one thread.
///
/// # Errors
/// [`StoreError::Setup`] when neither can be set up.
pub fn default_engine(cache: &Arc<BlockCache>) -> Result<DefaultEngine, StoreError> {
    match Uring::new(cache) {
        Ok(ring) => {
            let note = ring.note();
            Ok(DefaultEngine { engine: Box::new(ring), note })
        }
        Err(error) => {
            let note = Some(format!("io_uring is not available ({error}); reading with threads instead"));
            Ok(DefaultEngine { engine: Box::new(Psync::new(cache)?), note })
        }
    }
}

/// Reads at once, through the page cache, on the calling thread. It is for bytes that
/// [`PagesFile::is_cached`]: for uncached bytes the caller waits for the disk.
///
/// # Errors
/// The errors of an engine's read: [`ReadError`]. The buffer is filled when `Ok`, else its contents must not
/// be used.
pub fn read_now(file: &PagesFile, offset: u64, dst: &mut [u8]) -> Result<(), ReadError> {
    use std::os::unix::fs::FileExt;
    let mut transfer = Transfer::buffered(offset, dst.len());
    loop {
        let next = transfer.next(file);
        let got = next.file.read_at(&mut dst[next.at..next.at + next.len], next.offset);
        if let Step::Finished(result) = transfer.step(file, got) {
            return result;
        }
    }
}

/// The number of reads in flight of each kind, with their bounds.
#[derive(Debug, Default)]
struct Depth {
    blocks: usize,
    demand: usize,
}

impl Depth {
    fn total(&self) -> usize {
        self.blocks + self.demand
    }

    /// Counts a read; returns false when the bound of its kind is reached.
    fn enter(&mut self, dst: &BufferSlice, metrics: &Metrics) -> bool {
        let (count, bound) =
            if dst.is_demand() { (&mut self.demand, DEPTH_DEMAND) } else { (&mut self.blocks, DEPTH_BLOCKS) };
        if *count >= bound {
            Metrics::add(&metrics.refused, 1);
            return false;
        }
        *count += 1;
        true
    }

    fn leave(&mut self, dst: &BufferSlice) {
        if dst.is_demand() {
            self.demand -= 1;
        } else {
            self.blocks -= 1;
        }
    }
}

/// A read in flight.
#[derive(Debug)]
struct Flight {
    read: Read,
    transfer: Transfer,
}

impl Flight {
    fn new(read: Read) -> Self {
        let direct = read.how == ReadMode::Direct;
        let transfer = if direct {
            Transfer::direct(&read.file, read.offset, read.dst.len(), read.dst.capacity())
        } else {
            Transfer::buffered(read.offset, read.dst.len())
        };
        Self { read, transfer }
    }

    fn done(self, result: Result<(), ReadError>, metrics: &Metrics) -> Done {
        self.transfer.count(metrics);
        Done { ticket: self.read.ticket, dst: self.read.dst, result }
    }
}
