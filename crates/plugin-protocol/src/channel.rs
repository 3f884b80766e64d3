// SPDX-License-Identifier: MIT OR Apache-2.0
//! One end of a connection.

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::{
    ControlMessage, ControlMessageOwned, MsgFlags, getsockopt, recv, recvmsg, sendmsg, setsockopt, sockopt,
};
use nix::sys::time::{TimeVal, TimeValLike as _};
use nix::unistd::geteuid;
use prost::Message;

use crate::abi::adopt;
use crate::error::Error;

/// The most descriptors in one message. The kernel takes 253 (`SCM_MAX_FD`).
pub const MAX_DESCRIPTORS: usize = 250;
/// Time limit for every step of the peer. Opening the files and engines of a large machine takes less.
pub const STEP_LIMIT: Duration = Duration::from_secs(60);
/// Bytes of the largest message: [`MAX_DESCRIPTORS`] numbers are a tenth of it.
const MAX_MESSAGE: usize = 16 << 10;

/// One end of a connection.
#[derive(Debug)]
pub struct Channel {
    socket: OwnedFd,
    timeout: Duration,
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Channel {
    /// Makes a channel of a connected socket whose peer is this user or root, with a time limit of
    /// [`STEP_LIMIT`].
    ///
    /// # Errors
    /// The peer is another user.
    pub fn new(socket: OwnedFd) -> Result<Self, Error> {
        Self::with_timeout(socket, STEP_LIMIT)
    }

    /// Makes a channel with another time limit for every step, a microsecond at least.
    ///
    /// # Errors
    /// The peer is another user.
    pub fn with_timeout(socket: OwnedFd, timeout: Duration) -> Result<Self, Error> {
        let peer =
            getsockopt(&socket, sockopt::PeerCredentials).map_err(Error::of("read the peer's user"))?;
        let own = geteuid().as_raw();
        if peer.uid() != own && peer.uid() != 0 {
            return Err(Error::ForeignUser { found: peer.uid(), expected: own });
        }
        let channel = Self { socket, timeout };
        channel.restore_timeout()?;
        setsockopt(&channel.socket, sockopt::SendTimeout, &channel.limit())
            .map_err(Error::of("set a time limit"))?;
        Ok(channel)
    }

    fn limit(&self) -> TimeVal {
        TimeVal::microseconds(i64::try_from(self.timeout.as_micros()).unwrap_or(i64::MAX))
    }

    /// Sends a message.
    ///
    /// # Errors
    /// The other end has closed the connection, or does not receive.
    pub fn send(&self, message: &impl Message, descriptors: &[BorrowedFd<'_>]) -> Result<(), Error> {
        let bytes = message.encode_to_vec();
        let numbers: Vec<i32> = descriptors.iter().map(BorrowedFd::as_raw_fd).collect();
        let rights = [ControlMessage::ScmRights(&numbers)];
        let rights = if numbers.is_empty() { &[][..] } else { &rights[..] };
        let (bytes, flags) = ([IoSlice::new(&bytes)], MsgFlags::MSG_NOSIGNAL);
        // With a time limit the kernel does not restart these calls, even after a mere SIGSTOP and SIGCONT.
        loop {
            match sendmsg::<()>(self.socket.as_raw_fd(), &bytes, rights, flags, None) {
                Ok(_) => return Ok(()),
                Err(Errno::EINTR) => {}
                Err(errno) => return Err(self.failed("send", errno)),
            }
        }
    }

    /// Removes the time limit for receiving: the peer's next step may take any time.
    ///
    /// # Errors
    /// The kernel's.
    pub fn remove_timeout(&self) -> Result<(), Error> {
        setsockopt(&self.socket, sockopt::ReceiveTimeout, &TimeVal::zero())
            .map_err(Error::of("remove a time limit"))
    }

    /// Sets the time limit for receiving again that [`Channel::remove_timeout`] has removed.
    ///
    /// # Errors
    /// The kernel's.
    pub fn restore_timeout(&self) -> Result<(), Error> {
        setsockopt(&self.socket, sockopt::ReceiveTimeout, &self.limit())
            .map_err(Error::of("set a time limit"))
    }

    fn failed(&self, act: &'static str, errno: Errno) -> Error {
        match errno {
            Errno::EAGAIN => Error::TimedOut(self.timeout),
            errno => Error::of(act)(errno),
        }
    }

    /// Waits until a message or the end of the connection can be read, at most until the time limit.
    fn readable(&self) -> Result<(), Error> {
        let mut byte = [0];
        let peek = MsgFlags::MSG_PEEK;
        loop {
            match recv(self.socket.as_raw_fd(), &mut byte, peek) {
                Ok(_) => return Ok(()),
                Err(Errno::EINTR) => {}
                Err(errno) => return Err(self.failed("receive", errno)),
            }
        }
    }

    /// Receives a message.
    ///
    /// # Errors
    /// No message is received in time, or it cannot be decoded.
    pub fn receive<M: Message + Default>(&self) -> Result<(M, Vec<OwnedFd>), Error> {
        let mut buffer = [0; MAX_MESSAGE];
        self.readable()?;
        let mut space = nix::cmsg_space!([i32; MAX_DESCRIPTORS]);
        let mut bytes = [IoSliceMut::new(&mut buffer)];
        let flags = MsgFlags::MSG_CMSG_CLOEXEC;
        let received = recvmsg::<()>(self.socket.as_raw_fd(), &mut bytes, Some(&mut space), flags);
        let received = received.map_err(|errno| self.failed("receive", errno))?;
        let (length, flags) = (received.bytes, received.flags);
        let mut descriptors = Vec::new();
        // nix does not list descriptors that were cut off; the flag is checked below.
        for control in received.cmsgs().into_iter().flatten() {
            if let ControlMessageOwned::ScmRights(numbers) = control {
                descriptors.extend(adopt(numbers));
            }
        }
        if flags.intersects(MsgFlags::MSG_TRUNC | MsgFlags::MSG_CTRUNC) {
            return Err(Error::Truncated);
        }
        // No message is empty: zero bytes mean the end of the connection.
        if length == 0 {
            return Err(Error::Closed);
        }
        let message = M::decode(&buffer[..length]);
        let message =
            message.map_err(|error| Error::Malformed { expected: "a message", found: error.to_string() })?;
        Ok((message, descriptors))
    }
}
