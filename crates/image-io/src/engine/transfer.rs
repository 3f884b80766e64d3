// SPDX-License-Identifier: MIT OR Apache-2.0
//! The rules of one read for all engines: what is read next, and what a result means.

use std::fs::File;
use std::io;

use crate::PAGE;
use crate::error::ReadError;
use crate::file::PagesFile;
use crate::metrics::Metrics;

/// Short reads that are continued within one read: as many as a block has pages. Any real file system gives
/// at least a page at a time; more short reads are a fault of the storage.
pub const MAX_SHORT_READS: u32 = 64;

/// Times that a read is tried again after EIO. Multipath and network storage recover within a few tries, a
/// bad disk never does.
pub const MAX_EIO_RETRIES: u32 = 3;

/// Times that a read is tried again after EINTR, EAGAIN or ENOMEM, which pass by themselves.
pub const MAX_INTERRUPTIONS: u32 = 64;

/// The progress of one read.
#[derive(Debug)]
pub(crate) struct Transfer {
    offset: u64,
    len: usize,
    /// Bytes that a direct read may write: `len` rounded up to pages.
    direct_len: usize,
    direct: bool,
    done: usize,
    shorts: u32,
    eio: u32,
    interruptions: u32,
    refused_direct: bool,
    bytes_direct: u64,
    bytes_buffered: u64,
}

/// The next system call: read `len` bytes at `offset` of `file` to position `at` of the buffer.
#[derive(Debug)]
pub(crate) struct Next<'a> {
    pub(crate) file: &'a File,
    pub(crate) offset: u64,
    pub(crate) at: usize,
    pub(crate) len: usize,
}

/// What to do after a system call.
#[derive(Debug)]
pub(crate) enum Step {
    Again,
    Finished(Result<(), ReadError>),
}

impl Transfer {
    pub(crate) fn buffered(offset: u64, len: usize) -> Self {
        Self {
            offset,
            len,
            direct_len: 0,
            direct: false,
            done: 0,
            shorts: 0,
            eio: 0,
            interruptions: 0,
            refused_direct: false,
            bytes_direct: 0,
            bytes_buffered: 0,
        }
    }

    /// A direct read where the file, the offset and the buffer allow it, else a buffered one.
    pub(crate) fn direct(file: &PagesFile, offset: u64, len: usize, capacity: usize) -> Self {
        let direct_len = len.next_multiple_of(PAGE);
        let aligned = offset.is_multiple_of(PAGE as u64) && direct_len <= capacity;
        let direct = aligned && file.direct().is_some();
        Self { direct, direct_len, ..Self::buffered(offset, len) }
    }

    pub(crate) fn next<'a>(&self, file: &'a PagesFile) -> Next<'a> {
        // io_uring takes offset -1 for the file's cursor and would read other bytes. Here it lies beyond
        // every file, as for pread.
        let offset = self.offset.saturating_add(self.done as u64).min(i64::MAX as u64);
        match file.direct() {
            Some(direct) if self.direct => {
                Next { file: direct, offset, at: self.done, len: self.direct_len - self.done }
            }
            _ => Next { file: file.buffered(), offset, at: self.done, len: self.len - self.done },
        }
    }

    /// Takes the result of the system call that `next` returned.
    pub(crate) fn step(&mut self, file: &PagesFile, got: io::Result<usize>) -> Step {
        match got {
            Ok(n) => self.advance(file, n),
            Err(error) => self.refused(file, error),
        }
    }

    fn advance(&mut self, file: &PagesFile, n: usize) -> Step {
        if self.direct {
            self.bytes_direct += n as u64;
        } else {
            self.bytes_buffered += n as u64;
        }
        self.done += n;
        if self.done >= self.len {
            return Step::Finished(file.check_unchanged());
        }
        if n == 0 {
            return Step::Finished(Err(ReadError::Short {
                file: file.name().to_path_buf(),
                offset: self.offset,
                expected: self.len,
                got: self.done,
            }));
        }
        self.shorts += 1;
        if self.shorts > MAX_SHORT_READS {
            return Step::Finished(Err(ReadError::Fragmented {
                file: file.name().to_path_buf(),
                offset: self.offset,
                expected: self.len,
                got: self.done,
                reads: self.shorts,
            }));
        }
        // An unaligned short read is at the end of the file, or a direct read cannot continue it.
        self.direct &= self.done.is_multiple_of(PAGE);
        Step::Again
    }

    fn refused(&mut self, file: &PagesFile, error: io::Error) -> Step {
        let again = match error.raw_os_error() {
            Some(libc::EINVAL) if self.direct => {
                self.direct = false;
                self.refused_direct = true;
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
        if again {
            return Step::Again;
        }
        Step::Finished(Err(ReadError::Io {
            file: file.name().to_path_buf(),
            offset: self.offset,
            expected: self.len,
            tries: (self.eio + self.interruptions + u32::from(self.refused_direct)).max(1),
            source: error,
        }))
    }

    /// Adds the calls of a finished read to the counters.
    pub(crate) fn count(&self, metrics: &Metrics) {
        let retries = self.shorts + self.eio + self.interruptions + u32::from(self.refused_direct);
        Metrics::add(&metrics.bytes_direct, self.bytes_direct);
        Metrics::add(&metrics.bytes_buffered, self.bytes_buffered);
        Metrics::add(&metrics.retries, u64::from(retries));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEN: usize = 2 * PAGE;

    fn file() -> std::sync::Arc<PagesFile> {
        let temp = tempfile::tempfile().unwrap();
        temp.set_len(LEN as u64).unwrap();
        PagesFile::from_file(temp, "pages-1.img").unwrap()
    }

    fn errno(code: i32) -> io::Result<usize> {
        Err(io::Error::from_raw_os_error(code))
    }

    /// Steps with the same result until the read is over; returns the number of steps.
    fn steps(transfer: &mut Transfer, got: impl Fn() -> io::Result<usize>) -> (u32, Result<(), ReadError>) {
        let file = file();
        for step in 1..1000 {
            if let Step::Finished(result) = transfer.step(&file, got()) {
                return (step, result);
            }
        }
        panic!("a read without end");
    }

    #[test]
    fn a_refused_direct_read_continues_through_the_page_cache() {
        let file = file();
        let mut transfer = Transfer::direct(&file, 0, LEN, LEN);
        assert_eq!(transfer.direct, file.has_direct());
        transfer.direct = true;
        assert!(matches!(transfer.step(&file, errno(libc::EINVAL)), Step::Again));
        assert!(std::ptr::eq(transfer.next(&file).file, file.buffered()));
        assert!(matches!(transfer.step(&file, Ok(LEN)), Step::Finished(Ok(()))));
        assert_eq!((transfer.bytes_direct, transfer.bytes_buffered), (0, LEN as u64));
    }

    #[test]
    fn an_unaligned_read_or_a_small_buffer_is_never_direct() {
        let file = file();
        assert!(!Transfer::direct(&file, 512, LEN, LEN).direct);
        assert!(!Transfer::direct(&file, 0, LEN - 1, LEN - 1).direct);
        assert!(!Transfer::direct(&file, 0, LEN + 1, LEN + 1).direct);
    }

    #[test]
    fn every_way_to_try_again_has_its_bound() {
        let buffered = || Transfer::buffered(0, LEN);
        let (tries, result) = steps(&mut buffered(), || errno(libc::EIO));
        assert_eq!(tries, MAX_EIO_RETRIES + 1);
        assert!(matches!(result, Err(ReadError::Io { tries: 4, .. })), "{result:?}");
        let (tries, result) = steps(&mut buffered(), || errno(libc::EAGAIN));
        assert_eq!(tries, MAX_INTERRUPTIONS + 1);
        assert!(matches!(result, Err(ReadError::Io { .. })), "{result:?}");
        let (tries, result) = steps(&mut buffered(), || Ok(1));
        assert_eq!(tries, MAX_SHORT_READS + 1);
        assert!(matches!(result, Err(ReadError::Fragmented { got: 65, .. })), "{result:?}");
    }

    #[test]
    fn any_other_error_ends_the_read_at_once() {
        let (tries, result) = steps(&mut Transfer::buffered(0, LEN), || errno(libc::EBADF));
        assert_eq!(tries, 1);
        assert!(matches!(result, Err(ReadError::Io { tries: 1, .. })), "{result:?}");
        let (tries, _) = steps(&mut Transfer::buffered(0, LEN), || errno(libc::EINVAL));
        assert_eq!(tries, 1, "EINVAL of a buffered read is an error");
    }
}
