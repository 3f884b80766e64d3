// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake export` and `rewake pull`: an image is copied to another directory, and restored there.

use std::fs;
use std::process::Command;

use rewake_testkit::programs::rewake;
use rewake_tests::daemon::{restore, timeline};
use rewake_tests::export::{ImageExport, pull, seal, verify};
use rewake_tests::scene::ACT;
use rewake_tests::{Criu, Scene, Verdict, need};

#[test]
fn a_copied_image_is_restored() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "plain", 32).unwrap();
    let server = ImageExport::start(scene.images().parent().unwrap()).unwrap();
    let copies = tempfile::tempdir().unwrap();
    let copy = copies.path().join("copy");

    let (copied, message) = pull(server.port(), "images", &copy).unwrap();
    assert!(!copied && message.contains("run `rewake seal"), "{message}");
    let name = seal(&scene).unwrap();
    let (copied, message) = pull(server.port(), &name, &copy).unwrap();
    assert!(copied && message.contains(" were sent, 0 B were here; image "), "{message}");
    verify(&copy).unwrap();

    fs::remove_dir_all(scene.images()).unwrap();
    scene.go().unwrap();
    let mut command = restore(&criu, &copy).unwrap();
    timeline(&command.arg("-W").arg(scene.work()).args(["--", "-d"]).output().unwrap()).unwrap();
    assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok);
}

#[test]
fn addresses_of_other_hosts_need_a_word() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = Command::new(rewake().unwrap());
    let output = command.arg("export").arg(dir.path()).args(["--address", "0.0.0.0"]).output().unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(1) && message.contains("add --insecure"), "{message}");
}
