// SPDX-License-Identifier: MIT OR Apache-2.0
//! How a server reports that it is ready, and what a daemon releases then.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::{AsRawFd as _, OwnedFd};

/// Who waits until a server is ready, and what it has no use for afterwards.
#[derive(Debug, Default)]
pub struct Ready {
    /// Each gets a zero byte.
    pub waiting: Vec<File>,
    /// What a daemon has as its standard error from then on: its log or `/dev/null`. Until then it says what
    /// goes wrong to the user who started it. A script reads until no process has its pipe any more, so none
    /// may keep it.
    pub standard_error: Option<OwnedFd>,
}

impl Ready {
    /// Reports that the server is ready. Who waits may wait for the end of the file, so all are to be closed
    /// then.
    ///
    /// # Errors
    /// The first error; the other bytes were written all the same.
    pub fn report(&self) -> io::Result<()> {
        // Before the command that waits returns.
        let released = self.standard_error.as_ref().map_or(Ok(()), |file| put(file, libc::STDERR_FILENO));
        let tell = |mut waiting: &File| waiting.write_all(&[0]);
        self.waiting.iter().map(tell).fold(released, Result::and)
    }

    /// [`Ready::report`], and closes all.
    ///
    /// # Errors
    /// As for [`Ready::report`].
    pub fn report_once(self) -> io::Result<()> {
        self.report()
    }
}

/// Puts `/dev/null` in the place of a daemon's standard input and output.
///
/// # Errors
/// There is no `/dev/null`, or this process may open no file.
pub fn release_terminal() -> io::Result<OwnedFd> {
    let null = File::options().read(true).write(true).open("/dev/null")?.into();
    put(&null, libc::STDIN_FILENO)?;
    put(&null, libc::STDOUT_FILENO)?;
    Ok(null)
}

/// Gives an open file one of the standard numbers, too.
fn put(file: &OwnedFd, number: i32) -> io::Result<()> {
    // SAFETY: the call has no pointers; the standard descriptors are owned by nothing, and what they were is
    // closed.
    let put = unsafe { libc::dup2(file.as_raw_fd(), number) };
    crate::check(put.into()).map(drop)
}
