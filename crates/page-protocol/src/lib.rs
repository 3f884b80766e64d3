// SPDX-License-Identifier: MIT OR Apache-2.0
//! The protocol of CRIU's page server: messages and their bytes, without I/O.
//!
//! Both directions of a connection carry messages: a header ([`MessageHeader`]), and after some of them
//! pages. There is no greeting and no version. CRIU 4.2 made the header longer; [`HeaderLayout::detect`]
//! finds out which one a peer uses.
//!
//! Two roles share the protocol:
//! - `criu dump --page-server` sends memory: for each task and each shared memory object
//!   [`PageMessage::Open`], then its pages in ascending order ([`PageMessage::Add`]), and at the end
//!   [`PageMessage::Close`].
//! - `criu lazy-pages --page-server` requests pages ([`PageMessage::Get`]). Each answer is [`answer_header`],
//!   then the pages. Answers have the order of the requests.
//!
//! Rewake also requests files of an image by it, from its own peer of a migration: [`file_task`].
//!
//! All numbers have the byte order of the machine: CRIU does not convert them, and both peers have the same
//! kind of processor. Sources: CRIU 4.1.1 and 4.2.1, and the compressed pages of 4.3
//! ([`PagesEncoding::Lz4`]).
#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable))]

mod error;
mod file_task;
mod header;
mod message;
mod payload;

pub use error::BadMessage;
pub use file_task::{file_of_task, file_task};
pub use header::{HeaderLayout, MessageHeader, NARROW_LEN, WIDE_LEN};
pub use message::{PageMessage, PageRun, PagesEncoding, answer_header};
pub use payload::CompressedPage;

/// The answer to [`PageMessage::Close`]: all that the peer sent was received.
pub const CLOSED: [u8; 4] = 0i32.to_ne_bytes();

/// Returns the answer to [`PageMessage::Open`] with `wants_answer`: whether the parent image has pages of it.
#[must_use]
pub fn opened(has_parent: bool) -> [u8; 1] {
    [u8::from(has_parent)]
}

/// Returns the answer to [`PageMessage::AskParent`].
#[must_use]
pub fn has_parent(has_parent: bool) -> [u8; 4] {
    i32::from(has_parent).to_ne_bytes()
}
