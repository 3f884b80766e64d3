// SPDX-License-Identifier: MIT OR Apache-2.0
//! Signals to a streamer's process group: none that it does not use ends it, and a request to stop counts once, however
//! many of its processes get it.

use nix::sys::signal::Signal;
use rewake_tests::scene::END;
use rewake_tests::{Criu, Scene, Verdict, need};

/// All that a terminal, a script or a service manager sends, but SIGKILL.
const SIGNALS: [Signal; 9] = [
    Signal::SIGHUP,
    Signal::SIGQUIT,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
    Signal::SIGALRM,
    Signal::SIGPIPE,
    Signal::SIGPWR,
    Signal::SIGTERM,
    Signal::SIGINT,
];

#[test]
fn a_group_s_signal_while_memory_is_missing_costs_nothing() {
    let criu = need!(Criu::main());
    let mut scene = Scene::dumped(&criu, "random", 128).unwrap();
    for signal in SIGNALS {
        let mut server = scene.serve().unwrap();
        scene.go().unwrap();
        scene.restore().unwrap();
        // Twice: a service manager asks every process, and a person asks again.
        server.signal_group(signal).unwrap();
        server.signal_group(signal).unwrap();
        scene.stop().unwrap();
        assert_eq!(scene.verdict(END).unwrap(), Verdict::Ok, "{signal}: {}", scene.logs());
        assert_eq!(server.ended(END).unwrap().code(), Some(0), "{signal}: {}", server.text());
        scene.next_round().unwrap();
    }
}

#[test]
fn before_a_restore_comes_only_a_request_to_stop_ends_it() {
    let criu = need!(Criu::main());
    let mut scene = Scene::dumped(&criu, "plain", 4).unwrap();
    for signal in SIGNALS {
        let mut server = scene.serve().unwrap();
        server.signal_group(signal).unwrap();
        if !matches!(signal, Signal::SIGTERM | Signal::SIGINT) {
            scene.play_with(&mut server).unwrap();
        } else {
            assert_eq!(server.ended(END).unwrap().code(), Some(0), "{signal}: {}", server.text());
        }
        scene.next_round().unwrap();
    }
}
