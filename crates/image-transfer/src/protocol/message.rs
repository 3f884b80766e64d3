// SPDX-License-Identifier: MIT OR Apache-2.0
//! One message on a stream: its length as a little-endian `u32`, then its bytes, then the data that it
//! announces.

use std::io::{self, IoSlice, Read, Write};

use prost::Message;

use crate::protocol::{MAX_MESSAGE, VERSION};

/// Why a message was not received or sent. The connection is useless after any of these.
#[derive(Debug, thiserror::Error)]
pub enum MessageError {
    /// The peer closed the connection in the middle of a message, or where one was due.
    #[error("the peer closed the connection")]
    Closed,
    /// The length says more than [`MAX_MESSAGE`].
    #[error(
        "a message of {0} bytes announced, {MAX_MESSAGE} expected at most: not a rewake image server or \
         client, or one with --tls?"
    )]
    TooLong(usize),
    /// The bytes are not such a message.
    #[error("not a message of the image protocol: {0}")]
    Garbage(prost::DecodeError),
    /// The peer sent something else.
    #[error("{expected} expected, {found} received")]
    Unexpected {
        /// What the protocol permits here.
        expected: &'static str,
        /// What was received.
        found: String,
    },
    /// A stored block is damaged: its store may have sent other bytes once.
    #[error("a stored block cannot be decompressed: {0}")]
    Damaged(String),
    /// The peer has another version of the protocol.
    #[error(
        "the peer ({program}) has version {version} of the image protocol, {VERSION} expected: use the same \
         release on both sides"
    )]
    Version {
        /// The peer's version.
        version: u32,
        /// Its program.
        program: String,
    },
    /// The server refuses.
    #[error("refused: {0}")]
    Refused(String),
    /// The connection failed.
    #[error("connection: {0}")]
    Io(io::Error),
}

// Each message ends with its cause, so the cause is no `source`: it would be printed twice.
impl From<prost::DecodeError> for MessageError {
    fn from(error: prost::DecodeError) -> Self {
        Self::Garbage(error)
    }
}

impl From<io::Error> for MessageError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// Sends a message and the data that it announces.
///
/// # Errors
/// The message is too long, or the stream fails.
pub fn send(stream: &mut impl Write, message: &impl Message, data: &[u8]) -> Result<(), MessageError> {
    let length = message.encoded_len();
    if length > MAX_MESSAGE {
        return Err(MessageError::TooLong(length));
    }
    let mut bytes = Vec::with_capacity(4 + length);
    bytes.extend_from_slice(&u32::try_from(length).unwrap_or(u32::MAX).to_le_bytes());
    message.encode_raw(&mut bytes);
    let mut parts = [IoSlice::new(&bytes), IoSlice::new(data)];
    let mut parts = &mut parts[..];
    while !parts.is_empty() {
        match stream.write_vectored(parts) {
            Ok(0) => return Err(MessageError::Closed),
            Ok(written) => IoSlice::advance_slices(&mut parts, written),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(closed(error)),
        }
        // Empty data is no part.
        while parts.first().is_some_and(|part| part.is_empty()) {
            parts = &mut std::mem::take(&mut parts)[1..];
        }
    }
    Ok(())
}

/// Receives a message; `None` when the peer closed the stream before one began.
///
/// # Errors
/// See [`MessageError`].
pub fn receive<M: Message + Default>(stream: &mut impl Read) -> Result<Option<M>, MessageError> {
    let mut length = [0; 4];
    let first = loop {
        match stream.read(&mut length) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            read => break read.map_err(closed)?,
        }
    };
    if first == 0 {
        return Ok(None);
    }
    stream.read_exact(&mut length[first..]).map_err(closed)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > MAX_MESSAGE {
        return Err(MessageError::TooLong(length));
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body).map_err(closed)?;
    Ok(Some(M::decode(body.as_slice())?))
}

/// Returns the error of a stream: a peer that has ended closes or resets the connection.
#[must_use]
pub fn closed(error: io::Error) -> MessageError {
    match error.kind() {
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
            MessageError::Closed
        }
        _ => error.into(),
    }
}

/// Replaces characters that would change the look of a log or terminal.
#[must_use]
pub fn printable(text: &str) -> String {
    text.chars().map(|char| if char.is_control() { ' ' } else { char }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{Data, Hello, Reply, Request, hello, reply, request};

    #[test]
    fn an_error_of_the_stream_is_printed_once() {
        let error = anyhow::Error::from(MessageError::from(io::Error::other("broken")));
        assert_eq!(format!("{error:#}"), "connection: broken");
    }

    /// A stream that takes and gives one byte at a time.
    #[derive(Default)]
    struct Slow(std::collections::VecDeque<u8>);

    impl Write for Slow {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.extend(bytes.first());
            Ok(bytes.len().min(1))
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Read for Slow {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            let Some(byte) = self.0.pop_front() else { return Ok(0) };
            into[0] = byte;
            Ok(1)
        }
    }

    #[test]
    fn messages_and_data_arrive_as_they_were_sent() {
        let mut stream = Slow::default();
        let data = Reply { what: Some(reply::What::Data(Data { length: 3, form: 0 })) };
        let ask = Request { what: Some(request::What::Hello(hello())) };
        send(&mut stream, &data, b"abc").unwrap();
        send(&mut stream, &ask, b"").unwrap();
        assert_eq!(receive::<Reply>(&mut stream).unwrap(), Some(data));
        let mut bytes = [0; 3];
        stream.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"abc");
        assert_eq!(receive::<Request>(&mut stream).unwrap(), Some(ask));
        assert_eq!(receive::<Request>(&mut stream).unwrap(), None);
    }

    #[test]
    fn a_message_cut_anywhere_is_an_error() {
        let mut whole = Vec::new();
        send(&mut whole, &hello(), b"").unwrap();
        for length in 1..whole.len() {
            let cut = receive::<Hello>(&mut &whole[..length]);
            assert!(matches!(cut, Err(MessageError::Closed)), "{length}: {cut:?}");
        }
    }

    #[test]
    fn a_length_beyond_the_limit_is_refused_before_memory_is_taken() {
        for length in [MAX_MESSAGE + 1, u32::MAX as usize] {
            let bytes = u32::try_from(length).unwrap().to_le_bytes();
            let refused = receive::<Hello>(&mut &bytes[..]);
            assert!(matches!(refused, Err(MessageError::TooLong(found)) if found == length), "{refused:?}");
        }
        let long = Hello { version: 1, program: "x".repeat(MAX_MESSAGE) };
        let mut out = Vec::new();
        assert!(matches!(send(&mut out, &long, b""), Err(MessageError::TooLong(_))));
        assert_eq!(out, [0; 0]);
    }

    #[test]
    fn bytes_that_are_no_message_are_an_error() {
        let garbage = receive::<Hello>(&mut &b"\x04\0\0\0\xff\xff\xff\xff"[..]);
        assert!(matches!(garbage, Err(MessageError::Garbage(_))), "{garbage:?}");
    }
}
