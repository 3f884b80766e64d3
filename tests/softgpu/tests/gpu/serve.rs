// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake serve` and processes with GPUs: what restores share, and what each has for itself.

use rewake_skip::need;
use serde_json::Value;
use softgpu_tests::criu::{Version, wait_for_the_end_of};
use softgpu_tests::dumped::{Dumped, ONE_RING, Restoring, dies, is_paused, soon, streamer_of, unreached};
use softgpu_tests::{Daemon, DelayedCopies, Machine, REAL_GPUS, isolated};

/// Dumped servers, and the machine that restores them.
fn dumped<const COUNT: usize>() -> Result<(Machine, [Dumped; COUNT]), &'static str> {
    let machine = Machine::with(&ONE_RING).ok_or(REAL_GPUS)?;
    Ok((machine, Dumped::together(&unreached(), Version::V4_2)?))
}

/// The server runs, and its queues stay evicted for as long as copies are held.
fn paused(dumped: &Dumped, daemon: &Daemon) -> Restoring {
    let restoring = Restoring::by(daemon, &dumped.criu);
    if !soon(|| is_paused(dumped.server.pid)) {
        panic!("{:?}\n{}", restoring.end(), dumped.criu.log("restore"));
    }
    restoring
}

/// States of the agent's sessions.
fn states(status: &Value) -> Vec<String> {
    let sessions = status["sessions"].as_array().unwrap().iter();
    sessions.map(|session| session["state"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn two_restores_have_two_streamers_and_the_agent_may_die() {
    isolated(1, |_| {
        let (_machine, both) = need!(dumped::<2>());
        let (mut daemon, delayed) = (Daemon::start().unwrap(), DelayedCopies::streamers());
        let restorings = both.each_ref().map(|dumped| paused(dumped, &daemon));
        let paused = || both.iter().all(|dumped| is_paused(dumped.server.pid));
        let running = || states(&daemon.status().unwrap()) == ["running"; 2];
        assert!(soon(|| paused() && running()), "{}", daemon.status().unwrap());
        daemon.replace().unwrap();
        let running = || states(&daemon.status().unwrap()) == ["running"; 2];
        assert!(soon(running) && paused(), "{}", daemon.status().unwrap());
        drop(delayed);
        for restoring in restorings {
            let (well, said) = restoring.end();
            assert!(well && said.contains("GPUs run; all memory resident"), "{said}");
        }
        assert!(soon(|| states(&daemon.status().unwrap()).is_empty()), "{}", daemon.status().unwrap());
        let status = daemon.status().unwrap();
        assert_eq!(status["agent"]["sessions_served"], 2, "{status}");
        for ended in status["recent"].as_array().unwrap() {
            assert_eq!(ended["state"], "complete", "{status}");
            let memory =
                ended["processes"].as_array().unwrap().iter().flat_map(|of| of["memory"].as_array().unwrap());
            let sum = |name: &str| memory.clone().map(|of| of[name].as_u64().unwrap()).sum::<u64>();
            assert!(sum("bytes") > 12 << 20, "12 MiB of the GPU's: {status}");
            assert_eq!(sum("resident"), sum("bytes"), "{status}");
        }
        for dumped in both {
            dumped.server.ends_well();
        }
    });
}

#[test]
fn the_agent_reports_a_dead_streamer_and_others_serve_on() {
    isolated(1, |_| {
        let (_machine, [one, two]) = need!(dumped());
        let (daemon, delayed) = (Daemon::start().unwrap(), DelayedCopies::streamers());
        let first = paused(&one, &daemon);
        let (supervisor, workers) = streamer_of(daemon.id());
        let second = paused(&two, &daemon);
        dies(supervisor);
        workers.into_iter().for_each(dies);
        let (well, said) = first.end();
        assert!(!well && said.contains("run `rewake recover`"), "{said}");
        // The agent has run `rewake recover`.
        wait_for_the_end_of(one.server.pid).unwrap();
        assert!(daemon.logs().contains("its GPUs were not resumed yet"), "{}", daemon.logs());
        drop(delayed);
        let (well, said) = second.end();
        assert!(well, "{said}");
        two.server.ends_well();
        assert!(soon(|| states(&daemon.status().unwrap()).is_empty()), "{}", daemon.status().unwrap());
        let status = daemon.status().unwrap();
        let ended = &status["agent"];
        assert_eq!(
            (&ended["sessions_served"], &ended["sessions_failed"]),
            (&1.into(), &1.into()),
            "{status}"
        );
    });
}

/// Container engines start CRIU like this.
#[test]
fn a_restore_with_gpus_becomes_lazy_without_an_option() {
    isolated(1, |_| {
        let (_machine, [dumped]) = need!(dumped());
        let daemon = Daemon::start().unwrap();
        let mut command = dumped.criu.command(&["restore", "--restore-detached"]);
        command.env("REWAKE_LAZY", "1").env("REWAKE_SOCKET", daemon.socket());
        let status = command.status().unwrap();
        let log = dumped.criu.log("restore");
        assert!(status.success() && log.contains("the restore is lazy"), "{log}");
        dumped.server.ends_well();
        let served = || daemon.status().unwrap()["agent"]["sessions_served"] == 1;
        assert!(soon(served), "{}", daemon.status().unwrap());
    });
}

#[test]
fn a_killed_agent_ends_no_streamer() {
    isolated(1, |_| {
        let (_machine, [dumped]) = need!(dumped());
        let (daemon, delayed) = (Daemon::start().unwrap(), DelayedCopies::streamers());
        let restoring = paused(&dumped, &daemon);
        let (supervisor, _) = streamer_of(daemon.id());
        dies(daemon.id());
        drop(delayed);
        let (well, said) = restoring.end();
        assert!(well && said.contains("GPUs run; all memory resident"), "{said}");
        wait_for_the_end_of(supervisor).unwrap();
        assert!(!is_paused(dumped.server.pid));
        dumped.server.ends_well();
    });
}

/// The driver restores queues of copy engines by number, and both had the first.
#[test]
fn a_copy_engine_that_another_process_has_is_an_error() {
    isolated(1, |_| {
        let (_machine, [first]) = need!(dumped());
        let second = need!(Dumped::of(&unreached(), Version::V4_2));
        let daemon = Daemon::start().unwrap();
        let (well, said) = Restoring::by(&daemon, &second.criu).end();
        assert!(well, "{said}");
        let (well, said) = Restoring::by(&daemon, &first.criu).end();
        assert!(!well && said.contains("has a copy engine (SDMA) queue of the same number"), "{said}");
        second.server.ends_well();
        first.restores();
        first.server.ends_well();
    });
}

#[test]
fn a_restore_that_fails_leaves_no_streamer() {
    isolated(1, |_| {
        let (_machine, [dumped]) = need!(dumped());
        let daemon = Daemon::start().unwrap();
        std::fs::write(dumped.criu.images().join("pstree.img"), "").unwrap();
        let restoring = Restoring::by(&daemon, &dumped.criu);
        let (well, said) = restoring.end();
        assert!(!well && said.contains("criu restore failed"), "{said}");
        assert!(soon(|| states(&daemon.status().unwrap()).is_empty()), "{}", daemon.status().unwrap());
        let children = || softgpu_tests::streamer::children(daemon.id());
        assert!(soon(|| children().is_empty()), "{}", daemon.status().unwrap());
    });
}
