// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a driver is asked on a process's behalf: an ioctl that it takes from that process alone.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, RawFd};
use std::os::unix::fs::FileExt as _;

use crate::error::Error;
use crate::stop::Stopped;
use crate::{abi, proc};

/// Bytes of an argument, at most.
const PAGE: usize = 4096;

impl Stopped<'_> {
    /// Has one of the stopped threads make an ioctl whose argument these bytes are, a page at most, on its own descriptor of the open
    /// file `device`, a descriptor of this process. They lie in a page of their own meanwhile, which is gone afterwards. What the driver
    /// writes there is lost.
    ///
    /// # Errors
    /// Those of [`Stopped::syscall`]; [`Error::NotOpen`].
    pub fn ioctl(
        &mut self,
        call: &'static str,
        device: BorrowedFd<'_>,
        request: u32,
        argument: &[u8],
    ) -> Result<(), Error> {
        let number = word(self.number_of(device)?);
        let protection = word(libc::PROT_READ | libc::PROT_WRITE);
        let flags = word(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let bytes = PAGE as u64;
        let anywhere = [0, bytes, protection, flags, word(-1), 0];
        let scratch = self.syscall("map a page", libc::SYS_mmap, anywhere)?;
        let done = self
            .write(scratch, argument)
            .and_then(|()| self.syscall(call, libc::SYS_ioctl, [number, request.into(), scratch, 0, 0, 0]));
        // A page too many does no harm, and whether the ioctl was made matters.
        let _ = self.syscall("unmap a page", libc::SYS_munmap, [scratch, bytes, 0, 0, 0, 0]);
        done.map(drop)
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Error> {
        // Not the first thread's, whose files are empty once it has ended.
        let memory = File::options().write(true).open(format!("/proc/{}/mem", self.hand()?));
        let written = memory.and_then(|memory| match bytes.len() {
            0..=PAGE => memory.write_all_at(bytes, address),
            _ => Err(io::ErrorKind::InvalidInput.into()),
        });
        written.map_err(|source| Error::Call { pid: self.pid, call: "write an argument", source })
    }

    /// The number of a file of ours in the thread that makes our calls, which stays the same: one that stands still leaves only when all
    /// are killed.
    pub(crate) fn number_of(&self, device: BorrowedFd<'_>) -> Result<RawFd, Error> {
        let (pid, hand) = (self.pid, self.hand()?);
        let is_it = |number: &RawFd| abi::same_file(device.as_raw_fd(), hand, *number).unwrap_or(false);
        proc::descriptors(hand)?.into_iter().find(is_it).ok_or(Error::NotOpen { pid })
    }
}

fn word(value: i32) -> u64 {
    u64::from(value.cast_unsigned())
}
