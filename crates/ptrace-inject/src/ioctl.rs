// SPDX-License-Identifier: MIT OR Apache-2.0
//! Injects an ioctl that a driver accepts from the process alone.

use std::os::fd::{AsRawFd as _, BorrowedFd, RawFd};

use crate::error::Error;
use crate::scratch::word;
use crate::stop::Stopped;
use crate::{abi, proc};

impl Stopped<'_> {
    /// Makes a stopped thread call an ioctl on its own descriptor of the open file that `device`, a
    /// descriptor of this process, refers to. The argument is a copy of these bytes, a page at most, in a
    /// temporary page. What the driver writes there is lost.
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

    /// Returns the number of this process's file in the thread that makes injected calls. That thread stays
    /// the same: a stopped thread disappears only if all are killed.
    pub(crate) fn number_of(&self, device: BorrowedFd<'_>) -> Result<RawFd, Error> {
        let (pid, hand) = (self.pid, self.calling_thread()?);
        let is_it = |number: &RawFd| abi::same_file(device.as_raw_fd(), hand, *number).unwrap_or(false);
        proc::descriptors(hand)?.into_iter().find(is_it).ok_or(Error::NotOpen { pid })
    }
}
