// SPDX-License-Identifier: MIT OR Apache-2.0
//! The requests of one client, one after another.

use std::collections::VecDeque;
use std::ffi::OsStr;
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::protocol::compressed::{self, COMPRESSED_BLOCK};
use crate::protocol::message::{MessageError, closed, receive, send};
use crate::protocol::reply::What as Reply;
use crate::protocol::request::What as Request;
use crate::protocol::stored_parts;
use crate::protocol::{
    Data, DataForm, MAX_MESSAGE, MAX_READ, Open, Opened, Read as RangeRead, VERSION, hello, reply_of,
};
use anyhow::{Context as _, ensure};

use crate::server::exports::{Exports, OpenImage};
use crate::server::pace::ReplyPace;

/// Bytes that are read from a file and sent at a time, so that a demand read is one write.
const PIECE: usize = COMPRESSED_BLOCK;
const _: () = assert!(PIECE == stored_parts::BLOCK);

/// Bytes of requests that are taken at once: a read has some 20.
const ARRIVED: usize = 4 << 10;

/// What a connection was used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Served {
    /// Reads that were answered.
    pub reads: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// Answers a client until it closes the connection. `opened` is called when it has opened an image.
///
/// # Errors
/// The client is of another version, breaks the protocol or is lost, or a request was refused: then it has
/// the reason, too. A read that fails after its reply has begun gives no reason: only the connection ends.
pub fn serve<S: Read + Write>(
    exports: &Exports,
    stream: &mut S,
    opened: impl FnOnce(&mut S, &Path) -> std::io::Result<()>,
) -> anyhow::Result<Served> {
    let served = answer(exports, stream, opened);
    if let Err(error) = &served
        && error.downcast_ref::<MessageError>().is_none()
    {
        // It may be gone.
        let _ = send(stream, &reply_of(Reply::Refused(format!("{error:#}"))), &[]);
    }
    served
}

fn answer<S: Read + Write>(
    exports: &Exports,
    stream: &mut S,
    opened: impl FnOnce(&mut S, &Path) -> std::io::Result<()>,
) -> anyhow::Result<Served> {
    let mut requests = ArrivedRequests::default();
    match requests.next(stream)? {
        None => return Ok(Served::default()),
        Some(Request::Hello(theirs)) => {
            // Sent first, so that a client of another version can report that as well.
            send(stream, &reply_of(Reply::Hello(hello())), &[])?;
            ensure!(
                theirs.version == VERSION,
                MessageError::Version { version: theirs.version, program: theirs.program }
            );
        }
        Some(other) => return Err(unexpected("a hello", &other)),
    }
    let (mut served, mut reader) = (Served::default(), RangeSender::default());
    let mut image = match requests.next(stream)? {
        None => return Ok(Served::default()),
        Some(Request::Open(Open { image, ancestor, takes_stored })) => {
            reader.takes_stored = takes_stored;
            let image = Path::new(OsStr::from_bytes(&image));
            let open = exports.open(image, ancestor)?;
            let reply = Opened {
                image_id: open.id().0.to_vec(),
                manifest_length: open.manifest_length(),
                working_set_length: open.working_set_length(),
                signature: open.signature().unwrap_or_default(),
            };
            send(stream, &reply_of(Reply::Opened(reply)), &[])?;
            opened(stream, image).context("the connection")?;
            open
        }
        Some(other) => return Err(unexpected("the name of an image", &other)),
    };
    while requests.receive(stream)? {
        requests.announce(&mut *image);
        let Some(request) = requests.pop() else { break };
        let Request::Read(read) = request else { return Err(unexpected("a read", &request)) };
        reader.send(&mut *image, read, stream)?;
        served.reads += 1;
        served.bytes += u64::from(read.length);
    }
    Ok(served)
}

/// Requests that a client has sent, and that are not answered yet.
#[derive(Debug, Default)]
struct ArrivedRequests {
    waiting: VecDeque<Request>,
    /// How many of them, from the first on, the image expects.
    announced: usize,
    /// The first bytes of the next message.
    bytes: Vec<u8>,
}

impl ArrivedRequests {
    /// Returns the next request; none when the client has closed the connection.
    fn next(&mut self, stream: &mut impl Read) -> anyhow::Result<Option<Request>> {
        self.receive(stream)?;
        Ok(self.pop())
    }

    /// Waits for a request, and takes all that have arrived. Returns false when the client has closed the
    /// connection.
    fn receive(&mut self, stream: &mut impl Read) -> anyhow::Result<bool> {
        let mut received = [0; ARRIVED];
        while self.waiting.is_empty() {
            match stream.read(&mut received) {
                Ok(0) if self.bytes.is_empty() => return Ok(false),
                Ok(0) => return Err(MessageError::Closed.into()),
                Ok(length) => self.bytes.extend(&received[..length]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(closed(error).into()),
            }
            self.decode()?;
        }
        Ok(true)
    }

    fn pop(&mut self) -> Option<Request> {
        self.announced = self.announced.saturating_sub(1);
        self.waiting.pop_front()
    }

    fn decode(&mut self) -> anyhow::Result<()> {
        let mut rest = &self.bytes[..];
        while let Some((length, message)) = rest.split_first_chunk() {
            let length = u32::from_le_bytes(*length) as usize;
            // One that is too long is an error at once.
            if length <= MAX_MESSAGE && message.len() < length {
                break;
            }
            let request: Option<crate::protocol::Request> = receive(&mut rest)?;
            let what = request.and_then(|request| request.what);
            self.waiting.push_back(what.context("an empty request")?);
        }
        self.bytes = rest.to_vec();
        Ok(())
    }

    /// Has the image expect as many of the reads as it has room for.
    fn announce(&mut self, image: &mut dyn OpenImage) {
        let new = self.waiting.iter().skip(self.announced);
        let is_expected = |request: &&Request| match request {
            Request::Read(read) => expect(image, *read),
            _ => false,
        };
        self.announced += new.take_while(is_expected).count();
    }
}

/// Has an image expect a read, unless it will be refused. Returns false if there is no room for it now.
fn expect(image: &mut dyn OpenImage, read: RangeRead) -> bool {
    let RangeRead { file, offset, length } = read;
    match offset.checked_add(length.into()).filter(|_| (1..=MAX_READ).contains(&length)) {
        Some(end) => image.expect(file, offset..end),
        None => true,
    }
}

/// Sends ranges of files in pieces.
#[derive(Default)]
struct RangeSender {
    piece: Vec<u8>,
    /// Pieces as they travel.
    stored: Vec<u8>,
    pace: ReplyPace,
    /// Whether the client takes data as a store has it.
    takes_stored: bool,
}

impl RangeSender {
    /// Sends a range of a file. The first piece is read before the reply begins.
    fn send(
        &mut self,
        image: &mut dyn OpenImage,
        read: RangeRead,
        stream: &mut impl Write,
    ) -> anyhow::Result<()> {
        let RangeRead { file: number, offset, length } = read;
        ensure!((1..=MAX_READ).contains(&length), "a read of {length} bytes: 1 to {MAX_READ} expected");
        let context = || format!("file {number}: {length} bytes from offset {offset}");
        let end = offset.checked_add(u64::from(length)).with_context(context)?;
        image.begin(number, offset..end).with_context(context)?;
        let form = match (self.takes_stored && image.is_stored(), self.pace.is_compressed()) {
            (true, _) => DataForm::Stored,
            (false, true) => DataForm::Lz4,
            (false, false) => DataForm::Plain,
        };
        let data = reply_of(Reply::Data(Data { length, form: form.into() }));
        let (mut sent, mut took) = (0, Duration::ZERO);
        while sent < length as usize {
            let piece = match self.load(image, form, length as usize - sent) {
                // A refusal would be taken for the data that is due.
                Err(error) if sent > 0 => {
                    let what = format!("{}: cut after {sent} bytes: {error:#}", context());
                    return Err(MessageError::Io(io::Error::other(what)).into());
                }
                read => read.with_context(context)?,
            };
            let began = Instant::now();
            let bytes = match form {
                DataForm::Plain => &self.piece[..piece],
                DataForm::Stored => &self.stored,
                DataForm::Lz4 => {
                    self.stored.clear();
                    let blocks = self.piece[..piece].chunks(COMPRESSED_BLOCK);
                    blocks.for_each(|block| compressed::store(block, &mut self.stored));
                    &self.stored
                }
            };
            if sent == 0 {
                send(stream, &data, bytes)?;
            } else {
                stream.write_all(bytes).map_err(MessageError::from)?;
            }
            took += began.elapsed();
            sent += piece;
        }
        if form != DataForm::Stored {
            self.pace.note(u64::from(length), took);
        }
        Ok(())
    }

    /// Reads the next piece of a range, and returns its length. Of stored data it takes blocks until their
    /// parts fill one piece.
    fn load(&mut self, image: &mut dyn OpenImage, form: DataForm, left: usize) -> anyhow::Result<usize> {
        if form != DataForm::Stored {
            // A store may have damaged blocks: all are read before the reply begins.
            let piece = if image.is_stored() { left } else { PIECE.min(left) };
            self.piece.resize(piece.max(self.piece.len()), 0);
            return image.next(&mut self.piece[..piece]).map(|()| piece);
        }
        self.stored.clear();
        let mut loaded = 0;
        while loaded < left && self.stored.len() < PIECE {
            let end = left.min(loaded + PIECE);
            while loaded < end {
                loaded += image.next_stored(end - loaded, &mut self.stored)?;
            }
        }
        Ok(loaded)
    }
}

fn unexpected(expected: &'static str, found: &Request) -> anyhow::Error {
    let found = match found {
        Request::Hello(_) => "a hello",
        Request::Open(_) => "the name of an image",
        Request::Read(_) => "a read",
    };
    MessageError::Unexpected { expected, found: found.to_owned() }.into()
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::io::Cursor;
    use std::ops::Range;
    use std::sync::{Arc, Mutex};

    use crate::protocol::{Reply as RawReply, Request as RawRequest};
    use rewake_criu_images::{Digest, Inventory, write};
    use rewake_manifest::seal;

    use super::*;
    use crate::server::exports::{ImageDirectory, ImageFolder, PeerRights};

    const LENGTH: usize = 4 * PIECE;

    /// A client that has sent all its requests. The file is cut when data arrives.
    struct CuttingStream {
        requests: Cursor<Vec<u8>>,
        replies: Vec<u8>,
        file: File,
    }

    impl Read for CuttingStream {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            self.requests.read(buffer)
        }
    }

    impl Write for CuttingStream {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.replies.write_all(bytes)?;
            if self.replies.len() >= PIECE {
                self.file.set_len(PIECE as u64)?;
            }
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// An image that has room for two reads ahead, and what was done with it.
    #[derive(Debug, Default)]
    struct SlowImage {
        acts: Arc<Mutex<Vec<(&'static str, u64)>>>,
        expected: usize,
    }

    impl OpenImage for SlowImage {
        fn id(&self) -> Digest {
            Digest([7; 32])
        }

        fn manifest_length(&self) -> u64 {
            0
        }

        fn expect(&mut self, _: u32, range: Range<u64>) -> bool {
            let has_room = self.expected < 3;
            if has_room {
                self.expected += 1;
                self.acts.lock().unwrap().push(("expect", range.start));
            }
            has_room
        }

        fn begin(&mut self, _: u32, range: Range<u64>) -> anyhow::Result<()> {
            self.expected = self.expected.saturating_sub(1);
            self.acts.lock().unwrap().push(("begin", range.start));
            Ok(())
        }

        fn next(&mut self, _: &mut [u8]) -> anyhow::Result<()> {
            Ok(())
        }
    }

    #[derive(Debug)]
    struct SlowFolder(Arc<Mutex<Vec<(&'static str, u64)>>>);

    impl ImageFolder for SlowFolder {
        fn open(&self, _: &Path, _: u32, _: &PeerRights) -> anyhow::Result<Box<dyn OpenImage>> {
            Ok(Box::new(SlowImage { acts: Arc::clone(&self.0), expected: 0 }))
        }
    }

    /// A client that has sent these reads, in pieces of `piece` bytes.
    struct SentRequests {
        requests: Cursor<Vec<u8>>,
        piece: usize,
    }

    impl SentRequests {
        fn new(reads: &[(u64, u32)], piece: usize) -> Self {
            let open = Open { image: b"web".to_vec(), ancestor: 0, takes_stored: false };
            let reads =
                reads.iter().map(|&(offset, length)| Request::Read(RangeRead { file: 1, offset, length }));
            let mut requests = Vec::new();
            for request in [Request::Hello(hello()), Request::Open(open)].into_iter().chain(reads) {
                send(&mut requests, &RawRequest { what: Some(request) }, &[]).unwrap();
            }
            Self { requests: Cursor::new(requests), piece }
        }
    }

    impl Read for SentRequests {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let most = buffer.len().min(self.piece);
            self.requests.read(&mut buffer[..most])
        }
    }

    impl Write for SentRequests {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Serves these reads. Returns what was done with the image, and the result.
    fn served(reads: &[(u64, u32)], piece: usize) -> (Vec<(&'static str, u64)>, anyhow::Result<Served>) {
        let acts = Arc::new(Mutex::new(Vec::new()));
        let exports = Exports::new(Arc::new(SlowFolder(Arc::clone(&acts))));
        let result = serve(&exports, &mut SentRequests::new(reads, piece), |_, _| Ok(()));
        let acts = acts.lock().unwrap().clone();
        (acts, result)
    }

    #[test]
    fn reads_that_have_arrived_are_expected_before_their_turn() {
        let reads = [10, 20, 30, 40, 50].map(|offset| (offset, 1));
        let (acts, served) = served(&reads, usize::MAX);
        let [e, b] = ["expect", "begin"];
        let wanted =
            [(e, 10), (e, 20), (e, 30), (b, 10), (e, 40), (b, 20), (e, 50), (b, 30), (b, 40), (b, 50)];
        assert_eq!(acts, wanted);
        assert_eq!(served.unwrap(), Served { reads: 5, bytes: 5 });
    }

    #[test]
    fn requests_that_arrive_in_pieces_are_answered() {
        for piece in [1, 3, 50] {
            let (acts, served) = served(&[(10, 1), (20, 2)], piece);
            assert_eq!(acts.iter().filter(|(act, _)| *act == "begin").count(), 2);
            assert_eq!(served.unwrap(), Served { reads: 2, bytes: 3 });
        }
    }

    #[test]
    fn a_read_that_is_refused_is_not_expected() {
        for read in [(10, 0), (10, MAX_READ + 1), (10, u32::MAX), (u64::MAX, 2)] {
            let (acts, served) = served(&[(0, 1), read], usize::MAX);
            assert_eq!(acts, [("expect", 0), ("begin", 0)]);
            served.unwrap_err();
        }
    }

    #[test]
    fn a_client_that_ends_in_a_message_has_closed_the_connection() {
        let mut client = SentRequests::new(&[(10, 1)], usize::MAX);
        let length = client.requests.get_ref().len();
        client.requests.get_mut().truncate(length - 1);
        let exports = Exports::new(Arc::new(SlowFolder(Arc::default())));
        let error = serve(&exports, &mut client, |_, _| Ok(())).unwrap_err();
        assert!(matches!(error.downcast_ref(), Some(MessageError::Closed)), "{error:#}");
    }

    #[test]
    fn after_the_first_byte_of_a_reply_only_the_connection_ends() {
        let root = tempfile::tempdir().unwrap();
        let image = root.path().join("web");
        fs::create_dir(&image).unwrap();
        write::inventory(&image, &Inventory { version: 2, plugins: Vec::new(), run_id: None }).unwrap();
        let (path, memory) = (image.join("pages-1.img"), vec![7; LENGTH]);
        fs::write(&path, &memory).unwrap();
        seal(&image).unwrap();
        let mut requests = Vec::new();
        let open = Open { image: b"web".to_vec(), ancestor: 0, takes_stored: false };
        let read = RangeRead { file: 2, offset: 0, length: u32::try_from(LENGTH).unwrap() };
        for request in [Request::Hello(hello()), Request::Open(open), Request::Read(read)] {
            send(&mut requests, &RawRequest { what: Some(request) }, &[]).unwrap();
        }
        let file = File::options().write(true).open(&path).unwrap();
        let mut stream = CuttingStream { requests: Cursor::new(requests), replies: Vec::new(), file };
        let exports = Exports::new(Arc::new(ImageDirectory::new(root.path()).unwrap()));
        let error = serve(&exports, &mut stream, |_, _| Ok(())).unwrap_err();
        assert!(matches!(error.downcast_ref(), Some(MessageError::Io(_))), "{error:#}");
        assert!(error.to_string().contains(&format!("cut after {PIECE} bytes")), "{error:#}");
        let mut replies = &stream.replies[..];
        let mut reply = || receive::<RawReply>(&mut replies).unwrap().unwrap().what.unwrap();
        assert!(matches!(reply(), Reply::Hello(_)));
        assert!(matches!(reply(), Reply::Opened(_)));
        assert!(matches!(reply(), Reply::Data(Data { length, .. }) if length as usize == LENGTH));
        assert!(replies == &memory[..PIECE], "{} bytes after the reply's beginning", replies.len());
    }
}
