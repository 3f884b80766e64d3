// SPDX-License-Identifier: MIT OR Apache-2.0
//! The interface between an engine and what carries its transfers out.

use std::io;
use std::os::fd::{AsRawFd as _, RawFd};
use std::time::Duration;

use rewake_process::Notifier;

use super::request::{Completion, Direction, Request};
use super::transfer::{FileTransfer, Next, TransferStep};
use crate::class::Class;
use crate::error::TransferError;
use crate::file::ReadMode;
use crate::io_budget::Permit;
use crate::memory::Memory;
use crate::units::PAGE;

/// Transfers in flight in one engine: several times an NVMe drive's bandwidth times its latency (7 GB/s x
/// 0.2 ms = 1.4 MB), also where each has a block only.
pub const DEPTH: usize = 144;

/// Reads through the page cache of at least this size are given to other threads, which copy in parallel,
/// because one thread copies more slowly than a GPU takes the bytes. Fewer bytes are copied sooner than a
/// thread wakes up.
pub(super) const PARALLEL_BYTES: usize = 128 << 10;

/// Carries transfers out, at most [`DEPTH`] at a time.
pub(super) trait Backend<M: Memory> {
    /// Starts a transfer, at the next `flush` or `reap` at the latest.
    fn start(&mut self, flight: Flight<M>);

    /// Starts queued transfers, without waiting for them.
    fn flush(&mut self) {}

    /// Appends the transfers that are over, without waiting.
    fn reap(&mut self, done: &mut Vec<Completion<M>>);

    /// Readable when `reap` has work. None: call `reap` again and again while transfers are in flight.
    fn event(&self) -> Option<&Notifier>;

    /// How long to wait for `event` at most.
    fn patience(&self) -> Duration {
        Duration::MAX
    }
}

/// A transfer in flight.
#[derive(Debug)]
pub(super) struct Flight<M> {
    request: Request<M>,
    transfer: FileTransfer,
    /// Whether another thread of the kernel copies the bytes from the page cache.
    pub(super) by_worker: bool,
    /// Whether its bytes were wrong once.
    is_second_try: bool,
    permit: Option<Permit>,
}

/// One system call of a transfer.
#[derive(Debug)]
pub(super) struct Call {
    pub(super) fd: RawFd,
    pub(super) direction: Direction,
    pub(super) offset: u64,
    /// The memory, which is valid for `len` bytes while the flight exists.
    pub(super) start: *mut u8,
    pub(super) len: usize,
}

impl<M: Memory> Flight<M> {
    /// # Panics
    /// The request exceeds its memory: a mistake of the program.
    pub(super) fn new(request: Request<M>, mode: ReadMode, permit: Option<Permit>) -> Self {
        let Request { direction, offset, at, bytes, needed, ref memory, .. } = request;
        let inside = at.checked_add(bytes).is_some_and(|end| end <= memory.bytes());
        assert!(inside && needed <= bytes, "{bytes} bytes at {at}, {needed} needed");
        let mode =
            if mode == ReadMode::Direct && !at.is_multiple_of(PAGE) { ReadMode::Buffered } else { mode };
        let transfer = FileTransfer::new(direction, offset, bytes, needed, mode);
        let by_worker = mode != ReadMode::Direct && bytes >= PARALLEL_BYTES;
        Self { request, transfer, by_worker, is_second_try: false, permit }
    }

    /// Makes no direct calls from here on.
    pub(super) fn use_page_cache(&mut self) {
        self.transfer.direct = false;
    }

    pub(super) fn class(&self) -> Class {
        self.request.class
    }

    /// Returns the next call.
    pub(super) fn next(&self) -> Call {
        let Next { file, offset, at, len } = self.transfer.next(&self.request.file);
        let Request { direction, ref memory, at: first, .. } = self.request;
        Call {
            fd: file.as_raw_fd(),
            direction,
            offset,
            start: memory.start().as_ptr().wrapping_add(first + at),
            len,
        }
    }

    /// Makes the next call on this thread, of at most `most` bytes.
    pub(super) fn call(&self, most: usize) -> io::Result<usize> {
        let Call { fd, direction, offset, start, len } = self.next();
        let (len, offset) = (len.min(most), offset.cast_signed());
        let got = match direction {
            // SAFETY: `new` has checked that the bytes lie in the memory, which is writable and not borrowed.
            Direction::Read => unsafe { libc::pread(fd, start.cast(), len, offset) },
            // SAFETY: as above, and the memory is only read.
            Direction::Write => unsafe { libc::pwrite(fd, start.cast(), len, offset) },
        };
        usize::try_from(got).map_err(|_| io::Error::last_os_error())
    }

    /// Makes the next call of a read, which must not wait for the disk.
    pub(super) fn call_cached(&self) -> io::Result<usize> {
        let Call { fd, offset, start, len, .. } = self.next();
        let part = libc::iovec { iov_base: start.cast(), iov_len: len };
        // SAFETY: `new` has checked that the bytes lie in the memory, which is writable and not borrowed.
        let got = unsafe { libc::preadv2(fd, &raw const part, 1, offset.cast_signed(), libc::RWF_NOWAIT) };
        usize::try_from(got).map_err(|_| io::Error::last_os_error())
    }

    /// Takes the result of a call. Blocks that are not those that were sealed are read once more, past the
    /// page cache: its copy may be the damaged one.
    pub(super) fn step(&mut self, got: io::Result<usize>) -> TransferStep {
        let step = self.transfer.step(&self.request.file, got);
        if !matches!(step, TransferStep::Finished(Ok(()))) || self.request.direction == Direction::Write {
            return step;
        }
        let verified = self.verify();
        if verified.is_ok() || std::mem::replace(&mut self.is_second_try, true) {
            return TransferStep::Finished(verified);
        }
        let Request { direction, offset, bytes, needed, .. } = self.request;
        self.transfer = FileTransfer::new(direction, offset, bytes, needed, ReadMode::Direct);
        TransferStep::Again
    }

    fn verify(&self) -> Result<(), TransferError> {
        let Request { ref file, ref memory, offset, at, needed, .. } = self.request;
        let start = memory.start().as_ptr().wrapping_add(at);
        // SAFETY: `new` has checked that the bytes lie in the memory, which this flight owns. The kernel has
        // ended its call, so nothing writes to them.
        let bytes = unsafe { std::slice::from_raw_parts(start, needed) };
        file.verify(offset, bytes)
    }

    /// Keeps the memory and the file for ever: the kernel may still use them. Gives the permit back.
    pub(super) fn leak(mut self) {
        self.permit = None;
        std::mem::forget(self);
    }

    pub(super) fn done(self, result: Result<(), TransferError>) -> Completion<M> {
        let Request { token, class, memory, .. } = self.request;
        Completion { token, class, memory, result }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::file::ImageFile;
    use crate::verification::{BlockChecksums, block_checksum};
    use crate::{Acquire, BLOCK, BlockCache, BufferSlice};

    /// A read through the page cache of a sealed file of one block of sevens.
    fn flight() -> Flight<BufferSlice> {
        let temp = tempfile::tempfile().unwrap();
        temp.set_len(BLOCK as u64).unwrap();
        let file = ImageFile::from_file(temp, "pages-1.img").unwrap();
        let checksum = block_checksum(&[7; BLOCK]).to_le_bytes();
        file.verify_with(BlockChecksums::new(Arc::new(checksum), 0, BLOCK as u64).unwrap());
        let cache = BlockCache::new(2 * BLOCK).unwrap();
        let Acquire::Load(mut guard) = cache.acquire(&file, 0, &Notifier::new().unwrap()) else {
            panic!("the cache is empty")
        };
        let memory = guard.take_slice().unwrap();
        Flight::new(Request::fill(1, &file, 0, memory, Class::Demand), ReadMode::Cached, None)
    }

    /// Ends the system call in flight with a block of this byte.
    fn step(flight: &mut Flight<BufferSlice>, byte: u8) -> TransferStep {
        flight.request.memory.fill(byte);
        flight.step(Ok(BLOCK))
    }

    #[test]
    fn a_wrong_block_is_read_once_more_past_the_page_cache() {
        let mut flight = flight();
        assert!(!flight.transfer.direct);
        assert!(matches!(step(&mut flight, 9), TransferStep::Again) && flight.transfer.direct);
        assert!(matches!(step(&mut flight, 7), TransferStep::Finished(Ok(()))));
    }

    #[test]
    fn a_block_that_is_wrong_twice_is_an_error_with_its_place() {
        let mut flight = flight();
        assert!(matches!(step(&mut flight, 9), TransferStep::Again));
        let TransferStep::Finished(Err(error)) = step(&mut flight, 9) else { panic!("it is not over") };
        assert!(matches!(error, TransferError::Damaged { offset: 0, length: BLOCK, .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains("offset 0 of pages-1.img") && text.contains("`rewake verify`"), "{text}");
    }
}
