// SPDX-License-Identifier: MIT OR Apache-2.0
//! What other commands report of processes whose gates are closed: dumps, and waits for a restore.

use std::fs::OpenOptions;
use std::time::Duration;

use nix::sys::signal::Signal;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use rewake_skip::need;
use softgpu_tests::criu::{Criu, Plugin, Version, wait_for_the_end_of};
use softgpu_tests::dumped::{
    Behind, Dumped, ONE_RING, Restoring, dies, gate_files, is_paused, pages, signal, unreached,
};
use softgpu_tests::random::{Random, count, is_share};
use softgpu_tests::streamer::recover;
use softgpu_tests::{Machine, REAL_GPUS, isolated};

/// A dumped server, and the machine that restores it.
fn dumped() -> Result<(Machine, Dumped), &'static str> {
    let machine = Machine::with(&ONE_RING).ok_or(REAL_GPUS)?;
    Ok((machine, Dumped::of(&unreached(), Version::V4_2)?))
}

/// A folder of its own for a dump of the restored process.
fn again(dumped: &Dumped) -> Criu {
    Criu::with(Plugin::Ours, Version::V4_2, &dumped.criu.images().with_file_name("again")).unwrap()
}

#[test]
fn a_dump_waits_for_a_closed_gate_and_past_its_limit_is_refused() {
    isolated(1, |_| {
        let (_machine, mut dumped) = need!(dumped());
        let (mut streamer, delayed) = dumped.restores_paused();
        let again = again(&dumped);
        let without_patience = again.clone().variable("REWAKE_DUMP_WAIT", "0");
        let refused = without_patience.dump(dumped.server.pid).unwrap_err().to_string();
        assert!(
            refused.contains("has GPU queues that are stopped until memory of the GPU is resident"),
            "{refused}"
        );
        assert!(is_paused(dumped.server.pid), "{refused}");
        assert!(pages(again.images()).is_empty(), "the dump has written nothing");
        let (criu, pid) = (again.clone(), dumped.server.pid);
        let dump = std::thread::spawn(move || criu.dump(pid));
        std::thread::sleep(Duration::from_secs(2));
        assert!(!dump.is_finished() && is_paused(dumped.server.pid), "the dump waits");
        assert!(pages(again.images()).is_empty(), "the dump has written nothing");
        drop(delayed);
        assert!(streamer.end().unwrap().success(), "{}", streamer.said());
        dump.join().unwrap().unwrap();
        dumped.server.was_dumped(&again);
        again.restore().unwrap();
        dumped.server.ends_well();
    });
}

/// Rate of the copy rings in 10^6 bytes a second: the gate stays closed for a second, or for an instant.
const PACES: [&str; 3] = ["5", "20", "400"];
/// What a dump logs that waits for a closed gate, and for missing memory.
const WAITS: [&str; 2] = ["has GPU queues that are stopped", "has memory that session"];

/// `REWAKE_DUMPS` is the number of moments (default 2), `REWAKE_SEED` chooses them.
#[test]
fn a_dump_at_any_moment_has_all_memory() {
    isolated(1, |_| {
        let rounds = count("REWAKE_DUMPS", 2_usize);
        let mut random = Random::new(count("REWAKE_SEED", 0x5eed_0018));
        let (machine, mut dumped) = need!(dumped());
        let mut waited = 0;
        for round in 0..rounds {
            machine.becomes(&[("copy_mbps", random.of(&PACES)), ("sdma_rings", "1")]);
            let behind = random.of(&[Behind::Gpus, Behind::Both]);
            let mut streamer = dumped.streamer_of(behind);
            let restored = dumped.restore_command(behind).status().unwrap();
            assert!(restored.success(), "{}\n{}", dumped.criu.log("restore"), streamer.said());
            std::thread::sleep(Duration::from_millis(random.below(600)));
            let again = again(&dumped);
            let done = again.dump(dumped.server.pid);
            done.unwrap_or_else(|error| panic!("round {round}, {behind:?}: {error:#}\n{}", streamer.said()));
            waited += usize::from(WAITS.iter().any(|text| again.log("dump").contains(text)));
            assert!(streamer.end().unwrap().success(), "{}", streamer.said());
            dumped.server.was_dumped(&again);
            // All at once, by the plugin alone: memory that is missing in the second image stays missing.
            again.restore().unwrap();
            dumped.server.works();
            dumped.ends();
            std::fs::remove_dir_all(again.images()).unwrap();
        }
        assert!(is_share(waited, 2, rounds), "{waited} of {rounds} dumps began while memory was missing");
    });
}

#[test]
fn processes_that_have_ended_are_not_reported() {
    isolated(1, |_| {
        let (_machine, dumped) = need!(dumped());
        for itself in [false, true] {
            let (mut streamer, delayed) = dumped.restores_paused();
            assert_eq!(gate_files(dumped.server.pid).len(), 1);
            let dying = if itself { vec![dumped.server.pid] } else { streamer.workers() };
            dying.into_iter().for_each(dies);
            drop(delayed);
            assert_eq!(streamer.end().unwrap().success(), itself, "{}", streamer.said());
            wait_for_the_end_of(dumped.server.pid).unwrap();
            assert!(gate_files(dumped.server.pid).is_empty());
        }
        dumped.restores();
        dumped.server.ends_well();
    });
}

#[test]
fn rewake_restore_reports_the_result_after_any_death() {
    isolated(1, |_| {
        let (_machine, dumped) = need!(dumped());

        let (restoring, delayed) = dumped.restoring();
        dies(restoring.streamer().0);
        drop(delayed);
        let (well, said) = restoring.end();
        assert!(well && said.contains("GPUs run; all memory resident"), "{said}");
        assert!(!is_paused(dumped.server.pid), "{said}");
        dumped.server.answers().unwrap();
        dumped.ends();

        let (restoring, delayed) = dumped.restoring();
        let (supervisor, workers) = restoring.streamer();
        dies(supervisor);
        workers.into_iter().for_each(dies);
        drop(delayed);
        let (well, said) = restoring.end();
        assert!(!well && said.contains("run `rewake recover`"), "{said}");
        assert!(is_paused(dumped.server.pid), "it waits: {said}");
        let (well, said) = recover().unwrap();
        assert!(!well && said.contains("its GPUs were not resumed yet"), "{said}");
        wait_for_the_end_of(dumped.server.pid).unwrap();
        dumped.restores();
        dumped.server.ends_well();
    });
}

#[test]
fn an_unknown_result_is_reported_and_a_paused_target_not_dumped() {
    isolated(1, |_| {
        let (_machine, mut dumped) = need!(dumped());
        let (restoring, delayed) = dumped.restoring();
        let (supervisor, workers) = restoring.streamer();
        // The supervisor must not notice that its worker died.
        signal(&[supervisor], Signal::SIGSTOP);
        workers.into_iter().chain([supervisor]).for_each(dies);
        drop(delayed);
        let (well, said) = restoring.end();
        assert!(!well && said.contains("run `rewake recover`"), "{said}");
        assert!(is_paused(dumped.server.pid), "{said}");
        let again = again(&dumped);
        let without_patience = again.clone().variable("REWAKE_DUMP_WAIT", "0");
        let refused = without_patience.dump(dumped.server.pid).unwrap_err().to_string();
        assert!(refused.contains("has GPU queues that are stopped"), "{refused}");
        dumped.ends();
        // The report of it stays, and is not shown for the next process with its pid.
        assert_eq!(gate_files(dumped.server.pid).len(), 1);
        dumped.restores();
        assert_eq!(gate_files(dumped.server.pid).len(), 1);
        again.dump(dumped.server.pid).unwrap();
        dumped.server.was_dumped(&again);
        again.restore().unwrap();
        gate_files(dumped.server.pid).into_iter().for_each(|stale| std::fs::remove_file(stale).unwrap());
        dumped.server.ends_well();
    });
}

#[test]
fn rewake_restore_ends_a_streamer_without_sessions() {
    isolated(1, |_| {
        let (_machine, dumped) = need!(dumped());
        // CRIU waits for a writer.
        let tree = dumped.criu.images().join("pstree.img");
        std::fs::remove_file(&tree).unwrap();
        mkfifo(&tree, Mode::S_IRUSR | Mode::S_IWUSR).unwrap();
        let restoring = Restoring::start(&dumped.criu);
        let (supervisor, workers) = restoring.streamer();
        dies(supervisor);
        // The file is empty: CRIU fails, and the streamer receives no task.
        drop(OpenOptions::new().write(true).open(&tree).unwrap());
        let (well, said) = restoring.end();
        assert!(!well && said.contains("criu restore failed"), "{said}");
        for worker in workers {
            wait_for_the_end_of(worker).unwrap();
        }
    });
}
