// SPDX-License-Identifier: MIT OR Apache-2.0
//! A connection with the protocol of its peer.

use std::os::fd::{AsFd, BorrowedFd};

use crate::image_wire::ImageWire;
use crate::queue::FlightPages;
use crate::stream::PageStream;
use crate::wire::PageWire;

/// A connection with the protocol of its peer.
#[derive(Debug)]
pub(crate) enum PeerWire {
    Pages(PageWire),
    Image(ImageWire),
}

impl PeerWire {
    /// Receives what the stream has now.
    pub(crate) fn receive(&mut self) -> anyhow::Result<()> {
        match self {
            Self::Pages(wire) => wire.receive(),
            Self::Image(wire) => wire.receive(),
        }
    }

    /// Returns the next pages of the answer to a request, and their bytes.
    pub(crate) fn answer(&mut self, expected: &FlightPages) -> anyhow::Result<Option<(u64, &[u8])>> {
        match self {
            Self::Pages(wire) => wire.answer(expected),
            Self::Image(wire) => wire.answer(expected),
        }
    }

    /// Sends requests together.
    pub(crate) fn request(&mut self, requests: &[FlightPages]) -> anyhow::Result<()> {
        match self {
            Self::Pages(wire) => wire.request(requests),
            Self::Image(wire) => wire.request(requests),
        }
    }

    /// Takes what an image server says before the first data. Returns false until it has opened the image.
    pub(crate) fn is_opened(&mut self) -> anyhow::Result<bool> {
        match self {
            Self::Pages(_) => Ok(true),
            Self::Image(wire) => wire.is_opened(),
        }
    }

    /// Whether bytes were received that are not used.
    pub(crate) fn has_more(&self) -> bool {
        match self {
            Self::Pages(wire) => wire.has_more(),
            Self::Image(wire) => wire.has_more(),
        }
    }

    /// Returns what carries the bytes.
    pub(crate) fn stream(&mut self) -> &mut PageStream {
        match self {
            Self::Pages(wire) => &mut wire.stream,
            Self::Image(wire) => &mut wire.stream,
        }
    }

    /// [`PeerWire::stream`], at the end.
    pub(crate) fn into_stream(self) -> PageStream {
        match self {
            Self::Pages(wire) => wire.stream,
            Self::Image(wire) => wire.stream,
        }
    }
}

impl AsFd for PeerWire {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Pages(wire) => wire.stream.as_fd(),
            Self::Image(wire) => wire.stream.as_fd(),
        }
    }
}
