// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake lazy-pages --page-server` restores programs whose lazy pages come from another host: from
//! `criu page-server --lazy-pages`, `criu dump --lazy-pages`, and `rewake page-server --lazy-pages`.

use rewake_tests::lazy_source::{LazyDump, PipeLimit, take_over};
use rewake_tests::page_server::PageServer;
use rewake_tests::process::write_program;
use rewake_tests::scene::END;
use rewake_tests::server::{Server, Setup, rewake};
use rewake_tests::{Criu, Scene, images, need};

const MIB: usize = 24;

/// Moves a scene's images to another host, which serves them. The scene's own have other bytes in lazy pages:
/// a restore that reads one of them from there fails.
fn moved(scene: &Scene) -> std::path::PathBuf {
    let served = scene.files().join("served");
    images::copy(&scene.images(), &served).unwrap();
    images::spoil_lazy_pages(&scene.images()).unwrap();
    served
}

fn client(scene: &Scene, options: &[String]) -> Setup {
    options.iter().fold(scene.setup().unwrap(), |setup, option| setup.with(option))
}

/// Restores the scene by a client of the server, and waits for good ends.
fn restored(scene: &Scene, server: &PageServer) -> Server {
    let mut client = client(scene, &server.client_options()).listening().unwrap();
    scene.go().unwrap();
    scene.stop().unwrap();
    scene.restore().unwrap();
    scene.expect_good_end(&mut client).unwrap();
    client
}

fn restored_from_ours(scenario: &str) {
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
fn a_process_is_restored_from_our_page_server() {
    restored_from_ours("random");
}

#[test]
fn a_tree_is_restored_from_our_page_server() {
    restored_from_ours("tree");
}

#[test]
fn zero_pages_are_restored_from_our_page_server() {
    restored_from_ours("zeros");
}

#[test]
fn a_process_that_forks_with_missing_memory_sees_right_bytes() {
    restored_from_ours("fork");
}

#[test]
fn memory_that_moves_while_it_is_missing_is_restored() {
    restored_from_ours("mremap");
}

fn restored_from_stock(scenario: &str) {
    let _limit = need!(PipeLimit::raised());
    for criu in Criu::both() {
        let criu = need!(criu);
        let scene = Scene::dumped(&criu, scenario, MIB).unwrap();
        let mut server = PageServer::stock(&criu, &moved(&scene), &["--lazy-pages"]).unwrap();
        restored(&scene, &server);
        assert_eq!(server.ended().unwrap().code(), Some(0), "{}", server.text());
    }
}

#[test]
fn a_tree_is_restored_from_criu_s_page_server() {
    restored_from_stock("tree");
}

fn restored_from_dump(scenario: &str) {
    let _limit = need!(PipeLimit::raised());
    for criu in Criu::both() {
        let criu = need!(criu);
        let scene = Scene::started(&criu, scenario, MIB).unwrap();
        let mut dump = LazyDump::listening(&scene).unwrap();
        let options = ["--page-server", "--address", "127.0.0.1", "--port", &dump.port().to_string()];
        let mut client = client(&scene, &options.map(str::to_owned)).listening().unwrap();
        take_over(&scene, &mut dump, &mut client);
    }
}

#[test]
fn a_tree_is_restored_from_a_dump_that_waits() {
    restored_from_dump("tree");
}

#[test]
fn a_process_is_restored_through_a_unix_socket() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "random", MIB).unwrap();
    let path = scene.files().join("pages.socket");
    let address = path.to_str().unwrap();
    let mut server = PageServer::ours(&moved(&scene), &["--lazy-pages", "--address", address]).unwrap();
    let options = ["--page-server", "--address", address].map(str::to_owned);
    let mut client = client(&scene, &options).listening().unwrap();
    scene.stop().unwrap();
    scene.play_with(&mut client).unwrap();
    assert_eq!(server.ended().unwrap().code(), Some(0), "{}", server.text());
}

#[test]
fn a_process_is_restored_through_a_given_connection() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "random", MIB).unwrap();
    let mut server = PageServer::ours(&moved(&scene), &["--lazy-pages"]).unwrap();
    let program = scene.work().join("connected");
    let script = format!(
        "#!/bin/bash\nexec 8<>/dev/tcp/127.0.0.1/{}\nexec {} \"$@\" --page-server --ps-socket 8\n",
        server.port(),
        rewake().unwrap().display()
    );
    write_program(&program, &script).unwrap();
    let mut client = scene.setup().unwrap().by(&program).listening().unwrap();
    scene.stop().unwrap();
    scene.play_with(&mut client).unwrap();
    assert_eq!(server.ended().unwrap().code(), Some(0), "{}", server.text());
}

/// Options that a client must refuse, with a line that has these words.
fn refused(scene: &Scene, options: &[&str], words: &[&str]) {
    let options: Vec<String> = options.iter().map(|option| (*option).to_owned()).collect();
    let refusal = client(scene, &options).start().unwrap().expect_err("accepted");
    assert!(!refusal.status.success() && refusal.line_with(words), "{}", refusal.text);
}

#[test]
fn options_that_name_no_page_server_are_refused() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "plain", 4).unwrap();
    refused(&scene, &["--page-server"], &["--port PORT"]);
    refused(&scene, &["--page-server", "--port", "0"], &["--port"]);
    refused(
        &scene,
        &["--page-server", "--address", "no such host", "--port", "9"],
        &["--address no such host"],
    );
    refused(&scene, &["--page-server", "--ps-socket", "2", "--port", "9"], &["--ps-socket", "is no socket"]);
}

#[test]
fn a_page_server_that_does_not_listen_ends_the_session() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "random", 4).unwrap();
    let options = ["--page-server", "--port", "9"].map(str::to_owned);
    let mut client = client(&scene, &options).listening().unwrap();
    scene.go().unwrap();
    // The target ends before or after CRIU does.
    let _ = scene.restore();
    assert_eq!(client.ended(END).unwrap().code(), Some(1));
    let text = client.text();
    assert!(text.contains("page server 127.0.0.1:9: connecting: does the server listen there?"), "{text}");
    assert_eq!(scene.written(), "", "no byte was read");
}
