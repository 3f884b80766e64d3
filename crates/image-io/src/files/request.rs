// SPDX-License-Identifier: MIT OR Apache-2.0
//! One transfer, and the rules for continuing it after a system call that did only a part of it.

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use super::{Memory, TransferFile};

/// Calls for one transfer that do less than is left. Each does at least a page on any real file system, and a
/// transfer of 2 MiB has 512 pages.
const MAX_SHORT: u32 = 1024;
/// Times that a call is tried again after EIO: see [`crate::engine`]. A disk that fails more often is broken.
const MAX_EIO: u32 = 3;
/// Times that a call is tried again after EINTR, EAGAIN or ENOMEM, which pass by themselves.
const MAX_INTERRUPTIONS: u32 = 64;

/// The direction of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the file into memory.
    Read,
    /// From memory into the file.
    Write,
}

impl Direction {
    pub(super) fn act(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
        }
    }
}

/// A range of a file and the memory to transfer it to or from.
#[derive(Debug, Clone)]
pub struct Request<M> {
    /// The file.
    pub file: Arc<TransferFile>,
    /// The direction.
    pub direction: Direction,
    /// First byte in the file.
    pub offset: u64,
    /// The memory. The ring holds it until the transfer is over.
    pub memory: M,
    /// Offset of the first byte in the memory.
    pub at: usize,
    /// Number of bytes, at least one. The transfer is direct if offset, place and length are multiples of a
    /// page and devices may use the memory. Reads of bytes in the page cache are not direct.
    pub bytes: usize,
    /// Bytes that a read must get at least: less than `bytes` where the file ends inside its last page.
    pub needed: usize,
    /// A number for the caller.
    pub token: u64,
}

/// A transfer that is over.
#[derive(Debug)]
pub struct Finished {
    /// The request's token.
    pub token: u64,
    /// Whether the whole transfer was done.
    pub result: Result<(), TransferError>,
}

/// A transfer failed.
#[derive(Debug, thiserror::Error)]
#[error("{act} {bytes} bytes at {offset} of {}", file.display())]
pub struct TransferError {
    pub(super) act: &'static str,
    pub(super) file: PathBuf,
    pub(super) offset: u64,
    pub(super) bytes: usize,
    pub(super) source: io::Error,
}

/// A transfer in flight.
#[derive(Debug)]
pub(super) struct Progress<M> {
    pub(super) request: Request<M>,
    done: usize,
    short: u32,
    eio: u32,
    interruptions: u32,
}

/// What to do after a call.
#[derive(Debug)]
pub(super) enum Step {
    Again,
    Over(Finished),
}

impl<M: Memory> Progress<M> {
    pub(super) fn new(request: Request<M>) -> Self {
        Self { request, done: 0, short: 0, eio: 0, interruptions: 0 }
    }

    /// File offset, offset in the memory and length of the next call.
    pub(super) fn next(&self) -> (u64, usize, usize) {
        let Request { offset, at, bytes, .. } = self.request;
        (offset + self.done as u64, at + self.done, bytes - self.done)
    }

    /// The descriptor of the next call, and whether it is direct.
    pub(super) fn file(&self) -> (&File, bool) {
        let (offset, at, bytes) = self.next();
        self.request.file.at(offset, at, bytes)
    }

    /// The address of the next call's memory.
    pub(super) fn start(&self) -> *mut u8 {
        let (_, at, _) = self.next();
        self.request.memory.start().as_ptr().wrapping_add(at)
    }

    /// Takes the result of the call that [`Progress::next`] describes. `direct`: the call was a direct one.
    pub(super) fn step(&mut self, direct: bool, got: io::Result<usize>) -> Step {
        match got {
            Ok(0) => self.over(Err(match self.request.direction {
                Direction::Read => io::ErrorKind::UnexpectedEof.into(),
                Direction::Write => io::ErrorKind::WriteZero.into(),
            })),
            Ok(bytes) => {
                self.done += bytes;
                self.short += 1;
                let wanted = match self.request.direction {
                    Direction::Read => self.request.needed,
                    Direction::Write => self.request.bytes,
                };
                if self.done >= wanted {
                    return self.over(Ok(()));
                }
                if self.short > MAX_SHORT {
                    return self.over(Err(io::Error::other(format!(
                        "only {} bytes in {MAX_SHORT} calls",
                        self.done
                    ))));
                }
                Step::Again
            }
            Err(error) => self.refused(direct, error),
        }
    }

    fn refused(&mut self, direct: bool, error: io::Error) -> Step {
        let again = match error.raw_os_error() {
            Some(libc::EINVAL) if direct => {
                self.request.file.refuse_direct();
                true
            }
            Some(libc::EIO) => {
                self.eio += 1;
                self.eio <= MAX_EIO
            }
            Some(libc::EINTR | libc::EAGAIN | libc::ENOMEM) => {
                self.interruptions += 1;
                self.interruptions <= MAX_INTERRUPTIONS
            }
            _ => false,
        };
        if again { Step::Again } else { self.over(Err(error)) }
    }

    fn over(&self, result: io::Result<()>) -> Step {
        let Request { file, token, .. } = &self.request;
        let result = result.map_err(|source| file.error(&self.request, source));
        Step::Over(Finished { token: *token, result })
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::Pages;
    use super::*;

    fn read(bytes: usize, needed: usize) -> Progress<Arc<Pages>> {
        let file = TransferFile::new("pages.img", tempfile::tempfile().unwrap(), None);
        let (direction, memory) = (Direction::Read, Pages::new(4096));
        Progress::new(Request { file, direction, offset: 4096, memory, at: 8192, bytes, needed, token: 7 })
    }

    fn errno(code: i32) -> io::Result<usize> {
        Err(io::Error::from_raw_os_error(code))
    }

    fn failure(step: Step) -> String {
        let Step::Over(Finished { token: 7, result: Err(error) }) = step else { panic!("{step:?}") };
        format!("{error}: {}", error.source)
    }

    #[test]
    fn a_short_call_is_continued_where_it_ended() {
        let mut progress = read(8192, 8192);
        assert!(matches!(progress.step(true, Ok(4096)), Step::Again));
        assert_eq!(progress.next(), (8192, 12288, 4096));
        assert!(matches!(progress.step(true, Ok(4096)), Step::Over(Finished { result: Ok(()), .. })));
    }

    #[test]
    fn a_read_may_end_with_the_file_but_never_before_what_is_needed() {
        assert!(matches!(read(8192, 5000).step(true, Ok(5000)), Step::Over(Finished { result: Ok(()), .. })));
        let mut progress = read(8192, 5000);
        assert!(matches!(progress.step(true, Ok(4999)), Step::Again));
        let text = failure(progress.step(true, Ok(0)));
        assert_eq!(text, "read 8192 bytes at 4096 of pages.img: unexpected end of file");
    }

    #[test]
    fn every_way_to_try_again_has_its_bound() {
        for (code, bound) in [(libc::EIO, MAX_EIO), (libc::EAGAIN, MAX_INTERRUPTIONS)] {
            let mut progress = read(8192, 8192);
            let tries = (0..1000).take_while(|_| matches!(progress.step(true, errno(code)), Step::Again));
            assert_eq!(tries.count(), bound as usize);
        }
        let mut progress = read(1 << 20, 1 << 20);
        let tries = (0..5000).take_while(|_| matches!(progress.step(true, Ok(1)), Step::Again));
        assert_eq!(tries.count(), MAX_SHORT as usize);
    }

    #[test]
    fn after_a_refused_direct_call_all_use_the_page_cache() {
        let file = || tempfile::tempfile().unwrap();
        let transferred = TransferFile::new("pages.img", file(), Some(file()));
        let mut progress = read(8192, 8192);
        progress.request.file = Arc::clone(&transferred);
        assert!(transferred.at(0, 0, 4096).1);
        assert!(!transferred.at(8, 0, 4096).1 && !transferred.at(0, 8, 4096).1 && !transferred.at(0, 0, 8).1);
        assert!(matches!(progress.step(true, errno(libc::EINVAL)), Step::Again));
        assert!(!transferred.at(0, 0, 4096).1);
        assert!(failure(progress.step(false, errno(libc::EINVAL))).contains("Invalid argument"));
    }
}
