// SPDX-License-Identifier: MIT OR Apache-2.0
//! Incremental dumps. The kernel of this machine does not track changes (no soft-dirty bits), so no CRIU can
//! make one here: a client sends the messages of one, to CRIU's server and to ours.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use rewake_tests::images::{self, PARENT, Pagemap};
use rewake_tests::page_server::Peer::{New, Old};
use rewake_tests::page_server::{PageClient, PageServer, Peer, command, memory_files, shared, task};
use rewake_tests::{Criu, Scene, need};

const PAGE: u64 = 4096;

/// A folder with a full image of task 7, four pages, and an empty one for the dump after it.
struct Chain {
    folder: tempfile::TempDir,
}

impl Chain {
    /// The full image is one that a CRIU of this kind reads.
    fn new(kind: Peer) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let chain = Self { folder };
        [chain.full(), chain.next()].iter().for_each(|path| fs::create_dir(path).unwrap());
        let mut server = PageServer::ours(&chain.full(), &[]).unwrap();
        let mut client = server.connect(kind).unwrap();
        assert!(!client.open(task(7)).unwrap());
        client.send(command::LAZY, 4, 0x10000, task(7), &[9; 4 * 4096]).unwrap();
        assert_eq!(client.close().unwrap(), 0);
        drop(client);
        assert_eq!(server.ended().unwrap().code(), Some(0));
        chain
    }

    fn full(&self) -> PathBuf {
        self.folder.path().join("full")
    }

    fn next(&self) -> PathBuf {
        self.folder.path().join("next")
    }
}

/// Two pages in the parent, one anew, one more in the parent; and new shared memory.
fn incremental(client: &mut PageClient) {
    client.send(command::PARENT, 0, 0, task(7), &[]).unwrap();
    assert_eq!(client.receive::<4>().unwrap(), [1, 0, 0, 0]);
    client.send(command::PARENT, 0, 0, task(8), &[]).unwrap();
    assert_eq!(client.receive::<4>().unwrap(), [0; 4]);
    assert!(client.open(task(7)).unwrap());
    client.send(command::HOLE, 2, 0x10000, task(7), &[]).unwrap();
    client.send(command::LAZY, 1, 0x12000, task(7), &[1; 4096]).unwrap();
    client.send(command::HOLE, 1, 0x13000, task(7), &[]).unwrap();
    assert!(!client.open(shared(5)).unwrap());
    client.send(command::PRESENT, 1, 0, shared(5), &[2; 4096]).unwrap();
    assert_eq!(client.close().unwrap(), 0);
}

/// Sends the incremental dump to a server; the images that it and its parent have then.
fn sent(criu: Option<&Criu>, kind: Peer, options: &[&str]) -> (Chain, Vec<(String, Vec<u8>)>) {
    let chain = Chain::new(kind);
    let mut server = match criu {
        Some(criu) => PageServer::stock(criu, &chain.next(), options).unwrap(),
        None => PageServer::ours(&chain.next(), options).unwrap(),
    };
    incremental(&mut server.connect(kind).unwrap());
    assert_eq!(server.ended().unwrap().code(), Some(0), "{}", server.text());
    assert_eq!(fs::read_link(chain.next().join("parent")).unwrap(), Path::new("../full"));
    let files = [memory_files(&chain.next()).unwrap(), memory_files(&chain.full()).unwrap()].concat();
    (chain, files)
}

#[test]
fn an_incremental_dump_is_received_as_by_stock() {
    for (criu, kind) in Criu::both().into_iter().zip([New, Old]) {
        let criu = need!(criu);
        for options in
            [&["--prev-images-dir", "../full"][..], &["--prev-images-dir", "../full", "--auto-dedup"]]
        {
            let (_, stock) = sent(Some(&criu), kind, options);
            let (_, ours) = sent(None, kind, options);
            assert!(ours == stock, "{kind:?} {options:?}");
        }
    }
}

#[test]
fn deduplication_frees_what_the_new_image_has() {
    need!(Criu::main());
    let (chain, _) = sent(None, New, &["--prev-images-dir", "../full", "--auto-dedup"]);
    let pages = fs::read(chain.full().join("pages-65537.img")).unwrap();
    assert_eq!(pages.len(), 4 * 4096);
    let first: Vec<u8> = pages.chunks(4096).map(|page| page[0]).collect();
    assert_eq!(first, [9, 9, 0, 9]);
    assert_eq!(fs::metadata(chain.full().join("pages-65537.img")).unwrap().blocks(), 3 * 8);
}

#[test]
fn a_cut_client_takes_nothing_from_the_parent() {
    need!(Criu::main());
    let chain = Chain::new(New);
    let mut server =
        PageServer::ours(&chain.next(), &["--prev-images-dir", "../full", "--auto-dedup"]).unwrap();
    let mut client = server.connect(New).unwrap();
    client.open(task(7)).unwrap();
    client.send(command::LAZY, 4, 0x10000, task(7), &[1; 4 * 4096]).unwrap();
    drop(client);
    assert_eq!(server.ended().unwrap().code(), Some(1));
    assert_eq!(fs::read(chain.full().join("pages-65537.img")).unwrap(), [9; 4 * 4096]);
    assert_eq!(fs::read_dir(chain.next()).unwrap().count(), 0);
}

#[test]
fn a_hole_that_the_parent_lacks_is_refused() {
    need!(Criu::main());
    for (vaddr, pages, missing) in [(0x10000, 5, "0x14000"), (0xf000, 2, "0xf000"), (0x20000, 1, "0x20000")] {
        let chain = Chain::new(New);
        let mut server = PageServer::ours(&chain.next(), &["--prev-images-dir", "../full"]).unwrap();
        let mut client = server.connect(New).unwrap();
        assert!(client.open(task(7)).unwrap());
        client.send(command::HOLE, pages, vaddr, task(7), &[]).unwrap();
        assert!(client.is_closed());
        assert_eq!(server.ended().unwrap().code(), Some(1));
        let text = server.text();
        let line =
            text.lines().find(|line| line.contains("are said to be in the parent image")).expect(&text);
        assert!(
            line.contains(&format!("lacks the bytes of {missing}:")) && line.contains("pagemap-7.img"),
            "{line}"
        );
        assert_eq!(fs::read_dir(chain.next()).unwrap().count(), 0);
    }
}

#[test]
fn a_parent_that_does_not_exist_is_refused_at_the_start() {
    need!(Criu::main());
    let chain = Chain::new(New);
    let refused =
        PageServer::try_ours(&chain.next(), &["--prev-images-dir", "../none"]).unwrap().unwrap_err();
    assert_eq!(refused.code, Some(1));
    assert!(refused.text.contains("--prev-images-dir ../none"), "{}", refused.text);
    fs::create_dir(chain.next().join("other")).unwrap();
    std::os::unix::fs::symlink("other", chain.next().join("parent")).unwrap();
    let refused =
        PageServer::try_ours(&chain.next(), &["--prev-images-dir", "../full"]).unwrap().unwrap_err();
    assert!(refused.text.contains("links to"), "{}", refused.text);
}

/// Sends the pages of an image: every second page as one that the parent has.
fn send_half(client: &mut PageClient, images: &Path, pid: nix::unistd::Pid) {
    let map = Pagemap::read(&images::pagemap_path(images, pid)).unwrap();
    let bytes = fs::read(images::pages_path(images, &map)).unwrap();
    let id = task(u64::try_from(pid.as_raw()).unwrap());
    assert!(client.open(id).unwrap());
    for (entry, at) in map.placed() {
        for step in 0..entry.pages {
            let vaddr = entry.vaddr + step * PAGE;
            if step % 2 == 0 {
                client.send(command::HOLE, 1, vaddr, id, &[]).unwrap();
            } else {
                let start = usize::try_from((at + step) * PAGE).unwrap();
                client.send(6 | entry.flags << 16, 1, vaddr, id, &bytes[start..start + 4096]).unwrap();
            }
        }
    }
    assert_eq!(client.close().unwrap(), 0);
}

#[test]
fn a_chain_of_a_dump_and_its_successor_is_restored() {
    for (criu, kind) in Criu::both().into_iter().zip([New, Old]) {
        let criu = need!(criu);
        let scene = Scene::dumped(&criu, "random", 8).unwrap();
        let (images, full) = (scene.images(), scene.files().join("full"));
        images::copy(&images, &full).unwrap();
        let map = Pagemap::read(&images::pagemap_path(&images, scene.pid())).unwrap();
        fs::remove_file(images::pages_path(&images, &map)).unwrap();
        fs::remove_file(images::pagemap_path(&images, scene.pid())).unwrap();
        let mut server =
            PageServer::ours(&images, &["--prev-images-dir", "../files/full", "--auto-dedup"]).unwrap();
        send_half(&mut server.connect(kind).unwrap(), &full, scene.pid());
        assert_eq!(server.ended().unwrap().code(), Some(0), "{}", server.text());
        let map = Pagemap::read(&images::pagemap_path(&images, scene.pid())).unwrap();
        assert!(map.entries.iter().any(|entry| entry.flags == PARENT));
        scene.stop().unwrap();
        scene.play().unwrap();
    }
}
