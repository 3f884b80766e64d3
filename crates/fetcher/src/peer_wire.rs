// SPDX-License-Identifier: MIT OR Apache-2.0
//! A connection with either protocol.

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

    pub(crate) fn has_more(&self) -> bool {
        match self {
            Self::Pages(wire) => wire.has_more(),
            Self::Image(wire) => wire.has_more(),
        }
    }

    pub(crate) fn stream(&mut self) -> &mut PageStream {
        match self {
            Self::Pages(wire) => &mut wire.stream,
            Self::Image(wire) => &mut wire.stream,
        }
    }

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
