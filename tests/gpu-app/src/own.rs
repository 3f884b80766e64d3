// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory of the first process that its CPU alone can access, as much as its shape says: every answer begins
//! with some of it.

use anyhow::{Context as _, ensure};

use crate::kernel::{hash, longs};
use crate::shape::Shape;
use crate::weights;

/// Pages that an answer reads, far from each other.
const LOOKS: u64 = 64;
/// Bytes that are made, or checked, at a time.
const PART: usize = 64 << 10;

/// The memory.
#[derive(Debug)]
pub struct Own {
    seed: u64,
    bytes: Vec<u8>,
}

/// Addresses that an answer reads.
fn places(bytes: u64) -> impl Iterator<Item = u64> {
    let looks = if bytes == 0 { 0 } else { LOOKS };
    (0..looks).map(move |look| look * (bytes / LOOKS))
}

/// The seed of an answer, made from `start`, the seed without own memory; the shape alone determines it.
#[must_use]
pub fn start(shape: &Shape, start: u64) -> u64 {
    let word = |at| {
        let mut word = [0; 8];
        weights::own(shape.seed, at, &mut word);
        u64::from_le_bytes(word)
    };
    hash(places(shape.own_mib << 20).map(word), start)
}

impl Own {
    /// Makes the memory.
    ///
    /// # Errors
    /// It is more than can be addressed.
    pub fn load(shape: &Shape) -> anyhow::Result<Self> {
        let mut bytes = vec![0; usize::try_from(shape.own_mib << 20).context("--own-mib")?];
        for (at, part) in (0..).step_by(PART).zip(bytes.chunks_mut(PART)) {
            weights::own(shape.seed, at, part);
        }
        Ok(Self { seed: shape.seed, bytes })
    }

    /// As [`start`], from the bytes in memory.
    #[must_use]
    pub fn start(&self, start: u64) -> u64 {
        let word = |at| usize::try_from(at).ok().and_then(|at| longs(self.bytes.get(at..at + 8)?).next());
        hash(places(self.bytes.len() as u64).filter_map(word), start)
    }

    /// Checks every byte.
    ///
    /// # Errors
    /// A byte is wrong.
    pub fn check(&self) -> anyhow::Result<()> {
        let mut right = vec![0; PART];
        for (at, part) in (0..).step_by(PART).zip(self.bytes.chunks(PART)) {
            weights::own(self.seed, at, &mut right[..part.len()]);
            ensure!(
                right[..part.len()] == *part,
                "its own memory has other bytes, in {PART} bytes at {at:#x}"
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_as_expected_and_a_changed_byte_is_found() {
        let shape = Shape { own_mib: 1, ..Shape::small() };
        let mut own = Own::load(&shape).unwrap();
        assert_eq!(own.start(5), start(&shape, 5));
        assert_ne!(own.start(5), start(&Shape::small(), 5));
        own.check().unwrap();
        own.bytes[700_001] ^= 1;
        assert!(own.check().unwrap_err().to_string().contains("at 0xa0000"));
        own.bytes[1 << 14] ^= 1;
        assert_ne!(own.start(5), start(&shape, 5));
    }

    #[test]
    fn without_any_it_is_the_same_everywhere() {
        let none = Own::load(&Shape::small()).unwrap();
        none.check().unwrap();
        assert_eq!(none.start(9), start(&Shape::small(), 9));
    }
}
