// SPDX-License-Identifier: MIT OR Apache-2.0
//! Requests and answers on a connection. An answer that is not the next one, or has other pages than its
//! request, is an error: no byte of it is used.

use std::rc::Rc;

use anyhow::{Context as _, ensure};
use rewake_criu_images::PAGE;
use rewake_page_protocol::{CLOSED, HeaderLayout, PageMessage, PageRun, WIDE_LEN, answer_header};

use crate::ended::explained;
use crate::plan::FetchExtent;
use crate::queue::{FlightPages, MAX_PAGES};
use crate::received::ReceivedBytes;
use crate::stream::PageStream;

/// Bytes of the longest answer.
const BUFFER: usize = WIDE_LEN + (256 << 10);
const _: () = assert!(MAX_PAGES * PAGE == 256 << 10);

/// The protocol on a connection.
#[derive(Debug)]
pub(crate) struct PageWire {
    pub(crate) stream: PageStream,
    layout: HeaderLayout,
    extents: Rc<[FetchExtent]>,
    received: ReceivedBytes,
}

impl PageWire {
    pub(crate) fn new(stream: PageStream, layout: HeaderLayout, extents: Rc<[FetchExtent]>) -> Self {
        Self { stream, layout, extents, received: ReceivedBytes::new(BUFFER) }
    }

    /// Returns the task of pages in flight, and where they are in its memory.
    fn run(&self, flight: &FlightPages) -> anyhow::Result<(u32, PageRun)> {
        let at = self.extents.partition_point(|extent| extent.first + extent.pages <= flight.first);
        let extent = self.extents.get(at).context("pages of no extent")?;
        let vaddr = extent.vaddr + (flight.first - extent.first) * PAGE;
        Ok((extent.pid, PageRun::new(vaddr, flight.pages)?))
    }

    /// Sends requests together.
    pub(crate) fn request(&mut self, flights: &[FlightPages]) -> anyhow::Result<()> {
        let encode = |flight: &FlightPages| -> anyhow::Result<Vec<u8>> {
            let (pid, run) = self.run(flight)?;
            Ok(self.layout.encode(&PageMessage::Get { pid, run }.header())?)
        };
        let messages = flights.iter().map(encode).collect::<Result<Vec<_>, _>>()?;
        self.stream.send(&messages).map_err(explained).context("sending requests")
    }

    /// Sends the last message. With `forced` the connection stays open: others use it afterwards.
    pub(crate) fn close(&mut self, forced: bool) -> anyhow::Result<()> {
        let bytes = self.layout.encode(&PageMessage::Close { forced }.header())?;
        self.stream.send(&[bytes]).map_err(explained).context("sending the last message")
    }

    /// Receives what the stream has now.
    ///
    /// # Errors
    /// The connection has ended.
    pub(crate) fn receive(&mut self) -> anyhow::Result<()> {
        self.received.receive(&mut self.stream, "receiving an answer")
    }

    /// Returns the number of pages of the next answer, and their bytes, if all of it was received. `expected`
    /// is the request.
    ///
    /// # Errors
    /// It is no answer to that request.
    pub(crate) fn answer(&self, expected: &FlightPages) -> anyhow::Result<Option<(u64, &[u8])>> {
        let received = self.received.bytes();
        let Some((header, rest)) = received.split_at_checked(self.layout.len()) else { return Ok(None) };
        let mut bytes = [0; WIDE_LEN];
        bytes[..header.len()].copy_from_slice(header);
        let header = self.layout.decode(&bytes);
        let (pid, run) = self.run(expected)?;
        let (vaddr, wanted) = (run.vaddr(), run.pages());
        let pages = header.pages;
        let right = PageRun::new(vaddr, pages).is_ok_and(|run| {
            // CRIU may not set the padding. The other fields must equal the request's.
            pages <= wanted && header == answer_header(pid, run)
        });
        ensure!(
            right,
            "unexpected answer: {pages} pages at {:#x} of task {} (command {:#x}), requested 1 to {wanted} \
             pages at {vaddr:#x} of task {}: no page of this answer is used. Is the peer a CRIU page server \
             of the version that made the image?",
            header.vaddr,
            header.id,
            header.command,
            pid
        );
        let len = usize::try_from(pages * PAGE)?;
        Ok(rest.get(..len).map(|bytes| (pages, bytes)))
    }

    /// Drops the answer that [`PageWire::answer`] returned.
    pub(crate) fn used(&mut self, pages: u64) {
        let len = self.layout.len() + usize::try_from(pages * PAGE).unwrap_or(usize::MAX);
        self.received.used(len);
    }

    /// Whether bytes were received that are not used.
    pub(crate) fn has_more(&self) -> bool {
        !self.received.bytes().is_empty()
    }

    /// Returns whether the answer to the last message was received.
    ///
    /// # Errors
    /// It is another answer.
    pub(crate) fn is_closed(&self) -> anyhow::Result<bool> {
        let received = self.received.bytes();
        ensure!(
            CLOSED.starts_with(received) || received.starts_with(&CLOSED),
            "{received:?} in answer to the last message: expected {CLOSED:?}"
        );
        Ok(received.len() >= CLOSED.len())
    }
}
