// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake page-server --lazy-pages` serves an image to `criu lazy-pages --page-server` of both versions.

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use nix::sys::signal::Signal;
use rewake_testkit::programs::rewake;
use rewake_tests::images::{self, LAZY, PARENT, Pagemap, split};
use rewake_tests::page_server::Peer::{New, Old};
use rewake_tests::page_server::{PageServer, Peer, StockLazyPages, command, task};
use rewake_tests::pattern::BASE;
use rewake_tests::process::until;
use rewake_tests::scene::ACT;
use rewake_tests::{Criu, Scene, Verdict, need};

const MIB: usize = 24;

/// Copies a scene's images for a server, and spoils the lazy pages of the scene's own.
fn moved(scene: &Scene) -> PathBuf {
    let served = scene.files().join("served");
    images::move_lazy_pages(&scene.images(), &served).unwrap();
    served
}

/// Restores a scene by stock `criu lazy-pages`, which gets pages from the server.
fn restored(scene: &Scene, server: &PageServer) {
    let mut lazy = StockLazyPages::listening(scene.criu(), &scene.images(), &scene.work(), server).unwrap();
    scene.go().unwrap();
    scene.stop().unwrap();
    scene.restore().unwrap();
    assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok, "{}", server.text());
    assert_eq!(lazy.ended().unwrap().code(), Some(0), "{}", server.text());
}

fn restored_lazily(scenario: &str) {
    for criu in Criu::both() {
        let criu = need!(criu);
        let scene = Scene::dumped(&criu, scenario, MIB).unwrap();
        let mut server = PageServer::ours(&moved(&scene), &["--lazy-pages"]).unwrap();
        restored(&scene, &server);
        assert_eq!(server.ended().unwrap().code(), Some(0), "{}", server.text());
        assert!(server.text().contains("done, "), "{}", server.text());
    }
}

#[test]
fn a_process_is_restored_from_another_host_s_image() {
    restored_lazily("random");
}

#[test]
fn a_tree_is_restored_from_another_host_s_image() {
    restored_lazily("tree");
}

#[test]
fn pages_of_parents_are_served() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "random", MIB).unwrap();
    let served = scene.files().join("served");
    images::copy(&scene.images(), &served).unwrap();
    split(&served, "before", scene.pid(), PARENT | LAZY, false).unwrap();
    images::spoil_lazy_pages(&scene.images()).unwrap();
    let server = PageServer::ours(&served, &["--lazy-pages"]).unwrap();
    restored(&scene, &server);
}

/// Reads all lazy pages of a task by a client of its own, and compares them with the image.
fn read_all(server: &PageServer, kind: Peer, images: &Path, pid: nix::unistd::Pid) {
    let map = Pagemap::read(&images::pagemap_path(images, pid)).unwrap();
    let pages = fs::read(images::pages_path(images, &map)).unwrap();
    let mut client = server.connect(kind).unwrap();
    let mut read = 0;
    for (entry, at) in map.placed().filter(|(entry, _)| entry.flags & LAZY != 0) {
        let mut done = 0;
        while done < entry.pages {
            let vaddr = entry.vaddr + done * 4096;
            let (got, bytes) =
                client.get(u64::try_from(pid.as_raw()).unwrap(), vaddr, entry.pages - done).unwrap();
            assert_eq!(got, vaddr);
            let start = usize::try_from((at + done) * 4096).unwrap();
            assert!(bytes == pages[start..start + bytes.len()], "{vaddr:#x}");
            done += u64::try_from(bytes.len() / 4096).unwrap();
            read += bytes.len();
        }
    }
    assert!(read >= MIB << 20, "{read}");
    assert_eq!(client.close().unwrap(), 0);
}

#[test]
fn clients_at_once_and_one_after_another_are_served() {
    for criu in Criu::both() {
        let criu = need!(criu);
        let mut scene = Scene::dumped(&criu, "random", MIB).unwrap();
        let served = moved(&scene);
        let mut server = PageServer::ours(&served, &["--lazy-pages", "--keep-listening"]).unwrap();
        for _ in 0..2 {
            std::thread::scope(|scope| {
                let (server, served, pid) = (&server, &served, scene.pid());
                for kind in [Old, New] {
                    scope.spawn(move || (0..3).for_each(|_| read_all(server, kind, served, pid)));
                }
                restored(&scene, server);
            });
            scene.next_round().unwrap();
        }
        server.signal(Signal::SIGTERM).unwrap();
        assert_eq!(server.ended().unwrap().code(), Some(0), "{}", server.text());
    }
}

#[test]
fn a_long_request_gets_its_first_pages() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "plain", MIB).unwrap();
    let map = Pagemap::read(&images::pagemap_path(&scene.images(), scene.pid())).unwrap();
    let start =
        map.entries.iter().find(|entry| entry.vaddr == BASE as u64).expect("the target's region").vaddr;
    let pid = u64::try_from(scene.pid().as_raw()).unwrap();
    let server = PageServer::ours(&scene.images(), &["--lazy-pages"]).unwrap();
    let mut client = server.connect(New).unwrap();
    client.get(pid, start, 1).unwrap();
    for (pages, expected) in [(1 << 40, 1024), (1025, 1024), (1024, 1024), (1000, 1000)] {
        let (vaddr, bytes) = client.get(pid, start, pages).unwrap();
        assert_eq!((vaddr, bytes.len()), (start, expected * 4096));
    }
}

#[test]
fn a_client_that_just_ends_is_no_success() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "plain", 4).unwrap();
    let mut server = PageServer::ours(&scene.images(), &["--lazy-pages"]).unwrap();
    drop(server.connect(New).unwrap());
    assert_eq!(server.ended().unwrap().code(), Some(1));
    let text = server.text();
    assert!(text.contains("without its last message, after 0 pages"), "{text}");
}

/// A request that must end its client, with a line that contains `reason`; the next client is served.
fn refused(server: &PageServer, kind: Peer, request: [u64; 4], reason: &str) {
    let [command, pages, vaddr, id] = request;
    let mut client = server.connect(kind).unwrap();
    client.send(u32::try_from(command).unwrap(), pages, vaddr, id, &[]).unwrap();
    assert!(client.is_closed(), "{reason}");
    let said =
        || server.text().lines().any(|line| line.contains("client 127.0.0.1:") && line.contains(reason));
    assert!(until(ACT, || said().then_some(())).is_some(), "{reason}: {}", server.text());
}

#[test]
fn requests_for_bytes_that_the_image_lacks_end_their_client() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "plain", MIB).unwrap();
    let images = scene.images();
    let pid = u64::try_from(scene.pid().as_raw()).unwrap();
    let map = Pagemap::read(&images::pagemap_path(&images, scene.pid())).unwrap();
    let eager = map.entries.iter().find(|entry| entry.flags & LAZY == 0).unwrap().vaddr;
    let lazy = map.entries.iter().find(|entry| entry.flags & LAZY != 0).unwrap().vaddr;
    let server = PageServer::ours(&images, &["--lazy-pages", "--keep-listening"]).unwrap();
    for kind in [Old, New] {
        refused(&server, kind, [7, 1, 0x1_0000, pid], "has no lazy page there");
        refused(&server, kind, [7, 1, eager, pid], "has no lazy page there");
        refused(&server, kind, [7, 1, lazy, pid + 1], "has no memory of such a task");
        refused(&server, kind, [7, 0, lazy, pid], "0 pages");
        refused(&server, kind, [7, 1, lazy, 0], "expected a pid");
        refused(&server, kind, [command::OPEN.into(), 0, 0, task(pid)], "the client sends memory");
        read_all(&server, kind, &images, scene.pid());
    }
}

#[test]
fn an_image_with_gpu_memory_is_refused_with_the_way_out() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "plain", 4).unwrap();
    fs::write(scene.images().join("amdgpu-dmabuf_99999.img"), b"\x02\0\0\0\0\0\0\0\x08\x05").unwrap();
    let refused = PageServer::try_ours(&scene.images(), &["--lazy-pages"]).unwrap().unwrap_err();
    assert_eq!(refused.code, Some(1));
    assert!(refused.text.contains("GPU memory") && refused.text.contains("use `rewake restore` there"));
}

#[test]
fn an_image_without_its_lazy_pages_is_refused() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "plain", 4).unwrap();
    images::drop_lazy_pages(&scene.images(), scene.pid()).unwrap();
    let refused = PageServer::try_ours(&scene.images(), &["--lazy-pages"]).unwrap().unwrap_err();
    assert_eq!(refused.code, Some(1));
    assert!(refused.text.contains("pages are not in the image"), "{}", refused.text);
}

#[test]
fn a_pages_file_that_changes_gives_no_byte_more() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "plain", 4).unwrap();
    let images = scene.images();
    let pid = u64::try_from(scene.pid().as_raw()).unwrap();
    let map = Pagemap::read(&images::pagemap_path(&images, scene.pid())).unwrap();
    let lazy = map.entries.iter().find(|entry| entry.flags & LAZY != 0).unwrap().vaddr;
    let mut server = PageServer::ours(&images, &["--lazy-pages"]).unwrap();
    let mut client = server.connect(New).unwrap();
    client.get(pid, lazy, 1).unwrap();
    let file = fs::File::options().write(true).open(images::pages_path(&images, &map)).unwrap();
    file.write_all_at(&[1; 4096], 0).unwrap();
    client.send(command::GET, 1, lazy, pid, &[]).unwrap();
    assert!(client.is_closed());
    assert_eq!(server.ended().unwrap().code(), Some(1));
    assert!(server.text().contains("the file changed while it was served"), "{}", server.text());
}

#[test]
fn damaged_blocks_of_a_sealed_image_are_not_served() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "plain", MIB).unwrap();
    let images = scene.images();
    let seal = std::process::Command::new(rewake().unwrap()).arg("seal").arg(&images).output().unwrap();
    assert!(seal.status.success(), "{seal:?}");
    let map = Pagemap::read(&images::pagemap_path(&images, scene.pid())).unwrap();
    let server = PageServer::ours(&images, &["--lazy-pages", "--keep-listening"]).unwrap();
    read_all(&server, New, &images, scene.pid());

    // The last page of the block, of which another page is requested.
    let (entry, at) = map.placed().find(|(entry, _)| entry.flags & LAZY != 0 && entry.pages > 64).unwrap();
    let path = images::pages_path(&images, &map);
    let block = (at + 16) / 16 * 16;
    let file = fs::File::options().write(true).open(&path).unwrap();
    let mtime = file.metadata().unwrap().modified().unwrap();
    file.write_all_at(b"x", (block + 15) * 4096 + 100).unwrap();
    file.set_modified(mtime).unwrap();
    drop(server);
    let server = PageServer::ours(&images, &["--lazy-pages", "--keep-listening"]).unwrap();
    let pid = u64::try_from(scene.pid().as_raw()).unwrap();
    let vaddr = entry.vaddr + (block - at) * 4096;
    let name = path.file_name().unwrap().to_str().unwrap();
    refused(&server, New, [command::GET.into(), 1, vaddr, pid], name);
    let offset = format!("offset {}", block * 4096);
    assert!(server.text().contains(&offset), "{offset}: {}", server.text());
    let mut client = server.connect(New).unwrap();
    let (got, bytes) = client.get(pid, vaddr - 4096, 1).unwrap();
    assert_eq!((got, bytes.len()), (vaddr - 4096, 4096), "the block before it is right");
}
