// SPDX-License-Identifier: MIT OR Apache-2.0
//! The bytes of the connection with the peer, encrypted or not.

use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use rewake_criu_tls::{EncryptedStream, HandshakeError, TlsClient};

use crate::peer::PeerSocket;

/// Time in which a peer announces its end after the last message. It has nothing else to do then.
const END_LIMIT: Duration = Duration::from_secs(10);

/// A connection.
#[derive(Debug)]
pub(crate) enum PageStream {
    Plain(PeerSocket),
    Encrypted(Box<EncryptedStream<PeerSocket>>),
}

impl PageStream {
    /// Makes a connection of a socket. With `tls` it makes the handshake.
    pub(crate) fn begin(socket: PeerSocket, tls: Option<&TlsClient>) -> Result<Self, HandshakeError> {
        Ok(match tls {
            Some(tls) => Self::Encrypted(Box::new(tls.connect(socket)?)),
            None => Self::Plain(socket),
        })
    }

    /// Whether the bytes are encrypted.
    pub(crate) fn is_encrypted(&self) -> bool {
        matches!(self, Self::Encrypted(_))
    }

    /// Sends messages together, each in a record of its own where they are encrypted.
    pub(crate) fn send(&mut self, messages: &[Vec<u8>]) -> io::Result<()> {
        match self {
            Self::Plain(socket) => socket.write_all(&messages.concat()),
            Self::Encrypted(stream) => {
                for message in messages {
                    stream.write_all(message)?;
                }
                stream.flush()
            }
        }
    }

    /// Receives bytes, 0 at the end. It is called when the socket has something to read. Encrypted bytes may
    /// be too few to decrypt any: [`io::ErrorKind::WouldBlock`].
    pub(crate) fn receive(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(socket) => socket.read(buffer),
            Self::Encrypted(stream) => stream.read(buffer),
        }
    }

    /// Returns whether there is more to receive, although the socket may have nothing to read.
    pub(crate) fn is_ready(&mut self) -> bool {
        match self {
            Self::Plain(_) => false,
            Self::Encrypted(stream) => stream.is_ready(),
        }
    }

    /// Ends the connection well.
    pub(crate) fn end(self) -> io::Result<()> {
        match self {
            Self::Plain(socket) => socket.end(),
            Self::Encrypted(stream) => stream.end(END_LIMIT)?.end(),
        }
    }
}

impl AsFd for PageStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Plain(socket) => socket.as_fd(),
            Self::Encrypted(stream) => stream.socket().as_fd(),
        }
    }
}
