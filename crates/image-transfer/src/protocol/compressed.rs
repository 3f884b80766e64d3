// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compressed data: blocks, each by itself, so that each can be used when it has arrived.
//!
//! A block is 64 KiB of the read from its start on, the last one what is left. It travels as the number of
//! its stored bytes (a little-endian `u32`), and these: as they are if there are as many as in the block,
//! else as an LZ4 block.

use crate::protocol::message::MessageError;

/// Bytes of a block.
pub const COMPRESSED_BLOCK: usize = 64 << 10;
/// Bytes of the number before a stored block.
pub const STORED_LENGTH: usize = 4;

/// Appends a block, compressed if that makes it shorter.
///
/// # Panics
/// It has more than [`COMPRESSED_BLOCK`] bytes.
pub fn store(block: &[u8], into: &mut Vec<u8>) {
    assert!(block.len() <= COMPRESSED_BLOCK, "a block of {} bytes", block.len());
    let start = into.len();
    into.resize(start + STORED_LENGTH + lz4_flex::block::get_maximum_output_size(block.len()), 0);
    let room = &mut into[start + STORED_LENGTH..];
    // It has room for the worst case, so it does not fail.
    let compressed = lz4_flex::block::compress_into(block, room).ok().filter(|length| *length < block.len());
    let length = compressed.unwrap_or_else(|| {
        room[..block.len()].copy_from_slice(block);
        block.len()
    });
    into.truncate(start + STORED_LENGTH + length);
    let length = u32::try_from(length).unwrap_or(u32::MAX);
    into[start..start + STORED_LENGTH].copy_from_slice(&length.to_le_bytes());
}

/// Returns the number of stored bytes of a block of `block` bytes.
///
/// # Errors
/// It is 0, or more than the block has.
pub fn stored_length(bytes: [u8; STORED_LENGTH], block: usize) -> Result<usize, MessageError> {
    let length = u32::from_le_bytes(bytes) as usize;
    if (1..=block).contains(&length) {
        return Ok(length);
    }
    Err(MessageError::Unexpected {
        expected: "the number of a block's stored bytes",
        found: format!("{length} for {block} bytes"),
    })
}

/// Restores a block of its stored bytes.
///
/// # Errors
/// The stored bytes are no block of this length.
pub fn restore(stored: &[u8], block: &mut [u8]) -> Result<(), MessageError> {
    if stored.len() == block.len() {
        block.copy_from_slice(stored);
        return Ok(());
    }
    let found = match lz4_flex::block::decompress_into(stored, block) {
        Ok(length) if length == block.len() => return Ok(()),
        Ok(length) => format!("{length} bytes"),
        Err(error) => error.to_string(),
    };
    Err(MessageError::Unexpected { expected: "a compressed block", found })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn stored(block: &[u8]) -> Vec<u8> {
        let mut bytes = b"before".to_vec();
        store(block, &mut bytes);
        bytes.split_off(6)
    }

    fn restored(bytes: &[u8], length: usize) -> Result<Vec<u8>, MessageError> {
        let (count, rest) = bytes.split_first_chunk().unwrap();
        assert_eq!(stored_length(*count, length)?, rest.len());
        let mut block = vec![0; length];
        restore(rest, &mut block).map(|()| block)
    }

    #[test]
    fn text_becomes_shorter_and_noise_stays() {
        let text = b"one page of text ".repeat(1000);
        assert!(stored(&text).len() < text.len() / 10);
        let noise: Vec<u8> = (0u32..1000).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
        assert_eq!(stored(&noise).len(), STORED_LENGTH + noise.len());
        for block in [&text, &noise] {
            assert_eq!(&restored(&stored(block), block.len()).unwrap(), block);
        }
    }

    #[test]
    fn stored_bytes_of_another_length_are_refused() {
        for length in [0, 101, u32::MAX] {
            stored_length(length.to_le_bytes(), 100).unwrap_err();
        }
        let text = stored(&[7; 1000]);
        for length in [999, 1001, 60_000] {
            restored(&text, length).unwrap_err();
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_an_error_or_a_whole_block(bytes in prop::collection::vec(any::<u8>(), 1..300)) {
            let mut block = [0; 300];
            // No panic, and no byte beyond the block.
            let _ = restore(&bytes, &mut block);
        }
    }
}
