// SPDX-License-Identifier: MIT OR Apache-2.0
//! The header of a message, in both layouts.
//!
//! ```text
//! CRIU up to 4.1.1, 24 bytes:  command u32 @0  pages u32 @4  address u64 @8  id u64 @16
//! CRIU from 4.2, 32 bytes:     command u32 @0  padding @4    pages u64 @8    address u64 @16  id u64 @24
//! ```
//! CRIU does not clear the padding.

use rewake_criu_images::PAGE;

use crate::error::BadMessage;

/// Bytes of a header of CRIU up to 4.1.1, and the bytes that [`HeaderLayout::detect`] needs.
pub const NARROW_LEN: usize = 24;
/// Bytes of a header of CRIU 4.2 and later.
pub const WIDE_LEN: usize = 32;

/// The layout of a peer's headers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeaderLayout {
    /// CRIU up to 4.1.1.
    Narrow,
    /// CRIU 4.2 and later.
    Wide,
}

/// A header, with its numbers as they are on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MessageHeader {
    /// The command in the low 16 bits, its flags above.
    pub command: u32,
    /// Number of pages.
    pub pages: u64,
    /// Address of the first page.
    pub vaddr: u64,
    /// The memory: what the number means depends on the command.
    pub id: u64,
}

impl HeaderLayout {
    /// Returns the length of a header in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "no header is empty")]
    pub const fn len(self) -> usize {
        match self {
            Self::Narrow => NARROW_LEN,
            Self::Wide => WIDE_LEN,
        }
    }

    /// Finds out the layout of a peer from the first bytes that it sent.
    ///
    /// Bytes 16 to 24 are the id in a narrow header, and the address in a wide one:
    /// - An id of an image is never a multiple of 4096: its lowest byte is the kind, 1 or 2. An address
    ///   always is.
    /// - A page request has a pid there, which may be a multiple of 4096. Then bytes 8 to 16 decide. They are
    ///   an address in a narrow header, from 4096 on, and the number of pages in a wide one. CRIU requests at
    ///   most 1024 pages, the length of its pipes.
    /// - The last message ([`crate::PageMessage::Close`]) has zeros in both places, and counts as wide. Where
    ///   it is also the first message, the other 8 bytes may not exist.
    #[must_use]
    pub fn detect(first: &[u8; NARROW_LEN]) -> Self {
        let (id_or_address, address_or_pages) = (u64_at(first, 16), u64_at(first, 8));
        if id_or_address.is_multiple_of(PAGE) && address_or_pages < PAGE { Self::Wide } else { Self::Narrow }
    }

    /// Reads a header. Bytes of `bytes` beyond the header's length are ignored.
    #[must_use]
    pub fn decode(self, bytes: &[u8; WIDE_LEN]) -> MessageHeader {
        let command = u32_at(bytes, 0);
        match self {
            Self::Narrow => MessageHeader {
                command,
                pages: u32_at(bytes, 4).into(),
                vaddr: u64_at(bytes, 8),
                id: u64_at(bytes, 16),
            },
            Self::Wide => MessageHeader {
                command,
                pages: u64_at(bytes, 8),
                vaddr: u64_at(bytes, 16),
                id: u64_at(bytes, 24),
            },
        }
    }

    /// Writes a header, with zeros as padding.
    ///
    /// # Errors
    /// A narrow header has no room for 2^32 pages.
    pub fn encode(self, header: &MessageHeader) -> Result<Vec<u8>, BadMessage> {
        let MessageHeader { command, pages, vaddr, id } = *header;
        let numbers = |list: &[u64]| list.iter().flat_map(|number| number.to_ne_bytes()).collect::<Vec<_>>();
        let (second, rest) = match self {
            Self::Narrow => {
                let count = u32::try_from(pages).map_err(|_| BadMessage::Overflow { vaddr, pages })?;
                (count, numbers(&[vaddr, id]))
            }
            Self::Wide => (0, numbers(&[pages, vaddr, id])),
        };
        Ok([&command.to_ne_bytes()[..], &second.to_ne_bytes(), &rest].concat())
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes[at..].first_chunk().map_or(0, |word| u32::from_ne_bytes(*word))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes[at..].first_chunk().map_or(0, |word| u64::from_ne_bytes(*word))
}
