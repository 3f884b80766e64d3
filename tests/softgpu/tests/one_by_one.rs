// SPDX-License-Identifier: MIT OR Apache-2.0
//! Gates that are opened one by one: a process whose memory is there goes on, whatever the others of its restore wait for, and is handed
//! none of theirs before that is there.

use std::fs;
use std::path::Path;

use gpu_app::shape::Shape;
use rewake_skip::need;
use serde_json::Value;
use softgpu_tests::criu::{Criu, Version, queues};
use softgpu_tests::dumped::{Dumped, ONE_RING, soon, unreached};
use softgpu_tests::{Held, Judge, Machine, Pair, REAL_GPUS, Streamer, Toucher, isolated};

fn comes_back(criu: &Criu) -> Streamer {
    let both = Streamer::of_both(criu.images()).unwrap();
    criu.restore_lazily().unwrap();
    both
}

#[test]
fn a_process_goes_on_while_another_waits_for_its_memory() {
    isolated("a_process_goes_on_while_another_waits_for_its_memory", 1, |_| {
        let _machine = need!(Machine::with(&ONE_RING), REAL_GPUS);
        let judge = need!(Judge::find(), REAL_GPUS);
        let dumped = need!(Dumped::of(&Shape { processes: 2, ..unreached() }, Version::V4_2));
        let held = Held::streamers();
        let mut both = comes_back(&dumped.criu);
        assert_eq!(judge.shut(), 2, "{}", both.said());
        held.lets_go_until_one_is_whole(&dumped.criu, &both);
        assert!(soon(|| judge.shut() == 1), "{}", both.said());
        assert!(!both.has_ended().unwrap(), "{}", both.said());
        drop(held);
        assert!(both.end().unwrap().success(), "{}", both.said());
        assert_eq!(judge.shut(), 0);
        dumped.server.ends_well();
    });
}

#[test]
fn a_buffer_is_not_handed_over_before_it_is_there() {
    isolated("a_buffer_is_not_handed_over_before_it_is_there", 1, |_| {
        let _machine = need!(Machine::with(&ONE_RING), REAL_GPUS);
        let folder = tempfile::tempdir().unwrap();
        let mut toucher = Toucher::start(env!("CARGO_BIN_EXE_toucher"), folder.path(), None).unwrap();
        let criu = toucher.dump(Version::V4_2).unwrap();
        toucher.ask("export 0").unwrap();
        let held = Held::streamers();
        let mut both = comes_back(&criu);
        assert!(soon(|| toucher.log().contains("EAGAIN")), "{}", both.said());
        assert_eq!(toucher.answered(), None, "{}", both.said());
        drop(held);
        toucher.answer().unwrap_or_else(|error| panic!("{error:#}\n{}", both.said()));
        assert!(both.end().unwrap().success(), "{}", both.said());
        toucher.ends();
    });
}

/// Its GPUs' memory is brought until one of them goes on: which.
fn until_one_goes_on(pair: &Pair, criu: &Criu, held: &Held, both: &Streamer) -> usize {
    let before = pair.counts().unwrap();
    held.lets_go_until_one_is_whole(criu, both);
    let one = || {
        let now = pair.counts().unwrap();
        (0..2).find(|gpu| now[*gpu] > before[*gpu])
    };
    assert!(soon(|| one().is_some()), "neither goes on: {:?}, {}", pair.counts(), both.said());
    one().unwrap()
}

/// What others can see of a process that is not to be dumped.
fn is_told(pid: u32) -> bool {
    let mut files = fs::read_dir("/run/rewake-gated").unwrap().map(|file| file.unwrap().file_name());
    files.any(|name| name.to_str().unwrap().starts_with(&format!("{pid}-")))
}

/// `pair`, restored, with copies held.
fn restored_pair(
    machine: &Machine,
    folder: &Path,
) -> Result<(Pair, Criu, Held, Streamer, Judge), &'static str> {
    machine.becomes(&ONE_RING);
    let judge = Judge::find().ok_or(REAL_GPUS)?;
    queues()?;
    let (pair, criu) = Pair::dumped(env!("CARGO_BIN_EXE_pair"), folder).unwrap();
    let held = Held::streamers();
    let both = comes_back(&criu);
    Ok((pair, criu, held, both, judge))
}

/// When its GPUs go on, as a picture tells it: by their places; none if they do not yet.
fn go_on(memory: &Value) -> Vec<Option<u64>> {
    let of_gpus = memory.as_array().unwrap().iter().filter(|of| !of["minor"].is_null());
    of_gpus.map(|of| of["goes_on_us"].as_u64().filter(|at| *at > 0)).collect()
}

/// What is left of it for people: the one of its GPUs before the other, that with the gate or just before.
fn is_told_of_both(criu: &Criu, first: usize) {
    let text = fs::read_to_string(criu.images().join("rewake-timeline.json")).unwrap();
    let timeline: Value = serde_json::from_str(&text).unwrap();
    let at = go_on(&timeline["memory"]);
    let gate = timeline["processes"][0]["gate_open_us"].as_u64();
    assert!(at.iter().all(Option::is_some) && at.len() == 2, "{timeline}");
    assert!(at[first] < at[1 - first] && at[1 - first] <= gate, "{timeline}");
    let page = fs::read_to_string(criu.images().join("rewake-timeline.html")).unwrap();
    assert_eq!(page.matches("<line class=\"gpu ").count(), 1, "{page}");
}

/// Rounds are counted on these GPUs.
fn run(pair: &Pair, gpus: &[usize], both: &Streamer) {
    assert!(pair.goes_on(gpus), "{:?}, {}", pair.counts(), both.said());
}

fn ends(pair: &Pair) {
    assert!(!is_told(pair.pid()));
    pair.ends();
}

#[test]
fn a_gpu_goes_on_while_another_of_its_process_waits() {
    isolated("a_gpu_goes_on_while_another_of_its_process_waits", 2, |_| {
        let folder = tempfile::tempdir().unwrap();
        let machine = need!(Machine::find(), REAL_GPUS);
        let (pair, criu, held, mut both, judge) = need!(restored_pair(&machine, folder.path()));
        let first = until_one_goes_on(&pair, &criu, &held, &both);
        let other = 1 - first;
        assert_eq!(judge.shut(), 0, "{}", both.said());
        let before = pair.counts().unwrap()[other];
        run(&pair, &[first], &both);
        let now = criu.status();
        let told: Vec<bool> = go_on(&now["processes"][0]["memory"]).iter().map(Option::is_some).collect();
        assert_eq!((told[first], told[other], told.len()), (true, false, 2), "{now}");
        assert_eq!(judge.violations(), Vec::<String>::new());
        assert_eq!((pair.counts().unwrap()[other], is_told(pair.pid())), (before, true), "{}", both.said());
        assert!(!both.has_ended().unwrap(), "{}", both.said());
        drop(held);
        assert!(both.end().unwrap().success(), "{}", both.said());
        run(&pair, &[0, 1], &both);
        is_told_of_both(&criu, first);
        ends(&pair);
    });
}

#[test]
fn queues_that_end_while_their_gpu_waits_are_nobody_s_trouble() {
    isolated("queues_that_end_while_their_gpu_waits_are_nobody_s_trouble", 2, |_| {
        let folder = tempfile::tempdir().unwrap();
        let machine = need!(Machine::find(), REAL_GPUS);
        let (pair, criu, held, mut both, _) = need!(restored_pair(&machine, folder.path()));
        let first = until_one_goes_on(&pair, &criu, &held, &both);
        pair.asked(&format!("end-{}", 1 - first)).unwrap();
        run(&pair, &[first], &both);
        drop(held);
        assert!(both.end().unwrap().success(), "{}", both.said());
        run(&pair, &[first], &both);
        ends(&pair);
    });
}

#[test]
fn a_process_that_is_killed_between_its_gpus_is_nobody_s_trouble() {
    isolated("a_process_that_is_killed_between_its_gpus_is_nobody_s_trouble", 2, |_| {
        let folder = tempfile::tempdir().unwrap();
        let machine = need!(Machine::find(), REAL_GPUS);
        let (pair, criu, held, mut both, _) = need!(restored_pair(&machine, folder.path()));
        until_one_goes_on(&pair, &criu, &held, &both);
        pair.ends();
        drop(held);
        assert!(both.end().unwrap().success(), "{}", both.said());
        assert!(!is_told(pair.pid()));
    });
}

#[test]
fn gpus_of_a_process_that_has_closed_their_driver_go_on_together() {
    isolated("gpus_of_a_process_that_has_closed_their_driver_go_on_together", 2, |_| {
        let folder = tempfile::tempdir().unwrap();
        let machine = need!(Machine::find(), REAL_GPUS);
        let (pair, criu, held, mut both, _) = need!(restored_pair(&machine, folder.path()));
        pair.asked("close").unwrap();
        held.lets_go_until_one_is_whole(&criu, &both);
        let tried = soon(|| both.said().contains("GPUs of a process go on together"));
        assert!(tried && is_told(pair.pid()), "{}", both.said());
        drop(held);
        assert!(both.end().unwrap().success(), "{}", both.said());
        run(&pair, &[0, 1], &both);
        ends(&pair);
    });
}

#[test]
fn a_program_that_executes_another_between_its_gpus_is_let_go() {
    isolated("a_program_that_executes_another_between_its_gpus_is_let_go", 2, |_| {
        let folder = tempfile::tempdir().unwrap();
        let machine = need!(Machine::find(), REAL_GPUS);
        let (pair, criu, held, mut both, _) = need!(restored_pair(&machine, folder.path()));
        until_one_goes_on(&pair, &criu, &held, &both);
        pair.asked("execute").unwrap();
        drop(held);
        assert!(both.end().unwrap().success(), "{}", both.said());
        ends(&pair);
    });
}
