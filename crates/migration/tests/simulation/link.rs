// SPDX-License-Identifier: MIT OR Apache-2.0
//! A connection that delays, and that is cut. Each side learns of the cut in its own time.

use std::collections::VecDeque;
use std::ops::Range;

use rewake_migration::blocks::BlockDigest;
use rewake_migration::message::{FromDestination, FromSource};

/// What travels to the destination, in order.
#[derive(Debug, Clone)]
pub(super) enum ToDestination {
    Message(FromSource),
    /// Bytes of a block, read while the program runs.
    Candidate(usize, [u64; 2]),
    /// All candidates of a round were sent.
    RoundEnd(u32),
    /// For some halves of a block.
    Digest(usize, Range<usize>, BlockDigest),
    /// Bytes of halves of a block, read after the freeze.
    Bytes(usize, Range<usize>, [u64; 2]),
}

/// What travels to the source, in order.
#[derive(Debug, Clone)]
pub(super) enum ToSource {
    Message(FromDestination),
    /// All candidates of a round are stored.
    RoundStored(u32),
    Request {
        block: usize,
        halves: Range<usize>,
        wants_bytes: bool,
    },
}

/// The network between both hosts: one connection at most.
#[derive(Debug, Default)]
pub(super) struct Link {
    is_connected: bool,
    to_destination: VecDeque<ToDestination>,
    to_source: VecDeque<ToSource>,
    /// Sides that have not learnt of the cut.
    pub(super) source_believes: bool,
    pub(super) destination_believes: bool,
}

impl Link {
    pub(super) fn connect(&mut self) {
        *self =
            Self { is_connected: true, source_believes: true, destination_believes: true, ..Self::default() };
    }

    /// What is in flight is lost.
    pub(super) fn cut(&mut self) {
        self.is_connected = false;
        self.to_destination.clear();
        self.to_source.clear();
    }

    pub(super) fn is_connected(&self) -> bool {
        self.is_connected
    }

    pub(super) fn send_to_destination(&mut self, item: ToDestination) {
        if self.is_connected {
            self.to_destination.push_back(item);
        }
    }

    pub(super) fn send_to_source(&mut self, item: ToSource) {
        if self.is_connected {
            self.to_source.push_back(item);
        }
    }

    pub(super) fn next_for_destination(&mut self) -> Option<ToDestination> {
        self.to_destination.pop_front()
    }

    pub(super) fn next_for_source(&mut self) -> Option<ToSource> {
        self.to_source.pop_front()
    }
}
