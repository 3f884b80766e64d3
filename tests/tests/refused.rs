// SPDX-License-Identifier: MIT OR Apache-2.0
//! When the machine or the image lets the server down: memory is refused for a while or for good, and the image is
//! not there any more when a successor takes over.

use std::fs;
use std::time::Duration;

use rewake_tests::limit::MemoryLimit;
use rewake_tests::process::until;
use rewake_tests::scene::{ACT, END};
use rewake_tests::{Criu, Scene, Server, Verdict, need};

/// Enough that most is missing when the restore has finished.
const MIB: usize = 512;

/// What the server says when it waits no longer.
const TOO_LONG: &str = "times within 2 s: raise the memory limit";

/// More than the target has when it starts, less than it wants.
const ALLOWED: usize = 48;

/// Restores at most until a limit was lifted in time.
const MOST: usize = 5;

/// A restored target whose memory is refused from `ALLOWED` on, and its server.
fn starved(limit: &MemoryLimit, scene: &Scene) -> Server {
    let mut server = scene.serve().unwrap();
    scene.restore_and_stop(&mut server).unwrap();
    limit.hold(scene.pid()).unwrap();
    scene.go().unwrap();
    server.goes_on().unwrap();
    until(END, || server.text().contains("no memory for a restored process").then_some(()))
        .expect("memory is refused");
    server
}

#[test]
fn a_shortage_of_memory_that_passes_is_borne() {
    let criu = need!(Criu::main());
    for _ in 0..MOST {
        let limit = need!(MemoryLimit::new(ALLOWED));
        let scene = Scene::dumped(&criu, "plain", MIB).unwrap();
        let mut server = starved(&limit, &scene);
        std::thread::sleep(Duration::from_millis(300));
        limit.lift().unwrap();
        let borne = scene.expect_good_end(&mut server);
        let text = server.text();
        // Otherwise this test itself stood still for so long.
        if !text.contains(TOO_LONG) {
            borne.unwrap();
            assert!(text.contains("there is memory again"), "{text}");
            return;
        }
    }
    panic!("the limit was lifted too late {MOST} times");
}

#[test]
fn a_shortage_of_memory_that_lasts_ends_the_target_with_a_clear_error() {
    let criu = need!(Criu::main());
    let limit = need!(MemoryLimit::new(ALLOWED + 1));
    let scene = Scene::dumped(&criu, "plain", MIB).unwrap();
    let mut server = starved(&limit, &scene);
    assert!(scene.verdict(ACT).unwrap().killed(), "{}", scene.written());
    assert_eq!(server.ended(END).unwrap().code(), Some(1));
    let text = server.text();
    let line = text.lines().find(|line| line.contains("Cannot allocate memory")).expect("it says why");
    assert!(line.contains(TOO_LONG), "{line}");
    drop(scene);
}

/// The worker is killed when the images are not what they were: the target ends, and the server says why.
fn takeover_fails(damage: impl FnOnce(&Scene), reason: &str) {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "random", MIB).unwrap();
    let mut server = scene.serve().unwrap();
    scene.go().unwrap();
    scene.restore_and_stop(&mut server).unwrap();
    damage(&scene);
    assert!(server.kill_worker(), "there is no worker: {}", server.text());
    server.goes_on().unwrap();
    let verdict = scene.verdict(ACT).unwrap();
    assert!(verdict.killed(), "{verdict:?}");
    assert_eq!(server.ended(END).unwrap().code(), Some(1));
    assert!(server.childless(END));
    let text = server.text();
    assert!(text.lines().any(|line| line.contains("taking over") && line.contains(reason)), "{text}");
}

#[test]
fn when_the_image_is_gone_at_a_takeover_the_target_is_killed() {
    takeover_fails(|scene| fs::rename(scene.images(), scene.files().join("away")).unwrap(), "cannot open it");
}

#[test]
fn when_another_image_is_in_its_place_at_a_takeover_the_target_is_killed() {
    let criu = need!(Criu::main());
    let other = Scene::dumped(&criu, "plain", 4).unwrap();
    let replace = |scene: &Scene| {
        fs::rename(scene.images(), scene.files().join("away")).unwrap();
        fs::rename(other.images(), scene.images()).unwrap();
    };
    takeover_fails(replace, "is not in the image any more");
}

#[test]
fn after_its_last_page_a_target_waits_for_nobody() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "prompt", 16).unwrap();
    let daemon = rewake_tests::daemon::Daemon::start().unwrap();
    let mut command = daemon.restore(&criu, &scene.images()).unwrap();
    command.arg("-W").arg(scene.work()).args(["--", "-d", "-v4"]);
    let output = command.output().unwrap();
    let timeline = rewake_tests::daemon::timeline(&output).unwrap();
    assert_eq!(timeline["ok"], true);
    scene.go().unwrap();
    assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok);
}
