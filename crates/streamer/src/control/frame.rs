// SPDX-License-Identifier: MIT OR Apache-2.0
//! One message on a stream: its length as a little-endian `u32`, then its bytes. For any peer, a message is
//! no longer than [`MAX_MESSAGE`], and is received or sent within a limit.

use std::io;
use std::time::Duration;

use prost::Message;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::time::timeout;

use super::{MAX_MESSAGE, MESSAGE_LIMIT};

/// Why a message was not received or sent. The stream is useless after any of these.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// Nothing, or not all of it, within the limit.
    #[error("no whole message within {} s", .0.as_secs_f32())]
    Late(Duration),
    /// The length says more than [`MAX_MESSAGE`].
    #[error("a message of {0} bytes announced, {MAX_MESSAGE} expected at most: not a rewake control socket?")]
    TooLong(usize),
    /// The peer closed in the middle of a message.
    #[error("the peer closed the connection in the middle of a message")]
    Cut,
    /// The bytes are not such a message.
    #[error("not a control message: {0}")]
    Garbage(prost::DecodeError),
    /// The stream failed.
    #[error("control socket: {0}")]
    Io(io::Error),
}

// Each message ends with its cause, so the cause is no `source`: it would be printed twice.
impl From<prost::DecodeError> for FrameError {
    fn from(error: prost::DecodeError) -> Self {
        Self::Garbage(error)
    }
}

impl From<io::Error> for FrameError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// Sends one message.
///
/// # Errors
/// It is too long, or the peer does not take it within [`MESSAGE_LIMIT`].
pub async fn send(stream: &mut (impl AsyncWrite + Unpin), message: &impl Message) -> Result<(), FrameError> {
    let body = message.encode_to_vec();
    let len = u32::try_from(body.len()).ok().filter(|_| body.len() <= MAX_MESSAGE);
    let len = len.ok_or(FrameError::TooLong(body.len()))?;
    let mut bytes = Vec::with_capacity(4 + body.len());
    bytes.extend_from_slice(&len.to_le_bytes());
    bytes.extend_from_slice(&body);
    let sent = timeout(MESSAGE_LIMIT, stream.write_all(&bytes)).await;
    Ok(sent.map_err(|_| FrameError::Late(MESSAGE_LIMIT))??)
}

/// Receives one message; none when the peer closed the stream before one began.
///
/// # Errors
/// See [`FrameError`].
pub async fn receive<M: Message + Default>(
    stream: &mut (impl AsyncRead + Unpin),
    limit: Duration,
) -> Result<Option<M>, FrameError> {
    timeout(limit, receive_all(stream)).await.map_err(|_| FrameError::Late(limit))?
}

async fn receive_all<M: Message + Default>(
    stream: &mut (impl AsyncRead + Unpin),
) -> Result<Option<M>, FrameError> {
    let mut len = [0; 4];
    let first = stream.read(&mut len).await?;
    if first == 0 {
        return Ok(None);
    }
    stream.read_exact(&mut len[first..]).await.map_err(cut)?;
    let len = u32::from_le_bytes(len) as usize;
    if len > MAX_MESSAGE {
        return Err(FrameError::TooLong(len));
    }
    let mut body = vec![0; len];
    stream.read_exact(&mut body).await.map_err(cut)?;
    Ok(Some(M::decode(body.as_slice())?))
}

fn cut(error: io::Error) -> FrameError {
    if error.kind() == io::ErrorKind::UnexpectedEof { FrameError::Cut } else { error.into() }
}

#[cfg(test)]
mod tests {
    use super::super::proto::{Failure, Hello};
    use super::*;

    const SOON: Duration = Duration::from_millis(20);

    async fn received(bytes: &[u8]) -> Result<Option<Hello>, FrameError> {
        receive(&mut &*bytes, SOON).await
    }

    #[test]
    fn an_error_of_the_stream_is_printed_once() {
        let broken = || FrameError::from(io::Error::other("broken"));
        let printed = |error: anyhow::Error| format!("{error:#}");
        assert_eq!(printed(broken().into()), "control socket: broken");
        let client = super::super::client::ClientError::from(broken());
        assert_eq!(printed(client.into()), "talking to the daemon: control socket: broken");
    }

    #[tokio::test]
    async fn messages_arrive_as_they_were_sent_one_after_another() {
        let (mut one, mut two) = tokio::io::duplex(64);
        let sent = [super::super::hello(), Hello::default(), Hello { version: 7, program: "x".repeat(50) }];
        for message in &sent {
            send(&mut one, message).await.unwrap();
            assert_eq!(receive::<Hello>(&mut two, SOON).await.unwrap().as_ref(), Some(message));
        }
        drop(one);
        assert_eq!(receive::<Hello>(&mut two, SOON).await.unwrap(), None);
    }

    #[tokio::test]
    async fn a_message_is_received_byte_by_byte() {
        let (mut one, mut two) = tokio::io::duplex(1);
        let wanted = super::super::hello();
        let (sent, got) = tokio::join!(send(&mut one, &wanted), receive::<Hello>(&mut two, MESSAGE_LIMIT));
        sent.unwrap();
        assert_eq!(got.unwrap(), Some(wanted));
    }

    #[tokio::test]
    async fn a_length_beyond_the_cap_is_refused_before_any_memory_is_taken() {
        for len in [MAX_MESSAGE + 1, u32::MAX as usize] {
            let bytes = u32::try_from(len).unwrap().to_le_bytes();
            assert!(matches!(received(&bytes).await, Err(FrameError::TooLong(found)) if found == len));
        }
    }

    #[tokio::test]
    async fn a_message_longer_than_the_cap_is_not_sent() {
        let mut out = Vec::new();
        let long = Failure { reason: "x".repeat(MAX_MESSAGE), lasting: false };
        assert!(matches!(send(&mut out, &long).await, Err(FrameError::TooLong(_))));
        assert!(out.is_empty());
    }

    #[tokio::test]
    async fn a_message_cut_anywhere_is_an_error() {
        let mut whole = Vec::new();
        send(&mut whole, &super::super::hello()).await.unwrap();
        for len in 1..whole.len() {
            assert!(matches!(received(&whole[..len]).await, Err(FrameError::Cut)), "{len}");
        }
    }

    #[tokio::test]
    async fn bytes_that_are_no_message_are_an_error() {
        assert!(matches!(received(b"\x04\0\0\0\xff\xff\xff\xff").await, Err(FrameError::Garbage(_))));
    }

    #[tokio::test]
    async fn a_peer_that_says_nothing_or_half_is_given_up_after_the_limit() {
        let (mut one, mut two) = tokio::io::duplex(64);
        assert!(matches!(receive::<Hello>(&mut two, SOON).await, Err(FrameError::Late(_))));
        one.write_all(&[9, 0]).await.unwrap();
        assert!(matches!(receive::<Hello>(&mut two, SOON).await, Err(FrameError::Late(_))));
    }
}
