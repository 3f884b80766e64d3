// SPDX-License-Identifier: MIT OR Apache-2.0
//! How the plugin saves and loads BO contents: zeros take no space, small BOs share submissions, any shape is
//! restored.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use gpu_app::shape::Shape;
use softgpu_tests::app::App;
use softgpu_tests::criu::{Criu, Plugin, Version, queues_can_be_restored, wait_for_the_end_of};
use softgpu_tests::isolated;

/// Dumps a workload, passes the dump to `look`, restores it and asks for tokens.
fn dump_and_restore(shape: &Shape, folder: &Path, look: impl FnOnce(&Criu)) {
    let criu = Criu::with(Plugin::Ours, Version::V4_2, &folder.join("images")).unwrap();
    let mut app = App::start(shape, folder).unwrap();
    app.answers(&[1, 2, 3], 4).unwrap();
    let pid = app.pid().unwrap();
    criu.dump(pid).unwrap();
    app.was_dumped();
    look(&criu);
    if queues_can_be_restored() {
        criu.restore().unwrap();
        app.answers(&[200], 3).unwrap();
        app.quit().unwrap();
        wait_for_the_end_of(pid).unwrap();
    }
}

/// Bytes and bytes on disk of all files with BO contents.
fn pages_files(images: &Path) -> (u64, u64) {
    let files = fs::read_dir(images).unwrap().map(|entry| entry.unwrap());
    let pages = files.filter(|entry| entry.file_name().to_string_lossy().starts_with("amdgpu-pages-"));
    pages
        .map(|entry| entry.metadata().unwrap())
        .fold((0, 0), |(length, disk), metadata| (length + metadata.len(), disk + metadata.blocks() * 512))
}

/// A number of the log line that has `done`: the one before `word`.
fn said(log: &str, done: &str, word: &str) -> u64 {
    let line = log.lines().find(|line| line.contains(done)).unwrap_or_else(|| panic!("{done:?} in {log}"));
    let words: Vec<&str> = line.split([' ', ',']).filter(|word| !word.is_empty()).collect();
    let at = words.iter().position(|found| *found == word).unwrap_or_else(|| panic!("{word:?} in {line}"));
    let number = words[..at].iter().rev().find_map(|found| found.parse().ok());
    number.unwrap_or_else(|| panic!("a number before {word:?} in {line}"))
}

#[test]
fn zeros_are_holes_of_the_file() {
    isolated(1, |_| {
        let folder = tempfile::tempdir().unwrap();
        let shape =
            Shape { layers: 4, layer_kib: 2048, zero_share: 75, cache_mib: 8, queues: 1, ..Shape::small() };
        dump_and_restore(&shape, folder.path(), |criu| {
            let (length, disk) = pages_files(criu.images());
            // Weights are 8 MiB, a quarter of which is not zero; the cache is all zero except for some rows.
            assert!(length > 16 << 20, "{length}");
            assert!(disk < length / 4, "{disk} bytes on disk of {length}");
            assert!(said(&criu.log("dump"), "contents saved", "of") > length / 2);
        });
    });
}

#[test]
fn small_buffers_share_submissions() {
    isolated(1, |_| {
        let folder = tempfile::tempdir().unwrap();
        let shape =
            Shape { layers: 2, layer_kib: 64, cache_mib: 1, queues: 1, small_bos: 800, ..Shape::small() };
        let images = folder.path().join("images");
        dump_and_restore(&shape, folder.path(), |criu| {
            let log = criu.log("dump");
            let (submissions, buffers) =
                (said(&log, "contents saved", "submissions"), said(&log, "contents saved", "buffers"));
            assert!(
                buffers > 800 && submissions * 16 < buffers,
                "{submissions} submissions, {buffers} buffers"
            );
        });
        if queues_can_be_restored() {
            let log = fs::read_to_string(images.join("restore.log")).unwrap();
            let (submissions, buffers) =
                (said(&log, "contents loaded", "submissions"), said(&log, "contents loaded", "buffers"));
            assert!(
                buffers > 800 && submissions * 16 < buffers,
                "{submissions} submissions, {buffers} buffers"
            );
        }
    });
}

#[test]
fn several_chunks_of_two_gpus_are_in_flight_at_once() {
    isolated(2, |_| {
        let folder = tempfile::tempdir().unwrap();
        let shape = Shape { gpus: 2, layers: 6, layer_kib: 3000, cache_mib: 3, queues: 1, ..Shape::small() };
        dump_and_restore(&shape, folder.path(), |criu| {
            let log = criu.log("dump");
            assert!(said(&log, "contents saved", "submissions") >= 10, "{log}");
        });
    });
}

#[test]
fn staging_memory_may_be_as_little_as_two_chunks() {
    isolated(1, |_| {
        let folder = tempfile::tempdir().unwrap();
        let shape = Shape { layers: 3, layer_kib: 3000, cache_mib: 2, queues: 1, ..Shape::small() };
        let criu = Criu::with(Plugin::Ours, Version::V4_2, &folder.path().join("images")).unwrap();
        let little = criu.clone().variable("KFD_MAX_BUFFER_SIZE", "1M");
        let wrong = criu.variable("KFD_MAX_BUFFER_SIZE", "much");
        let mut app = App::start(&shape, folder.path()).unwrap();
        let pid = app.pid().unwrap();
        let error = wrong.dump(pid).unwrap_err().to_string();
        assert!(error.contains("KFD_MAX_BUFFER_SIZE=much"), "{error}");
        app.answers(&[1, 2, 3], 2).unwrap();
        little.dump(pid).unwrap();
        app.was_dumped();
        if queues_can_be_restored() {
            little.restore().unwrap();
            app.answers(&[200], 3).unwrap();
            app.quit().unwrap();
            wait_for_the_end_of(pid).unwrap();
        }
    });
}
