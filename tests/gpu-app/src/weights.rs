// SPDX-License-Identifier: MIT OR Apache-2.0
//! The server's numbers: any of them from the seed and its place, so that every process can check any byte.

use crate::shape::{LINKS, Shape, VOCABULARY, WIDTH};

/// Names of number sequences besides layers, which are 0 and up.
const EMBEDDINGS: u64 = 1 << 32;
const LINK_ORDER: u64 = 2 << 32;
const SMALL: u64 = 3 << 32;
const RENDERED: u64 = 4 << 32;
const GIVEN: u64 = 5 << 32;
const OWN: u64 = 6 << 32;

/// Two 32-bit numbers of `what` at place `pair` (Steele, Lea and Flood's SplitMix64).
#[must_use]
fn pair(seed: u64, what: u64, pair: u64) -> u64 {
    let start = seed.wrapping_mul(0xd134_2543_de82_ef95).wrapping_add(what.rotate_left(17));
    let mut z = start.wrapping_add(pair.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn bytes_of(seed: u64, what: u64, first_pair: u64, into: &mut [u8]) {
    for (index, chunk) in into.chunks_mut(8).enumerate() {
        let value = pair(seed, what, first_pair + index as u64).to_le_bytes();
        chunk.copy_from_slice(&value[..chunk.len()]);
    }
}

/// Bytes of a layer's weights from byte `at`, a multiple of 8.
pub fn layer(shape: &Shape, layer: u64, at: u64, into: &mut [u8]) {
    let dense = usize::try_from(shape.dense_bytes().saturating_sub(at)).unwrap_or(usize::MAX).min(into.len());
    let (dense, zeros) = into.split_at_mut(dense);
    bytes_of(shape.seed, layer, at / 8, dense);
    zeros.fill(0);
}

/// Bytes of a small buffer.
pub fn small(seed: u64, buffer: u64, into: &mut [u8]) {
    bytes_of(seed, SMALL + buffer, 0, into);
}

/// Bytes that a process with render nodes only keeps on one of them.
pub fn rendered(seed: u64, gpu: usize, into: &mut [u8]) {
    bytes_of(seed, RENDERED + gpu as u64, 0, into);
}

/// Bytes of the first process's own memory from byte `at`, a multiple of 8.
pub fn own(seed: u64, at: u64, into: &mut [u8]) {
    bytes_of(seed, OWN, at / 8, into);
}

/// Bytes that the CPU passes to a GPU in one round.
pub fn given(seed: u64, round: u64, into: &mut [u8]) {
    bytes_of(seed, GIVEN + round, 0, into);
}

/// The table of embeddings.
#[must_use]
pub fn embeddings(seed: u64) -> Vec<u8> {
    let mut table = vec![0; usize::try_from(VOCABULARY * WIDTH * 4).unwrap_or(0)];
    bytes_of(seed, EMBEDDINGS, 0, &mut table);
    table
}

/// For every entry of the list, the next one: one cycle through all.
#[must_use]
pub fn links(seed: u64) -> Vec<u64> {
    let mut order: Vec<u64> = (0..LINKS).collect();
    for at in (1..order.len()).rev() {
        let other = usize::try_from(pair(seed, LINK_ORDER, at as u64) % (at as u64 + 1)).unwrap_or(0);
        order.swap(at, other);
    }
    let mut next = vec![0; order.len()];
    for (at, entry) in order.iter().enumerate() {
        let following = order[(at + 1) % order.len()];
        if let Some(place) = usize::try_from(*entry).ok().and_then(|entry| next.get_mut(entry)) {
            *place = following;
        }
    }
    next
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_part_of_a_layer_is_the_same_as_in_the_whole() {
        let shape = Shape { seed: 7, ..Shape::small() };
        let mut whole = [0; 256];
        layer(&shape, 3, 0, &mut whole);
        let mut part = [0; 64];
        layer(&shape, 3, 128, &mut part);
        assert_eq!(part, whole[128..192]);
        layer(&shape, 4, 128, &mut part);
        assert_ne!(part, whole[128..192]);
    }

    #[test]
    fn zeros_are_at_the_end_and_the_rest_is_as_without_them() {
        let part = |zero_share, at| {
            let mut part = [1; 4096];
            layer(&Shape { zero_share, layer_kib: 64, ..Shape::small() }, 0, at, &mut part);
            part
        };
        // Half of 64 rows of 1 KiB.
        assert_eq!(part(50, 28 * 1024), part(0, 28 * 1024));
        assert_eq!(part(50, 30 * 1024)[..2048], part(0, 30 * 1024)[..2048]);
        assert_eq!(part(50, 30 * 1024)[2048..], [0; 2048]);
        assert_eq!(part(50, 60 * 1024), [0; 4096]);
        assert_eq!(part(100, 0), [0; 4096]);
    }

    #[test]
    fn the_list_is_one_cycle() {
        let next = links(1);
        let (mut at, mut steps) = (0, 0);
        loop {
            at = usize::try_from(next[at]).unwrap();
            steps += 1;
            if at == 0 {
                break;
            }
        }
        assert_eq!(steps, LINKS);
    }
}
