// SPDX-License-Identifier: MIT OR Apache-2.0
//! Failures of the machine or the image: memory is refused for a while or for good, and a successor finds the
//! image removed.

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::Duration;

use rewake_tests::limit::MemoryLimit;
use rewake_tests::process::until;
use rewake_tests::scene::{ACT, END};
use rewake_tests::{Criu, Scene, Server, Verdict, images, need};

/// Enough that most is missing when the restore has finished.
const MIB: usize = 512;

/// What the server logs when it gives up.
const TOO_LONG: &str = "times within 2 s: raise the memory limit";

/// More than the target has when it starts, less than it needs.
const ALLOWED: usize = 48;

/// Restores at most until a limit was lifted in time.
const MOST: usize = 5;

/// A restored target whose memory is refused beyond `ALLOWED`, and its server.
fn starved(limit: &MemoryLimit, scene: &Scene) -> Server {
    let mut server = scene.serve().unwrap();
    scene.restore_and_stop(&mut server).unwrap();
    limit.hold(scene.pid()).unwrap();
    scene.go().unwrap();
    server.continues().unwrap();
    until(END, || server.text().contains("no memory for a restored process").then_some(()))
        .expect("memory is refused");
    server
}

#[test]
fn a_target_survives_a_short_lack_of_memory() {
    let criu = need!(Criu::main());
    for _ in 0..MOST {
        let limit = need!(MemoryLimit::new(ALLOWED));
        let scene = Scene::dumped(&criu, "plain", MIB).unwrap();
        let mut server = starved(&limit, &scene);
        std::thread::sleep(Duration::from_millis(300));
        limit.lift().unwrap();
        let borne = scene.expect_good_end(&mut server);
        let text = server.text();
        // Otherwise this test itself was stopped for so long.
        if !text.contains(TOO_LONG) {
            borne.unwrap();
            assert!(text.contains("there is memory again"), "{text}");
            return;
        }
    }
    panic!("the limit was lifted too late {MOST} times");
}

#[test]
fn a_lasting_shortage_of_memory_kills_the_target_with_an_error() {
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

/// Kills the worker after another file has replaced the image. Its successor serves the target from the files
/// that the session has open.
fn served_on(change: impl FnOnce(&Scene)) {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "plain", MIB).unwrap();
    let mut server = scene.serve().unwrap();
    scene.go().unwrap();
    scene.restore_and_stop(&mut server).unwrap();
    change(&scene);
    assert!(server.kill_worker(), "no worker runs: {}", server.text());
    server.continues().unwrap();
    scene.expect_good_end(&mut server).unwrap();
    assert!(server.text().contains("taking over"), "{}", server.text());
}

/// The pages file of a running target changes while its memory is missing.
fn pages_file_changes(change: impl FnOnce(&Path)) -> (Verdict, String) {
    let criu = Criu::main().unwrap();
    let scene = Scene::dumped(&criu, "plain", MIB).unwrap();
    let mut server = scene.serve().unwrap();
    scene.go().unwrap();
    scene.restore_and_stop(&mut server).unwrap();
    change(&scene.images().join("pages-1.img"));
    server.continues().unwrap();
    let verdict = scene.verdict(ACT).unwrap();
    server.ended(END).unwrap();
    (verdict, server.text())
}

#[test]
fn a_rewritten_pages_file_of_the_same_length_and_time_is_found() {
    need!(Criu::main());
    let (verdict, text) = pages_file_changes(|path| {
        let file = fs::File::options().write(true).open(path).unwrap();
        let modified = file.metadata().unwrap().modified().unwrap();
        // Half of a page in each block.
        for offset in (0..file.metadata().unwrap().len()).step_by(64 << 10) {
            file.write_all_at(&[0xab; 2048], offset).unwrap();
        }
        file.set_times(fs::FileTimes::new().set_modified(modified)).unwrap();
    });
    assert!(verdict.killed(), "{verdict:?}: {text}");
    let line = text
        .lines()
        .find(|line| line.contains("the file changed while it was served"))
        .unwrap_or_else(|| panic!("no reason: {text}"));
    assert!(line.contains("pages-1.img") && line.contains("change time is another"), "{line}");
}

#[test]
fn a_session_continues_when_its_pages_file_is_removed() {
    need!(Criu::main());
    let (verdict, text) = pages_file_changes(|path| fs::remove_file(path).unwrap());
    assert_eq!(verdict, Verdict::Ok, "{text}");
}

#[test]
fn a_successor_serves_a_target_whose_image_was_removed() {
    served_on(|scene| fs::remove_dir_all(scene.images()).unwrap());
}

#[test]
fn a_successor_serves_with_another_image_at_the_path() {
    need!(Criu::main());
    served_on(|scene| images::replace_with_other_bytes(&scene.images()).unwrap());
}

#[test]
fn after_its_last_page_a_target_needs_no_server() {
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
