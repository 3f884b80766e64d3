// SPDX-License-Identifier: MIT OR Apache-2.0
//! Restores that end during the handshake, and which server owns the socket.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use nix::sys::stat::{Mode, SFlag, mknod};
use rewake_tests::process::run;
use rewake_tests::scene::{ACT, END};
use rewake_tests::{Criu, Scene, need};

#[test]
fn a_restore_that_dies_before_its_finish_notice_kills_targets() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "plain", 64).unwrap();
    let mut server = scene.serve().unwrap();
    let mut impostor = scene.target_as("impostor").unwrap();
    impostor.args(["--pid", &scene.pid().to_string(), "--socket"]).arg(scene.socket());
    let status = run(&mut impostor, ACT).unwrap();
    let written = scene.written();
    assert_eq!(status.code(), Some(3), "expected a killed client, which wrote: {written}");
    assert!(!written.contains("BAD"), "{written}");
    let status = server.ended(END).unwrap();
    assert_eq!(status.code(), Some(1), "{}", server.text());
}

/// A client that connects, sends these bytes and disconnects: the server must end, and not with success.
fn cut_handshake(bytes: impl FnOnce(&Scene) -> Vec<u8>) {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "plain", 4).unwrap();
    let mut server = scene.serve().unwrap();
    let mut stream = UnixStream::connect(scene.socket()).unwrap();
    stream.write_all(&bytes(&scene)).unwrap();
    drop(stream);
    let status = server.ended(END).unwrap();
    assert_eq!(status.code(), Some(1), "{}", server.text());
}

#[test]
fn a_restore_that_dies_right_after_connecting_is_a_failure() {
    cut_handshake(|_| Vec::new());
}

#[test]
fn a_restore_that_dies_within_a_pid_is_a_failure() {
    cut_handshake(|scene| scene.pid().as_raw().to_ne_bytes()[..2].to_vec());
}

#[test]
fn a_restore_that_dies_before_it_sends_descriptors_fails() {
    cut_handshake(|scene| scene.pid().as_raw().to_ne_bytes().to_vec());
}

#[test]
fn a_task_that_hands_over_no_descriptor_is_a_failure() {
    cut_handshake(|scene| [&scene.pid().as_raw().to_ne_bytes()[..], &[0]].concat());
}

#[test]
fn a_task_that_is_not_in_the_images_is_a_failure() {
    cut_handshake(|scene| (scene.pid().as_raw() + 1).to_ne_bytes().to_vec());
}

#[test]
fn a_server_without_a_restore_ends_when_asked() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "plain", 4).unwrap();
    let mut server = scene.serve().unwrap();
    assert!(server.ended(Duration::from_millis(300)).is_err(), "it must wait for its restore");
    server.terminate().unwrap();
    server.ended(END).unwrap();
    assert!(server.childless(END));
}

#[test]
fn a_socket_file_without_a_listener_is_replaced() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "plain", 16).unwrap();
    // No socket was ever bound to this path: a child of another test may have a copy of a closed one.
    mknod(&scene.socket(), SFlag::S_IFSOCK, Mode::S_IRUSR | Mode::S_IWUSR, 0).unwrap();
    scene.play().unwrap();
}

#[test]
fn a_second_server_on_a_live_socket_is_refused() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "plain", 16).unwrap();
    let mut server = scene.serve().unwrap();
    let refusal = scene.setup().unwrap().start().unwrap().expect_err("two servers on one socket");
    assert!(refusal.status.code().is_some_and(|code| code != 0), "{}", refusal.status);
    assert!(refusal.line_with(&["lazy-pages.socket"]), "{}", refusal.text);
    scene.go().unwrap();
    scene.restore().unwrap();
    scene.expect_good_end(&mut server).unwrap();
}
