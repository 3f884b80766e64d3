// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads with io_uring: one system call starts a read, and an eventfd is signalled when it is over.
//!
//! The engine does not poll the ring's own descriptor. A ring with deferred completions wakes its eventfd
//! when a completion waits to be run. It wakes a poller of the ring only when the completion has been run,
//! and no thread runs it while the poller sleeps (seen on Linux 6.18).

use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use io_uring::{IoUring, Probe, opcode, types};

use super::transfer::Step;
use super::{DEPTH_BLOCKS, DEPTH_DEMAND, Depth, Done, Engine, Flight, Read};
use crate::BLOCK;
use crate::cache::BlockCache;
use crate::error::StoreError;
use crate::metrics::Metrics;
use crate::ring::{CompletionPoller, Flavour, build, flush, push, wait_readable};
use rewake_process::Notifier;

/// Reads in flight at most. The submission queue has room for all of them and the completion queue for twice
/// as many, so neither overflows.
const DEPTH: usize = DEPTH_BLOCKS + DEPTH_DEMAND;

/// Largest buffer that the kernel registers (SZ_1G); larger pools are registered in pieces. A multiple of
/// [`BLOCK`], so that no buffer crosses from one piece to the next.
const PIECE: usize = 1 << 30;

const _: () = assert!(PIECE.is_multiple_of(BLOCK));

/// How long a dropped engine waits for the kernel to finish its reads before it leaks their buffers.
const DROP_PATIENCE: Duration = Duration::from_secs(10);

/// Reads with io_uring. See [`Engine`]. It belongs to the thread that made it and is not `Send`: the kernel
/// runs a ring's deferred work in that thread only.
pub struct Uring {
    ring: IoUring,
    cache: Arc<BlockCache>,
    flights: Vec<Option<Flight>>,
    vacant: Vec<usize>,
    depth: Depth,
    finished: Notifier,
    poller: CompletionPoller,
    deferred: bool,
    registration: io::Result<()>,
    _one_thread: PhantomData<*mut ()>,
}

impl Uring {
    /// Sets up a ring on this thread, and registers the cache's memory with it when the limits allow.
    ///
    /// # Errors
    /// [`StoreError::Setup`] when the kernel has no io_uring, forbids it, or lacks its read operation.
    pub fn new(cache: &Arc<BlockCache>) -> Result<Self, StoreError> {
        let setup = |act| move |error| StoreError::Setup { act, error };
        let (ring, finished, flavour) = build(DEPTH).map_err(setup("setting up an io_uring"))?;
        let mut probe = Probe::new();
        let probed = ring.submitter().register_probe(&mut probe);
        probed.map_err(setup("querying io_uring's operations"))?;
        if !probe.is_supported(opcode::Read::CODE) || !probe.is_supported(opcode::ReadFixed::CODE) {
            let error = io::Error::from_raw_os_error(libc::EOPNOTSUPP);
            return Err(setup("looking for io_uring's read operation")(error));
        }
        let registration = register(&ring, cache);
        Ok(Self::assemble(cache, (ring, finished, flavour), registration))
    }

    fn assemble(
        cache: &Arc<BlockCache>,
        (ring, finished, flavour): (IoUring, Notifier, Flavour),
        registration: io::Result<()>,
    ) -> Self {
        Self {
            ring,
            cache: Arc::clone(cache),
            flights: (0..DEPTH).map(|_| None).collect(),
            vacant: (0..DEPTH).rev().collect(),
            depth: Depth::default(),
            finished,
            poller: CompletionPoller::default(),
            deferred: flavour == Flavour::Deferred,
            registration,
            _one_thread: PhantomData,
        }
    }

    /// Whether completions run only when this thread enters the kernel for them, which costs least.
    pub fn is_deferred(&self) -> bool {
        self.deferred
    }

    /// For the log: what this ring lacks.
    pub(super) fn note(&self) -> Option<String> {
        let defer = (!self.deferred).then(|| "deferred completions are not available".to_owned());
        let fixed = self.registration.as_ref().err().map(|error| {
            format!(
                "the cache's memory is not registered ({error}; raise RLIMIT_MEMLOCK), reads pin it each time"
            )
        });
        match (defer, fixed) {
            (None, None) => None,
            (a, b) => Some([a, b].into_iter().flatten().collect::<Vec<_>>().join("; ")),
        }
    }

    /// Queues the next system call of the read in `slot`. The submission queue has room: it is as long as the
    /// number of slots, and each slot has at most one call queued or running.
    fn queue(&mut self, slot: usize) {
        let Some(flight) = self.flights[slot].as_mut() else { return };
        let next = flight.transfer.next(&flight.read.file);
        let dst = &mut flight.read.dst;
        // SAFETY: Transfer keeps at + len within the buffer's capacity.
        let start = unsafe { dst.as_mut_ptr_whole().add(next.at) };
        // A buffer is at most a BLOCK long.
        let len = u32::try_from(next.len).unwrap_or(0);
        let fd = types::Fd(next.file.as_raw_fd());
        let fixed = self.registration.is_ok() && Arc::ptr_eq(dst.home(), &self.cache);
        let entry = if fixed {
            let piece = (start.addr() - self.cache.pool().base().addr()) / PIECE;
            let piece = u16::try_from(piece).unwrap_or(u16::MAX);
            opcode::ReadFixed::new(fd, start, len, piece).offset(next.offset).build()
        } else {
            opcode::Read::new(fd, start, len).offset(next.offset).build()
        };
        // SAFETY: the slot in `flights` owns the buffer and the file, and it outlives the read (see Drop).
        unsafe { push(&mut self.ring, &entry.user_data(slot as u64)) };
    }

    /// Takes completions from the ring, and queues reads again that are not over yet.
    fn collect(&mut self, done: &mut Vec<Done>) {
        loop {
            let Some(completion) = self.ring.completion().next() else { return };
            let Ok(slot) = usize::try_from(completion.user_data()) else { continue };
            let Some(flight) = self.flights.get_mut(slot).and_then(Option::as_mut) else { continue };
            let got = usize::try_from(completion.result())
                .map_err(|_| io::Error::from_raw_os_error(-completion.result()));
            match flight.transfer.step(&flight.read.file, got) {
                Step::Again => self.queue(slot),
                Step::Finished(result) => {
                    let Some(flight) = self.flights[slot].take() else { continue };
                    self.vacant.push(slot);
                    self.depth.leave(&flight.read.dst);
                    done.push(flight.done(result, self.cache.metrics()));
                }
            }
        }
    }
}

impl Engine for Uring {
    fn submit(&mut self, read: Read) -> Result<(), Read> {
        let metrics: &Metrics = self.cache.metrics();
        if !self.depth.enter(&read.dst, metrics) {
            return Err(read);
        }
        let Some(slot) = self.vacant.pop() else {
            // Not reached: the number of slots is the sum of both depths.
            self.depth.leave(&read.dst);
            return Err(read);
        };
        self.flights[slot] = Some(Flight::new(read));
        self.queue(slot);
        Ok(())
    }

    fn flush(&mut self) {
        flush(&mut self.ring);
    }

    fn reap(&mut self, done: &mut Vec<Done>) {
        // It ends: each round takes a completion, and every read has a bounded number of them.
        while self.poller.look(&mut self.ring, &self.finished, self.depth.total()) {
            self.collect(done);
        }
    }

    fn poll_fd(&self) -> Option<RawFd> {
        Some(self.finished.as_raw_fd())
    }

    fn in_flight(&self) -> usize {
        self.depth.total()
    }

    fn patience(&self) -> Duration {
        self.poller.patience(self.in_flight())
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        // The kernel may still be writing to the buffers: they must outlive its reads.
        let give_up = Instant::now() + DROP_PATIENCE;
        let mut done = Vec::new();
        while self.depth.total() > 0 && Instant::now() < give_up {
            self.reap(&mut done);
            done.clear();
            if self.depth.total() > 0 {
                wait_readable(self.finished.as_raw_fd(), Duration::from_millis(100));
            }
        }
        for flight in self.flights.iter_mut().filter_map(Option::take) {
            // The storage does not answer: losing a buffer is better than a write to it after its reuse.
            std::mem::forget(flight);
        }
    }
}

impl std::fmt::Debug for Uring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Uring")
            .field("depth", &self.depth)
            .field("deferred", &self.deferred)
            .field("registration", &self.registration)
            .finish_non_exhaustive()
    }
}

/// Registers the whole pool, so that reads need not find its pages each time.
fn register(ring: &IoUring, cache: &BlockCache) -> io::Result<()> {
    let (base, len) = (cache.pool().base(), cache.pool().len());
    let pieces: Vec<libc::iovec> = (0..len)
        .step_by(PIECE)
        .map(|from| libc::iovec { iov_base: base.wrapping_add(from).cast(), iov_len: PIECE.min(len - from) })
        .collect();
    // SAFETY: the pieces are the pool's mapping, which lives as long as the cache that Uring holds. The
    // kernel pins the pages for as long as the ring lives.
    unsafe { ring.submitter().register_buffers(&pieces) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ring::testing::{Flag, ends};
    use crate::ring::{TRUST_FLAG_FOR, build_as};
    use crate::{Acquire, PagesFile, ReadMode};
    use rewake_process::Notifier;
    use std::io::Write;

    /// Returns every kind of ring that older or stricter kernels allow.
    fn all_kinds(cache: &Arc<BlockCache>) -> Vec<Uring> {
        let mut kinds = Vec::new();
        for flavour in [Flavour::Deferred, Flavour::Cooperative, Flavour::Plain] {
            for registered in [true, false] {
                let (ring, finished) = build_as(flavour, DEPTH).expect("this kernel has every kind of ring");
                let refusal = || Err(io::Error::from_raw_os_error(libc::ENOMEM));
                let registration = if registered { register(&ring, cache) } else { refusal() };
                kinds.push(Uring::assemble(cache, (ring, finished, flavour), registration));
            }
        }
        kinds
    }

    #[test]
    fn every_kind_of_ring_reads_the_same_bytes_and_wakes_its_poller() {
        let mut temp = tempfile::NamedTempFile::new().unwrap();
        let content: Vec<u8> = (0..4 * BLOCK).map(|i| u8::try_from(i % 251).unwrap()).collect();
        temp.write_all(&content).unwrap();
        temp.as_file().sync_all().unwrap();
        let file = PagesFile::open(temp.path()).unwrap();
        let cache = BlockCache::new(8 * BLOCK).unwrap();
        let notifier = Notifier::new().unwrap();
        for mut ring in all_kinds(&cache) {
            for how in [ReadMode::Direct, ReadMode::Buffered] {
                let Acquire::Load(mut guard) = cache.acquire(&file, 2, &notifier) else {
                    panic!("not a load")
                };
                let dst = guard.take_slice().unwrap();
                let read = Read { ticket: 7, file: Arc::clone(&file), offset: guard.offset(), dst, how };
                ring.submit(read).unwrap();
                ring.flush();
                let mut done = Vec::new();
                while done.is_empty() {
                    let readable = wait_readable(ring.poll_fd().unwrap(), Duration::from_secs(60));
                    assert!(readable, "{ring:?} did not become readable");
                    ring.reap(&mut done);
                }
                let over = done.pop().unwrap();
                over.result.unwrap();
                let block = guard.publish(over.dst);
                assert!(*block == content[2 * BLOCK..3 * BLOCK], "{ring:?} {how:?}: wrong bytes");
                block.discard();
            }
        }
    }

    #[test]
    fn a_flag_without_completion_is_checked_once() {
        ends(|| {
            let cache = BlockCache::new(8 * BLOCK).unwrap();
            let mut ring = all_kinds(&cache).swap_remove(0);
            assert!(ring.is_deferred());
            Flag::of(&ring.ring).keep_set_during(|| ring.reap(&mut Vec::new()));
            assert_eq!(ring.patience(), Duration::MAX, "nothing is in flight");
        });
    }

    #[test]
    fn a_completed_read_without_the_flag_is_found() {
        let temp = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        // Not a hole, which would be read at once.
        temp.as_file().write_all(&[1; BLOCK]).unwrap();
        temp.as_file().sync_all().unwrap();
        let (file, cache) = (PagesFile::open(temp.path()).unwrap(), BlockCache::new(8 * BLOCK).unwrap());
        let mut ring = all_kinds(&cache).swap_remove(0);
        let Acquire::Load(mut guard) = cache.acquire(&file, 0, &Notifier::new().unwrap()) else {
            panic!("not a load")
        };
        let (dst, how) = (guard.take_slice().unwrap(), ReadMode::Direct);
        ring.submit(Read { ticket: 7, file: Arc::clone(&file), offset: 0, dst, how }).unwrap();
        ring.flush();
        assert!(wait_readable(ring.poll_fd().unwrap(), Duration::from_secs(60)));
        ring.finished.drain();
        Flag::of(&ring.ring).clear();
        let (mut done, start) = (Vec::new(), Instant::now());
        while done.is_empty() {
            let patience = ring.patience();
            assert!(
                patience <= TRUST_FLAG_FOR && start.elapsed() < Duration::from_secs(10),
                "the completion is not found"
            );
            wait_readable(ring.poll_fd().unwrap(), patience);
            ring.reap(&mut done);
        }
        assert_eq!(ring.patience(), Duration::MAX);
    }

    #[test]
    fn the_note_names_what_a_ring_lacks_and_the_remedy() {
        let cache = BlockCache::new(8 * BLOCK).unwrap();
        let kinds = all_kinds(&cache);
        assert_eq!(kinds[0].note(), None);
        assert!(kinds[1].note().unwrap().contains("RLIMIT_MEMLOCK"));
        assert!(kinds[2].note().unwrap().contains("deferred"));
    }
}
