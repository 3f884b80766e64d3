// SPDX-License-Identifier: MIT OR Apache-2.0
//! A connection to an image server, whose replies are taken as they arrive: whole blocks of them, before the
//! rest of a reply has come. Requests are sent before the server has said hello. A reply that is not the next
//! one is an error.

use std::ops::Range;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::rc::Rc;

use anyhow::{Context as _, bail, ensure};
use rewake_criu_images::{Digest, PAGE};
use rewake_image_io::BLOCK;
use rewake_image_transfer::protocol::client::form_of;
use rewake_image_transfer::protocol::compressed::{self, COMPRESSED_BLOCK, STORED_LENGTH};
use rewake_image_transfer::protocol::message::{MessageError, printable, receive, send};
use rewake_image_transfer::protocol::reply::What as Reply;
use rewake_image_transfer::protocol::request::What as Request;
use rewake_image_transfer::protocol::stored_parts::{self, PartReader};
use rewake_image_transfer::protocol::{
    Data, DataForm, MAX_MESSAGE, MAX_READ, Open, Opened, Read, VERSION, hello,
};

use crate::ended::explained;
use crate::plan::SparseFile;
use crate::queue::FlightPages;
use crate::received::ReceivedBytes;
use crate::stream::PageStream;

/// Bytes of the length before a message.
const LENGTH: usize = 4;
/// Bytes of received replies: more than the longest message, or a block.
const BUFFER: usize = 256 << 10;
const _: () = assert!(BUFFER >= LENGTH + MAX_MESSAGE && BUFFER >= STORED_LENGTH + BLOCK);
const _: () = assert!(BUFFER >= stored_parts::MAX_PART_BYTES);
// Blocks are checked, so whole ones are written: a compressed one is such a block.
const _: () = assert!(COMPRESSED_BLOCK == BLOCK && stored_parts::BLOCK == BLOCK);

/// The reply that is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DueReply {
    /// Whether an encrypted connection is admitted: the length of the reason why not, and the reason.
    Admission,
    Hello,
    Opened,
    Data,
    /// The rest of the data, in bytes.
    Rest(u64),
    /// The same, where the data travels compressed.
    Compressed(u64),
    /// The same, where it travels as a store has it.
    Stored(u64),
}

/// The protocol on a connection.
#[derive(Debug)]
pub(crate) struct ImageWire {
    pub(crate) stream: PageStream,
    id: Digest,
    files: Rc<[SparseFile]>,
    due: DueReply,
    received: ReceivedBytes,
    /// A block that travelled compressed, or in parts.
    block: Box<[u8]>,
    parts: PartReader,
    /// How many received bytes are the parts of that block, if it was restored from such.
    restored: Option<usize>,
}

impl ImageWire {
    /// Opens the image `name`, which must have this id.
    pub(crate) fn open(
        mut stream: PageStream,
        name: &Path,
        id: Digest,
        files: Rc<[SparseFile]>,
    ) -> anyhow::Result<Self> {
        let image = name.as_os_str().as_bytes().to_vec();
        let open = Open { image, ancestor: 0, takes_stored: true };
        let messages = [Request::Hello(hello()), Request::Open(open)].map(encoded);
        let messages = messages.into_iter().collect::<Result<Vec<_>, _>>()?;
        stream.send(&messages).map_err(explained).context("opening the image")?;
        let due = if stream.is_encrypted() { DueReply::Admission } else { DueReply::Hello };
        let (block, received) = (vec![0; COMPRESSED_BLOCK].into(), ReceivedBytes::new(BUFFER));
        let parts = PartReader::new().context("zstd")?;
        Ok(Self { stream, id, files, due, received, block, parts, restored: None })
    }

    /// Returns the file of a page, the offset there, and the bytes of these pages: fewer at the end of the
    /// file.
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
        self.received.receive(&mut self.stream, "receiving a reply")
    }

    /// Returns the next whole blocks of the reply to the oldest request, and their number of pages, or `None`
    /// if the next block has not been received. `expected` is what is left of that request.
    ///
    /// # Errors
    /// It is no reply to that request, or the server has another image by now.
    pub(crate) fn answer(&mut self, expected: &FlightPages) -> anyhow::Result<Option<(u64, &[u8])>> {
        if !self.is_opened()? {
            return Ok(None);
        }
        if self.due == DueReply::Data {
            let Some(reply) = self.reply()? else { return Ok(None) };
            self.due = self.next_due(reply, Some(expected))?;
        }
        if let DueReply::Compressed(left) = self.due {
            return self.compressed(left);
        }
        if let DueReply::Stored(left) = self.due {
            return self.stored(left, expected);
        }
        let DueReply::Rest(left) = self.due else { return Ok(None) };
        let received = self.received.bytes().len();
        let whole = usize::try_from(left).ok().filter(|left| *left <= received);
        let bytes = whole.unwrap_or(received / BLOCK * BLOCK);
        let pages = (bytes as u64).div_ceil(PAGE);
        Ok((bytes > 0).then(|| (pages, &self.received.bytes()[..bytes])))
    }

    /// Returns the next block, of `left` bytes that are due, if all its stored bytes were received.
    fn compressed(&mut self, left: u64) -> anyhow::Result<Option<(u64, &[u8])>> {
        let Some((stored, length)) = self.stored_block(left)? else { return Ok(None) };
        let block = &mut self.block[..length];
        compressed::restore(&self.received.bytes()[stored], block)?;
        Ok(Some(((length as u64).div_ceil(PAGE), block)))
    }

    /// The same of a block that travels in parts.
    fn stored(&mut self, left: u64, expected: &FlightPages) -> anyhow::Result<Option<(u64, &[u8])>> {
        let (file, offset, _) = self.range(expected)?;
        let block = &mut self.block[..next_block(left)];
        if self.restored.is_none() {
            let place = || format!("offset {offset} of file {file} (`rewake verify` of its URL says more)");
            self.restored = self.parts.block(self.received.bytes(), block).with_context(place)?;
        }
        Ok(self.restored.map(|_| ((block.len() as u64).div_ceil(PAGE), &*block)))
    }

    /// Returns where the stored bytes of the next block are in what was received, and the block's length.
    fn stored_block(&self, left: u64) -> anyhow::Result<Option<(Range<usize>, usize)>> {
        let received = self.received.bytes();
        let Some(count) = received.first_chunk() else { return Ok(None) };
        let length = next_block(left);
        let end = STORED_LENGTH + compressed::stored_length(*count, length)?;
        Ok((received.len() >= end).then_some((STORED_LENGTH..end, length)))
    }

    /// Takes the replies before the first data. Returns false until the server has opened the image.
    ///
    /// # Errors
    /// It refuses, or has another image.
    pub(crate) fn is_opened(&mut self) -> anyhow::Result<bool> {
        loop {
            match self.due {
                DueReply::Data | DueReply::Rest(_) | DueReply::Compressed(_) | DueReply::Stored(_) => {
                    return Ok(true);
                }
                DueReply::Admission => {
                    if !self.is_admitted()? {
                        return Ok(false);
                    }
                    self.due = DueReply::Hello;
                }
                DueReply::Hello | DueReply::Opened => {
                    let Some(reply) = self.reply()? else { return Ok(false) };
                    self.due = self.next_due(reply, None)?;
                }
            }
        }
    }

    /// Checks a reply. Returns what is due after it. `expected`: the read that data answers.
    fn next_due(&self, reply: Reply, expected: Option<&FlightPages>) -> anyhow::Result<DueReply> {
        Ok(match (self.due, reply) {
            (_, Reply::Refused(reason)) => bail!(MessageError::Refused(printable(&reason))),
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
            (DueReply::Data, Reply::Data(data)) => {
                let Data { length, .. } = data;
                let (file, offset, wanted) = self.range(expected.context("data that answers no read")?)?;
                ensure!(
                    u64::from(length) == wanted,
                    "{length} bytes for a read of {wanted} from offset {offset} of file {file}"
                );
                match form_of(&data)? {
                    DataForm::Plain => DueReply::Rest(wanted),
                    DataForm::Lz4 => DueReply::Compressed(wanted),
                    DataForm::Stored => DueReply::Stored(wanted),
                }
            }
            (due, _) => bail!("a reply that is not {due:?}: is it a `rewake export`?"),
        })
    }

    /// Takes the server's answer to this side's certificate. Returns false if not all of it was received.
    ///
    /// # Errors
    /// It is a refusal.
    fn is_admitted(&mut self) -> anyhow::Result<bool> {
        let received = self.received.bytes();
        let Some((length, rest)) = received.split_first_chunk() else { return Ok(false) };
        let length = usize::from(u16::from_le_bytes(*length));
        let Some(reason) = rest.get(..length) else { return Ok(false) };
        let reason = printable(&String::from_utf8_lossy(reason));
        ensure!(length == 0, "refused by the server: {reason}");
        self.received.used(size_of::<u16>());
        Ok(true)
    }

    /// Takes a message, if all of it was received.
    fn reply(&mut self) -> anyhow::Result<Option<Reply>> {
        let received = self.received.bytes();
        let Some(length) = received.first_chunk().map(|length| u32::from_le_bytes(*length) as usize) else {
            return Ok(None);
        };
        if length <= MAX_MESSAGE && received.len() < LENGTH + length {
            return Ok(None);
        }
        let mut rest = received;
        let reply: rewake_image_transfer::protocol::Reply =
            receive(&mut rest)?.ok_or(MessageError::Closed)?;
        let used = received.len() - rest.len();
        self.received.used(used);
        Ok(Some(reply.what.context("an empty reply")?))
    }

    /// Drops what [`ImageWire::answer`] returned.
    pub(crate) fn used(&mut self, pages: u64) {
        match self.due {
            DueReply::Rest(left) => {
                let bytes = (pages * PAGE).min(left);
                self.received.used(usize::try_from(bytes).unwrap_or(usize::MAX));
                self.due = if bytes == left { DueReply::Data } else { DueReply::Rest(left - bytes) };
            }
            DueReply::Compressed(left) => {
                let Ok(Some((stored, length))) = self.stored_block(left) else { return };
                self.received.used(stored.end);
                let left = left - length as u64;
                self.due = if left == 0 { DueReply::Data } else { DueReply::Compressed(left) };
            }
            DueReply::Stored(left) => {
                let Some(used) = self.restored.take() else { return };
                self.received.used(used);
                let left = left - next_block(left) as u64;
                self.due = if left == 0 { DueReply::Data } else { DueReply::Stored(left) };
            }
            DueReply::Admission | DueReply::Hello | DueReply::Opened | DueReply::Data => {}
        }
    }

    /// Whether bytes were received that are not used.
    pub(crate) fn has_more(&self) -> bool {
        !self.received.bytes().is_empty()
    }
}

/// The length of the next block when `left` bytes of the reply are still to come.
fn next_block(left: u64) -> usize {
    usize::try_from(left).unwrap_or(usize::MAX).min(COMPRESSED_BLOCK)
}

fn encoded(what: Request) -> Result<Vec<u8>, MessageError> {
    let mut bytes = Vec::new();
    send(&mut bytes, &rewake_image_transfer::protocol::Request { what: Some(what) }, &[])?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::net::UnixStream;
    use std::time::Instant;

    use rewake_image_io::Class;
    use rewake_image_transfer::protocol::reply_of;
    use rewake_image_transfer::protocol::stored_parts::PartHeader;

    use super::*;
    use crate::ended::PeerEnded;
    use crate::peer::PeerSocket;
    use crate::readers::ReaderSet;

    const ID: Digest = Digest([9; 32]);
    /// A file of three blocks and 100 bytes, after one of a page.
    const FILES: [SparseFile; 2] = [
        SparseFile { first: 0, len: PAGE, number: 5 },
        SparseFile { first: 16, len: 3 * BLOCK as u64 + 100, number: 7 },
    ];

    fn flight(first: u64, pages: u64) -> FlightPages {
        let (class, readers) = (Class::Demand, ReaderSet::default());
        FlightPages { first, pages, class, large: false, elsewhere: false, readers, sent: Instant::now() }
    }

    fn wire() -> (ImageWire, UnixStream) {
        let (ours, its) = UnixStream::pair().unwrap();
        let stream = PageStream::Plain(PeerSocket::Unix(ours));
        (ImageWire::open(stream, Path::new("web/1"), ID, FILES.as_slice().into()).unwrap(), its)
    }

    fn opened(id: Digest) -> Reply {
        Reply::Opened(Opened { image_id: id.0.to_vec(), manifest_length: 1, ..Opened::default() })
    }

    fn say(server: &mut UnixStream, replies: &[Reply]) {
        for reply in replies {
            send(server, &reply_of(reply.clone()), &[]).unwrap();
        }
    }

    /// What the client makes of replies to a read of the second file.
    fn answer_to(replies: &[Reply]) -> anyhow::Result<Option<u64>> {
        let (mut wire, mut server) = wire();
        say(&mut server, replies);
        wire.receive().unwrap();
        Ok(wire.answer(&flight(16, 49))?.map(|(pages, _)| pages))
    }

    #[test]
    fn requests_are_those_of_the_files_in_the_manifest() {
        let (mut wire, mut server) = wire();
        wire.request(&[flight(0, 1), flight(32, 33)]).unwrap();
        let mut next = || {
            receive::<rewake_image_transfer::protocol::Request>(&mut server).unwrap().unwrap().what.unwrap()
        };
        assert_eq!(next(), Request::Hello(hello()));
        assert_eq!(next(), Request::Open(Open { image: "web/1".into(), ancestor: 0, takes_stored: true }));
        assert_eq!(next(), Request::Read(Read { file: 5, offset: 0, length: 4096 }));
        assert_eq!(next(), Request::Read(Read { file: 7, offset: 65536, length: 2 * 65536 + 100 }));
    }

    #[test]
    fn whole_blocks_are_taken_before_the_rest_has_come() {
        const LENGTH: usize = 3 * BLOCK + 100;
        let (mut wire, mut server) = wire();
        let length = u32::try_from(LENGTH).unwrap();
        say(
            &mut server,
            &[Reply::Hello(hello()), opened(ID), Reply::Data(Data { length, form: DataForm::Plain.into() })],
        );
        let bytes: Vec<u8> = (0..LENGTH).map(|at| u8::try_from(at % 251).unwrap()).collect();
        let (mut done, mut at, mut left) = (0, 0, flight(16, 49));
        for (sent, expected) in [(BLOCK + 5000, BLOCK), (LENGTH, LENGTH)] {
            let (mut server, part) = (server.try_clone().unwrap(), bytes[done..sent].to_vec());
            let writer = std::thread::spawn(move || server.write_all(&part).unwrap());
            done = sent;
            while at < expected {
                wire.receive().unwrap();
                while let Some((pages, found)) = wire.answer(&left).unwrap() {
                    assert!(found == &bytes[at..at + found.len()]);
                    at += found.len();
                    (left.first, left.pages) = (left.first + pages, left.pages - pages);
                    wire.used(pages);
                    if left.pages == 0 {
                        break;
                    }
                }
            }
            writer.join().unwrap();
            assert_eq!(at, expected);
        }
        assert_eq!((left.pages, wire.has_more(), wire.due), (0, false, DueReply::Data));
    }

    #[test]
    fn compressed_blocks_are_restored_one_by_one() {
        const LENGTH: usize = 3 * BLOCK + 100;
        let bytes: Vec<u8> = (0..LENGTH).map(|at| u8::try_from(at % 251).unwrap()).collect();
        let mut stored = Vec::new();
        bytes.chunks(BLOCK).for_each(|block| compressed::store(block, &mut stored));
        assert!(stored.len() < BLOCK, "each block has a part of it only");
        let data = Reply::Data(Data { length: u32::try_from(LENGTH).unwrap(), form: DataForm::Lz4.into() });
        let (mut wire, mut server) = wire();
        say(&mut server, &[Reply::Hello(hello()), opened(ID), data.clone()]);
        let (mut found, mut left) = (Vec::new(), flight(16, 49));
        for byte in &stored {
            server.write_all(&[*byte]).unwrap();
            wire.receive().unwrap();
            let Some((pages, block)) = wire.answer(&left).unwrap() else { continue };
            found.extend_from_slice(block);
            (left.first, left.pages) = (left.first + pages, left.pages - pages);
            wire.used(pages);
        }
        assert!(found == bytes);
        assert_eq!((left.pages, wire.has_more(), wire.due), (0, false, DueReply::Data));
        for wrong in [0, 65537u32] {
            say(&mut server, std::slice::from_ref(&data));
            server.write_all(&wrong.to_le_bytes()).unwrap();
            wire.receive().unwrap();
            let error = wire.answer(&flight(16, 49)).unwrap_err().to_string();
            assert!(error.contains(&format!("{wrong} for 65536 bytes")), "{error}");
            (wire.due, wire.received) = (DueReply::Data, ReceivedBytes::new(BUFFER));
        }
    }

    #[test]
    fn blocks_are_restored_of_stored_parts() {
        const LENGTH: usize = BLOCK + 100;
        let bytes: Vec<u8> = (0..LENGTH).map(|at| u8::try_from(at % 251).unwrap()).collect();
        // A stored block that ends in the second block of the read.
        let stored = zstd::bulk::compress(&bytes[1000..], 1).unwrap();
        let frame = LENGTH - 1000;
        let (mut parts, header) =
            (Vec::new(), |stored, frame, first, bytes| PartHeader { stored, frame, first, bytes });
        header(1000, 0, 0, 1000).write(&mut parts);
        parts.extend(&bytes[..1000]);
        header(stored.len(), frame, 0, BLOCK - 1000).write(&mut parts);
        parts.extend(&stored);
        header(0, frame, BLOCK - 1000, 100).write(&mut parts);
        let data =
            Reply::Data(Data { length: u32::try_from(LENGTH).unwrap(), form: DataForm::Stored.into() });
        let (mut wire, mut server) = wire();
        say(&mut server, &[Reply::Hello(hello()), opened(ID), data.clone()]);
        let (mut found, mut left) = (Vec::new(), flight(48, 17));
        for byte in &parts {
            server.write_all(&[*byte]).unwrap();
            wire.receive().unwrap();
            // It is asked again before the block is used.
            let _ = wire.answer(&left).unwrap();
            let Some((pages, block)) = wire.answer(&left).unwrap() else { continue };
            found.extend_from_slice(block);
            (left.first, left.pages) = (left.first + pages, left.pages - pages);
            wire.used(pages);
        }
        assert!(found == bytes);
        assert_eq!((left.pages, wire.has_more(), wire.due), (0, false, DueReply::Data));
        say(&mut server, &[data]);
        let mut damaged = Vec::new();
        header(4, BLOCK, 0, BLOCK).write(&mut damaged);
        server.write_all(&[&damaged[..], b"none"].concat()).unwrap();
        wire.receive().unwrap();
        let error = wire.answer(&flight(48, 17)).unwrap_err();
        assert!(matches!(error.downcast_ref(), Some(MessageError::Damaged(_))), "{error:#}");
    }

    #[test]
    fn replies_that_are_not_due_are_refused() {
        let hello = || Reply::Hello(hello());
        let data = |length| Reply::Data(Data { length, form: DataForm::Plain.into() });
        let old = rewake_image_transfer::protocol::Hello { version: VERSION + 1, program: "other".into() };
        let wrong: [(&[Reply], &str); 9] = [
            (&[opened(ID)], "a reply that is not Hello"),
            (&[Reply::Hello(old)], "version"),
            (&[hello(), hello()], "a reply that is not Opened"),
            (&[hello(), data(1)], "a reply that is not Opened"),
            (&[hello(), opened(Digest([8; 32]))], "another image"),
            (&[hello(), Reply::Refused("no\nsuch image".into())], "refused: no such image"),
            (&[hello(), opened(ID), opened(ID)], "a reply that is not Data"),
            (&[hello(), opened(ID), data(3 * 65536)], "196608 bytes for a read of 196708"),
            (&[hello(), opened(ID), data(u32::MAX)], "4294967295 bytes for a read of 196708"),
        ];
        for (replies, expected) in wrong {
            let error = format!("{:#}", answer_to(replies).unwrap_err());
            assert!(error.contains(expected), "{expected}: {error}");
        }
        assert_eq!(answer_to(&[hello(), opened(ID), data(3 * 65536 + 100)]).unwrap(), None);
    }

    #[test]
    fn an_encrypted_connection_must_be_admitted() {
        let admitted = |bytes: &[u8]| {
            let (mut wire, mut server) = wire();
            wire.due = DueReply::Admission;
            server.write_all(bytes).unwrap();
            wire.receive().unwrap();
            wire.answer(&flight(16, 1)).map(|found| assert!(found.is_none())).map(|()| wire.due)
        };
        assert_eq!(admitted(b"\0").unwrap(), DueReply::Admission);
        assert_eq!(admitted(b"\x05\0not").unwrap(), DueReply::Admission);
        assert_eq!(admitted(b"\0\0").unwrap(), DueReply::Hello);
        let error = admitted(b"\x08\0not\nhere").unwrap_err().to_string();
        assert_eq!(error, "refused by the server: not here");
    }

    #[test]
    fn lengths_and_bytes_that_are_no_message_are_refused() {
        for bytes in [&b"\xff\xff\xff\xff"[..], b"\x04\0\0\0\xff\xff\xff\xff", b"\0\0\0\0"] {
            let (mut wire, mut server) = wire();
            server.write_all(bytes).unwrap();
            wire.receive().unwrap();
            assert!(wire.answer(&flight(16, 1)).is_err(), "{bytes:?}");
        }
        let (mut wire, server) = wire();
        drop(server);
        assert!(wire.receive().unwrap_err().is::<PeerEnded>());
    }
}
