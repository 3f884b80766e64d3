// SPDX-License-Identifier: MIT OR Apache-2.0
//! Gates that are opened one by one: a process whose memory is there goes on, whatever the others of its restore wait for, and is handed
//! none of theirs before that is there.

use gpu_app::shape::Shape;
use serde_json::Value;
use softgpu_tests::criu::{Criu, Plugin, Version, wait_for_the_end_of};
use softgpu_tests::dumped::{Dumped, ONE_RING, dies, soon, unreached};
use softgpu_tests::{Held, Judge, Machine, Streamer, Toucher, isolated};

fn comes_back(criu: &Criu) -> Streamer {
    let both = Streamer::of_both(criu.images()).unwrap();
    criu.restore_lazily().unwrap();
    both
}

/// Processes whose queues the driver holds until they are let go on.
fn shut(judge: &Judge) -> usize {
    judge.gates().iter().filter(|gate| gate.paused).count()
}

/// Processes that have all memory of their GPUs, as people are told.
fn whole(criu: &Criu) -> usize {
    let status = criu.status();
    let is_whole = |process: &&Value| {
        let memory = process["memory"].as_array().unwrap().iter();
        memory.filter(|of| !of["minor"].is_null()).all(|of| of["resident"] == of["bytes"])
    };
    status["processes"].as_array().unwrap().iter().filter(is_whole).count()
}

#[test]
fn a_process_goes_on_while_another_waits_for_its_memory() {
    isolated("a_process_goes_on_while_another_waits_for_its_memory", 1, |_| {
        let Some(machine) = Machine::find() else { return };
        machine.becomes(&ONE_RING);
        let Some(judge) = Judge::find() else { return };
        let Some(dumped) = Dumped::of(&Shape { processes: 2, ..unreached() }, Version::V4_2) else { return };
        let held = Held::streamers();
        let mut both = comes_back(&dumped.criu);
        assert_eq!(shut(&judge), 2, "{}", both.said());
        // A copy at a time: the second process's are begun when the first has all of its own.
        let first_is_whole = soon(|| {
            held.lets_go(1);
            whole(&dumped.criu) > 0
        });
        assert!(first_is_whole && soon(|| shut(&judge) == 1), "{}", both.said());
        assert_eq!(whole(&dumped.criu), 1, "{}", both.said());
        assert!(!both.has_ended().unwrap(), "{}", both.said());
        drop(held);
        assert!(both.end().unwrap().success(), "{}", both.said());
        assert_eq!(shut(&judge), 0);
        dumped.server.ends_well();
    });
}

#[test]
fn a_buffer_is_not_handed_over_before_it_is_there() {
    isolated("a_buffer_is_not_handed_over_before_it_is_there", 1, |_| {
        let Some(machine) = Machine::find() else { return };
        machine.becomes(&ONE_RING);
        let folder = tempfile::tempdir().unwrap();
        let mut toucher = Toucher::start(env!("CARGO_BIN_EXE_toucher"), folder.path(), None).unwrap();
        let criu = Criu::with(Plugin::Ours, Version::V4_2, &folder.path().join("images")).unwrap();
        criu.dump(toucher.pid()).unwrap();
        toucher.was_dumped().unwrap();
        toucher.ask("export 0").unwrap();
        let held = Held::streamers();
        let mut both = comes_back(&criu);
        assert!(soon(|| toucher.log().contains("EAGAIN")), "{}", both.said());
        assert_eq!(toucher.answered(), None, "{}", both.said());
        drop(held);
        toucher.answer().unwrap_or_else(|error| panic!("{error:#}\n{}", both.said()));
        assert!(both.end().unwrap().success(), "{}", both.said());
        dies(toucher.pid());
        wait_for_the_end_of(toucher.pid()).unwrap();
    });
}
