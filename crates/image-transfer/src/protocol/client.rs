// SPDX-License-Identifier: MIT OR Apache-2.0
//! A client's side of a connection: it opens one image, and reads ranges of its files. Several reads may be
//! outstanding; their bytes arrive in order.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use rewake_criu_images::Digest;

use crate::protocol::compressed::{self, COMPRESSED_BLOCK, STORED_LENGTH};
use crate::protocol::message::{MessageError, closed, printable, receive, send};
use crate::protocol::{
    Data, DataForm, MAX_OUTSTANDING, MAX_READ, Open, Opened, Reply, Request, VERSION, hello,
};
use crate::protocol::{reply::What as Replied, request::What as Requested};

/// A connection with an open image.
#[derive(Debug)]
pub struct ImageClient<S> {
    stream: S,
    image_id: Digest,
    manifest_length: u64,
    working_set_length: u64,
    signature: Option<Vec<u8>>,
    /// The lengths of outstanding reads, the oldest first.
    outstanding: VecDeque<u32>,
    /// A block as it travels.
    stored: Vec<u8>,
}

impl<S: Read + Write> ImageClient<S> {
    /// Opens an image of the server, or its `ancestor`-th ancestor.
    ///
    /// # Errors
    /// The peer is no image server or of another version, or it refuses: it has no such image, or one that is
    /// not sealed.
    pub fn open(mut stream: S, image: &Path, ancestor: u32) -> Result<Self, MessageError> {
        ask(&mut stream, Requested::Hello(hello()))?;
        match reply(&mut stream)? {
            Replied::Hello(theirs) if theirs.version == VERSION => {}
            Replied::Hello(theirs) => {
                return Err(MessageError::Version { version: theirs.version, program: theirs.program });
            }
            other => return Err(unexpected("a hello", &other)),
        }
        let image = image.as_os_str().as_bytes().to_vec();
        ask(&mut stream, Requested::Open(Open { image, ancestor, takes_stored: false }))?;
        let Opened { image_id, manifest_length, working_set_length, signature } = match reply(&mut stream)? {
            Replied::Opened(opened) => opened,
            other => return Err(unexpected("an open image", &other)),
        };
        let id = image_id.try_into().map_err(|id: Vec<u8>| MessageError::Unexpected {
            expected: "an image id of 32 bytes",
            found: format!("{} bytes", id.len()),
        })?;
        let (outstanding, stored) = (VecDeque::new(), Vec::new());
        let image_id = Digest(id);
        let signature = Some(signature).filter(|signature| !signature.is_empty());
        Ok(Self { stream, image_id, manifest_length, working_set_length, signature, outstanding, stored })
    }

    /// Returns the image's id, as the server says. The manifest proves it.
    pub fn image_id(&self) -> Digest {
        self.image_id
    }

    /// Returns the length of the manifest in bytes, as the server says.
    pub fn manifest_length(&self) -> u64 {
        self.manifest_length
    }

    /// Returns the signature of the image, as the server sent it.
    pub fn signature(&self) -> Option<&[u8]> {
        self.signature.as_deref()
    }

    /// Returns the length of the image's working set in bytes; 0 if it has none.
    pub fn working_set_length(&self) -> u64 {
        self.working_set_length
    }

    /// Returns whether another read may be requested now.
    pub fn has_room(&self) -> bool {
        self.outstanding.len() < MAX_OUTSTANDING
    }

    /// Returns whether a read is outstanding.
    pub fn is_waiting(&self) -> bool {
        !self.outstanding.is_empty()
    }

    /// Requests bytes of a file: 0 is the manifest, 1 the first file that it names,
    /// [`WORKING_SET_NUMBER`](crate::protocol::WORKING_SET_NUMBER) the working set.
    ///
    /// # Errors
    /// The connection fails.
    ///
    /// # Panics
    /// The length is 0 or above [`MAX_READ`], or there is no [room](Self::has_room).
    pub fn request(&mut self, file: u32, offset: u64, length: u32) -> Result<(), MessageError> {
        assert!((1..=MAX_READ).contains(&length) && self.has_room(), "a read of {length} bytes");
        ask(&mut self.stream, Requested::Read(crate::protocol::Read { file, offset, length }))?;
        self.outstanding.push_back(length);
        Ok(())
    }

    /// Receives the bytes of the oldest outstanding read. Returns how many travelled: fewer if they were
    /// compressed.
    ///
    /// # Errors
    /// The connection fails, the server refuses the read, or it sends another number of bytes.
    ///
    /// # Panics
    /// No read is outstanding.
    #[allow(clippy::expect_used, reason = "the caller's requests are counted, not the peer's answers")]
    pub fn next_data(&mut self, into: &mut Vec<u8>) -> Result<u64, MessageError> {
        let length = self.outstanding.pop_front().expect("a read is outstanding");
        let form = match reply(&mut self.stream)? {
            Replied::Data(data) if data.length == length => form_of(&data)?,
            Replied::Data(Data { length: sent, .. }) => {
                return Err(MessageError::Unexpected {
                    expected: "the bytes of a read",
                    found: format!("{sent} bytes for a read of {length}"),
                });
            }
            other => return Err(unexpected("the bytes of a read", &other)),
        };
        into.resize(length as usize, 0);
        match form {
            DataForm::Lz4 => into.chunks_mut(COMPRESSED_BLOCK).map(|block| self.receive_stored(block)).sum(),
            DataForm::Plain => {
                self.stream.read_exact(into).map_err(closed)?;
                Ok(length.into())
            }
            DataForm::Stored => Err(MessageError::Unexpected {
                expected: "the bytes of a read",
                found: "stored parts, which were not asked for".to_owned(),
            }),
        }
    }

    fn receive_stored(&mut self, block: &mut [u8]) -> Result<u64, MessageError> {
        let mut length = [0; STORED_LENGTH];
        self.stream.read_exact(&mut length).map_err(closed)?;
        self.stored.resize(compressed::stored_length(length, block.len())?, 0);
        self.stream.read_exact(&mut self.stored).map_err(closed)?;
        compressed::restore(&self.stored, block)?;
        Ok((STORED_LENGTH + self.stored.len()) as u64)
    }
}

/// The form of data, which this side must know.
///
/// # Errors
/// It does not.
pub fn form_of(data: &Data) -> Result<DataForm, MessageError> {
    DataForm::try_from(data.form)
        .map_err(|error| MessageError::Unexpected { expected: "the form of data", found: error.to_string() })
}

fn ask(stream: &mut impl Write, what: Requested) -> Result<(), MessageError> {
    send(stream, &Request { what: Some(what) }, &[])
}

fn reply(stream: &mut impl Read) -> Result<Replied, MessageError> {
    let reply: Reply = receive(stream)?.ok_or(MessageError::Closed)?;
    match reply.what {
        Some(Replied::Refused(reason)) => Err(MessageError::Refused(printable(&reason))),
        Some(what) => Ok(what),
        None => Err(MessageError::Unexpected { expected: "a reply", found: "nothing".into() }),
    }
}

fn unexpected(expected: &'static str, found: &Replied) -> MessageError {
    let found = match found {
        Replied::Hello(_) => "a hello",
        Replied::Opened(_) => "an open image",
        Replied::Data(_) => "bytes",
        Replied::Refused(_) => "a refusal",
    };
    MessageError::Unexpected { expected, found: found.to_owned() }
}
