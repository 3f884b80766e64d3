// SPDX-License-Identifier: MIT OR Apache-2.0
//! Bytes of a peer that were received, and are not used yet.

use std::io::ErrorKind;

use anyhow::{Context as _, ensure};

use crate::ended::{PeerEnded, explained};
use crate::stream::PageStream;

/// A buffer of a fixed size: what is received is used from its start.
#[derive(Debug)]
pub(crate) struct ReceivedBytes {
    buffer: Box<[u8]>,
    /// Bytes before `start` are used, those before `end` are received.
    start: usize,
    end: usize,
}

impl ReceivedBytes {
    pub(crate) fn new(size: usize) -> Self {
        Self { buffer: vec![0; size].into_boxed_slice(), start: 0, end: 0 }
    }

    /// Receives what the stream has now; `doing` is for errors.
    ///
    /// # Errors
    /// The connection has ended.
    pub(crate) fn receive(&mut self, stream: &mut PageStream, doing: &'static str) -> anyhow::Result<()> {
        if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let count = loop {
            match stream.receive(&mut self.buffer[self.end..]) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                received => break received.map_err(explained).context(doing)?,
            }
        };
        ensure!(count > 0, PeerEnded);
        self.end += count;
        Ok(())
    }

    /// Returns the bytes that are not used yet.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    /// Drops the first `count` bytes, or all if there are fewer.
    pub(crate) fn used(&mut self, count: usize) {
        self.start = self.end.min(self.start.saturating_add(count));
    }
}
