// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake lazy-pages --page-server --tls` restores programs whose lazy pages come from another host, over
//! TLS: from `criu page-server --lazy-pages`, `criu dump --lazy-pages`, and `rewake page-server
//! --lazy-pages`.

use std::path::{Path, PathBuf};

use rewake_testkit::authority::{Authority, Issued};
use rewake_tests::lazy_source::{LazyDump, NamespacedRestore, PipeLimit, take_over};
use rewake_tests::page_server::{PageServer, client_options, tls_options};
use rewake_tests::process::until;
use rewake_tests::relay::SlowLink;
use rewake_tests::scene::{ACT, END};
use rewake_tests::server::Setup;
use rewake_tests::{Criu, Scene, Verdict, images, need};

const MIB: usize = 24;
const HOST: &str = "127.0.0.1";

fn own(authority: &Authority) -> Issued {
    authority.issue(|request| request.address(HOST))
}

/// Moves a scene's images to another host, which serves them. The scene's own have other bytes in lazy pages.
fn moved(scene: &Scene) -> PathBuf {
    let served = scene.files().join("served");
    images::copy(&scene.images(), &served).unwrap();
    images::spoil_lazy_pages(&scene.images()).unwrap();
    served
}

fn with(setup: Setup, options: &[String]) -> Setup {
    options.iter().fold(setup, |setup, option| setup.with(option))
}

fn client(scene: &Scene, options: &[String]) -> Setup {
    with(scene.setup().unwrap(), options)
}

/// The options of a server of lazy pages with TLS.
fn serving(tls: &[String]) -> Vec<&str> {
    tls.iter().map(String::as_str).chain(["--lazy-pages"]).collect()
}

fn ours(images: &Path, tls: &[String]) -> PageServer {
    PageServer::ours(images, &serving(tls)).unwrap()
}

/// Restores the scene by a client of the server, and waits for good ends of all three.
fn restored(scene: &Scene, mut server: PageServer, tls: &[String]) {
    let server_options = server.client_options();
    let mut client = client(scene, &[&server_options, tls].concat()).listening().unwrap();
    scene.go().unwrap();
    scene.stop().unwrap();
    scene.restore().unwrap();
    scene.expect_good_end(&mut client).unwrap();
    assert_eq!(server.ended().unwrap().code(), Some(0), "{}", server.text());
}

fn restored_from_ours(scenario: &str) {
    for criu in Criu::both() {
        let criu = need!(criu);
        let authority = Authority::new();
        let scene = Scene::dumped(&criu, scenario, MIB).unwrap();
        let server = ours(&moved(&scene), &tls_options(&authority, &own(&authority)));
        restored(&scene, server, &tls_options(&authority, &own(&authority)));
    }
}

#[test]
fn a_tree_is_restored_from_our_page_server() {
    restored_from_ours("tree");
}

fn restored_from_stock(scenario: &str) {
    let _limit = need!(PipeLimit::raised());
    for criu in Criu::both() {
        let criu = need!(criu);
        let authority = Authority::new();
        let scene = Scene::dumped(&criu, scenario, MIB).unwrap();
        let tls = tls_options(&authority, &own(&authority));
        let server = PageServer::stock(&criu, &moved(&scene), &serving(&tls)).unwrap();
        restored(&scene, server, &tls_options(&authority, &own(&authority)));
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
        let authority = Authority::new();
        let scene = Scene::started(&criu, scenario, MIB).unwrap();
        let mut dump = LazyDump::listening_with(&scene, &tls_options(&authority, &own(&authority))).unwrap();
        let options = [client_options(dump.port()), tls_options(&authority, &own(&authority))].concat();
        let mut client = client(&scene, &options).listening().unwrap();
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
    let authority = Authority::new();
    let scene = Scene::dumped(&criu, "random", MIB).unwrap();
    let path = scene.files().join("pages.socket");
    let address = ["--address".to_owned(), path.display().to_string()];
    // No name is checked.
    let tls = [authority.issue(|request| request.common_name("host-a")), own(&authority)];
    let [tls, its_tls] = tls.map(|own| [&tls_options(&authority, &own)[..], &address].concat());
    let mut server = ours(&moved(&scene), &tls);
    let options = [vec!["--page-server".to_owned()], its_tls].concat();
    let mut client = client(&scene, &options).listening().unwrap();
    scene.stop().unwrap();
    scene.play_with(&mut client).unwrap();
    assert_eq!(server.ended().unwrap().code(), Some(0), "{}", server.text());
}

#[test]
fn files_are_relative_to_the_work_directory() {
    let criu = need!(Criu::main());
    let authority = Authority::new();
    let scene = Scene::dumped(&criu, "random", MIB).unwrap();
    let server = ours(&moved(&scene), &tls_options(&authority, &own(&authority)));
    let own = own(&authority);
    let files = [("--tls-cacert", authority.ca()), ("--tls-cert", own.certificate), ("--tls-key", own.key)];
    let mut tls = vec!["--tls".to_owned()];
    for (option, path) in files {
        std::fs::copy(path, scene.work().join(option)).unwrap();
        tls.extend([option.to_owned(), format!("./{option}")]);
    }
    restored(&scene, server, &tls);
}

#[test]
fn after_a_cut_the_load_continues_over_a_new_connection() {
    let criu = need!(Criu::main());
    let authority = Authority::new();
    let scene = Scene::dumped(&criu, "random", MIB).unwrap();
    let tls = [&tls_options(&authority, &own(&authority))[..], &["--keep-listening".to_owned()]].concat();
    let server = ours(&moved(&scene), &tls);
    let link = SlowLink::to(server.port(), 4 << 20).unwrap();
    let options = [client_options(link.port()), tls_options(&authority, &own(&authority))].concat();
    let mut client = client(&scene, &options).listening().unwrap();
    scene.go().unwrap();
    scene.restore().unwrap();
    for step in 1..4 {
        assert!(until(ACT, || (link.passed() >= step << 21).then_some(())).is_some());
        link.cut();
    }
    scene.stop().unwrap();
    scene.expect_good_end(&mut client).unwrap();
    assert!(client.text().matches("starting another fetcher").count() >= 3, "{}", client.text());
}

/// A client of the server gets no page, and says why in one line. The restored program is killed.
fn ended(scene: &Scene, server: &PageServer, tls: &[String], reason: &str) {
    let options = [&server.client_options()[..], tls].concat();
    let mut client = client(scene, &options).listening().unwrap();
    scene.go().unwrap();
    // The target ends before or after CRIU does.
    let _ = scene.restore();
    assert_eq!(client.ended(END).unwrap().code(), Some(1));
    let text = client.text();
    let said: Vec<&str> = text.lines().filter(|line| line.starts_with("rewake: ")).collect();
    let named = |line: &str| line.contains("page server 127.0.0.1:") && line.contains(reason);
    assert!(matches!(said[..], [line] if named(line)), "{reason}: {text}");
    assert!(!text.contains("starting another fetcher"), "{text}");
    assert_eq!(scene.written(), "", "no byte was read");
}

/// [`ended`] with servers of both kinds that show this certificate to clients with these options.
fn ended_with_both(server: &[String], client: &[String], from_ours: &str, from_stock: &str) {
    let _limit = need!(PipeLimit::raised());
    for criu in Criu::both() {
        let criu = need!(criu);
        let mut scene = Scene::dumped(&criu, "random", 4).unwrap();
        let served = moved(&scene);
        ended(&scene, &ours(&served, server), client, from_ours);
        scene.next_round().unwrap();
        let stock = PageServer::stock(&criu, &served, &serving(server)).unwrap();
        ended(&scene, &stock, client, from_stock);
    }
}

#[test]
fn a_server_of_another_ca_is_refused() {
    let (authority, other) = (Authority::new(), Authority::named("Other CA"));
    let server = tls_options(&authority, &other.issue(|request| request.address(HOST)));
    let client = tls_options(&authority, &own(&authority));
    let reason = "the peer's certificate is of no CA in --tls-cacert";
    ended_with_both(&server, &client, reason, reason);
}

#[test]
fn a_server_with_another_name_is_refused_by_default() {
    let authority = Authority::new();
    let other = authority.issue(|request| request.address("192.0.2.1"));
    let server = [tls_options(&authority, &other), vec!["--tls-no-cn-verify".to_owned()]].concat();
    let client = tls_options(&authority, &own(&authority));
    let reason = "expected 127.0.0.1, the address that this side was given";
    ended_with_both(&server, &client, reason, reason);
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "random", 4).unwrap();
    let client = [client, vec!["--tls-no-cn-verify".to_owned()]].concat();
    restored(&scene, ours(&moved(&scene), &server), &client);
}

#[test]
fn a_server_that_refuses_the_client_is_named() {
    let (authority, other) = (Authority::new(), Authority::named("Other CA"));
    let server = tls_options(&authority, &own(&authority));
    let client = tls_options(&authority, &other.issue(|request| request.address(HOST)));
    let [ours, stock] =
        ["the peer does not accept this side's certificate", "it may not accept this side's certificate"];
    ended_with_both(&server, &client, ours, stock);
}

#[test]
fn a_dump_that_is_refused_is_resumed_when_its_copy_has_ended() {
    let _limit = need!(PipeLimit::raised());
    for criu in Criu::both() {
        let criu = need!(criu);
        let (authority, other) = (Authority::new(), Authority::named("Other CA"));
        let scene = Scene::started(&criu, "random", 4).unwrap();
        let stranger = other.issue(|request| request.address(HOST));
        let mut dump = LazyDump::listening_with(&scene, &tls_options(&authority, &stranger)).unwrap();
        let options = [client_options(dump.port()), tls_options(&authority, &own(&authority))].concat();
        let mut client = client(&scene, &options).listening().unwrap();
        let mut restore = NamespacedRestore::start(&criu, &scene.images(), &scene.work()).unwrap();
        assert_eq!(client.ended(END).unwrap().code(), Some(1), "{}", client.text());
        assert!(client.text().contains("is of no CA in --tls-cacert"), "{}", client.text());
        restore.ended().unwrap();
        assert_eq!(dump.ended().unwrap().code(), Some(1), "{}", dump.text());
        scene.go().unwrap();
        scene.stop().unwrap();
        assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok, "the source has right bytes");
    }
}

#[test]
fn a_server_without_tls_is_named() {
    let criu = need!(Criu::main());
    let authority = Authority::new();
    let scene = Scene::dumped(&criu, "random", 4).unwrap();
    let client = tls_options(&authority, &own(&authority));
    let reason = "the peer closed the connection during the TLS handshake";
    ended(&scene, &ours(&moved(&scene), &[]), &client, reason);
}

/// A client with these options does not start; its line has these words.
fn refused(scene: &Scene, options: &[&str], words: &[&str]) {
    let options: Vec<String> = options.iter().map(|option| (*option).to_owned()).collect();
    let refusal = client(scene, &options).start().unwrap().expect_err("accepted");
    assert!(!refusal.status.success() && refusal.line_with(words), "{}", refusal.text);
}

#[test]
fn options_of_tls_that_cannot_work_are_refused() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "plain", 4).unwrap();
    refused(&scene, &["--page-server", "--ps-socket", "2", "--tls"], &["--ps-socket", "cannot be used with"]);
    let missing = ["--page-server", "--port", "9", "--tls", "--tls-cacert", "/none"];
    refused(&scene, &missing, &["--tls-cacert /none: No such file"]);
}
