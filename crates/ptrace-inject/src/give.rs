// SPDX-License-Identifier: MIT OR Apache-2.0
//! A descriptor of ours becomes one of the process's.
//!
//! The process makes a pair of sockets, we take one end (pidfd_getfd(2)), send our descriptor through it, and the process
//! receives it. Neither names nor namespaces matter, and the process needs no right to look into ours.

use std::collections::BTreeSet;
use std::os::fd::{AsFd as _, BorrowedFd, RawFd};

use crate::abi::{self, Receipt};
use crate::error::Error;
use crate::proc;
use crate::scratch::word;
use crate::stop::Stopped;

/// A given descriptor has a number below this one if the process has such a number free: a table of descriptors is as
/// long as its highest number, and fork(2) copies all of it.
const HIGHEST: u64 = 4096;
/// The kind of the sockets.
const SOCKETS: i32 = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC;

impl Stopped<'_> {
    /// Gives the process a copy of `descriptor`, one of ours, and returns its number there: the highest free one below
    /// the process's limit of open files and below 4096. Where all of these are taken, it is one of the lowest free ones.
    ///
    /// The copy is closed on exec, and inherited by fork. The process needs two free numbers for a moment. Do not give
    /// regular files: a second copy that is closed meanwhile would drop the process's own fcntl(2) locks on the file.
    ///
    /// # Errors
    /// [`Error::NoNumber`] where the process has fewer than two free numbers; those of [`Stopped::syscall`].
    pub fn give(&mut self, descriptor: BorrowedFd<'_>) -> Result<RawFd, Error> {
        let given = self.with_scratch(|stopped, scratch| {
            let socket = stopped.send(descriptor, scratch)?;
            let received = stopped.receive(socket, scratch);
            stopped.close(socket).and(received)
        });
        let received = given.map_err(|error| self.explain(error))?;
        self.raise(received)
    }

    /// Closes a descriptor of the process.
    ///
    /// # Errors
    /// [`Error::Call`] with EBADF when the process has no such descriptor; those of [`Stopped::syscall`].
    pub fn close(&mut self, number: RawFd) -> Result<(), Error> {
        self.syscall("close a descriptor", libc::SYS_close, [word(number), 0, 0, 0, 0, 0]).map(drop)
    }

    /// Puts our descriptor into the queue of a socket of the process; the socket's number.
    fn send(&mut self, descriptor: BorrowedFd<'_>, scratch: u64) -> Result<RawFd, Error> {
        let kind = [word(libc::AF_UNIX), word(SOCKETS), 0, scratch, 0, 0];
        self.syscall("make a pair of sockets", libc::SYS_socketpair, kind)?;
        let numbers: [u8; 8] = self.read(scratch)?;
        let number = |at: usize| RawFd::from_ne_bytes(std::array::from_fn(|byte| numbers[at + byte]));
        let (theirs, other) = (number(0), number(4));
        let taken = abi::take(self.pid, self.hand()?, other);
        // Closed before the process receives: that needs a number, too.
        self.close(other)?;
        let sent = taken.and_then(|ours| abi::send(ours.as_fd(), descriptor));
        match sent {
            Ok(()) => Ok(theirs),
            Err(source) => {
                self.close(theirs)?;
                Err(Error::Call { pid: self.pid, call: "send a descriptor", source })
            }
        }
    }

    /// Has the process receive what is in the queue of its socket; the new descriptor's number.
    fn receive(&mut self, socket: RawFd, scratch: u64) -> Result<RawFd, Error> {
        self.write(scratch, &Receipt::at(scratch).to_bytes())?;
        let flags = word(libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT);
        let arguments = [word(socket), scratch, flags, 0, 0, 0];
        self.syscall("receive a descriptor", libc::SYS_recvmsg, arguments)?;
        let received = Receipt::of_bytes(self.read(scratch)?).number();
        received.ok_or_else(|| self.no_number())
    }

    /// Moves a descriptor, which has the lowest free number, to the number that a given one is to have.
    fn raise(&mut self, received: RawFd) -> Result<RawFd, Error> {
        let Some(highest) = self.highest_free()?.filter(|number| *number > received) else {
            return Ok(received);
        };
        let arguments = [word(received), word(libc::F_DUPFD_CLOEXEC), word(highest), 0, 0, 0];
        let raised = self.syscall("duplicate a descriptor", libc::SYS_fcntl, arguments);
        let raised = match raised {
            Ok(number) => RawFd::try_from(number).unwrap_or(received),
            // A thread that did not stop may have taken the number.
            Err(Error::Call { .. }) => return Ok(received),
            Err(error) => return Err(error),
        };
        self.close(received)?;
        Ok(raised)
    }

    /// The highest number below the limits that the process does not use.
    fn highest_free(&self) -> Result<Option<RawFd>, Error> {
        let tid = self.hand()?;
        let used: BTreeSet<RawFd> = proc::descriptors(tid)?.into_iter().collect();
        let end = RawFd::try_from(proc::limit_of_files(tid)?.min(HIGHEST)).unwrap_or(0);
        Ok((0..end).rev().find(|number| !used.contains(number)))
    }

    /// What the kernel's EMFILE means here.
    fn explain(&self, error: Error) -> Error {
        match error {
            Error::Call { source, .. } if source.raw_os_error() == Some(libc::EMFILE) => self.no_number(),
            error => error,
        }
    }

    fn no_number(&self) -> Error {
        let limit = self.hand().and_then(proc::limit_of_files);
        limit.map_or_else(|error| error, |limit| Error::NoNumber { pid: self.pid, limit })
    }
}
