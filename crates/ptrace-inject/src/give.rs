// SPDX-License-Identifier: MIT OR Apache-2.0
//! Gives a descriptor of this process to a stopped process.
//!
//! The process creates a socket pair, and this process copies one end (pidfd_getfd(2)) and sends the
//! descriptor through it. The process receives the descriptor. So neither names nor namespaces matter, and
//! the process needs no access to this one.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd, RawFd};

use rewake_process::pidfd::{pidfd_getfd, pidfd_open, pidfd_open_thread};

use crate::abi::{self, ReceiveBuffer, Tid};
use crate::error::Error;
use crate::proc;
use crate::scratch::word;
use crate::stop::Stopped;

/// A given descriptor has a number below this one, if one is free. A descriptor table is as long as its
/// highest number, and fork(2) copies all of it.
const MAX_NUMBER: u64 = 4096;
/// The type of the sockets.
const SOCKETS: i32 = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC;

impl Stopped<'_> {
    /// Gives the process a copy of `descriptor`, and returns its number. It is the highest free number below
    /// the process's limit and below 4096. If all of these are in use, it is one of the lowest free numbers.
    ///
    /// The copy is closed on exec, and inherited by fork. The process needs two free numbers for a moment. Do
    /// not give regular files: a later close of the copy would release the process's own fcntl(2) locks on
    /// the file.
    ///
    /// # Errors
    /// [`Error::NoNumber`] if the process has fewer than two free numbers; the errors of
    /// [`Stopped::syscall`].
    pub fn give(&mut self, descriptor: BorrowedFd<'_>) -> Result<RawFd, Error> {
        let given = self.with_scratch(|stopped, scratch| {
            let socket = stopped.send(descriptor, scratch)?;
            let received = stopped.receive(socket, scratch);
            stopped.close(socket).and(received)
        });
        let received = given.map_err(|error| self.explain(error))?;
        self.move_to_highest(received)
    }

    /// Closes a descriptor of the process.
    ///
    /// # Errors
    /// [`Error::Call`] with EBADF if the process has no such descriptor; the errors of [`Stopped::syscall`].
    pub fn close(&mut self, number: RawFd) -> Result<(), Error> {
        self.syscall("close a descriptor", libc::SYS_close, [word(number), 0, 0, 0, 0, 0]).map(drop)
    }

    /// Sends the descriptor into a socket of the process, and returns the socket's number.
    fn send(&mut self, descriptor: BorrowedFd<'_>, scratch: u64) -> Result<RawFd, Error> {
        let kind = [word(libc::AF_UNIX), word(SOCKETS), 0, scratch, 0, 0];
        self.syscall("create a socket pair", libc::SYS_socketpair, kind)?;
        let numbers: [u8; 8] = self.read(scratch)?;
        let number = |at: usize| RawFd::from_ne_bytes(std::array::from_fn(|byte| numbers[at + byte]));
        let (theirs, other) = (number(0), number(4));
        let taken = take(self.pid, self.calling_thread()?, other);
        // This frees a number before the process receives, which needs one.
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

    /// Makes the process receive from its socket. Returns the new descriptor's number.
    fn receive(&mut self, socket: RawFd, scratch: u64) -> Result<RawFd, Error> {
        self.write(scratch, &ReceiveBuffer::at(scratch).to_bytes())?;
        let flags = word(libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT);
        let arguments = [word(socket), scratch, flags, 0, 0, 0];
        self.syscall("receive a descriptor", libc::SYS_recvmsg, arguments)?;
        let received = ReceiveBuffer::of_bytes(self.read(scratch)?).number();
        received.ok_or_else(|| self.no_number())
    }

    /// Moves a received descriptor from the lowest free number to its final number.
    fn move_to_highest(&mut self, received: RawFd) -> Result<RawFd, Error> {
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

    /// Returns the highest number below both limits that the process does not use.
    fn highest_free(&self) -> Result<Option<RawFd>, Error> {
        let tid = self.calling_thread()?;
        let used: BTreeSet<RawFd> = proc::descriptors(tid)?.into_iter().collect();
        let end = RawFd::try_from(proc::limit_of_files(tid)?.min(MAX_NUMBER)).unwrap_or(0);
        Ok((0..end).rev().find(|number| !used.contains(number)))
    }

    /// Turns EMFILE into [`Error::NoNumber`].
    fn explain(&self, error: Error) -> Error {
        match error {
            Error::Call { source, .. } if source.raw_os_error() == Some(libc::EMFILE) => self.no_number(),
            error => error,
        }
    }

    fn no_number(&self) -> Error {
        let limit = self.calling_thread().and_then(proc::limit_of_files);
        limit.map_or_else(|error| error, |limit| Error::NoNumber { pid: self.pid, limit })
    }
}

/// Copies descriptor `number` of thread `tid` of process `pid` into this process.
fn take(pid: Tid, tid: Tid, number: RawFd) -> io::Result<OwnedFd> {
    let process = if tid == pid { pidfd_open(pid) } else { pidfd_open_thread(tid) };
    pidfd_getfd(process?.as_fd(), number)
}
