// SPDX-License-Identifier: MIT OR Apache-2.0
//! The connection to an image server. After a cut there is a new one, and outstanding reads are requested
//! again.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use crate::protocol::client::ImageClient;
use crate::protocol::message::MessageError;
use crate::protocol::{MAX_READ, WORKING_SET_NUMBER};
use anyhow::{Context as _, ensure};
use rewake_criu_images::Digest;
use rewake_manifest::SealedChunk;
use tracing::warn;

use crate::pull::chunks::ChunkPlace;

/// Outstanding reads: while one is on its way, the server reads the next. 32 MiB of chunks at most.
const OUTSTANDING: usize = 16;
/// New connections in a row that bring no byte, before the copy fails.
const ATTEMPTS: u32 = 5;
/// Time before the second such connection; each later one waits twice as long.
const FIRST_RECONNECT_INTERVAL: Duration = Duration::from_millis(250);

/// Where the bytes of an image come from.
pub trait ChunkSource {
    /// Returns the image's id, as the source says.
    fn image_id(&self) -> Digest;

    /// Returns the length of the manifest in bytes, as the source says.
    fn manifest_length(&self) -> u64;

    /// Returns whether another read may be requested before the next one is received.
    fn has_room(&self) -> bool;

    /// Requests a range of the manifest.
    ///
    /// # Errors
    /// The source is lost for long.
    fn request_manifest(&mut self, offset: u64, length: u32) -> anyhow::Result<()>;

    /// Requests a chunk.
    ///
    /// # Errors
    /// The source is lost for long.
    fn request_chunk(&mut self, place: ChunkPlace, chunk: &SealedChunk) -> anyhow::Result<()>;

    /// Receives the bytes of the oldest outstanding read. Returns how many travelled: fewer if they were
    /// compressed.
    ///
    /// # Errors
    /// The source is lost for long, or has not these bytes.
    fn next_data(&mut self, into: &mut Vec<u8>) -> anyhow::Result<u64>;

    /// Reads the recorded working set of the image, while no read is outstanding. Returns how many bytes
    /// travelled, or `None` if the source has no working set that can be read: an image is right without it.
    fn working_set(&mut self, into: &mut Vec<u8>) -> Option<u64>;

    /// Returns the signature of the image's id, as the source has it; `None` if it is not signed.
    fn signature(&self) -> Option<&[u8]>;

    /// Returns the sum of the files' lengths, as the source says it beside the manifest; `None` if it does
    /// not. A caller may have reserved space for it.
    fn claimed_bytes(&self) -> Option<u64> {
        None
    }
}

/// A stream to an image server.
pub trait ServerStream: Read + Write {}
impl<T: Read + Write> ServerStream for T {}

/// An image on another host.
pub struct ImageSource {
    connect: Box<dyn FnMut() -> io::Result<Box<dyn ServerStream>>>,
    image: PathBuf,
    client: ImageClient<Box<dyn ServerStream>>,
    outstanding: VecDeque<RangeRead>,
    failures: u32,
}

/// A range of a file: its number in the manifest, offset and length in bytes.
type RangeRead = (u32, u64, u32);

impl std::fmt::Debug for ImageSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ImageSource").field("image", &self.image).finish_non_exhaustive()
    }
}

impl ImageSource {
    /// Opens an image of a server; `connect` makes each connection to it.
    ///
    /// # Errors
    /// The server cannot be reached, is of another version, or refuses.
    pub fn open(
        mut connect: impl FnMut() -> io::Result<Box<dyn ServerStream>> + 'static,
        image: impl Into<PathBuf>,
    ) -> anyhow::Result<Self> {
        let image = image.into();
        let client = ImageClient::open(connect().context("connecting")?, &image, 0)?;
        Ok(Self { connect: Box::new(connect), image, client, outstanding: VecDeque::new(), failures: 0 })
    }

    fn request(&mut self, file: u32, offset: u64, length: u32) -> anyhow::Result<()> {
        self.outstanding.push_back((file, offset, length));
        match self.client.request(file, offset, length) {
            Ok(()) => Ok(()),
            Err(error) => self.reconnect(error),
        }
    }

    /// Connects again after a cut, and requests what is outstanding.
    fn reconnect(&mut self, error: MessageError) -> anyhow::Result<()> {
        let mut error = error;
        loop {
            let is_cut = matches!(error, MessageError::Closed | MessageError::Io(_));
            if !is_cut || self.failures >= ATTEMPTS {
                return Err(error.into());
            }
            if self.failures > 0 {
                thread::sleep(FIRST_RECONNECT_INTERVAL * (1 << (self.failures - 1)));
            }
            self.failures += 1;
            warn!("{error}: connecting again, attempt {} of {ATTEMPTS}", self.failures);
            match self.connect_again() {
                Ok(()) => return Ok(()),
                Err(next) => error = next.downcast()?,
            }
        }
    }

    fn connect_again(&mut self) -> anyhow::Result<()> {
        let stream = (self.connect)().map_err(MessageError::from)?;
        let mut client = ImageClient::open(stream, &self.image, 0)?;
        ensure!(
            client.image_id() == self.client.image_id(),
            "image {} has been replaced on the server meanwhile: start again",
            self.image.display()
        );
        for &(file, offset, length) in &self.outstanding {
            client.request(file, offset, length)?;
        }
        self.client = client;
        Ok(())
    }
}

impl ChunkSource for ImageSource {
    fn image_id(&self) -> Digest {
        self.client.image_id()
    }

    fn manifest_length(&self) -> u64 {
        self.client.manifest_length()
    }

    fn has_room(&self) -> bool {
        self.outstanding.len() < OUTSTANDING
    }

    fn request_manifest(&mut self, offset: u64, length: u32) -> anyhow::Result<()> {
        self.request(0, offset, length)
    }

    fn request_chunk(&mut self, place: ChunkPlace, chunk: &SealedChunk) -> anyhow::Result<()> {
        self.request(place.file, place.offset, chunk.length)
    }

    fn next_data(&mut self, into: &mut Vec<u8>) -> anyhow::Result<u64> {
        loop {
            match self.client.next_data(into) {
                Ok(travelled) => {
                    self.outstanding.pop_front();
                    self.failures = 0;
                    return Ok(travelled);
                }
                Err(error) => self.reconnect(error)?,
            }
        }
    }

    fn signature(&self) -> Option<&[u8]> {
        self.client.signature()
    }

    fn working_set(&mut self, into: &mut Vec<u8>) -> Option<u64> {
        // By the length that each connection says: the file may be another one by then.
        loop {
            let length = u32::try_from(self.client.working_set_length()).ok();
            // A longer one is none.
            let length = length.filter(|length| (1..=MAX_READ).contains(length))?;
            let requested = self.client.request(WORKING_SET_NUMBER, 0, length);
            match requested.and_then(|()| self.client.next_data(into)) {
                Ok(travelled) => {
                    self.failures = 0;
                    return Some(travelled);
                }
                Err(MessageError::Refused(reason)) => {
                    warn!("the image is copied without its working set: {reason}");
                    // The server has closed the connection. If no other connection can be made, the next read
                    // fails with the reason.
                    let _ = self.reconnect(MessageError::Closed);
                    return None;
                }
                Err(error) => self.reconnect(error).ok()?,
            }
        }
    }
}
