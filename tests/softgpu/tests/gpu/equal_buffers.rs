// SPDX-License-Identifier: MIT OR Apache-2.0
//! BOs of several GPUs with the same bytes: a restore finds them by the manifest, and reads them once.

use std::path::Path;

use rewake_skip::need;
use softgpu_tests::criu::{Criu, Plugin, Version, queues, wait_for_the_end_of};
use softgpu_tests::pair::BYTES;
use softgpu_tests::{Pair, Streamer, isolated};

/// A dumped server, with the same bytes on both GPUs.
fn dumped(folder: &Path) -> Result<(Pair, Criu), &'static str> {
    queues()?;
    let mut pair = Pair::start_same(env!("CARGO_BIN_EXE_pair"), folder).unwrap();
    let criu = Criu::with(Plugin::Ours, Version::V4_2, &folder.join("images")).unwrap();
    criu.dump_by_rewake(pair.pid()).unwrap();
    pair.was_dumped().unwrap();
    Ok((pair, criu))
}

/// Restores it, and checks every byte; returns the streamer's log.
fn restores(pair: &Pair, criu: &Criu) -> String {
    let mut both = Streamer::of_both(criu.images()).unwrap();
    criu.restore_lazily().unwrap();
    assert!(both.end().unwrap().success(), "{}", both.said());
    assert!(pair.continues(&[0, 1]), "{:?}, {}", pair.counts(), both.said());
    pair.asked("look").unwrap();
    pair.counts().unwrap();
    both.said()
}

#[test]
fn equal_bytes_of_two_gpus_are_read_once() {
    isolated(2, |_| {
        let folder = tempfile::tempdir().unwrap();
        let (pair, criu) = need!(dumped(folder.path()));
        let said = restores(&pair, &criu);
        let spared = format!("{} of the bytes read for other buffers", BYTES[0]);
        assert!(said.contains(&spared), "{said}");
        pair.ends();
    });
}

#[test]
fn an_image_without_a_manifest_is_read_buffer_by_buffer() {
    isolated(2, |_| {
        let folder = tempfile::tempdir().unwrap();
        let (pair, criu) = need!(dumped(folder.path()));
        restores(&pair, &criu);
        // By `criu dump`, which seals no image.
        criu.dump(pair.pid()).unwrap();
        wait_for_the_end_of(pair.pid()).unwrap();
        assert!(!criu.images().join("rewake-manifest").exists(), "it is of other pages");
        let said = restores(&pair, &criu);
        assert!(!said.contains("for other buffers"), "{said}");
        pair.ends();
    });
}
