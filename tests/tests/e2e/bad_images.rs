// SPDX-License-Identifier: MIT OR Apache-2.0
//! Images that are missing, cut or hostile are refused at the start, with one line that says what is wrong.

use std::fs;
use std::path::{Path, PathBuf};

use rewake_tests::images::{self, Entry, LAZY, PRESENT, Pagemap};
use rewake_tests::scene::{ACT, END};
use rewake_tests::{Criu, Scene, Server, Setup, need};

const PAGE: u64 = 4096;

/// Spoils the images of a small target; a server must refuse them with one line that holds `parts`.
fn refused(spoil: impl FnOnce(&Scene) -> (PathBuf, Vec<String>)) {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "plain", 16).unwrap();
    let (images, parts) = spoil(&scene);
    let setup = Setup::new(&criu, &images, &scene.work()).unwrap();
    let refusal = setup.start().unwrap().expect_err("the server serves this");
    assert!(refusal.status.code().is_some_and(|code| code != 0), "{}\n{}", refusal.status, refusal.text);
    let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
    assert!(refusal.line_with(&parts), "no line holds all of {parts:?}:\n{}", refusal.text);
}

fn path(scene: &Scene) -> PathBuf {
    images::pagemap_path(&scene.images(), scene.pid())
}

fn name(path: &Path) -> String {
    path.file_name().unwrap().to_string_lossy().into_owned()
}

/// Changes the pagemap; the line must name its file.
fn refused_pagemap(change: impl FnOnce(&mut Vec<Entry>)) {
    refused(|scene| {
        let path = path(scene);
        let mut pagemap = Pagemap::read(&path).unwrap();
        change(&mut pagemap.entries);
        pagemap.write(&path).unwrap();
        (scene.images(), vec![name(&path)])
    });
}

#[test]
fn no_images_directory() {
    refused(|scene| {
        let images = scene.images().join("not-there");
        (images, vec!["not-there".to_owned()])
    });
}

#[test]
fn an_empty_images_directory() {
    refused(|scene| {
        let images = scene.images().join("nothing-in-it");
        fs::create_dir(&images).unwrap();
        (images, vec!["inventory.img".to_owned()])
    });
}

#[test]
fn a_pages_file_that_is_too_short() {
    refused(|scene| {
        let pages = images::pages_path(&scene.images(), &Pagemap::read(&path(scene)).unwrap());
        let whole = fs::metadata(&pages).unwrap().len();
        images::truncate(&pages, whole - 4096).unwrap();
        (scene.images(), vec![name(&pages), (whole - 4096).to_string(), whole.to_string()])
    });
}

#[test]
fn a_pages_file_that_is_missing() {
    refused(|scene| {
        let pages = images::pages_path(&scene.images(), &Pagemap::read(&path(scene)).unwrap());
        fs::remove_file(&pages).unwrap();
        (scene.images(), vec![name(&pages)])
    });
}

#[test]
fn a_pagemap_that_ends_within_a_record() {
    refused(|scene| {
        let path = path(scene);
        images::truncate(&path, fs::metadata(&path).unwrap().len() - 3).unwrap();
        (scene.images(), vec![name(&path)])
    });
}

#[test]
fn a_pagemap_with_another_magic() {
    refused(|scene| {
        let path = path(scene);
        let mut bytes = fs::read(&path).unwrap();
        bytes[4] ^= 1;
        fs::write(&path, bytes).unwrap();
        (scene.images(), vec![name(&path)])
    });
}

#[test]
fn a_pagemap_record_that_claims_to_be_huge() {
    refused(|scene| {
        let path = path(scene);
        let mut bytes = fs::read(&path).unwrap();
        bytes[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
        fs::write(&path, bytes).unwrap();
        (scene.images(), vec![name(&path)])
    });
}

#[test]
fn a_pagemap_whose_entries_overlap() {
    refused_pagemap(|entries| entries[1].vaddr = entries[0].vaddr);
}

#[test]
fn a_pagemap_whose_entries_are_out_of_order() {
    refused_pagemap(|entries| entries.swap(0, 1));
}

#[test]
fn a_pagemap_entry_that_wraps_around_the_address_space() {
    refused_pagemap(|entries| entries.last_mut().unwrap().pages = u64::MAX);
}

#[test]
fn a_pagemap_entry_that_claims_more_than_the_pages_file_holds() {
    refused(|scene| {
        let path = path(scene);
        let mut pagemap = Pagemap::read(&path).unwrap();
        pagemap.entries.last_mut().unwrap().pages = 1 << 20;
        pagemap.write(&path).unwrap();
        (scene.images(), vec![name(&images::pages_path(&scene.images(), &pagemap))])
    });
}

#[test]
fn a_pagemap_entry_that_is_not_aligned() {
    refused_pagemap(|entries| entries[0].vaddr += 8);
}

#[test]
fn lazy_pages_that_are_in_no_file_without_a_page_server() {
    refused(|scene| {
        images::drop_lazy_pages(&scene.images(), scene.pid()).unwrap();
        let entries = Pagemap::read(&path(scene)).unwrap().entries;
        assert!(entries.iter().any(|entry| entry.flags == LAZY));
        assert!(entries.iter().all(|entry| entry.flags != LAZY | PRESENT));
        (scene.images(), vec!["page".to_owned(), "server".to_owned()])
    });
}

/// A server for a copy of the images, so that only its pages file is cut, and not CRIU's.
fn server_of_its_own_copy(criu: &Criu, scene: &Scene) -> (Server, PathBuf) {
    let own = scene.images().join("of-the-server");
    images::copy(&scene.images(), &own).unwrap();
    let server = Setup::new(criu, &own, &scene.work()).unwrap().listening().unwrap();
    let pages = images::pages_path(&own, &Pagemap::read(&path(scene)).unwrap());
    (server, pages)
}

fn cut_in_half(pages: &Path) {
    images::truncate(pages, fs::metadata(pages).unwrap().len() / 2).unwrap();
}

#[test]
fn a_truncated_pages_file_kills_the_target_and_shows_no_zeros() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "random", 64).unwrap();
    let (mut server, pages) = server_of_its_own_copy(&criu, &scene);
    cut_in_half(&pages);
    scene.go().unwrap();
    scene.stop().unwrap();
    // The kernel itself accesses lazy pages at the end of a restore: the target may be killed before it runs.
    if scene.restore().is_ok() {
        let verdict = scene.verdict(ACT).unwrap();
        assert!(verdict.killed(), "{verdict:?}");
    }
    assert!(!scene.written().contains("BAD"), "{}", scene.written());
    let status = server.ended(END).unwrap();
    assert_eq!(status.code(), Some(1), "{}", server.text());
}

/// Resident bytes of the restored target.
fn resident(scene: &Scene) -> u64 {
    let pages = fs::read_to_string(format!("/proc/{}/statm", scene.pid())).unwrap();
    pages.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * PAGE
}

#[test]
fn a_pages_file_that_is_cut_while_it_streams_never_shows_zeros() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "random", 512).unwrap();
    let (mut server, pages) = server_of_its_own_copy(&criu, &scene);
    let whole = fs::metadata(&pages).unwrap().len();
    scene.go().unwrap();
    scene.stop().unwrap();
    scene.restore_and_stop(&mut server).unwrap();
    // The bytes that the server has read and not filled yet are half of the image at most.
    let resident = resident(&scene);
    // A target that has ended has none.
    assert!((1..whole / 2).contains(&resident), "{resident} of {whole} bytes were in memory before the cut");
    images::truncate(&pages, PAGE).unwrap();
    server.continues().unwrap();
    let verdict = scene.verdict(ACT).unwrap();
    assert!(verdict.killed(), "{verdict:?}");
    assert!(!scene.written().contains("BAD"), "{}", scene.written());
    let status = server.ended(END).unwrap();
    assert_eq!(status.code(), Some(1), "{}", server.text());
}
