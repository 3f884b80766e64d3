// SPDX-License-Identifier: MIT OR Apache-2.0
//! A connection to an image server, whose replies are taken as they arrive: whole blocks of them, before the rest of a
//! reply has come. Requests are sent before the server has said hello. A reply that is not the next one is an error.

use std::io::ErrorKind;
use std::rc::Rc;

use anyhow::{Context as _, bail, ensure};
use rewake_criu_images::{Digest, PAGE};
use rewake_image_io::BLOCK;
use rewake_image_protocol::message::{MessageError, receive, send};
use rewake_image_protocol::reply::What as Reply;
use rewake_image_protocol::request::What as Request;
use rewake_image_protocol::{Data, MAX_MESSAGE, MAX_READ, Open, Opened, Read, VERSION, hello};

use crate::plan::SparseFile;
use crate::queue::FlightPages;
use crate::stream::PageStream;
use crate::wire::{PeerEnded, explained};

/// Bytes of the length before a message.
const LENGTH: usize = 4;
/// Bytes of received replies: more than the longest message, or a block.
const BUFFER: usize = 256 << 10;
const _: () = assert!(BUFFER >= LENGTH + MAX_MESSAGE && BUFFER >= BLOCK);

/// The reply that is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DueReply {
    Hello,
    Opened,
    Data,
    /// The rest of the data: so many bytes.
    Rest(u64),
}

/// The protocol on a connection.
#[derive(Debug)]
pub(crate) struct ImageWire {
    pub(crate) stream: PageStream,
    id: Digest,
    files: Rc<[SparseFile]>,
    due: DueReply,
    buffer: Box<[u8]>,
    /// Bytes before `start` are used, those before `end` are received.
    start: usize,
    end: usize,
}

impl ImageWire {
    /// Opens the image `name`, which must have this id.
    pub(crate) fn open(
        mut stream: PageStream,
        name: &str,
        id: Digest,
        files: Rc<[SparseFile]>,
    ) -> anyhow::Result<Self> {
        let open = Open { image: name.to_owned(), ancestor: 0 };
        let messages = [Request::Hello(hello()), Request::Open(open)].map(|what| encoded(what));
        let messages = messages.into_iter().collect::<Result<Vec<_>, _>>()?;
        stream.send(&messages).map_err(explained).context("opening the image")?;
        let buffer = vec![0; BUFFER].into_boxed_slice();
        Ok(Self { stream, id, files, due: DueReply::Hello, buffer, start: 0, end: 0 })
    }

    /// Returns the file of a page, the offset there, and the bytes of these pages: fewer at the end of the file.
    fn range(&self, flight: &FlightPages) -> anyhow::Result<(u32, u64, u64)> {
        let at = self.files.partition_point(|file| file.first + file.pages() <= flight.first);
        let file = self.files.get(at).context("pages of no file")?;
        let offset = (flight.first - file.first) * PAGE;
        let length = (flight.pages * PAGE).min(file.len.saturating_sub(offset));
        Ok((file.number, offset, length))
    }

    /// Sends requests together.
    pub(crate) fn request(&mut self, flights: &[FlightPages]) -> anyhow::Result<()> {
        let read = |flight: &FlightPages| -> anyhow::Result<Vec<u8>> {
            let (file, offset, length) = self.range(flight)?;
            let length = u32::try_from(length).ok().filter(|length| (1..=MAX_READ).contains(length));
            let length = length.with_context(|| format!("{flight:?}: not 1 to {MAX_READ} bytes"))?;
            Ok(encoded(Request::Read(Read { file, offset, length }))?)
        };
        let messages = flights.iter().map(read).collect::<anyhow::Result<Vec<_>>>()?;
        self.stream.send(&messages).map_err(explained).context("sending requests")
    }

    /// Receives what the stream has now.
    ///
    /// # Errors
    /// The connection has ended.
    pub(crate) fn receive(&mut self) -> anyhow::Result<()> {
        if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let count = loop {
            match self.stream.receive(&mut self.buffer[self.end..]) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                received => break received.map_err(explained).context("receiving a reply")?,
            }
        };
        ensure!(count > 0, PeerEnded);
        self.end += count;
        Ok(())
    }

    /// Returns the next whole blocks of the reply to the oldest request, and their number of pages; none if the next
    /// block has not been received. `expected` is what is left of that request.
    ///
    /// # Errors
    /// It is no reply to that request, or the server has another image by now.
    pub(crate) fn answer(&mut self, expected: &FlightPages) -> anyhow::Result<Option<(u64, &[u8])>> {
        let left = loop {
            if let DueReply::Rest(left) = self.due {
                break left;
            }
            let Some(reply) = self.reply()? else { return Ok(None) };
            self.due = self.next_due(reply, expected)?;
        };
        let received = self.end - self.start;
        let whole = usize::try_from(left).ok().filter(|left| *left <= received);
        let bytes = whole.unwrap_or(received / BLOCK * BLOCK);
        let pages = (bytes as u64).div_ceil(PAGE);
        Ok((bytes > 0).then(|| (pages, &self.buffer[self.start..self.start + bytes])))
    }

    /// Checks a reply. Returns what is due after it.
    fn next_due(&self, reply: Reply, expected: &FlightPages) -> anyhow::Result<DueReply> {
        Ok(match (self.due, reply) {
            (_, Reply::Refused(reason)) => {
                let reason: String =
                    reason.chars().map(|char| if char.is_control() { ' ' } else { char }).collect();
                bail!(MessageError::Refused(reason))
            }
            (DueReply::Hello, Reply::Hello(theirs)) => {
                let (version, program) = (theirs.version, theirs.program);
                ensure!(version == VERSION, MessageError::Version { version, program });
                DueReply::Opened
            }
            (DueReply::Opened, Reply::Opened(Opened { image_id, .. })) => {
                ensure!(
                    image_id == self.id.0,
                    "the server has another image of this name by now: none of its bytes is used"
                );
                DueReply::Data
            }
            (DueReply::Data, Reply::Data(Data { length })) => {
                let (file, offset, wanted) = self.range(expected)?;
                ensure!(
                    u64::from(length) == wanted,
                    "{length} bytes for a read of {wanted} from offset {offset} of file {file}"
                );
                DueReply::Rest(wanted)
            }
            (due, _) => bail!("a reply that is not {due:?}: is it a `rewake export`?"),
        })
    }

    /// Takes a message, if all of it was received.
    fn reply(&mut self) -> anyhow::Result<Option<Reply>> {
        let received = &self.buffer[self.start..self.end];
        let Some(length) = received.first_chunk().map(|length| u32::from_le_bytes(*length) as usize) else {
            return Ok(None);
        };
        if length <= MAX_MESSAGE && received.len() < LENGTH + length {
            return Ok(None);
        }
        let mut rest = received;
        let reply: rewake_image_protocol::Reply = receive(&mut rest)?.ok_or(MessageError::Closed)?;
        self.start = self.end - rest.len();
        Ok(Some(reply.what.context("an empty reply")?))
    }

    /// Drops what [`ImageWire::answer`] returned.
    pub(crate) fn used(&mut self, pages: u64) {
        let DueReply::Rest(left) = self.due else { return };
        let bytes = (pages * PAGE).min(left);
        self.start = self.end.min(self.start + usize::try_from(bytes).unwrap_or(usize::MAX / 2));
        self.due = if bytes == left { DueReply::Data } else { DueReply::Rest(left - bytes) };
    }

    /// Whether bytes were received that are not used.
    pub(crate) fn has_more(&self) -> bool {
        self.start < self.end
    }
}

fn encoded(what: Request) -> Result<Vec<u8>, MessageError> {
    let mut bytes = Vec::new();
    send(&mut bytes, &rewake_image_protocol::Request { what: Some(what) }, &[])?;
    Ok(bytes)
}
