// SPDX-License-Identifier: MIT OR Apache-2.0
//! Every process of a streamer is killed at one moment while memory is missing. The target waits, and `rewake recover`
//! serves it to its end, byte for byte.
//!
//! `REWAKE_RECOVERIES` is the number of total deaths of the random tests (default 10 each).

use std::env;
use std::fs;
use std::path::Path;
use std::process::Output;
use std::thread::sleep;
use std::time::Duration;

use nix::sys::signal::Signal;
use rewake_tests::daemon::Daemon;
use rewake_tests::pattern::Random;
use rewake_tests::process::{kill_all, session, until};
use rewake_tests::scene::{ACT, END};
use rewake_tests::sessions::{
    are_parked, folders, own_sessions, recover, served_again, waits_in_a_page_fault,
};
use rewake_tests::{Criu, Scene, Server, Verdict, need};

/// Memory of a target, in MiB: loading it takes longer than killing its streamer.
const MIB: usize = 256;

fn rounds() -> usize {
    env::var("REWAKE_RECOVERIES").map_or(10, |text| text.parse().expect("REWAKE_RECOVERIES is a number"))
}

/// Restores, and waits until every task is parked; false when all memory was resident before that was seen.
fn parked(scene: &Scene, server: &mut Server) -> bool {
    scene.go().unwrap();
    scene.restore().unwrap();
    let is_over = |server: &mut Server| server.text().contains("all memory is back");
    until(ACT, || (are_parked(scene.pid()) || is_over(server)).then_some(())).expect("it is never parked");
    are_parked(scene.pid())
}

/// Kills every process of a streamer at once.
fn total_death(server: &mut Server) {
    server.signal_group(Signal::SIGKILL).unwrap();
    server.ended(END).unwrap();
}

fn recovered() -> Output {
    let output = recover().unwrap().output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output
}

/// Total deaths at random moments after a target was parked. At least half must come while memory is missing.
fn campaign(scenario: &str, rounds: usize) {
    let criu = need!(Criu::main());
    own_sessions().unwrap();
    let mut random = Random::new(rounds as u64);
    let mut scene = Scene::dumped(&criu, scenario, MIB).unwrap();
    let mut served = 0;
    for _ in 0..rounds {
        let mut server = scene.serve().unwrap();
        if parked(&scene, &mut server) {
            sleep(Duration::from_micros(random.below(40_000) as u64));
            total_death(&mut server);
            served += served_again(&recovered());
        }
        scene.stop().unwrap();
        let verdict = scene.verdict(ACT).unwrap();
        assert_eq!(verdict, Verdict::Ok, "{}", scene.logs());
        scene.next_round().unwrap();
    }
    eprintln!("{scenario}: {served} of {rounds} total deaths while memory was missing");
    assert!(served * 2 >= rounds, "{served} of {rounds} deaths came while memory was missing");
    assert_eq!(folders().len(), 0, "nothing is left below /run/rewake/sessions");
}

#[test]
fn a_target_outlives_every_process_of_its_streamer() {
    campaign("random", rounds());
}

#[test]
fn so_does_one_that_forks_drops_and_moves_memory() {
    campaign("active", rounds());
}

#[test]
fn so_do_the_processes_of_a_tree() {
    campaign("tree", rounds() / 2);
}

/// A restored target whose streamer is dead, and which has missing memory.
fn orphaned(criu: &Criu, scenario: &str) -> Scene {
    own_sessions().unwrap();
    let scene = Scene::dumped(criu, scenario, 2 * MIB).unwrap();
    let mut server = scene.serve().unwrap();
    assert!(parked(&scene, &mut server), "all memory was resident before it was parked");
    total_death(&mut server);
    assert_eq!(folders().len(), 1, "its ledger is left");
    scene
}

fn ends_well(scene: &Scene) {
    scene.stop().unwrap();
    assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok, "{}", scene.logs());
    assert_eq!(folders().len(), 0);
}

#[test]
fn until_then_its_thread_waits_in_a_page_fault() {
    let criu = need!(Criu::main());
    let scene = orphaned(&criu, "random");
    until(ACT, || waits_in_a_page_fault(scene.pid()).then_some(())).expect("it reaches a missing page");
    sleep(Duration::from_millis(500));
    assert!(waits_in_a_page_fault(scene.pid()) && scene.written().is_empty(), "it reads nothing else");
    assert_eq!(served_again(&recovered()), 1);
    ends_well(&scene);
}

#[test]
fn of_two_that_recover_at_once_one_serves() {
    let criu = need!(Criu::main());
    let scene = orphaned(&criu, "random");
    let both = [recover().unwrap().spawn().unwrap(), recover().unwrap().spawn().unwrap()];
    let outputs = both.map(|one| one.wait_with_output().unwrap());
    assert!(outputs.iter().all(|output| output.status.success()), "{outputs:?}");
    assert_eq!(outputs.iter().map(served_again).sum::<usize>(), 1, "{outputs:?}");
    ends_well(&scene);
}

#[test]
fn a_daemon_that_starts_serves_what_others_have_left() {
    let criu = need!(Criu::main());
    let scene = orphaned(&criu, "random");
    let daemon = Daemon::start().unwrap();
    scene.stop().unwrap();
    assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok, "{}", daemon.logs());
}

#[test]
fn of_a_target_that_has_ended_nothing_is_left() {
    let criu = need!(Criu::main());
    let scene = orphaned(&criu, "random");
    kill_all(&session(scene.pid()));
    assert_eq!(served_again(&recovered()), 0, "no process has its fd store");
    assert_eq!(folders().len(), 0);
}

/// Every byte of the pages is another.
fn change_pages(images: &Path) {
    for entry in fs::read_dir(images).unwrap().map(Result::unwrap) {
        if entry.file_name().to_string_lossy().starts_with("pages-") {
            let bytes: Vec<u8> = fs::read(entry.path()).unwrap().iter().map(|byte| !byte).collect();
            fs::write(entry.path(), bytes).unwrap();
        }
    }
}

#[test]
fn another_image_of_the_same_pid_in_its_place_is_not_served() {
    let criu = need!(Criu::main());
    let scene = orphaned(&criu, "random");
    let images = scene.images();
    let old = images.with_file_name("old");
    fs::rename(&images, &old).unwrap();
    fs::create_dir(&images).unwrap();
    for entry in fs::read_dir(&old).unwrap().map(Result::unwrap) {
        fs::copy(entry.path(), images.join(entry.file_name())).unwrap();
    }
    change_pages(&images);
    assert_eq!(served_again(&recovered()), 1);
    ends_well(&scene);
}

#[test]
fn an_image_that_was_removed_is_served_on() {
    let criu = need!(Criu::main());
    let scene = orphaned(&criu, "random");
    fs::remove_dir_all(scene.images()).unwrap();
    assert_eq!(served_again(&recovered()), 1);
    ends_well(&scene);
}

#[test]
fn with_the_plugin_a_total_death_at_any_moment_costs_no_byte() {
    let criu = need!(Criu::main());
    own_sessions().unwrap();
    let mut random = Random::new(7);
    let mut scene = Scene::dumped(&criu, "random", MIB).unwrap();
    let (mut served, mut refused) = (0, 0);
    for _ in 0..rounds() {
        let mut server = scene.serve().unwrap();
        scene.go().unwrap();
        let plugins = rewake_tests::plugins::rewake_alone(&scene.work()).unwrap();
        let restored = std::thread::scope(|scope| {
            let options = [std::ffi::OsStr::new("-L"), plugins.as_os_str()];
            let (criu, images, work) = (&criu, scene.images(), scene.work());
            let restore = scope.spawn(move || criu.restore_with(&images, &work, &options));
            sleep(Duration::from_micros(random.below(250_000) as u64));
            total_death(&mut server);
            restore.join().unwrap()
        });
        let found = served_again(&recovered());
        scene.stop().unwrap();
        // CRIU ignores what the hook says: the tasks may have been killed by it.
        let killed = fs::read_to_string(scene.work().join("restore.log")).unwrap_or_default();
        let killed = killed.contains("the tasks are killed");
        if restored.is_err() || killed {
            refused += 1;
            assert_eq!(found, 0);
            assert!(!scene.written().contains("BAD"), "{}", scene.written());
        } else {
            served += 1;
            assert_eq!(scene.verdict(ACT).unwrap(), Verdict::Ok, "{}", scene.logs());
        }
        scene.next_round().unwrap();
    }
    eprintln!("{served} ended well, {refused} were refused");
    assert!(served * 4 >= rounds(), "{served} ended well, {refused} were refused");
}
