// SPDX-License-Identifier: MIT OR Apache-2.0
//! A page in the process for arguments of injected calls. It is a new mapping, so no userfaultfd covers it.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use crate::error::Error;
use crate::stop::Stopped;

/// The most bytes of an argument.
const PAGE: usize = 4096;

impl Stopped<'_> {
    /// Maps a page in the process, runs `act` with its address, and unmaps the page.
    pub(crate) fn with_scratch<T>(
        &mut self,
        act: impl FnOnce(&mut Self, u64) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let protection = word(libc::PROT_READ | libc::PROT_WRITE);
        let flags = word(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let bytes = PAGE as u64;
        let anywhere = [0, bytes, protection, flags, word(-1), 0];
        let scratch = self.syscall("map a page", libc::SYS_mmap, anywhere)?;
        let done = act(self, scratch);
        // A leaked page is harmless, and the caller needs the result of `act`.
        let _ = self.syscall("unmap a page", libc::SYS_munmap, [scratch, bytes, 0, 0, 0, 0]);
        done
    }

    /// Writes an argument of a page at most.
    pub(crate) fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Error> {
        let written = self.memory(true).and_then(|memory| match bytes.len() {
            0..=PAGE => memory.write_all_at(bytes, address),
            _ => Err(io::ErrorKind::InvalidInput.into()),
        });
        written.map_err(|source| Error::Call { pid: self.pid, call: "write an argument", source })
    }

    /// Reads bytes that a call has written.
    pub(crate) fn read<const BYTES: usize>(&self, address: u64) -> Result<[u8; BYTES], Error> {
        let mut bytes = [0; BYTES];
        let read = self.memory(false).and_then(|memory| memory.read_exact_at(&mut bytes, address));
        read.map_err(|source| Error::Call { pid: self.pid, call: "read a result", source })?;
        Ok(bytes)
    }

    /// Opens the process's memory through the thread that makes calls. A first thread that has ended has no
    /// memory.
    fn memory(&self, write: bool) -> io::Result<File> {
        let tid = self.calling_thread().map_err(io::Error::other)?;
        File::options().read(true).write(write).open(format!("/proc/{tid}/mem"))
    }
}

/// Converts a C `int` to an argument.
pub(crate) fn word(value: i32) -> u64 {
    u64::from(value.cast_unsigned())
}
