// SPDX-License-Identifier: MIT OR Apache-2.0
//! The messages of one client.

use std::io;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use rewake_criu_tls::{HandshakeError, TlsServer};
use rewake_page_protocol::{HeaderLayout, MessageHeader, NARROW_LEN, PageMessage, WIDE_LEN};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::time::timeout;

use crate::page_server::endpoint::{Blocking, ByteStream, ConnectedClient};

/// Bytes of a client that are read ahead: most runs of pages of a sparse program are short.
const READ_AHEAD: usize = 64 << 10;
/// Time that a client has for its first message. A `criu dump` connects before the plugin saves GPU memory,
/// which takes minutes.
const FIRST_MESSAGE_LIMIT: Duration = Duration::from_secs(30 * 60);
/// Time that a client has to close its connection after its last message was answered.
const END_LIMIT: Duration = Duration::from_secs(10);
/// The first bytes of a connection with TLS: a handshake record.
const TLS_START: [u8; 2] = [0x16, 0x03];

/// A client that is served.
pub(crate) struct PageConnection {
    stream: BufReader<Box<dyn ByteStream>>,
    peer: String,
    is_encrypted: bool,
    /// Known from the first message on.
    layout: Option<HeaderLayout>,
    /// [`FIRST_MESSAGE_LIMIT`], but for tests.
    first_limit: Duration,
    /// Dropped after the stream.
    _blocking: Option<Blocking>,
}

impl PageConnection {
    /// Takes a client, after a handshake if the server uses TLS.
    ///
    /// # Errors
    /// The handshake fails.
    pub(crate) async fn begin(arrival: ConnectedClient, tls: Option<&TlsServer>) -> anyhow::Result<Self> {
        let ConnectedClient { mut stream, peer, blocking } = arrival;
        if let Some(tls) = tls {
            stream = Box::new(tls.accept(stream).await?);
        }
        let stream = BufReader::with_capacity(READ_AHEAD, stream);
        let (is_encrypted, first_limit) = (tls.is_some(), FIRST_MESSAGE_LIMIT);
        Ok(Self { stream, peer, is_encrypted, layout: None, first_limit, _blocking: blocking })
    }

    /// Returns the client's name, for logs.
    pub(crate) fn peer(&self) -> &str {
        &self.peer
    }

    /// Returns the layout of the client's headers: that of its first message.
    pub(crate) fn layout(&self) -> HeaderLayout {
        self.layout.unwrap_or(HeaderLayout::Wide)
    }

    /// Reads the next message; none when the client has closed its connection before it.
    pub(crate) async fn next(&mut self) -> anyhow::Result<Option<PageMessage>> {
        let Some(layout) = self.layout else {
            let limit = self.first_limit;
            let first = timeout(limit, self.first()).await;
            return first
                .unwrap_or_else(|_| bail!("the client has sent nothing for {limit:?} after it connected"));
        };
        let mut bytes = [0; WIDE_LEN];
        if !self.begins(&mut bytes[..layout.len()]).await? {
            return Ok(None);
        }
        Ok(Some(PageMessage::parse(&layout.decode(&bytes))?))
    }

    /// Reads the beginning of a message; false when the client has closed its connection before it.
    async fn begins(&mut self, bytes: &mut [u8]) -> anyhow::Result<bool> {
        let read = match self.stream.read(bytes).await {
            // A client with TLS has to announce the end, and one that is killed does not.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => 0,
            read => read.map_err(explained).context("reading a message")?,
        };
        if read > 0 {
            self.fill(&mut bytes[read..]).await?;
        }
        Ok(read > 0)
    }

    /// Reads the first message, which shows the layout of all.
    async fn first(&mut self) -> anyhow::Result<Option<PageMessage>> {
        let mut bytes = [0; WIDE_LEN];
        if !self.begins(&mut bytes[..NARROW_LEN]).await? {
            ensure!(
                !self.is_encrypted,
                "the client ended its connection before its first message: it may not accept this server's \
                 certificate, and its log says why"
            );
            return Ok(None);
        }
        ensure!(
            !bytes.starts_with(&TLS_START),
            "the client uses TLS, and this server does not: add --tls to it"
        );
        let command = HeaderLayout::Narrow.decode(&bytes);
        if let Ok(close @ PageMessage::Close { .. }) = PageMessage::parse(&command) {
            // Its layout makes no difference, and is not known: the other 8 bytes may not exist.
            return Ok(Some(close));
        }
        let (start, rest) = bytes.split_first_chunk_mut::<NARROW_LEN>().context("a header")?;
        let layout = HeaderLayout::detect(start);
        if layout == HeaderLayout::Wide {
            self.fill(rest).await?;
        }
        self.layout = Some(layout);
        Ok(Some(PageMessage::parse(&layout.decode(&bytes))?))
    }

    /// Reads bytes that the client has announced.
    pub(crate) async fn fill(&mut self, bytes: &mut [u8]) -> anyhow::Result<()> {
        match self.stream.read_exact(bytes).await {
            Ok(_) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                bail!("the client closed its connection in the middle of a message")
            }
            Err(error) => Err(explained(error)).context("reading from the client"),
        }
    }

    /// Sends bytes.
    pub(crate) async fn send(&mut self, bytes: &[u8]) -> anyhow::Result<()> {
        self.stream.write_all(bytes).await.context("sending to the client")?;
        self.stream.flush().await.context("sending to the client")
    }

    /// Sends a header of `header` bytes and the first pages after it.
    pub(crate) async fn send_answer(&mut self, bytes: &[u8], header: usize) -> anyhow::Result<()> {
        if self.is_encrypted {
            // CRIU waits for more to arrive where one record has both: `rewake_criu_tls`.
            let (header, pages) = bytes.split_at(header);
            self.stream.write_all(header).await.context("sending to the client")?;
            self.send(pages).await
        } else {
            // The client wakes up once for both.
            self.send(bytes).await
        }
    }

    /// Writes a header in the client's layout.
    pub(crate) fn header(&self, header: &MessageHeader) -> anyhow::Result<Vec<u8>> {
        Ok(self.layout().encode(header)?)
    }

    /// Waits until the client has closed its connection, which it does first: the port stays usable on this
    /// side.
    pub(crate) async fn closed(&mut self) -> anyhow::Result<()> {
        // A closing message that was also the first one may have 8 bytes more.
        let mut allowed = if self.layout.is_none() { WIDE_LEN - NARROW_LEN } else { 0 };
        let end = async {
            loop {
                match self.stream.read(&mut [0; 1]).await {
                    // A reset also ends it: all was received and answered.
                    Ok(0) | Err(_) => return Ok(()),
                    Ok(_) if allowed > 0 => allowed -= 1,
                    Ok(_) => bail!("the client sent more after its last message"),
                }
            }
        };
        match timeout(END_LIMIT, end).await {
            Ok(ended) => ended?,
            Err(_) => {
                bail!("the client kept its connection for {} s after its last message", END_LIMIT.as_secs())
            }
        }
        if self.is_encrypted {
            // The client waits for this side's end of TLS. It may be gone.
            let _ = timeout(END_LIMIT, self.stream.shutdown()).await;
        }
        Ok(())
    }
}

/// Says what an error of TLS means: that the client refuses this server's certificate.
fn explained(error: io::Error) -> anyhow::Error {
    match HandshakeError::of(&error) {
        Some(explained) => explained.into(),
        None => error.into(),
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{DuplexStream, duplex};

    use super::*;

    const LIMIT: Duration = Duration::from_millis(50);

    async fn connected() -> (PageConnection, DuplexStream) {
        let (near, far) = duplex(4096);
        let arrival =
            ConnectedClient { stream: Box::new(near), peer: "of a test".to_owned(), blocking: None };
        (PageConnection::begin(arrival, None).await.unwrap(), far)
    }

    #[tokio::test]
    async fn a_client_that_sends_nothing_is_ended_after_a_limit() {
        let (mut connection, _client) = connected().await;
        assert_eq!(connection.first_limit, Duration::from_secs(1800));
        connection.first_limit = LIMIT;
        let error = timeout(LIMIT * 100, connection.next()).await.unwrap().unwrap_err();
        assert_eq!(error.to_string(), "the client has sent nothing for 50ms after it connected");
    }

    #[tokio::test]
    async fn a_client_may_be_silent_after_its_first_message() {
        let (mut connection, mut client) = connected().await;
        connection.first_limit = LIMIT;
        // A request for one page of task 7.
        let request =
            [&7u32.to_ne_bytes()[..], &[0; 4], &[1, 0x10000, 7].map(u64::to_ne_bytes).concat()].concat();
        client.write_all(&request).await.unwrap();
        assert!(matches!(connection.next().await.unwrap(), Some(PageMessage::Get { pid: 7, .. })));
        assert!(timeout(LIMIT * 4, connection.next()).await.is_err(), "it is still served");
    }
}
