// SPDX-License-Identifier: MIT OR Apache-2.0
//! The rules of one transfer for all backends: what is transferred next, and what a result means.

use std::fs::File;
use std::io;

use super::request::Direction;
use crate::error::TransferError;
use crate::file::{ImageFile, ReadMode};
use crate::units::PAGE;

/// Short calls that are continued within one transfer. Any real file system moves at least a page at a time,
/// and a chunk of 2 MiB has 512 pages; more short calls are a fault of the storage.
pub const MAX_SHORT_CALLS: u32 = 1024;

/// Times that a call is tried again after EIO. Multipath and network storage recover within a few tries, a
/// bad disk never does.
pub const MAX_EIO_RETRIES: u32 = 3;

/// Times that a call is tried again after EINTR, EAGAIN or ENOMEM, which pass by themselves.
pub const MAX_INTERRUPTIONS: u32 = 64;

/// The progress of one transfer.
#[derive(Debug)]
pub(crate) struct FileTransfer {
    direction: Direction,
    offset: u64,
    /// Bytes that may be transferred.
    bytes: usize,
    /// Bytes that must be transferred.
    needed: usize,
    pub(super) direct: bool,
    /// A read through the page cache does not make the kernel read ahead.
    exact: bool,
    done: usize,
    shorts: u32,
    eio: u32,
    interruptions: u32,
}

/// The next system call: `len` bytes at `offset` of `file`, from position `at` of the transfer on.
#[derive(Debug)]
pub(crate) struct Next<'a> {
    pub(crate) file: &'a File,
    pub(crate) offset: u64,
    pub(crate) at: usize,
    pub(crate) len: usize,
}

/// What to do after a system call.
#[derive(Debug)]
pub(crate) enum TransferStep {
    Again,
    Finished(Result<(), TransferError>),
}

impl FileTransfer {
    /// A transfer of `bytes`, of which a read must get `needed`. It is direct where `mode`, the file, the
    /// offset and the length allow it, else buffered.
    pub(crate) fn new(
        direction: Direction,
        offset: u64,
        bytes: usize,
        needed: usize,
        mode: ReadMode,
    ) -> Self {
        let aligned = offset.is_multiple_of(PAGE as u64) && bytes.is_multiple_of(PAGE);
        let (direct, exact) = (mode == ReadMode::Direct && aligned, mode == ReadMode::Exact);
        let (done, shorts, eio, interruptions) = (0, 0, 0, 0);
        Self { direction, offset, bytes, needed, direct, exact, done, shorts, eio, interruptions }
    }

    pub(crate) fn next<'a>(&self, file: &'a ImageFile) -> Next<'a> {
        // io_uring takes offset -1 for the file's cursor and would transfer other bytes. Here it lies beyond
        // every file, as for pread.
        let offset = self.offset.saturating_add(self.done as u64).min(i64::MAX as u64);
        let buffered = if self.exact { file.exact() } else { file.buffered() };
        let file = file.direct().filter(|_| self.direct).unwrap_or(buffered);
        Next { file, offset, at: self.done, len: self.bytes - self.done }
    }

    /// Takes the result of the system call that `next` returned.
    pub(crate) fn step(&mut self, file: &ImageFile, got: io::Result<usize>) -> TransferStep {
        match got {
            Ok(n) => self.advance(file, n),
            Err(error) => self.refused(file, error),
        }
    }

    fn advance(&mut self, file: &ImageFile, n: usize) -> TransferStep {
        self.done += n;
        if self.done >= self.needed {
            return TransferStep::Finished(match self.direction {
                Direction::Read => file.check_unchanged(),
                Direction::Write => Ok(()),
            });
        }
        let (name, offset, expected, got) = (file.name(), self.offset, self.needed, self.done);
        if n == 0 {
            return TransferStep::Finished(Err(match self.direction {
                Direction::Read => TransferError::short(name, offset, expected, got),
                Direction::Write => self.failed(file, io::ErrorKind::WriteZero.into()),
            }));
        }
        self.shorts += 1;
        if self.shorts > MAX_SHORT_CALLS {
            let (file, act, calls) = (name.to_path_buf(), self.direction.act(), self.shorts);
            return TransferStep::Finished(Err(TransferError::Fragmented {
                file,
                act,
                offset,
                expected,
                got,
                calls,
            }));
        }
        // An unaligned short call is at the end of the file, or a direct call cannot continue it.
        self.direct &= self.done.is_multiple_of(PAGE);
        TransferStep::Again
    }

    fn refused(&mut self, file: &ImageFile, error: io::Error) -> TransferStep {
        let again = match error.raw_os_error() {
            Some(libc::EINVAL) if self.direct => {
                self.direct = false;
                file.refuse_direct();
                true
            }
            Some(libc::EIO) => {
                self.eio += 1;
                self.eio <= MAX_EIO_RETRIES
            }
            Some(libc::EINTR | libc::EAGAIN | libc::ENOMEM) => {
                self.interruptions += 1;
                self.interruptions <= MAX_INTERRUPTIONS
            }
            _ => false,
        };
        if again { TransferStep::Again } else { TransferStep::Finished(Err(self.failed(file, error))) }
    }

    fn failed(&self, file: &ImageFile, source: io::Error) -> TransferError {
        TransferError::Io {
            act: self.direction.act(),
            file: file.name().to_path_buf(),
            offset: self.offset,
            expected: self.needed,
            tries: (self.eio + self.interruptions).max(1),
            source,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    const LEN: usize = 2 * PAGE;
    const DIRECT: ReadMode = ReadMode::Direct;

    fn file() -> Arc<ImageFile> {
        let temp = tempfile::tempfile().unwrap();
        temp.set_len(LEN as u64).unwrap();
        ImageFile::from_file(temp, "pages-1.img").unwrap()
    }

    fn read(direct: bool) -> FileTransfer {
        FileTransfer::new(Direction::Read, 0, LEN, LEN, if direct { DIRECT } else { ReadMode::Buffered })
    }

    fn errno(code: i32) -> io::Result<usize> {
        Err(io::Error::from_raw_os_error(code))
    }

    /// Steps with the same result until the read is over; returns the number of steps.
    fn steps(mut transfer: FileTransfer, got: impl Fn() -> io::Result<usize>) -> (u32, TransferError) {
        let file = file();
        for step in 1..5000 {
            if let TransferStep::Finished(result) = transfer.step(&file, got()) {
                return (step, result.unwrap_err());
            }
        }
        panic!("a transfer without end");
    }

    #[test]
    fn after_a_refused_direct_call_all_use_the_page_cache() {
        let file = file();
        let (mut first, other) = (read(true), read(true));
        assert!(matches!(first.step(&file, errno(libc::EINVAL)), TransferStep::Again));
        for transfer in [&first, &other] {
            assert!(std::ptr::eq(transfer.next(&file).file, file.buffered()));
        }
        assert!(matches!(first.step(&file, Ok(LEN)), TransferStep::Finished(Ok(()))));
    }

    #[test]
    fn an_unaligned_transfer_is_never_direct() {
        let direct = |offset, bytes| FileTransfer::new(Direction::Read, offset, bytes, bytes, DIRECT).direct;
        assert!(direct(PAGE as u64, LEN) && !direct(512, LEN) && !direct(0, LEN - 1));
    }

    #[test]
    fn a_short_call_is_continued_where_it_ended() {
        let (file, mut transfer) = (file(), read(true));
        assert!(matches!(transfer.step(&file, Ok(PAGE)), TransferStep::Again));
        let Next { offset, at, len, .. } = transfer.next(&file);
        assert_eq!((offset, at, len, transfer.direct), (PAGE as u64, PAGE, PAGE, true));
        assert!(matches!(transfer.step(&file, Ok(100)), TransferStep::Again));
        assert!(!transfer.direct, "a direct call cannot continue it");
    }

    #[test]
    fn a_read_may_end_with_the_file_but_never_before_what_is_needed() {
        let (file, transfer) = (file(), || FileTransfer::new(Direction::Read, 0, LEN, 5000, DIRECT));
        assert!(matches!(transfer().step(&file, Ok(5000)), TransferStep::Finished(Ok(()))));
        let mut early = transfer();
        assert!(matches!(early.step(&file, Ok(4999)), TransferStep::Again));
        let TransferStep::Finished(Err(error)) = early.step(&file, Ok(0)) else { panic!("it is not over") };
        assert!(matches!(error, TransferError::Short { expected: 5000, got: 4999, .. }), "{error}");
    }

    #[test]
    fn every_way_to_try_again_has_its_bound() {
        let (tries, error) = steps(read(false), || errno(libc::EIO));
        assert_eq!(tries, MAX_EIO_RETRIES + 1);
        assert!(matches!(error, TransferError::Io { tries: 4, .. }), "{error}");
        let (tries, error) = steps(read(false), || errno(libc::EAGAIN));
        assert_eq!(tries, MAX_INTERRUPTIONS + 1);
        assert!(matches!(error, TransferError::Io { .. }), "{error}");
        let (tries, error) = steps(read(false), || Ok(1));
        assert_eq!(tries, MAX_SHORT_CALLS + 1);
        assert!(matches!(error, TransferError::Fragmented { got: 1025, .. }), "{error}");
    }

    #[test]
    fn any_other_error_ends_the_transfer_at_once() {
        for code in [libc::EBADF, libc::EINVAL] {
            let (tries, error) = steps(read(false), || errno(code));
            assert_eq!(tries, 1, "{error}");
            assert!(matches!(error, TransferError::Io { tries: 1, .. }), "{error}");
        }
    }

    #[test]
    fn a_write_that_writes_nothing_is_an_error_that_says_so() {
        let mut write = FileTransfer::new(Direction::Write, 8, 9, 9, ReadMode::Buffered);
        let TransferStep::Finished(Err(error)) = write.step(&file(), Ok(0)) else { panic!("it is not over") };
        assert!(error.to_string().starts_with("writing 9 bytes at offset 8 of pages-1.img"), "{error}");
    }
}
