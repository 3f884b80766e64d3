// SPDX-License-Identifier: MIT OR Apache-2.0
//! The page server is killed at random moments while a target's memory is loaded. The target checks its
//! memory all the time and ends well: a restore may fail, and no target is killed or sees a wrong byte.
//!
//! `REWAKE_KILLS` is the number of kills (default 40), `REWAKE_SEED` repeats the moments of another run.

use std::fmt;
use std::fs;
use std::thread::scope;
use std::time::{Duration, Instant};

use nix::unistd::Pid;
use rewake_testkit::{PATIENCE, until};
use rewake_tests::Random;
use rewake_tests::random::{count, is_share, moment, seed};
use rewake_tests::scene::END;
use rewake_tests::{Criu, Scene, Server, Verdict, need};

/// Time for a target to end after the last kill: far more than it needs.
const LIMIT: Duration = Duration::from_secs(60);

/// Memory of a target: it takes several times as long to load as CRIU's restore, so that most kills come
/// while some is missing.
const MIB: usize = 128;
/// Restores at most for each kill that is to hit.
const MOST: usize = 4;

/// Failed restores that a short test allows, in addition to a quarter of all.
const FEW: usize = 8;

/// CRIU's error when a server that was asked to end has removed its socket before CRIU connects.
const NO_SERVER: &str = "connect to lazy-pages.socket failed";

/// Which processes are killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victim {
    /// The process that serves; every fourth time its successor too.
    Worker,
    /// The process that was started.
    Supervisor,
    /// No process: the started one is asked to end (SIGTERM).
    Asked,
}

/// How the restores of one test ended.
#[derive(Debug, Default)]
struct Outcomes {
    good: usize,
    killed: usize,
    restore_failed: usize,
    /// The server was asked to end before CRIU connected: it had no target that it could lose.
    too_early: usize,
    /// The server had ended before the kill; counted besides the outcome.
    too_late: usize,
    /// Outcomes that must not happen: wrong bytes, hangs, unexplained errors.
    wrong: Vec<String>,
}

impl fmt::Display for Outcomes {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { good, killed, restore_failed, too_early, too_late, wrong } = self;
        write!(
            out,
            "{good} ended well, {killed} targets killed, {restore_failed} restores failed, {} WRONG \
             ({too_early} kills came before CRIU connected, {too_late} too late)",
            wrong.len()
        )
    }
}

impl Outcomes {
    /// The number of `restores` that had a target when the kill came. A restore whose kill was too early has
    /// no other outcome; one whose kill was too late has one.
    fn met(&self, restores: usize) -> usize {
        restores - self.too_late - self.too_early
    }
}

fn rounds(part: usize) -> usize {
    (count("REWAKE_KILLS", 8) / part).max(1)
}

/// Time from the start of a restore to the end of its server when nothing is killed.
fn undisturbed(scene: &mut Scene) -> Duration {
    let mut server = scene.serve().unwrap();
    scene.go().unwrap();
    let start = Instant::now();
    scene.restore().unwrap();
    let status = server.ended(END).unwrap();
    let took = start.elapsed();
    assert_eq!(status.code(), Some(0));
    scene.stop().unwrap();
    assert_eq!(scene.verdict(LIMIT).unwrap(), Verdict::Ok);
    scene.next_round().unwrap();
    took
}

/// Kills at a random moment within `span` of the restore's start; false when no process was left.
fn kill(server: &mut Server, victim: Victim, span: Duration, random: &mut Random) -> bool {
    moment(span, random);
    let hit = match victim {
        Victim::Worker => server.kill_worker(),
        Victim::Supervisor => server.kill_supervisor(),
        Victim::Asked => server.terminate().is_ok(),
    };
    if victim == Victim::Worker && random.below(4) == 0 {
        moment(Duration::from_millis(20), random);
        server.kill_worker();
    }
    hit
}

/// One restore with one kill.
fn round(scene: &Scene, victim: Victim, span: &mut Duration, random: &mut Random, sum: &mut Outcomes) {
    let mut server = scene.serve().unwrap();
    scene.go().unwrap();
    let restored = scope(|scope| {
        let restore = scope.spawn(|| scene.restore());
        // The machine's speed changes: the span follows it.
        if kill(&mut server, victim, *span, random) {
            *span = span.mul_f64(1.05);
        } else {
            sum.too_late += 1;
            *span = span.mul_f64(0.8);
        }
        restore.join().expect("the restore thread")
    });
    scene.stop().unwrap();
    if let Err(error) = restored {
        if scene.written().contains("BAD") {
            sum.wrong.push(format!("{}\n{}", scene.written(), scene.logs()));
        }
        let text = error.to_string();
        let reason = text.lines().find(|line| line.contains("Error ("));
        let reason = reason.unwrap_or(&text);
        eprintln!("restore failed: {reason}");
        if victim == Victim::Asked && reason.contains(NO_SERVER) {
            sum.too_early += 1;
        } else {
            sum.restore_failed += 1;
        }
        return;
    }
    match scene.verdict(LIMIT).unwrap() {
        Verdict::Ok => sum.good += 1,
        Verdict::Killed(_) => sum.killed += 1,
        other => sum.wrong.push(format!("{other:?}\n{}", scene.logs())),
    }
    let ended = server.ended(END);
    let childless = server.childless(END);
    // A successor serves the rest, and its exit code shows that.
    if victim == Victim::Worker
        && let Ok(status) = ended
        && !status.success()
    {
        sum.wrong.push(format!(
            "the target was served well, and the server ended with {status}\n{}",
            scene.logs()
        ));
    }
    if ended.is_err() || !childless {
        sum.wrong.push(format!("the server, or a child of it, still runs\n{}", scene.logs()));
    }
}

/// Restores one image again and again, each time with a kill, until `rounds` kills have met a target.
fn campaign(criu: &Criu, scenario: &str, victim: Victim, rounds: usize) {
    let seed = seed();
    let mut random = Random::new(seed);
    let mut scene = Scene::dumped(criu, scenario, MIB).unwrap();
    let mut span = undisturbed(&mut scene);
    let mut sum = Outcomes::default();
    let mut restores = 0;
    while sum.met(restores) < rounds && restores < MOST * rounds {
        round(&scene, victim, &mut span, &mut random, &mut sum);
        scene.next_round().unwrap();
        restores += 1;
    }
    eprintln!("{scenario}, {victim:?} killed, REWAKE_SEED={seed}, within {span:?}: {sum}");
    assert!(sum.wrong.is_empty(), "{}", sum.wrong.join("\n==========\n"));
    assert_eq!(sum.met(restores), rounds, "most kills came too early or too late to mean anything: {sum}");
    // A kill before the userfaultfds have arrived costs the restore, and these moments are few.
    assert!(is_share(sum.good, 2, rounds), "too few targets ended well: {sum}");
    assert!(4 * sum.restore_failed <= restores + FEW, "too many restores failed: {sum}");
    assert_eq!(sum.killed, 0, "one process of a streamer is left, and must serve: {sum}");
}

#[test]
fn a_killed_worker_is_replaced_and_the_target_sees_right_bytes() {
    let criu = need!(Criu::main());
    campaign(&criu, "random", Victim::Worker, rounds(1));
}

#[test]
fn a_worker_killed_while_the_layout_changes_is_replaced() {
    let criu = need!(Criu::main());
    campaign(&criu, "active", Victim::Worker, rounds(2));
}

/// A supervisor shares its descriptor table with the worker, so the descriptors of a dead worker stay open
/// until its successor closes them.
#[test]
fn a_successor_keeps_nothing_open_of_the_workers_before_it() {
    let criu = need!(Criu::main());
    let scene = Scene::dumped(&criu, "random", 4).unwrap();
    let mut server = scene.serve().unwrap();
    let count = |worker: Pid| fs::read_dir(format!("/proc/{worker}/fd")).map_or(0, Iterator::count);
    let before = count(server.worker().unwrap());
    for killed in 1..=3 {
        assert!(server.kill_worker());
        let has_started = || scene.logs().matches("taken over in state").count() >= killed;
        until(PATIENCE, || has_started().then_some(())).expect("a successor");
    }
    let now = count(server.worker().unwrap());
    assert!(now <= before, "{before} descriptors before, {now} now");
}

#[test]
fn a_killed_supervisor_costs_no_target() {
    let criu = need!(Criu::main());
    campaign(&criu, "random", Victim::Supervisor, rounds(4));
}

#[test]
fn a_server_asked_to_end_serves_its_target_first() {
    let criu = need!(Criu::main());
    campaign(&criu, "random", Victim::Asked, rounds(4));
}
