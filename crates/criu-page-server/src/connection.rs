// SPDX-License-Identifier: MIT OR Apache-2.0
//! The messages of one client.

use std::io;
use std::time::Duration;

use anyhow::{Context as _, bail};
use rewake_page_protocol::{HeaderLayout, MessageHeader, NARROW_LEN, PageMessage, WIDE_LEN};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::time::timeout;

use crate::endpoint::{Blocking, ByteStream, ConnectedClient};

/// Bytes of a client that are read ahead: most runs of pages of a sparse program are short.
const READ_AHEAD: usize = 64 << 10;
/// Time that a client has to close its connection after its last message was answered.
const END_LIMIT: Duration = Duration::from_secs(10);

/// A client that is served.
pub(crate) struct PageConnection {
    stream: BufReader<Box<dyn ByteStream>>,
    peer: String,
    /// Known from the first message on.
    layout: Option<HeaderLayout>,
    /// Dropped after the stream.
    _blocking: Option<Blocking>,
}

impl PageConnection {
    pub(crate) fn new(arrival: ConnectedClient) -> Self {
        let ConnectedClient { stream, peer, blocking } = arrival;
        let stream = BufReader::with_capacity(READ_AHEAD, stream);
        Self { stream, peer, layout: None, _blocking: blocking }
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
        let mut bytes = [0; WIDE_LEN];
        let first = self.layout.map_or(NARROW_LEN, HeaderLayout::len);
        match self.stream.read(&mut bytes[..first]).await.context("reading a message")? {
            0 => return Ok(None),
            some => self.fill(&mut bytes[some..first]).await?,
        }
        let Some(layout) = self.layout else {
            return self.first(bytes).await.map(Some);
        };
        Ok(Some(PageMessage::parse(&layout.decode(&bytes))?))
    }

    /// Reads the rest of the first message, of which `bytes` has what both layouts have.
    async fn first(&mut self, mut bytes: [u8; WIDE_LEN]) -> anyhow::Result<PageMessage> {
        let command = HeaderLayout::Narrow.decode(&bytes);
        if let Ok(close @ PageMessage::Close { .. }) = PageMessage::parse(&command) {
            // Its layout makes no difference, and is not known: the other 8 bytes may not exist.
            return Ok(close);
        }
        let (start, rest) = bytes.split_first_chunk_mut::<NARROW_LEN>().context("a header")?;
        let layout = HeaderLayout::detect(start);
        if layout == HeaderLayout::Wide {
            self.fill(rest).await?;
        }
        self.layout = Some(layout);
        Ok(PageMessage::parse(&layout.decode(&bytes))?)
    }

    /// Reads bytes that the client has announced.
    pub(crate) async fn fill(&mut self, bytes: &mut [u8]) -> anyhow::Result<()> {
        match self.stream.read_exact(bytes).await {
            Ok(_) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                bail!("the client closed its connection in the middle of a message")
            }
            Err(error) => Err(error).context("reading from the client"),
        }
    }

    /// Sends bytes.
    pub(crate) async fn send(&mut self, bytes: &[u8]) -> anyhow::Result<()> {
        self.stream.write_all(bytes).await.context("sending to the client")?;
        self.stream.flush().await.context("sending to the client")
    }

    /// Writes a header in the client's layout.
    pub(crate) fn header(&self, header: &MessageHeader) -> anyhow::Result<Vec<u8>> {
        Ok(self.layout().encode(header)?)
    }

    /// Waits until the client has closed its connection, which it does first: the port stays usable on this side.
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
            Ok(ended) => ended,
            Err(_) => {
                bail!("the client kept its connection for {} s after its last message", END_LIMIT.as_secs())
            }
        }
    }
}
