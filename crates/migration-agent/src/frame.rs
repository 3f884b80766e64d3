// SPDX-License-Identifier: MIT OR Apache-2.0
//! The connection between both agents: a greeting, then frames.
//!
//! ```text
//! greeting, by the source:  "REWAKEMG"   id of the migration, 16 bytes
//! frame:                    length u32   kind u8   body
//! ```
//! Numbers are little-endian. Messages of the protocol are JSON; the first one has the version.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use rewake_migration::blocks::{BLOCK_PAGES, BlockDigest, PageMask};
use rewake_migration::message::{FromDestination, FromSource};
use rewake_page_protocol::PageRun;
use rewake_peer_stream::{PROMPT, PeerStream, watch_peer};

/// The bytes before everything else.
const MAGIC: &[u8; 8] = b"REWAKEMG";
/// Bytes of a frame's body at most.
const MAX_BODY: usize = (4 << 20) + (4 << 10);
/// Bytes of a file in one frame.
pub(crate) const FILE_PIECE: usize = 1 << 20;
const PAGE: usize = 4096;
/// The most pages of zeros in one part, which is as many as one answer has.
const MAX_ZEROS: u64 = 1024;
/// How a refusal of TLS begins. No message of an agent is as long as these bytes would say.
const TLS_ALERT: [u8; 5] = [0x15, 3, 3, 0, 2];

/// Time without room for a byte after which the connection is lost: the peer does not read.
const SEND_LIMIT: Duration = Duration::from_secs(10);

/// The most events that wait for an agent. When there are more, its connections and scripts wait.
pub(crate) const MAX_EVENTS: usize = 64;

/// Names a migration on every connection of it.
pub(crate) type MigrationId = [u8; 16];

/// Makes an id that no other migration has.
pub(crate) fn new_id() -> anyhow::Result<MigrationId> {
    let mut id = MigrationId::default();
    let mut random = File::open("/dev/urandom").context("opening /dev/urandom")?;
    random.read_exact(&mut id).context("reading /dev/urandom")?;
    Ok(id)
}

/// A short name that no other migration has.
pub(crate) fn new_name(prefix: &str) -> anyhow::Result<String> {
    let [a, b, c, d, ..] = new_id()?;
    Ok(format!("{prefix}-{:08x}", u32::from_le_bytes([a, b, c, d])))
}

/// Sends small frames at once, and finds out when the peer is lost.
pub(crate) fn set_limits(socket: &TcpStream) -> io::Result<()> {
    watch_peer(socket, PROMPT)?;
    socket.set_write_timeout(Some(SEND_LIMIT))
}

/// What both agents send each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Frame {
    Source(FromSource),
    Destination(FromDestination),
    /// Bytes of an image's file.
    File {
        name: String,
        offset: u64,
        bytes: Vec<u8>,
    },
    /// A file with GPU memory that the destination requests while the program runs there, as pages of a
    /// [task](rewake_page_protocol::file_task). Its first bytes are needed at once.
    ArrivingFile {
        number: u32,
        len: u64,
        name: String,
        head: Vec<u8>,
    },
    /// The destination needs pages of a task.
    PageRequest {
        pid: u32,
        run: PageRun,
        /// A digest does not help.
        wants_bytes: bool,
    },
    /// The first pages of a request. Answers have the order of the requests.
    Pages {
        pid: u32,
        vaddr: u64,
        parts: Vec<PagePart>,
    },
    /// The answer to a request whose bytes cannot be read.
    PagesLost(String),
    /// Pages of a block that was read while the program runs: all others are zeros.
    Candidate {
        pid: u32,
        vaddr: u64,
        pages: PageMask,
        bytes: Vec<u8>,
    },
    /// All candidates of a round were sent.
    RoundEnd(u32),
    /// All candidates of a round are stored.
    RoundStored(u32),
}

/// Pages of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PagePart {
    Bytes(Vec<u8>),
    /// This number of pages of zeros.
    Zeros(u64),
    /// Pages of one block, which has this digest: that of the candidate that was sent last.
    Unchanged {
        pages: u64,
        digest: BlockDigest,
    },
}

impl PagePart {
    pub(crate) fn pages(&self) -> u64 {
        match self {
            Self::Bytes(bytes) => (bytes.len() / PAGE) as u64,
            Self::Zeros(pages) => *pages,
            Self::Unchanged { pages, .. } => *pages,
        }
    }

    /// Bytes of pages that need not travel.
    pub(crate) fn spared(&self) -> u64 {
        match self {
            Self::Bytes(_) => 0,
            Self::Zeros(pages) | Self::Unchanged { pages, .. } => pages.saturating_mul(PAGE as u64),
        }
    }

    fn encode(&self, body: &mut Vec<u8>) {
        body.extend(self.pages().to_le_bytes());
        match self {
            Self::Bytes(bytes) => {
                body.push(part::BYTES);
                body.extend(bytes);
            }
            Self::Zeros(_) => body.push(part::ZEROS),
            Self::Unchanged { digest, .. } => {
                body.push(part::UNCHANGED);
                body.extend(digest);
            }
        }
    }

    fn decode(rest: &mut &[u8]) -> anyhow::Result<Self> {
        let pages = u64::from_le_bytes(take(rest)?);
        match take::<1>(rest)? {
            [part::BYTES] => {
                let len = usize::try_from(pages)?.saturating_mul(PAGE);
                ensure!(len > 0 && len <= rest.len(), "{pages} pages in {} bytes", rest.len());
                let (bytes, after) = rest.split_at(len);
                *rest = after;
                Ok(Self::Bytes(bytes.to_vec()))
            }
            [part::ZEROS] => {
                ensure!(
                    (1..=MAX_ZEROS).contains(&pages),
                    "{pages} pages of zeros: expected {MAX_ZEROS} at most"
                );
                Ok(Self::Zeros(pages))
            }
            [part::UNCHANGED] => {
                ensure!((1..=BLOCK_PAGES).contains(&pages), "{pages} pages of one block");
                Ok(Self::Unchanged { pages, digest: take(rest)? })
            }
            [kind] => bail!("pages of kind {kind}: expected 0 to 2"),
        }
    }
}

mod kind {
    pub(super) const SOURCE: u8 = 1;
    pub(super) const DESTINATION: u8 = 2;
    pub(super) const FILE: u8 = 3;
    pub(super) const PAGE_REQUEST: u8 = 4;
    pub(super) const PAGES: u8 = 5;
    pub(super) const PAGES_LOST: u8 = 6;
    pub(super) const CANDIDATE: u8 = 7;
    pub(super) const ROUND_END: u8 = 8;
    pub(super) const ROUND_STORED: u8 = 9;
    pub(super) const ARRIVING_FILE: u8 = 10;
}

mod part {
    pub(super) const BYTES: u8 = 0;
    pub(super) const UNCHANGED: u8 = 1;
    pub(super) const ZEROS: u8 = 2;
}

impl Frame {
    fn encode(&self) -> anyhow::Result<Vec<u8>> {
        let (kind, body) = match self {
            Self::Source(message) => (kind::SOURCE, serde_json::to_vec(message)?),
            Self::Destination(message) => (kind::DESTINATION, serde_json::to_vec(message)?),
            Self::File { name, offset, bytes } => {
                let head = [&encoded_name(name)?[..], &offset.to_le_bytes()].concat();
                (kind::FILE, [&head, &bytes[..]].concat())
            }
            Self::ArrivingFile { number, len, name, head } => {
                let numbers = [&number.to_le_bytes()[..], &len.to_le_bytes()].concat();
                (kind::ARRIVING_FILE, [&numbers[..], &encoded_name(name)?, head].concat())
            }
            Self::PageRequest { pid, run, wants_bytes } => {
                let numbers = [run.vaddr().to_le_bytes(), run.pages().to_le_bytes()].concat();
                (kind::PAGE_REQUEST, [&pid.to_le_bytes()[..], &numbers, &[u8::from(*wants_bytes)]].concat())
            }
            Self::Pages { pid, vaddr, parts } => {
                let mut body = [&pid.to_le_bytes()[..], &vaddr.to_le_bytes()].concat();
                parts.iter().for_each(|part| part.encode(&mut body));
                (kind::PAGES, body)
            }
            Self::PagesLost(reason) => (kind::PAGES_LOST, reason.as_bytes().to_vec()),
            Self::Candidate { pid, vaddr, pages, bytes } => {
                let place = [&pid.to_le_bytes()[..], &vaddr.to_le_bytes(), &pages.to_le_bytes()].concat();
                (kind::CANDIDATE, [&place, &bytes[..]].concat())
            }
            Self::RoundEnd(round) => (kind::ROUND_END, round.to_le_bytes().to_vec()),
            Self::RoundStored(round) => (kind::ROUND_STORED, round.to_le_bytes().to_vec()),
        };
        ensure!(body.len() <= MAX_BODY, "a frame of {} bytes: expected at most {MAX_BODY}", body.len());
        let len = u32::try_from(body.len())?;
        Ok([&len.to_le_bytes()[..], &[kind], &body].concat())
    }

    /// Checks that a frame can be sent.
    ///
    /// # Errors
    /// It is too large.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        self.encode().map(drop)
    }

    /// Reads a frame; none at the end of the connection.
    pub(crate) fn read(stream: &mut impl Read) -> anyhow::Result<Option<Self>> {
        let mut head = [0; 5];
        match stream.read(&mut head).context("reading a frame")? {
            0 => return Ok(None),
            some => stream.read_exact(&mut head[some..]).context("reading a frame")?,
        }
        ensure!(head != TLS_ALERT, "the peer uses TLS: add --tls");
        let len = u32::from_le_bytes([head[0], head[1], head[2], head[3]]) as usize;
        ensure!(len <= MAX_BODY, "a frame of {len} bytes: expected at most {MAX_BODY}");
        let mut body = vec![0; len];
        stream.read_exact(&mut body).context("reading a frame")?;
        Self::decode(head[4], &body).map(Some)
    }

    fn decode(kind: u8, body: &[u8]) -> anyhow::Result<Self> {
        let mut rest = body;
        Ok(match kind {
            kind::SOURCE => Self::Source(serde_json::from_slice(body).context("a message of the source")?),
            kind::DESTINATION => {
                Self::Destination(serde_json::from_slice(body).context("a message of the destination")?)
            }
            kind::FILE => {
                let name = decoded_name(&mut rest)?;
                let offset = u64::from_le_bytes(take(&mut rest)?);
                Self::File { name, offset, bytes: rest.to_vec() }
            }
            kind::ARRIVING_FILE => {
                let number = u32::from_le_bytes(take(&mut rest)?);
                let len = u64::from_le_bytes(take(&mut rest)?);
                Self::ArrivingFile { number, len, name: decoded_name(&mut rest)?, head: rest.to_vec() }
            }
            kind::PAGE_REQUEST => {
                let pid = u32::from_le_bytes(take(&mut rest)?);
                let (vaddr, pages) =
                    (u64::from_le_bytes(take(&mut rest)?), u64::from_le_bytes(take(&mut rest)?));
                let [wants_bytes] = take(&mut rest)?;
                Self::PageRequest { pid, run: PageRun::new(vaddr, pages)?, wants_bytes: wants_bytes != 0 }
            }
            kind::PAGES => {
                let (pid, vaddr) = place(&mut rest)?;
                let mut parts = Vec::new();
                while !rest.is_empty() {
                    parts.push(PagePart::decode(&mut rest)?);
                }
                ensure!(!parts.is_empty(), "an answer without pages");
                Self::Pages { pid, vaddr, parts }
            }
            kind::PAGES_LOST => Self::PagesLost(String::from_utf8_lossy(body).into_owned()),
            kind::CANDIDATE => {
                let (pid, vaddr) = place(&mut rest)?;
                let pages = PageMask::from_le_bytes(take(&mut rest)?);
                Self::Candidate { pid, vaddr, pages, bytes: rest.to_vec() }
            }
            kind::ROUND_END => Self::RoundEnd(u32::from_le_bytes(take(&mut rest)?)),
            kind::ROUND_STORED => Self::RoundStored(u32::from_le_bytes(take(&mut rest)?)),
            _ => bail!("a frame of kind {kind}: expected 1 to 10; is the peer a Rewake of another version?"),
        })
    }
}

fn take<const N: usize>(bytes: &mut &[u8]) -> anyhow::Result<[u8; N]> {
    let (first, rest) = bytes.split_first_chunk().context("a frame is cut off")?;
    *bytes = rest;
    Ok(*first)
}

fn encoded_name(name: &str) -> anyhow::Result<Vec<u8>> {
    let len = u16::try_from(name.len()).context("the name of a file")?;
    Ok([&len.to_le_bytes()[..], name.as_bytes()].concat())
}

fn decoded_name(bytes: &mut &[u8]) -> anyhow::Result<String> {
    let len = u16::from_le_bytes(take(bytes)?) as usize;
    let (name, rest) = bytes.split_at_checked(len).context("a frame with a file: its name is cut off")?;
    *bytes = rest;
    String::from_utf8(name.to_vec()).context("the name of a file")
}

/// A task and an address.
fn place(bytes: &mut &[u8]) -> anyhow::Result<(u32, u64)> {
    Ok((u32::from_le_bytes(take(bytes)?), u64::from_le_bytes(take(bytes)?)))
}

/// Sends a greeting.
pub(crate) fn greet(stream: &mut impl Write, id: &MigrationId) -> io::Result<()> {
    stream.write_all(&[&MAGIC[..], id].concat())
}

/// Reads a greeting.
pub(crate) fn greeted(stream: &mut impl Read) -> anyhow::Result<MigrationId> {
    let mut bytes = [0; 24];
    stream.read_exact(&mut bytes).context("reading the greeting")?;
    let (magic, id) = bytes.split_at(MAGIC.len());
    ensure!(
        magic == MAGIC,
        "the client's first bytes are {magic:02x?}: expected a `rewake migrate` without --tls"
    );
    Ok(id.try_into()?)
}

/// The sending half of a connection, which threads share.
#[derive(Debug)]
pub(crate) struct FrameWriter {
    stream: Mutex<PeerStream>,
    /// Ends the connection while a thread sends.
    end: PeerStream,
    /// Bytes that were sent.
    sent: AtomicU64,
}

impl FrameWriter {
    pub(crate) fn new(stream: PeerStream) -> Self {
        Self { end: stream.clone(), stream: Mutex::new(stream), sent: AtomicU64::new(0) }
    }

    pub(crate) fn send(&self, frame: &Frame) -> anyhow::Result<()> {
        let bytes = frame.encode()?;
        let mut stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        let sent = stream.write_all(&bytes);
        if sent.is_err() {
            // A part of the frame may have been sent.
            self.close();
        }
        self.sent.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        sent.context("sending a frame")
    }

    /// Returns the number of bytes that were sent.
    pub(crate) fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    /// Ends the connection: the reader of it sees the end.
    pub(crate) fn close(&self) {
        // It may have ended.
        let _ = self.end.socket().shutdown(std::net::Shutdown::Both);
    }
}

#[cfg(test)]
mod tests {
    use rewake_migration::message::DestinationProgress;

    use super::*;

    #[test]
    fn frames_are_read_as_they_were_sent() {
        let frames = [
            Frame::Source(FromSource::Hello { version: 1 }),
            Frame::Destination(FromDestination::Hello {
                version: 1,
                progress: DestinationProgress::Gone("x".into()),
                gpu_on_demand: true,
            }),
            Frame::File { name: "core-1.img".into(), offset: 7, bytes: vec![1, 2, 3] },
            Frame::ArrivingFile { number: 2, len: 1 << 40, name: "amdgpu".into(), head: vec![4; 8] },
            Frame::PageRequest { pid: 9, run: PageRun::new(0x7000, 3).unwrap(), wants_bytes: true },
            Frame::Pages {
                pid: 9,
                vaddr: 0x7000,
                parts: vec![
                    PagePart::Bytes(vec![5; PAGE]),
                    PagePart::Unchanged { pages: 16, digest: [7; 32] },
                    PagePart::Zeros(3),
                    PagePart::Bytes(vec![6; 2 * PAGE]),
                ],
            },
            Frame::PagesLost("gone".into()),
            Frame::Candidate { pid: 9, vaddr: 0x10000, pages: 0x81, bytes: vec![1; 2 * PAGE] },
            Frame::RoundEnd(3),
            Frame::RoundStored(3),
        ];
        let bytes: Vec<u8> = frames.iter().flat_map(|frame| frame.encode().unwrap()).collect();
        let mut stream = &bytes[..];
        for frame in frames {
            assert_eq!(Frame::read(&mut stream).unwrap(), Some(frame));
        }
        assert_eq!(Frame::read(&mut stream).unwrap(), None);
    }

    #[test]
    fn frames_that_are_wrong_are_refused() {
        let refused = |bytes: &[u8], reason: &str| {
            let error = format!("{:#}", Frame::read(&mut &bytes[..]).unwrap_err());
            assert!(error.contains(reason), "{error}");
        };
        refused(&[0xff, 0xff, 0xff, 0xff, 1], "expected at most");
        refused(&[1, 0, 0, 0, 99, 0], "of kind 99");
        refused(&[3, 0, 0, 0, 3, 9, 0, b'x'], "its name is cut off");
        refused(&[&[15, 0, 0, 0, 10][..], &[0; 12], &[9, 0, b'x']].concat(), "its name is cut off");
        refused(&[&[12, 0, 0, 0, 5][..], &[0; 12]].concat(), "an answer without pages");
        refused(&[&[22, 0, 0, 0, 5][..], &[0; 12], &[1], &[0; 9]].concat(), "1 pages in 1 bytes");
        refused(&[&[21, 0, 0, 0, 5][..], &[0; 12], &[17, 0, 0, 0, 0, 0, 0, 0, 1]].concat(), "of one block");
        refused(&[&[21, 0, 0, 0, 5][..], &[0; 12], &[1, 4, 0, 0, 0, 0, 0, 0, 2]].concat(), "of zeros");
        refused(&[2, 0, 0, 0, 1, b'{'], "reading a frame");
        refused(&[0x15, 3, 3, 0, 2, 2, 40], "the peer uses TLS: add --tls");
    }

    #[test]
    fn a_connection_ends_while_a_thread_sends() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        set_limits(&stream).unwrap();
        let writer = FrameWriter::new(stream.into());
        let start = std::time::Instant::now();
        let frame = Frame::Candidate { pid: 1, vaddr: 0, pages: 0, bytes: vec![0; 64 * PAGE] };
        std::thread::scope(|scope| {
            // The peer reads nothing.
            let sends = scope.spawn(|| while writer.send(&frame).is_ok() {});
            std::thread::sleep(Duration::from_millis(300));
            assert!(!sends.is_finished());
            writer.close();
        });
        assert!(start.elapsed() < SEND_LIMIT / 2, "{:?}", start.elapsed());
    }
}
