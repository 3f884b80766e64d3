// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake page-server --tls` with unmodified CRIUs on the other side, in both roles, and with peers that it
//! refuses.

use std::ffi::OsStr;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use nix::sys::signal::Signal;
use rewake_testkit::authority::{Authority, Issued};
use rewake_tests::lazy_source::PipeLimit;
use rewake_tests::page_server::{PageServer, StockLazyPages, memory_files, tls_options};
use rewake_tests::printed::{HOST_A, HOST_B, Terminals, recipe};
use rewake_tests::scene::ACT;
use rewake_tests::{Criu, Scene, Verdict, images, need};

const MIB: usize = 24;
const HOST: &str = "127.0.0.1";

fn own(authority: &Authority) -> Issued {
    authority.issue(|request| request.address(HOST))
}

/// Starts a server with a certificate for `HOST`; its clients have `client`'s.
fn server(authority: &Authority, client: &Issued, images: &Path, options: &[&str]) -> PageServer {
    let tls = tls_options(authority, &own(authority));
    let options: Vec<&str> = tls.iter().map(String::as_str).chain(options.iter().copied()).collect();
    PageServer::ours(images, &options).unwrap().with_clients(&tls_options(authority, client))
}

fn dump(scene: &Scene, images: &Path, options: &[String]) -> anyhow::Result<()> {
    let options: Vec<&OsStr> = options.iter().map(OsStr::new).collect();
    scene.dump_with(images, &options)
}

#[test]
fn a_dump_is_received_and_restored() {
    for criu in Criu::both() {
        let criu = need!(criu);
        let authority = Authority::new();
        let scene = Scene::started(&criu, "mixed", MIB).unwrap();
        let mut server = server(&authority, &own(&authority), &scene.images(), &[]);
        dump(&scene, &scene.images(), &server.client_options()).unwrap();
        assert_eq!(server.ended().unwrap().code(), Some(0), "{}", server.text());
        assert!(!scene.images().join("pages-1.img").exists(), "the pages went to the server");
        scene.stop().unwrap();
        scene.play().unwrap();
    }
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
        let authority = Authority::new();
        let scene = Scene::dumped(&criu, scenario, MIB).unwrap();
        let served = scene.files().join("served");
        images::move_lazy_pages(&scene.images(), &served).unwrap();
        let mut server = server(&authority, &own(&authority), &served, &["--lazy-pages"]);
        restored(&scene, &server);
        assert_eq!(server.ended().unwrap().code(), Some(0), "{}", server.text());
        assert!(server.text().contains("done, "), "{}", server.text());
    }
}

#[test]
fn a_tree_is_restored_from_another_host_s_image() {
    restored_lazily("tree");
}

#[test]
fn two_versions_of_criu_dump_at_once() {
    let (criu, other) = (need!(Criu::main()), need!(Criu::alternative()));
    let scenes = [&criu, &other].map(|criu| Scene::started(criu, "random", MIB).unwrap());
    let (authority, inbox) = (Authority::new(), tempfile::tempdir().unwrap());
    let mut server = server(&authority, &own(&authority), inbox.path(), &["--keep-listening"]);
    std::thread::scope(|scope| {
        for scene in &scenes {
            scope.spawn(|| dump(scene, &scene.images(), &server.client_options()).unwrap());
        }
    });
    for scene in &scenes {
        for (name, bytes) in memory_files(&inbox.path().join(scene.pid().to_string())).unwrap() {
            fs::write(scene.images().join(name), bytes).unwrap();
        }
        scene.stop().unwrap();
        scene.play().unwrap();
    }
    server.signal(Signal::SIGTERM).unwrap();
    assert_eq!(server.ended().unwrap().code(), Some(0), "{}", server.text());
}

/// Both versions of CRIU dump to a server with these options, and are refused; its one line says `reason`.
/// The program continues.
fn refused(server_options: &[String], client_options: &[String], reason: &str) {
    for criu in Criu::both() {
        let criu = need!(criu);
        let (scene, images) = (Scene::started(&criu, "plain", 1).unwrap(), tempfile::tempdir().unwrap());
        let options: Vec<&str> = server_options.iter().map(String::as_str).collect();
        let mut server = PageServer::ours(images.path(), &options).unwrap().with_clients(client_options);
        dump(&scene, &scene.images(), &server.client_options()).unwrap_err();
        assert_eq!(server.ended().unwrap().code(), Some(1), "{}", server.text());
        let text = server.text();
        let said: Vec<&str> =
            text.lines().filter(|line| line.starts_with("rewake: client 127.0.0.1:")).collect();
        assert!(matches!(said[..], [line] if line.contains(reason)), "{reason}: {text}");
        assert_eq!(fs::read_dir(images.path()).unwrap().count(), 0);
        scene.go().unwrap();
        assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok);
    }
}

#[test]
fn a_client_of_another_ca_is_refused() {
    let (authority, other) = (Authority::new(), Authority::named("Other CA"));
    let stranger = other.issue(|request| request.address(HOST));
    // It trusts the server.
    let client = tls_options(&authority, &stranger);
    refused(&tls_options(&authority, &own(&authority)), &client, "is of no CA in --tls-cacert");
}

#[test]
fn a_client_with_an_expired_certificate_is_refused() {
    let authority = Authority::new();
    let old = authority.issue(|request| request.address(HOST).until(2020));
    let client = tls_options(&authority, &old);
    refused(&tls_options(&authority, &own(&authority)), &client, "certificate has expired");
}

#[test]
fn a_client_with_another_name_is_refused_by_default() {
    let authority = Authority::new();
    let other = authority.issue(|request| request.common_name("host-a"));
    let client = tls_options(&authority, &other);
    let name = "certificate is for CN=host-a: expected 127.0.0.1";
    refused(&tls_options(&authority, &own(&authority)), &client, name);
    let criu = need!(Criu::main());
    let scene = Scene::started(&criu, "plain", 1).unwrap();
    let server = server(&authority, &other, &scene.images(), &["--tls-no-cn-verify"]);
    dump(&scene, &scene.images(), &server.client_options()).unwrap();
}

#[test]
fn a_client_with_a_revoked_certificate_is_refused() {
    let authority = Authority::new();
    let revoked = own(&authority);
    let list = authority.revoke(&revoked, 2090).display().to_string();
    let options = tls_options(&authority, &own(&authority));
    let options = [options, vec!["--tls-cacrl".to_owned(), list]].concat();
    refused(&options, &tls_options(&authority, &revoked), "certificate is revoked by --tls-cacrl");
}

#[test]
fn a_client_without_tls_and_a_server_without_it_are_named() {
    let authority = Authority::new();
    let tls = tls_options(&authority, &own(&authority));
    refused(&tls, &[], "the peer does not use TLS: start it with --tls, too");
    refused(&[], &tls, "the client uses TLS, and this server does not: add --tls to it");
}

#[test]
fn a_client_without_a_certificate_is_refused() {
    need!(Criu::main());
    let (authority, images) = (Authority::new(), tempfile::tempdir().unwrap());
    let mut server = server(&authority, &own(&authority), images.path(), &[]);
    let mut client = Command::new("openssl");
    client
        .args(["s_client", "-connect", &format!("{HOST}:{}", server.port()), "-CAfile"])
        .arg(authority.ca());
    client.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    client.status().unwrap();
    assert_eq!(server.ended().unwrap().code(), Some(1));
    let text = server.text();
    let said = text.lines().filter(|line| line.starts_with("rewake: client 127.0.0.1:"));
    assert_eq!(said.filter(|line| line.contains("the peer showed no certificate")).count(), 1, "{text}");
}

#[test]
fn a_server_that_its_client_does_not_accept_says_so() {
    let (authority, other) = (Authority::new(), Authority::new());
    let server = tls_options(&authority, &other.issue(|request| request.address(HOST)));
    let client = tls_options(&authority, &own(&authority));
    refused(&server, &client, "it may not accept this server's certificate");
}

#[test]
fn other_hosts_are_admitted_with_tls() {
    need!(Criu::main());
    let (authority, images) = (Authority::new(), tempfile::tempdir().unwrap());
    let tls = tls_options(&authority, &own(&authority));
    let tls: Vec<&str> = tls.iter().map(String::as_str).collect();
    let any = [&tls[..], &["--address", "0.0.0.0"]].concat();
    let refused = PageServer::try_ours(images.path(), &any).unwrap().unwrap_err();
    assert_eq!(refused.code, Some(1));
    assert!(refused.text.contains("add --tls-no-cn-verify"), "{}", refused.text);
    PageServer::ours(images.path(), &[&any[..], &["--tls-no-cn-verify"]].concat()).unwrap();
}

#[test]
fn options_of_tls_without_tls_do_nothing_as_criu_s() {
    need!(Criu::main());
    let images = tempfile::tempdir().unwrap();
    for ignored in [["--tls-cert", "x"].as_slice(), &["--tls-no-cn-verify"]] {
        PageServer::try_ours(images.path(), ignored).unwrap().unwrap();
    }
    let refused = PageServer::try_ours(images.path(), &["--tls", "--insecure"]).unwrap().unwrap_err();
    assert_eq!(refused.code, Some(2), "{}", refused.text);
    assert!(refused.text.contains("--tls"), "{}", refused.text);
    let refused =
        PageServer::try_ours(images.path(), &["--tls", "--tls-cacert", "/none"]).unwrap().unwrap_err();
    assert_eq!(refused.code, Some(1));
    assert!(refused.text.contains("--tls-cacert /none: No such file"), "{}", refused.text);
}

/// The port of the printed commands.
const PORT: u16 = 9000;

/// Two users who have made certificates by the printed commands, and have a folder for an image each.
fn terminals(criu: &Criu) -> Terminals {
    let mut terminals = Terminals::open(criu, 8).unwrap();
    terminals.make_certificates().unwrap();
    for host in ["hostA", "hostB"] {
        fs::create_dir(terminals.folder(host).join("IMG")).unwrap();
    }
    terminals
}

/// Copies an image from one user's folder into the other's, which keeps its own files.
fn copy(terminals: &Terminals, from: &str, to: &str) {
    let [from, to] = [from, to].map(|host| terminals.folder(host));
    let copied = Command::new("cp").arg("-an").arg(from.join("IMG")).arg(to).status().unwrap();
    assert!(copied.success());
}

#[test]
fn the_printed_commands_restore_from_another_host() {
    let _limit = need!(PipeLimit::raised());
    let mut terminals = terminals(&need!(Criu::main()));
    let pid = terminals.migration.pid().to_string();
    let commands = recipe("restore-from-host", &[("HOST-A", HOST_A), ("PID", &pid)]).commands();
    let [dump, lazy, restore] = &commands[..] else { panic!("{commands:?}") };
    let mut dump = terminals.type_in(dump).unwrap();
    terminals.listens(&mut dump, "hostA", PORT).unwrap();
    copy(&terminals, "hostA", "hostB");
    let mut lazy = terminals.type_in(lazy).unwrap();
    lazy.makes(&terminals.folder("hostB").join("IMG/lazy-pages.socket")).unwrap();
    let mut restore = terminals.type_in(restore).unwrap();
    assert_eq!(dump.ended().unwrap().code(), Some(0), "{}\n{}\n{}", dump.text(), lazy.text(), restore.text());
    assert_eq!(lazy.ended().unwrap().code(), Some(0), "{}", lazy.text());
    terminals.migration.expect_right_bytes().unwrap();
    assert_eq!(restore.ended().unwrap().code(), Some(0), "{}", restore.text());
}

#[test]
fn the_printed_commands_receive_a_dump_and_serve_it() {
    let mut terminals = terminals(&need!(Criu::main()));
    let pid = terminals.migration.pid().to_string();
    let commands = recipe("receive-dump", &[("HOST-B", HOST_B), ("PID", &pid)]).commands();
    let [server, dump] = &commands[..] else { panic!("{commands:?}") };
    let mut server = terminals.type_in(server).unwrap();
    terminals.listens(&mut server, "hostB", PORT).unwrap();
    terminals.run(dump).unwrap();
    assert_eq!(server.ended().unwrap().code(), Some(0), "{}", server.text());
    copy(&terminals, "hostB", "hostA");
    copy(&terminals, "hostA", "hostB");

    let commands = recipe("serve-image", &[("HOST-A", HOST_A)]).commands();
    let [server, lazy, restore] = &commands[..] else { panic!("{commands:?}") };
    let mut server = terminals.type_in(server).unwrap();
    terminals.listens(&mut server, "hostA", PORT).unwrap();
    let mut lazy = terminals.type_in(lazy).unwrap();
    lazy.makes(&terminals.folder("hostB").join("IMG/lazy-pages.socket")).unwrap();
    let mut restore = terminals.type_in(restore).unwrap();
    assert_eq!(
        lazy.ended().unwrap().code(),
        Some(0),
        "{}\n{}\n{}",
        server.text(),
        lazy.text(),
        restore.text()
    );
    terminals.migration.expect_right_bytes().unwrap();
    assert_eq!(restore.ended().unwrap().code(), Some(0), "{}", restore.text());
}
