// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a driver is asked on a process's behalf: an ioctl that it takes from that process alone.

use std::os::fd::{AsRawFd as _, BorrowedFd, RawFd};

use crate::error::Error;
use crate::scratch::word;
use crate::stop::Stopped;
use crate::{abi, proc};

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
        self.with_scratch(|stopped, scratch| {
            stopped.write(scratch, argument)?;
            stopped.syscall(call, libc::SYS_ioctl, [number, request.into(), scratch, 0, 0, 0]).map(drop)
        })
    }

    /// The number of a file of ours in the thread that makes our calls, which stays the same: one that stands still leaves only when all
    /// are killed.
    pub(crate) fn number_of(&self, device: BorrowedFd<'_>) -> Result<RawFd, Error> {
        let (pid, hand) = (self.pid, self.hand()?);
        let is_it = |number: &RawFd| abi::same_file(device.as_raw_fd(), hand, *number).unwrap_or(false);
        proc::descriptors(hand)?.into_iter().find(is_it).ok_or(Error::NotOpen { pid })
    }
}
