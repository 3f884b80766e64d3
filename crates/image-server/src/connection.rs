// SPDX-License-Identifier: MIT OR Apache-2.0
//! The requests of one client, one after another.

use std::io::{self, Read, Write};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use rewake_image_protocol::compressed::{self, COMPRESSED_BLOCK};
use rewake_image_protocol::message::{MessageError, receive, send};
use rewake_image_protocol::reply::What as Reply;
use rewake_image_protocol::request::What as Request;
use rewake_image_protocol::{Data, MAX_READ, Open, Opened, Read as RangeRead, VERSION, hello, reply_of};

use crate::exports::{Exports, OpenImage};
use crate::pace::ReplyPace;

/// Bytes that are read from a file and sent at a time: those of a demand read, in one write.
const PIECE: usize = COMPRESSED_BLOCK;

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
/// The client is of another version, breaks the protocol or is lost, or a request was refused: then it has the reason,
/// too. A read that fails after its reply has begun gives no reason: only the connection ends.
pub fn serve<S: Read + Write>(
    exports: &Exports,
    stream: &mut S,
    opened: impl FnOnce(&mut S, &str) -> std::io::Result<()>,
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
    opened: impl FnOnce(&mut S, &str) -> std::io::Result<()>,
) -> anyhow::Result<Served> {
    match next(stream)? {
        None => return Ok(Served::default()),
        Some(Request::Hello(theirs)) => {
            // Sent first: a client of another version says so, too.
            send(stream, &reply_of(Reply::Hello(hello())), &[])?;
            ensure!(
                theirs.version == VERSION,
                MessageError::Version { version: theirs.version, program: theirs.program }
            );
        }
        Some(other) => return Err(unexpected("a hello", &other)),
    }
    let mut image = match next(stream)? {
        None => return Ok(Served::default()),
        Some(Request::Open(Open { image, ancestor })) => {
            let open = exports.open(&image, ancestor)?;
            let reply = Opened {
                image_id: open.id().0.to_vec(),
                manifest_length: open.manifest_length(),
                working_set_length: open.working_set_length(),
            };
            send(stream, &reply_of(Reply::Opened(reply)), &[])?;
            opened(stream, &image).context("the connection")?;
            open
        }
        Some(other) => return Err(unexpected("the name of an image", &other)),
    };
    let (mut served, mut reader) = (Served::default(), RangeSender::default());
    while let Some(request) = next(stream)? {
        let Request::Read(read) = request else { return Err(unexpected("a read", &request)) };
        reader.send(&mut *image, read, stream)?;
        served.reads += 1;
        served.bytes += u64::from(read.length);
    }
    Ok(served)
}

fn next(stream: &mut impl Read) -> anyhow::Result<Option<Request>> {
    let request: Option<rewake_image_protocol::Request> = receive(stream)?;
    request.map(|request| request.what.context("an empty request")).transpose()
}

/// Sends ranges of files in pieces.
struct RangeSender {
    piece: Box<[u8]>,
    /// Compressed pieces.
    stored: Vec<u8>,
    pace: ReplyPace,
}

impl Default for RangeSender {
    fn default() -> Self {
        Self { piece: vec![0; PIECE].into(), stored: Vec::new(), pace: ReplyPace::default() }
    }
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
        let data = reply_of(Reply::Data(Data { length, compressed: self.pace.is_compressed() }));
        let (mut sent, mut took) = (0, Duration::ZERO);
        while sent < length as usize {
            let piece = self.piece.len().min(length as usize - sent);
            let piece = &mut self.piece[..piece];
            match image.next(piece) {
                // A refusal would be taken for the data that is due.
                Err(error) if sent > 0 => {
                    let what = format!("{}: cut after {sent} bytes: {error:#}", context());
                    return Err(MessageError::Io(io::Error::other(what)).into());
                }
                read => read.with_context(context)?,
            }
            let began = Instant::now();
            let mut bytes = &*piece;
            if self.pace.is_compressed() {
                self.stored.clear();
                compressed::store(piece, &mut self.stored);
                bytes = &self.stored;
            }
            if sent == 0 {
                send(stream, &data, bytes)?;
            } else {
                stream.write_all(bytes).map_err(MessageError::from)?;
            }
            took += began.elapsed();
            sent += piece.len();
        }
        self.pace.note(u64::from(length), took);
        Ok(())
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
    use std::sync::Arc;

    use rewake_criu_images::{Inventory, write};
    use rewake_image_protocol::{Reply as RawReply, Request as RawRequest};
    use rewake_manifest::seal;

    use super::*;
    use crate::exports::ImageDirectory;

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
        let open = Open { image: "web".to_owned(), ancestor: 0 };
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
