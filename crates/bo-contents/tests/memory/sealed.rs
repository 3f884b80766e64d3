// SPDX-License-Identifier: MIT OR Apache-2.0
//! Buffers of a sealed image become resident with the bytes that were sealed, or not at all.

use crate::scene::{CHUNK, Scene, pattern};

/// Buffers that begin and end within blocks, some of them holes.
const SIZES: [usize; 6] = [4096, 3 * CHUNK + 4096, 65536, 2 * CHUNK, 8192, 5 * CHUNK];

/// A sealed image: the fourth buffer is a hole, and the second and the last have one.
fn sealed() -> (Scene, Vec<Vec<u8>>) {
    let scene = Scene::new(&SIZES);
    let mut bytes: Vec<Vec<u8>> =
        SIZES.iter().enumerate().map(|(buffer, size)| pattern(buffer, *size)).collect();
    bytes[3].fill(0);
    bytes[1][CHUNK + 5000..2 * CHUNK].fill(0);
    bytes[5][..4 * CHUNK + 777].fill(0);
    for (buffer, bytes) in bytes.iter().enumerate() {
        scene.put(buffer, 0, bytes);
    }
    scene.punch(3, 0, SIZES[3]);
    scene.punch(1, CHUNK + 5000, CHUNK - 5000);
    scene.punch(5, 0, 4 * CHUNK + 777);
    scene.seal();
    (scene, bytes)
}

#[test]
fn every_byte_of_a_sealed_image_is_loaded_and_holes_are_not_read() {
    for cold in [false, true] {
        let (scene, bytes) = sealed();
        if cold {
            scene.chill();
        }
        let (report, _) = scene.load(&[]);
        assert!(report.moved.zero > 5 * CHUNK as u64, "{report}");
        for (buffer, bytes) in bytes.iter().enumerate() {
            assert!(scene.memory(buffer) == *bytes, "buffer {buffer}, cold: {cold}");
        }
    }
}

/// Checks that a load fails for a block in the file of GPU 8, and that `buffer` is not resident.
fn refused(scene: &Scene, buffer: usize) {
    let (whole, error) = scene.load_damaged();
    assert!(!whole.contains(&buffer), "{whole:?}");
    for part in ["amdgpu-pages-3-0008.img: some are not those that were sealed", "`rewake verify`"] {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn one_wrong_bit_ends_the_load_from_page_cache_and_disk() {
    for (at, cold) in [(0, false), (3 * CHUNK + 4095, false), (CHUNK - 1, true), (2 * CHUNK, true)] {
        let (scene, bytes) = sealed();
        scene.put(1, at, &[bytes[1][at] ^ 0x20]);
        if cold {
            scene.chill();
        }
        refused(&scene, 1);
    }
}

#[test]
fn bytes_in_the_place_of_a_sealed_hole_end_the_load() {
    let (scene, _) = sealed();
    scene.put(3, CHUNK + 12345, &[1]);
    refused(&scene, 3);
}

#[test]
fn a_hole_in_the_place_of_sealed_bytes_ends_the_load() {
    for (buffer, at, bytes) in [(1, 8192, 4096), (1, 0, CHUNK), (5, 4 * CHUNK + 65536, 65536)] {
        let (scene, _) = sealed();
        scene.punch(buffer, at, bytes);
        refused(&scene, buffer);
        // Of whole blocks: no byte of them is stored.
        let (scene, _) = sealed();
        scene.punch(buffer, scene.block_border(buffer, at), 65536);
        refused(&scene, buffer);
    }
}
