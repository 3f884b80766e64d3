// SPDX-License-Identifier: MIT OR Apache-2.0
//! One end of the conversation.

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

/// Descriptors in one message: the kernel takes 253 (`SCM_MAX_FD`).
pub const MAX_DESCRIPTORS: usize = 250;
/// For every step of the other end. Opening the files and engines of a large machine takes less.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// The largest message: [`MAX_DESCRIPTORS`] numbers are a tenth of it.
const MAX_MESSAGE: usize = 16 << 10;

/// One end.
#[derive(Debug)]
pub struct Channel {
    socket: OwnedFd,
    patience: Duration,
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Channel {
    /// An end that is connected, to this user or root, with [`PATIENCE`].
    ///
    /// # Errors
    /// It is a stranger's.
    pub fn new(socket: OwnedFd) -> Result<Self, Error> {
        Self::with_patience(socket, PATIENCE)
    }

    /// The same with another deadline for every step, a microsecond at least.
    ///
    /// # Errors
    /// It is a stranger's.
    pub fn with_patience(socket: OwnedFd, patience: Duration) -> Result<Self, Error> {
        let peer = getsockopt(&socket, sockopt::PeerCredentials).map_err(Error::of("look who is there"))?;
        let own = geteuid().as_raw();
        if peer.uid() != own && peer.uid() != 0 {
            return Err(Error::Stranger { found: peer.uid(), expected: own });
        }
        let limit = TimeVal::microseconds(i64::try_from(patience.as_micros()).unwrap_or(i64::MAX));
        setsockopt(&socket, sockopt::ReceiveTimeout, &limit).map_err(Error::of("set a deadline"))?;
        setsockopt(&socket, sockopt::SendTimeout, &limit).map_err(Error::of("set a deadline"))?;
        Ok(Self { socket, patience })
    }

    /// Says something.
    ///
    /// # Errors
    /// The other end has gone, or does not listen.
    pub fn send(&self, message: &impl Message, descriptors: &[BorrowedFd<'_>]) -> Result<(), Error> {
        let bytes = message.encode_to_vec();
        let numbers: Vec<i32> = descriptors.iter().map(BorrowedFd::as_raw_fd).collect();
        let rights = [ControlMessage::ScmRights(&numbers)];
        let rights = if numbers.is_empty() { &[][..] } else { &rights[..] };
        let (bytes, flags) = ([IoSlice::new(&bytes)], MsgFlags::MSG_NOSIGNAL);
        // With a deadline the kernel starts neither of the two again, even after a mere SIGSTOP and SIGCONT.
        loop {
            match sendmsg::<()>(self.socket.as_raw_fd(), &bytes, rights, flags, None) {
                Ok(_) => return Ok(()),
                Err(Errno::EINTR) => {}
                Err(errno) => return Err(self.failed("send", errno)),
            }
        }
    }

    /// From now on waits for the other end as long as it lives: what it does takes its time.
    ///
    /// # Errors
    /// The kernel's.
    pub fn wait_for_ever(&self) -> Result<(), Error> {
        setsockopt(&self.socket, sockopt::ReceiveTimeout, &TimeVal::zero())
            .map_err(Error::of("take a deadline back"))
    }

    fn failed(&self, act: &'static str, errno: Errno) -> Error {
        match errno {
            Errno::EAGAIN => Error::Silent(self.patience),
            errno => Error::of(act)(errno),
        }
    }

    /// Waits until there is something to hear, or the deadline is over.
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

    /// Hears something.
    ///
    /// # Errors
    /// Nothing comes, or nothing that makes sense.
    pub fn receive<M: Message + Default>(&self) -> Result<(M, Vec<OwnedFd>), Error> {
        let mut buffer = [0; MAX_MESSAGE];
        self.readable()?;
        let mut space = nix::cmsg_space!([i32; MAX_DESCRIPTORS]);
        let mut bytes = [IoSliceMut::new(&mut buffer)];
        let flags = MsgFlags::MSG_CMSG_CLOEXEC;
        let came = recvmsg::<()>(self.socket.as_raw_fd(), &mut bytes, Some(&mut space), flags);
        let came = came.map_err(|errno| self.failed("receive", errno))?;
        let (length, flags) = (came.bytes, came.flags);
        let mut descriptors = Vec::new();
        // nix gives no list of what was cut off; the flag tells below.
        for control in came.cmsgs().into_iter().flatten() {
            if let ControlMessageOwned::ScmRights(received) = control {
                descriptors.extend(adopt(received));
            }
        }
        if flags.intersects(MsgFlags::MSG_TRUNC | MsgFlags::MSG_CTRUNC) {
            return Err(Error::CutOff);
        }
        // No message is empty: that is the end.
        if length == 0 {
            return Err(Error::Closed);
        }
        let message = M::decode(&buffer[..length]);
        let message =
            message.map_err(|error| Error::Garbled { expected: "a message", found: error.to_string() })?;
        Ok((message, descriptors))
    }
}
