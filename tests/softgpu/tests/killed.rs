// SPDX-License-Identifier: MIT OR Apache-2.0
//! Whoever of a streamer is killed, and whenever: nobody stands still for ever, and no GPU reads what is not there.

use std::thread;
use std::time::Instant;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rewake_skip::need;
use softgpu_tests::criu::{Version, wait_for_the_end_of};
use softgpu_tests::dumped::{Behind, Dumped, ONE_RING, dies, is_paused, soon, unreached};
use softgpu_tests::streamer::recover;
use softgpu_tests::{Held, Machine, REAL_GPUS, Streamer, isolated};

/// Copies take half a second.
const SLOW: [(&str, &str); 2] = [("copy_mbps", "24"), ("sdma_rings", "1")];

#[test]
fn a_streamer_that_dies_takes_what_stands_still_with_it() {
    isolated("a_streamer_that_dies_takes_what_stands_still_with_it", 1, |_| {
        let _machine = need!(Machine::with(&ONE_RING), REAL_GPUS);
        let dumped = need!(Dumped::of(&unreached(), Version::V4_2));
        let (mut streamer, held) = dumped.comes_back_paused();
        streamer.workers().into_iter().for_each(dies);
        drop(held);
        assert!(!streamer.end().unwrap().success());
        wait_for_the_end_of(dumped.server.pid).unwrap();
        assert!(
            streamer.said().contains("the worker died while it loaded memory of GPUs"),
            "{}",
            streamer.said()
        );
        dumped.comes_back();
        dumped.server.ends_well();
    });
}

#[test]
fn without_its_supervisor_it_serves_and_after_its_death_recover_kills() {
    isolated("without_its_supervisor_it_serves_and_after_its_death_recover_kills", 1, |_| {
        let _machine = need!(Machine::with(&ONE_RING), REAL_GPUS);
        let dumped = need!(Dumped::of(&unreached(), Version::V4_2));
        for both in [false, true] {
            let (mut streamer, held) = dumped.comes_back_paused();
            let workers = streamer.workers();
            dies(streamer.pid());
            streamer.end().unwrap();
            if both {
                workers.into_iter().for_each(dies);
                drop(held);
                let (well, said) = recover().unwrap();
                assert!(!well && said.contains("its GPUs were not resumed yet"), "{said}");
            } else {
                drop(held);
                dumped.server.answers().unwrap();
                assert!(!is_paused(dumped.server.pid), "{}", streamer.said());
                dies(dumped.server.pid);
            }
            wait_for_the_end_of(dumped.server.pid).unwrap();
        }
        dumped.comes_back();
        dumped.server.ends_well();
    });
}

/// Who is killed.
#[derive(Debug, Clone, Copy)]
enum Victim {
    Workers,
    Supervisor,
    All,
}

impl Victim {
    fn pids(self, streamer: &Streamer) -> Vec<u32> {
        let (supervisor, workers) = (streamer.pid(), streamer.workers());
        match self {
            Self::Workers => workers,
            Self::Supervisor => vec![supervisor],
            Self::All => workers.into_iter().chain([supervisor]).collect(),
        }
    }
}

/// Restores it, kills some of the streamer when `moment` has come, before CRIU is started if there is none, and sees that it goes on or has ended; which.
fn killed_at(dumped: &Dumped, behind: Behind, victim: Victim, moment: Option<&dyn Fn()>) -> bool {
    let mut streamer = dumped.streamer_of(behind);
    let victims = victim.pids(&streamer);
    let kill_them = || {
        for victim in &victims {
            // It may have ended.
            let _ = kill(Pid::from_raw(victim.cast_signed()), Signal::SIGKILL);
        }
    };
    let mut criu = dumped.restore_command(behind);
    let mut criu = if let Some(moment) = moment {
        let criu = criu.spawn().unwrap();
        moment();
        kill_them();
        criu
    } else {
        kill_them();
        criu.spawn().unwrap()
    };
    let restored = criu.wait().unwrap().success();
    streamer.end().unwrap();
    if restored && matches!(victim, Victim::All) {
        // It serves memory of CPUs to its end, and kills what waits for its GPUs.
        recover().unwrap();
    }
    let answer = if restored {
        dumped.server.answers().map_err(|error| format!("{error:#}"))
    } else {
        Err(String::new())
    };
    if answer.is_ok() {
        assert!(!is_paused(dumped.server.pid), "{}", streamer.said());
        dies(dumped.server.pid);
    }
    let ended = wait_for_the_end_of(dumped.server.pid);
    ended.unwrap_or_else(|error| panic!("restored {restored}, {answer:?}, {error:#}: {}", streamer.said()));
    answer.is_ok()
}

#[test]
fn killed_at_any_moment_nobody_stands_still() {
    isolated("killed_at_any_moment_nobody_stands_still", 1, |_| {
        let _machine = need!(Machine::with(&SLOW), REAL_GPUS);
        let dumped = need!(Dumped::of(&unreached(), Version::V4_2));
        let start = Instant::now();
        dumped.comes_back();
        let whole = start.elapsed();
        dumped.ends();
        let moments: u32 = std::env::var("REWAKE_KILLS").map_or(12, |kills| kills.parse().unwrap());
        let gpus = |victim, moment| killed_at(&dumped, Behind::Gpus, victim, moment);
        assert!(gpus(Victim::Workers, None), "nothing was handed over yet");
        let stands_still = || assert!(soon(|| is_paused(dumped.server.pid)));
        let held = Held::streamers();
        assert!(!gpus(Victim::Workers, Some(&stands_still)), "nobody was left to open its gate");
        assert!(!gpus(Victim::All, Some(&stands_still)), "nobody was left to open its gate");
        drop(held);
        let victims = [Victim::Workers, Victim::Supervisor, Victim::All];
        let all = [Behind::Gpus, Behind::Both].into_iter().flat_map(|behind| victims.map(|of| (behind, of)));
        let mut went_on = 0;
        for (moment, (behind, victim)) in (1..moments).zip(all.cycle()) {
            eprintln!("at {moment} of {moments}: {victim:?}, {behind:?}");
            let moment = || thread::sleep(whole * moment / moments);
            let answers = killed_at(&dumped, behind, victim, Some(&moment));
            assert!(answers || !matches!(victim, Victim::Supervisor), "its worker serves without it");
            went_on += u32::from(answers);
        }
        eprintln!("{went_on} went on");
        dumped.comes_back();
        dumped.server.ends_well();
    });
}
