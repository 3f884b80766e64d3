// SPDX-License-Identifier: MIT OR Apache-2.0
//! CRIU's page protocol on this host: requests of a lazy restore travel over the migration's connection.
//!
//! The client, `lazy-pages --page-server`, never sees that the connection is cut. Its requests wait, and are sent
//! again on the next connection.

use std::collections::VecDeque;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context as _, bail, ensure};
use rewake_page_protocol::{CLOSED, HeaderLayout, NARROW_LEN, PageMessage, PageRun, WIDE_LEN, answer_header};

use crate::frame::{Frame, FrameWriter};

/// Requests without an answer. All of them fit into a socket's buffer, so that sending them never waits.
const MAX_OUTSTANDING: usize = 1024;
const PAGE: u64 = 4096;

/// The relay of one restore.
#[derive(Debug)]
pub(crate) struct PageRelay {
    state: Mutex<RelayState>,
    /// For answers.
    client: UnixStream,
}

#[derive(Debug, Default)]
struct RelayState {
    link: Option<Arc<FrameWriter>>,
    outstanding: VecDeque<(u32, PageRun)>,
    layout: Option<HeaderLayout>,
}

impl PageRelay {
    pub(crate) fn new(client: UnixStream) -> Self {
        Self { state: Mutex::default(), client }
    }

    /// Uses a new connection, or none.
    pub(crate) fn connect(&self, link: Option<Arc<FrameWriter>>) {
        let mut state = self.lock();
        if let Some(link) = &link {
            for (pid, run) in &state.outstanding {
                // If the connection is cut again, they are sent on the next one.
                let _ = link.send(&Frame::PageRequest { pid: *pid, run: *run });
            }
        }
        state.link = link;
    }

    /// Takes requests until the client has all pages.
    ///
    /// # Errors
    /// The client ends without its last message, or violates the protocol.
    pub(crate) fn run(&self) -> anyhow::Result<()> {
        loop {
            match self.next()? {
                PageMessage::Get { pid, run } => self.request(pid, run)?,
                PageMessage::Close { .. } => {
                    (&self.client).write_all(&CLOSED).context("answering the lazy-pages client")?;
                    return Ok(());
                }
                other => bail!("the lazy-pages client sent {other:?}, expected a request for pages"),
            }
        }
    }

    fn request(&self, pid: u32, run: PageRun) -> anyhow::Result<()> {
        let mut state = self.lock();
        ensure!(
            state.outstanding.len() < MAX_OUTSTANDING,
            "the lazy-pages client has {MAX_OUTSTANDING} requests without an answer"
        );
        state.outstanding.push_back((pid, run));
        if let Some(link) = &state.link {
            // As above.
            let _ = link.send(&Frame::PageRequest { pid, run });
        }
        Ok(())
    }

    /// Gives pages to the client.
    ///
    /// # Errors
    /// They are not those of the oldest request, or the client has ended.
    pub(crate) fn answer(&self, pid: u32, vaddr: u64, bytes: &[u8]) -> anyhow::Result<()> {
        let mut state = self.lock();
        let (wanted, run) = *state.outstanding.front().context("the source sent pages without a request")?;
        let pages = bytes.len() as u64 / PAGE;
        ensure!(
            (wanted, run.vaddr()) == (pid, vaddr) && pages <= run.pages(),
            "the source sent {pages} pages at {vaddr:#x} of task {pid}, expected {} at {:#x} of task {wanted}",
            run.pages(),
            run.vaddr()
        );
        state.outstanding.pop_front();
        let layout = state.layout.context("the lazy-pages client's layout")?;
        let header = layout.encode(&answer_header(pid, PageRun::new(vaddr, pages)?))?;
        let mut client = &self.client;
        client.write_all(&header).and_then(|()| client.write_all(bytes)).context("giving pages to the client")
    }

    fn next(&self) -> anyhow::Result<PageMessage> {
        let mut bytes = [0; WIDE_LEN];
        let known = self.lock().layout;
        let first = known.map_or(NARROW_LEN, HeaderLayout::len);
        (&self.client)
            .read_exact(&mut bytes[..first])
            .context("the lazy-pages client ended before its last message")?;
        if let Some(layout) = known {
            return Ok(PageMessage::parse(&layout.decode(&bytes))?);
        }
        if let Ok(close @ PageMessage::Close { .. }) =
            PageMessage::parse(&HeaderLayout::Narrow.decode(&bytes))
        {
            return Ok(close);
        }
        let (start, rest) = bytes.split_first_chunk_mut::<NARROW_LEN>().context("a header")?;
        let layout = HeaderLayout::detect(start);
        if layout == HeaderLayout::Wide {
            (&self.client).read_exact(rest).context("reading a request")?;
        }
        self.lock().layout = Some(layout);
        Ok(PageMessage::parse(&layout.decode(&bytes))?)
    }

    fn lock(&self) -> MutexGuard<'_, RelayState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
