// SPDX-License-Identifier: MIT OR Apache-2.0
//! The pages after a message with [`crate::PagesEncoding::Lz4`].

use rewake_criu_images::PAGE;

use crate::error::BadMessage;

/// One page: a length of 32 bits says what follows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CompressedPage {
    /// Length 0: the page has zeros, and nothing follows.
    Zero,
    /// Length 4096: the page's bytes follow.
    Raw,
    /// Any other length: one LZ4 block of this length follows.
    Lz4(u32),
}

impl CompressedPage {
    /// Reads the length of a page.
    ///
    /// # Errors
    /// It is longer than a page.
    pub fn parse(length: [u8; 4]) -> Result<Self, BadMessage> {
        let length = u32::from_ne_bytes(length);
        match u64::from(length) {
            0 => Ok(Self::Zero),
            PAGE => Ok(Self::Raw),
            1..PAGE => Ok(Self::Lz4(length)),
            _ => Err(BadMessage::PageLength(length)),
        }
    }
}
