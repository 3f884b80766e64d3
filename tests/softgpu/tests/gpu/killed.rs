// SPDX-License-Identifier: MIT OR Apache-2.0
//! Processes of a streamer are killed at any moment: no target stays stopped for ever, and no GPU reads
//! missing memory.

use std::process::Child;
use std::thread;
use std::time::Instant;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rewake_skip::need;
use softgpu_tests::criu::{Version, WAITS, wait_for_the_end_of};
use softgpu_tests::dumped::{Behind, Dumped, ONE_RING, dies, gate_opens, is_paused, soon, unreached};
use softgpu_tests::streamer::recover;
use softgpu_tests::{DelayedCopies, Machine, REAL_GPUS, Streamer, isolated};

/// Copies take half a second.
const SLOW: [(&str, &str); 2] = [("copy_mbps", "24"), ("sdma_rings", "1")];

#[test]
fn a_dying_streamer_kills_processes_with_closed_gates() {
    isolated(1, |_| {
        let _machine = need!(Machine::with(&ONE_RING), REAL_GPUS);
        let dumped = need!(Dumped::of(&unreached(), Version::V4_2));
        let (mut streamer, delayed) = dumped.restores_paused();
        streamer.workers().into_iter().for_each(dies);
        drop(delayed);
        assert!(!streamer.end().unwrap().success());
        wait_for_the_end_of(dumped.server.pid).unwrap();
        assert!(
            streamer.said().contains("the worker died while it loaded GPU memory"),
            "{}",
            streamer.said()
        );
        dumped.restores();
        dumped.server.ends_well();
    });
}

#[test]
fn a_worker_without_supervisor_serves_until_recover_kills() {
    isolated(1, |_| {
        let _machine = need!(Machine::with(&ONE_RING), REAL_GPUS);
        let dumped = need!(Dumped::of(&unreached(), Version::V4_2));
        for both in [false, true] {
            let (mut streamer, delayed) = dumped.restores_paused();
            let workers = streamer.workers();
            dies(streamer.pid());
            streamer.end().unwrap();
            if both {
                workers.into_iter().for_each(dies);
                drop(delayed);
                let (well, said) = recover().unwrap();
                assert!(!well && said.contains("its GPUs were not resumed yet"), "{said}");
            } else {
                drop(delayed);
                dumped.server.answers().unwrap();
                assert!(!is_paused(dumped.server.pid), "{}", streamer.said());
                dies(dumped.server.pid);
            }
            wait_for_the_end_of(dumped.server.pid).unwrap();
        }
        dumped.restores();
        dumped.server.ends_well();
    });
}

/// Which processes are killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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

/// The outcome for a target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    /// CRIU has reported that the restore failed. No target is left.
    RestoreFailed,
    /// It was killed, and the plugin, the supervisor or `rewake recover` reports that.
    Killed,
    /// Its gate is open, and it answers.
    Answers,
}

/// What the plugin, a supervisor and `rewake recover` log when they have killed a target.
const KILLED: [&str; 3] = [
    "all restored tasks are killed",
    "killed 1 restored processes whose GPUs were not resumed yet",
    "its GPUs were not resumed yet, and what was loaded for them is lost",
];

/// Waits for a moment of a restore.
type Moment<'a> = &'a dyn Fn(&mut Child);

/// Restores the target, and kills the victims when `moment` has come: before CRIU is started if it is None.
fn killed_at(dumped: &Dumped, behind: Behind, victim: Victim, moment: Option<Moment<'_>>) -> Outcome {
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
        let mut criu = criu.spawn().unwrap();
        moment(&mut criu);
        kill_them();
        criu
    } else {
        kill_them();
        criu.spawn().unwrap()
    };
    let restored = criu.wait().unwrap().success();
    streamer.end().unwrap();
    let recovered = if restored && victim == Victim::All { recover().unwrap().1 } else { String::new() };
    let outcome = match restored.then(|| dumped.server.answers()) {
        None => Outcome::RestoreFailed,
        Some(Ok(())) => Outcome::Answers,
        Some(Err(_)) => Outcome::Killed,
    };
    let said = [streamer.said(), recovered, dumped.criu.log("restore")].concat();
    if outcome == Outcome::RestoreFailed {
        eprintln!(
            "restore failed: {}\n{}",
            said.lines().find(|line| line.contains("Error (")).unwrap_or(&said),
            streamer.said()
        );
    }
    if outcome == Outcome::Answers {
        assert!(!is_paused(dumped.server.pid), "{said}");
        dies(dumped.server.pid);
    }
    if outcome == Outcome::Killed {
        assert!(KILLED.iter().any(|words| said.contains(words)), "it ended, and nothing says why: {said}");
    }
    let ended = wait_for_the_end_of(dumped.server.pid);
    ended.unwrap_or_else(|error| panic!("{outcome:?}, {error:#}: {said}"));
    outcome
}

/// How many restores had each outcome.
#[derive(Debug, Default)]
struct Sum {
    failed: u32,
    killed: u32,
    answers: u32,
}

impl Sum {
    fn add(&mut self, outcome: Outcome) {
        *match outcome {
            Outcome::RestoreFailed => &mut self.failed,
            Outcome::Killed => &mut self.killed,
            Outcome::Answers => &mut self.answers,
        } += 1;
    }
}

/// Moments that need no timing: before the restore, while its gate is closed, while CRIU waits for memory,
/// when its gate is open.
fn killed_at_known_moments(dumped: &Dumped) {
    let pid = dumped.server.pid;
    let gpus = |victim, moment| killed_at(dumped, Behind::Gpus, victim, moment);
    assert_eq!(gpus(Victim::Workers, None), Outcome::Answers, "no handoff has happened yet");
    let closed = |criu: &mut Child| {
        criu.wait().unwrap();
        assert!(is_paused(pid));
    };
    let delayed = DelayedCopies::streamers();
    for victim in [Victim::Workers, Victim::All] {
        assert_eq!(gpus(victim, Some(&closed)), Outcome::Killed, "no process was left to open its gate");
    }
    drop(delayed);
    let waits = |_: &mut Child| assert!(soon(|| dumped.criu.log("restore").contains(WAITS)));
    let failed = killed_at(dumped, Behind::Both, Victim::All, Some(&waits));
    assert_eq!(failed, Outcome::RestoreFailed, "CRIU waits for memory that no process loads");
    let open = |criu: &mut Child| {
        criu.wait().unwrap();
        gate_opens(pid);
    };
    for victim in [Victim::Workers, Victim::Supervisor, Victim::All] {
        assert_eq!(gpus(victim, Some(&open)), Outcome::Answers, "all memory of its GPUs was resident");
    }
}

/// `REWAKE_KILLS` is the number of moments (default 2).
#[test]
fn a_streamer_killed_at_any_moment_leaves_no_paused_queue() {
    isolated(1, |_| {
        let _machine = need!(Machine::with(&SLOW), REAL_GPUS);
        let dumped = need!(Dumped::of(&unreached(), Version::V4_2));
        let start = Instant::now();
        dumped.restores();
        let whole = start.elapsed();
        dumped.ends();
        killed_at_known_moments(&dumped);
        let moments: u32 = std::env::var("REWAKE_KILLS").map_or(2, |kills| kills.parse().unwrap());
        let victims = [Victim::Workers, Victim::Supervisor, Victim::All];
        let all = [Behind::Gpus, Behind::Both].into_iter().flat_map(|behind| victims.map(|of| (behind, of)));
        let mut sum = Sum::default();
        for (moment, (behind, victim)) in (1..=moments).zip(all.cycle()) {
            // Up to twice as long as a restore takes: on a busy machine another one takes longer.
            let at = |_: &mut Child| thread::sleep(2 * whole * moment / moments);
            let outcome = killed_at(&dumped, behind, victim, Some(&at));
            eprintln!("at {moment} of {moments}: {victim:?}, {behind:?}: {outcome:?}");
            if victim == Victim::Supervisor {
                assert_eq!(outcome, Outcome::Answers, "its worker serves without it");
            } else {
                sum.add(outcome);
            }
        }
        // The first moments come before the handoff, the last ones when all memory is resident.
        assert!(moments < 12 || sum.answers > 0 && sum.failed + sum.killed > 0, "{sum:?}");
        dumped.restores();
        dumped.server.ends_well();
    });
}
