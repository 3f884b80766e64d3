// SPDX-License-Identifier: MIT OR Apache-2.0
//! A client's encrypted stream over a blocking socket, for a thread that waits in `poll`.
//!
//! Alerts of failures are never sent: the peer sees how the caller closes the socket. A `criu dump
//! --lazy-pages` resumes its program when its connection fails, and the caller decides when that may happen.

use std::io::{self, BufRead as _, ErrorKind, Read, Write};
use std::os::fd::{AsFd, AsRawFd as _};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{MsgFlags, recv};
use rustls::ClientConnection;

use crate::HANDSHAKE_LIMIT;
use crate::error::HandshakeError;

/// A stream whose bytes are encrypted. Reads never wait: where all bytes that have arrived were read, they
/// fail with [`ErrorKind::WouldBlock`]. Each write becomes a record of its own, sent by the next flush, as
/// long as it has no more than 16 KiB.
#[derive(Debug)]
pub struct EncryptedStream<S> {
    connection: ClientConnection,
    socket: S,
    /// What the next read returns: this one had bytes.
    failure: Option<io::Error>,
}

impl<S: AsFd + Write> EncryptedStream<S> {
    /// Makes the handshake.
    pub(crate) fn shake(connection: ClientConnection, socket: S) -> Result<Self, HandshakeError> {
        let mut stream = Self { connection, socket, failure: None };
        let deadline = Instant::now() + HANDSHAKE_LIMIT;
        loop {
            stream.flush()?;
            if !stream.connection.is_handshaking() {
                return Ok(stream);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(HandshakeError::Timeout);
            }
            wait(&stream.socket, left)?;
            match stream.take_arrived() {
                Ok(0) => return Err(HandshakeError::Closed),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Returns the socket.
    pub fn socket(&self) -> &S {
        &self.socket
    }

    /// Returns whether the next read has bytes, the end or an error, although the socket may have nothing to
    /// read.
    pub fn is_ready(&mut self) -> bool {
        let mut reader = self.connection.reader();
        self.failure.is_some()
            || !matches!(reader.fill_buf(), Err(error) if error.kind() == ErrorKind::WouldBlock)
    }

    /// Announces this side's end, and waits until the peer has announced its own, or ends the connection, or
    /// `limit` is over. Returns the socket.
    ///
    /// # Errors
    /// The connection has failed.
    pub fn end(mut self, limit: Duration) -> io::Result<S> {
        let deadline = Instant::now() + limit;
        self.connection.send_close_notify();
        self.flush()?;
        loop {
            match self.read(&mut [0; 64]) {
                Ok(0) => return Ok(self.socket),
                Err(error) if error.kind() != ErrorKind::WouldBlock => return Err(error),
                Ok(_) | Err(_) => {}
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(self.socket);
            }
            wait(&self.socket, left)?;
        }
    }

    /// Takes what the socket has, without waiting. Returns the number of encrypted bytes, 0 at the end.
    fn take_arrived(&mut self) -> io::Result<usize> {
        let taken = self.connection.read_tls(&mut Arrived(&self.socket))?;
        self.connection
            .process_new_packets()
            .map_err(|error| io::Error::new(ErrorKind::InvalidData, error))?;
        Ok(taken)
    }
}

impl<S: AsFd + Write> Read for EncryptedStream<S> {
    /// Reads as much of what has arrived as there is room for.
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if let Some(failure) = self.failure.take() {
            return Err(failure);
        }
        let mut filled = 0;
        loop {
            let read = match self.connection.reader().read(&mut buffer[filled..]) {
                // Without an announcement, which a peer that is killed cannot make.
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => Ok(0),
                Err(error) if error.kind() == ErrorKind::WouldBlock => match self.take_arrived() {
                    Ok(_) => continue,
                    Err(error) => Err(error),
                },
                read => read,
            };
            match read {
                Ok(read) if read > 0 && filled + read < buffer.len() => filled += read,
                Ok(read) => return Ok(filled + read),
                Err(error) if filled == 0 => return Err(error),
                Err(error) => {
                    self.failure = Some(error).filter(|error| error.kind() != ErrorKind::WouldBlock);
                    return Ok(filled);
                }
            }
        }
    }
}

impl<S: AsFd + Write> Write for EncryptedStream<S> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.connection.writer().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        while self.connection.wants_write() {
            match self.connection.write_tls(&mut self.socket) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                written => drop(written?),
            }
        }
        Ok(())
    }
}

/// What a blocking socket has at the moment.
struct Arrived<'a, S>(&'a S);

impl<S: AsFd> Read for Arrived<'_, S> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match recv(self.0.as_fd().as_raw_fd(), buffer, MsgFlags::MSG_DONTWAIT) {
                Err(Errno::EINTR) => {}
                received => return Ok(received?),
            }
        }
    }
}

/// Waits until a socket has something to read, or the time is over.
fn wait(socket: &impl AsFd, limit: Duration) -> io::Result<()> {
    let limit = PollTimeout::try_from(limit).unwrap_or(PollTimeout::MAX);
    match poll(&mut [PollFd::new(socket.as_fd(), PollFlags::POLLIN)], limit) {
        Ok(_) | Err(Errno::EINTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
