// SPDX-License-Identifier: MIT OR Apache-2.0
//! Data as a store has it: blocks of 64 KiB of the read from its start on, each as parts of stored blocks,
//! which begin at other places. So the server decompresses nothing but a block of which a part is shorter
//! than its stored form: no part has more stored bytes than bytes. What is wrong is found by the checksums of
//! the manifest.
//!
//! A part is four little-endian `u32`s, and its bytes:
//!
//! | stored bytes | length of the stored block | first byte of it | bytes | what |
//! |---|---|---|---|---|
//! | 0 | 0 | 0 | n | zeros |
//! | n | 0 | 0 | n | bytes as they are |
//! | s | l | f | n | a zstd frame of `l` bytes, of which `n` from `f` on are the part |
//! | 0 | l | f | n | the same, of the last frame of the connection |

use zstd::bulk::Decompressor;

use crate::protocol::message::MessageError;

/// Bytes of a block: of the read, and of a store at most.
pub const BLOCK: usize = 64 << 10;
/// Bytes of the header in front of a part.
pub const PART_HEADER: usize = 16;
/// The most parts of a block. A store has chunks of whole pages, and zeros may lie between two of them.
pub const MAX_PARTS: usize = 64;
/// The most bytes of all parts of a block, because no part has more stored bytes than bytes.
pub const MAX_PART_BYTES: usize = BLOCK + MAX_PARTS * PART_HEADER;

/// The header of a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartHeader {
    /// Stored bytes that follow.
    pub stored: usize,
    /// Bytes of the frame; 0: there is none.
    pub frame: usize,
    /// The first of them that belongs to the part.
    pub first: usize,
    /// The bytes of the part.
    pub bytes: usize,
}

impl PartHeader {
    /// Appends the header.
    pub fn write(self, into: &mut Vec<u8>) {
        for number in [self.stored, self.frame, self.first, self.bytes] {
            into.extend(u32::try_from(number).unwrap_or(u32::MAX).to_le_bytes());
        }
    }

    /// Reads a header, or `None` if it is not complete. `room`: the bytes that are left of the block.
    fn read(bytes: &[u8], room: usize) -> Result<Option<Self>, MessageError> {
        let Some(header) = bytes.first_chunk::<PART_HEADER>() else { return Ok(None) };
        let (numbers, _) = header.as_chunks();
        let [stored, frame, first, bytes] =
            [0, 1, 2, 3].map(|at| usize::try_from(u32::from_le_bytes(numbers[at])).unwrap_or(usize::MAX));
        let is_plain = frame == 0 && first == 0 && [0, bytes].contains(&stored);
        let is_short = stored <= bytes && stored < frame && frame <= BLOCK;
        let is_frame = is_short && first.checked_add(bytes).is_some_and(|end| end <= frame);
        if (1..=room).contains(&bytes) && (is_plain || is_frame) {
            return Ok(Some(Self { stored, frame, first, bytes }));
        }
        let found =
            format!("{stored} stored bytes of {frame}, {bytes} from {first} on, where {room} are due");
        Err(MessageError::Unexpected { expected: "a part of a block", found })
    }
}

/// Restores the blocks of one connection.
pub struct PartReader {
    decompressor: Decompressor<'static>,
    /// The last frame's bytes, and how many.
    frame: Box<[u8]>,
    length: usize,
}

impl std::fmt::Debug for PartReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PartReader").field("length", &self.length).finish_non_exhaustive()
    }
}

impl PartReader {
    /// For a new connection.
    ///
    /// # Errors
    /// No memory.
    pub fn new() -> std::io::Result<Self> {
        Ok(Self { decompressor: Decompressor::new()?, frame: vec![0; BLOCK].into(), length: 0 })
    }

    /// Restores a block from what was received: once for each block, in their order. Returns how many bytes
    /// of it were used, or `None` if not all parts were received.
    ///
    /// # Errors
    /// They are not such parts ([`MessageError::Unexpected`]), or a stored block is damaged
    /// ([`MessageError::Damaged`]).
    pub fn block(&mut self, received: &[u8], block: &mut [u8]) -> Result<Option<usize>, MessageError> {
        let Some(parts) = parts(received, block.len())? else { return Ok(None) };
        let (mut used, mut filled) = (0, 0);
        for part in parts {
            let stored = &received[used + PART_HEADER..][..part.stored];
            let into = &mut block[filled..filled + part.bytes];
            if part.frame > 0 {
                self.take(part, stored, into)?;
            } else if part.stored > 0 {
                into.copy_from_slice(stored);
            } else {
                into.fill(0);
            }
            used += PART_HEADER + part.stored;
            filled += part.bytes;
        }
        Ok(Some(used))
    }

    fn take(&mut self, part: PartHeader, stored: &[u8], into: &mut [u8]) -> Result<(), MessageError> {
        if part.stored > 0 {
            self.length = 0;
            let found = self.decompressor.decompress_to_buffer(stored, &mut self.frame[..part.frame]);
            match found {
                Ok(length) if length == part.frame => self.length = length,
                Ok(length) => {
                    return Err(MessageError::Damaged(format!("{length} bytes, expected {}", part.frame)));
                }
                Err(error) => return Err(MessageError::Damaged(error.to_string())),
            }
        }
        if self.length != part.frame {
            let found = format!("a frame of {} bytes, after one of {}", part.frame, self.length);
            return Err(MessageError::Unexpected { expected: "a part of the last frame", found });
        }
        into.copy_from_slice(&self.frame[part.first..part.first + part.bytes]);
        Ok(())
    }
}

/// The headers of the parts of a block, or `None` if not all parts were received.
fn parts(received: &[u8], length: usize) -> Result<Option<Vec<PartHeader>>, MessageError> {
    let (mut parts, mut used, mut left) = (Vec::new(), 0, length);
    while left > 0 {
        if parts.len() == MAX_PARTS {
            let found = format!("{MAX_PARTS}, and {left} bytes are left");
            return Err(MessageError::Unexpected { expected: "the parts of a block", found });
        }
        let Some(part) = PartHeader::read(received.get(used..).unwrap_or_default(), left)? else {
            return Ok(None);
        };
        used += PART_HEADER + part.stored;
        left -= part.bytes;
        parts.push(part);
    }
    Ok((used <= received.len()).then_some(parts))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frame(bytes: &[u8]) -> Vec<u8> {
        zstd::bulk::compress(bytes, 1).unwrap()
    }

    fn part(stored: &[u8], frame: usize, first: usize, bytes: usize) -> Vec<u8> {
        let mut part = Vec::new();
        PartHeader { stored: stored.len(), frame, first, bytes }.write(&mut part);
        [&part, stored].concat()
    }

    /// A block of bytes, zeros, and a part of a frame; then one of the frame's rest.
    fn scene() -> (Vec<u8>, Vec<u8>, [Vec<u8>; 2]) {
        let text: Vec<u8> = b"one page of text ".iter().copied().cycle().take(10_000).collect();
        let first =
            [part(b"plain", 0, 0, 5), part(&[], 0, 0, 100), part(&frame(&text), 10_000, 7, 895)].concat();
        let second = part(&[], 10_000, 902, 9098);
        let blocks = [[&b"plain"[..], &[0; 100], &text[7..902]].concat(), text[902..].to_vec()];
        (first, second, blocks)
    }

    #[test]
    fn parts_are_the_bytes_of_the_block() {
        let (first, second, blocks) = scene();
        let mut reader = PartReader::new().unwrap();
        for (bytes, expected) in [&first, &second].into_iter().zip(&blocks) {
            let mut block = vec![0xff; expected.len()];
            for end in 0..bytes.len() {
                assert_eq!(reader.block(&bytes[..end], &mut block).unwrap(), None, "{end}");
            }
            let received = [&bytes[..], b"next"].concat();
            assert_eq!(reader.block(&received, &mut block).unwrap(), Some(bytes.len()));
            assert!(&block == expected);
        }
    }

    #[test]
    fn wrong_parts_are_refused_and_damaged_frames_have_an_error_of_their_own() {
        let wrong = |bytes: &[u8], length: usize| {
            let mut reader = PartReader::new().unwrap();
            reader.block(bytes, &mut vec![0; length]).unwrap_err()
        };
        let text = frame(&[7; 1000]);
        let refused = [
            // More than is due, none, more than the frame, a frame that is longer than it may be, and no
            // frame before.
            part(b"plain", 0, 0, 5),
            part(&[], 0, 0, 0),
            part(&text, 1000, 998, 3),
            part(&text, BLOCK + 1, 0, 4),
            part(b"abcd", 0, 0, 3),
            part(&[], 1000, 0, 4),
            part(&text, 1000, usize::MAX, 4),
            // More stored bytes than bytes.
            part(&text, 1000, 0, 4),
        ];
        for bytes in refused {
            assert!(matches!(wrong(&bytes, 4), MessageError::Unexpected { .. }), "{bytes:?}");
        }
        let many = part(&[], 0, 0, 1).repeat(MAX_PARTS);
        assert!(matches!(wrong(&many, MAX_PARTS + 1), MessageError::Unexpected { .. }));
        for bytes in [part(&text[1..], 1000, 0, 99), part(&text, 1001, 0, 99), part(&text, 999, 0, 99)] {
            assert!(matches!(wrong(&bytes, 99), MessageError::Damaged(_)), "{bytes:?}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_an_error_or_a_whole_block(bytes in prop::collection::vec(any::<u8>(), 1..300)) {
            let mut block = [0; 300];
            // No panic, and no byte beyond the block.
            let _ = PartReader::new().unwrap().block(&bytes, &mut block);
        }
    }
}
