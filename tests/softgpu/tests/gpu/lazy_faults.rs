// SPDX-License-Identifier: MIT OR Apache-2.0
//! Restores with lazy CPU and GPU memory that CRIU does not finish: it is killed, or a driver call fails. No
//! target stays stopped, the page server ends, and the image is unchanged.
//!
//! `REWAKE_KILLS` is the number of moments at which CRIU is killed besides the named ones;
//! `PLUGIN_EVERY_FAULT=1` tries every call.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rewake_skip::need;
use softgpu_tests::criu::{Version, WAITS, wait_for_the_end_of};
use softgpu_tests::dumped::{Dumped, dies, soon, unreached};
use softgpu_tests::failing_calls::{CRIU, ERRNOS, every, failing_calls, says_why, tail};
use softgpu_tests::faults::{Calls, Fault};
use softgpu_tests::{Faults, Judge, REAL_GPUS, Streamer, criu_leftovers, isolated, script};

/// What the plugin logs when a page server has answered it.
const MET: &str = "a streamer loads memory in the background";
/// What the CRIU watchdog logs when it has killed the tasks.
const KILLED: &str = "the restored tasks are killed";
/// The calls that fail without `PLUGIN_EVERY_FAULT`: state is made, first buffers are loaded, gates are
/// closed, queues start.
const HALF_WAY: [&str; 4] = ["kfd/CRIU_OP/RESTORE", LOADS, "kfd/CRIU_OP/PROCESS_INFO", "kfd/CRIU_OP/RESUME"];
const LOADS: &str = "amdgpu/CS";

/// Polls of CRIU's log, and time between them: half a minute.
const LOOKS: u32 = 30_000;
const LOOK: Duration = Duration::from_millis(1);

/// Polling interval where CRIU continues and may finish.
const TRIES: u32 = 5;

/// When CRIU is killed.
#[derive(Debug, Clone, Copy)]
enum Moment {
    /// In a script that it waits for.
    Script(&'static str),
    /// In a call to a driver.
    Call(&'static str, Fault),
    /// While it loads the first buffers, with its watchdog stopped.
    Unguarded,
    /// As soon as it logs this text.
    Says(&'static str),
    /// So long after its start.
    After(Duration),
}

/// At these moments no process runs yet, whatever is killed.
const EARLY: [Moment; 4] = [
    Moment::Script(script::BEFORE),
    Moment::Script(script::RESTORED),
    Moment::Call(LOADS, Fault::KillBefore),
    Moment::Unguarded,
];
/// The same, when all tasks are whole: each version of CRIU has a watchdog then.
const WHOLE: [Moment; 3] = [
    Moment::Says(WAITS),
    Moment::Call("kfd/CRIU_OP/PROCESS_INFO", Fault::KillAfter),
    Moment::Call("kfd/CRIU_OP/RESUME", Fault::KillAfter),
];

/// A dumped server, to be restored again and again.
struct Stage {
    dumped: Dumped,
    faults: Faults,
    judge: Judge,
    alive: BTreeMap<String, u64>,
}

impl Stage {
    /// The reason where GPUs are real, or queues cannot be restored.
    fn set(version: Version) -> Result<Self, &'static str> {
        let (faults, judge) = (Faults::find().ok_or(REAL_GPUS)?, Judge::find().ok_or(REAL_GPUS)?);
        let dumped = Dumped::of(&unreached(), version)?;
        let alive = judge.alive();
        Ok(Self { dumped, faults, judge, alive })
    }

    fn streamer(&self) -> Streamer {
        Streamer::of_both(self.dumped.criu.images()).unwrap()
    }

    fn restore(&self) -> Command {
        self.dumped.criu.command(&["restore", "--restore-detached", "--lazy-pages"])
    }

    fn log(&self) -> String {
        self.dumped.criu.log("restore")
    }

    /// Restores it, and has CRIU killed at that moment.
    fn killed(&self, moment: Moment) {
        let criu = &self.dumped.criu;
        let mut restore = self.restore();
        match moment {
            Moment::Script(action) => {
                restore.arg("--action-script").arg(script::at(criu, action, script::KILLS));
            }
            Moment::Call(name, fault) => self.dies_in(name, fault),
            Moment::Unguarded => {
                // CRIU would notice the watchdog's death, so it is stopped.
                let stands = format!("busybox killall -STOP {}", criu_leftovers::WATCHDOG);
                restore.arg("--action-script").arg(script::at(criu, script::RESTORED, &stands));
                self.dies_in(LOADS, Fault::KillBefore);
            }
            Moment::Says(_) | Moment::After(_) => {}
        }
        let mut restoring = restore.spawn().unwrap();
        match moment {
            Moment::Script(_) | Moment::Call(..) | Moment::Unguarded => {}
            Moment::Says(what) => {
                let says = (0..LOOKS).any(|_| {
                    thread::sleep(LOOK);
                    self.log().contains(what)
                });
                restoring.kill().unwrap();
                assert!(says, "{}", tail(&self.log()));
            }
            Moment::After(time) => {
                thread::sleep(time);
                restoring.kill().unwrap();
            }
        }
        let ended = restoring.wait().unwrap();
        self.faults.off();
        if matches!(moment, Moment::Unguarded) {
            assert!(
                soon(|| !criu_leftovers::runs(self.dumped.server.pid)),
                "it still runs: {}",
                tail(&self.log())
            );
            criu_leftovers::named(criu_leftovers::WATCHDOG).into_iter().for_each(dies);
        }
        let by_itself = matches!(moment, Moment::Says(_) | Moment::After(_)) && ended.success();
        assert!(
            by_itself || ended.signal() == Some(libc::SIGKILL),
            "{moment:?}: {ended}: {}",
            tail(&self.log())
        );
    }

    fn dies_in(&self, call: &str, fault: Fault) {
        self.faults.fail(1, fault, Calls { comm: Some(self.dumped.criu.name()), call: Some(call) });
    }

    /// The outcome of a restore that may have ended early: true if the server answers; it is then ended.
    /// Otherwise no process of it is left.
    fn is_restored(&self, mut streamer: Streamer, after: &str) -> bool {
        let pid = self.dumped.server.pid;
        criu_leftovers::sweep(pid);
        let log = self.log();
        if !log.contains(MET) {
            // No target was handed over, as far as the log says, and none will be.
            let _ = kill(Pid::from_raw(streamer.pid().cast_signed()), Signal::SIGTERM);
        }
        let streamed = streamer.end().unwrap_or_else(|error| panic!("{after}: {error:#}")).success();
        let said = || format!("{after}: {}\n{}", streamer.said(), tail(&log));
        // It may have been killed after the handoff, before CRIU knew of it.
        let back = streamed && !log.contains(KILLED) && criu_leftovers::runs(pid);
        if back {
            self.dumped.server.answers().unwrap_or_else(|error| panic!("{error:#} {}", said()));
            assert_eq!(self.judge.stopped(), [], "{}", said());
            self.dumped.ends();
        }
        wait_for_the_end_of(pid).unwrap_or_else(|error| panic!("{error:#} {}", said()));
        let clean = soon(|| self.judge.alive() == self.alive);
        assert!(clean, "{:?}, before {:?}, {}", self.judge.alive(), self.alive, said());
        assert_eq!(marked(pid), Vec::<String>::new(), "{}", said());
        back
    }

    /// Restores it to the end; returns how long CRIU took.
    fn restores(&self) -> Duration {
        let (streamer, start) = (self.streamer(), Instant::now());
        self.dumped.criu.restore_lazily().unwrap();
        let took = start.elapsed();
        assert!(self.is_restored(streamer, "without a fault"));
        took
    }

    fn is_killed_at(&self, moment: Moment) -> bool {
        let streamer = self.streamer();
        self.killed(moment);
        self.is_restored(streamer, &format!("killed: {moment:?}"))
    }
}

/// Files that block dumps of process `pid`, because its gate is closed.
fn marked(pid: u32) -> Vec<String> {
    let files = fs::read_dir("/run/rewake/dump-blocks").unwrap();
    let names = files.map(|file| file.unwrap().file_name().to_string_lossy().into_owned());
    names.filter(|name| name.starts_with(&format!("{pid}-"))).collect()
}

/// Kills CRIU at each of these moments, and when its part is done.
fn killed_at(version: Version, early: &[Moment]) {
    let stage = need!(Stage::set(version));
    for moment in early {
        let tries = if matches!(moment, Moment::Says(_)) { TRIES } else { 1 };
        let back = (0..tries).all(|_| stage.is_killed_at(*moment));
        assert!(!back, "{moment:?}: no process was left to resume its queues");
    }
    let done = Moment::Script(script::ABOUT_TO_RUN);
    assert!(stage.is_killed_at(done), "the page server answered for it: {}", stage.log());
    stage.restores();
}

#[test]
fn criu_killed_before_or_after_the_page_server_answers() {
    isolated(1, |_| {
        killed_at(Version::V4_2, &[&EARLY[..], &WHOLE].concat());
    });
}

#[test]
fn the_older_criu_killed_when_tasks_are_whole_leaves_nothing() {
    isolated(1, |_| {
        killed_at(Version::V4_1, &WHOLE);
    });
}

#[test]
fn criu_killed_at_any_moment_leaves_no_paused_queue() {
    isolated(1, |_| {
        let stage = need!(Stage::set(Version::V4_2));
        let whole = stage.restores();
        let moments: u32 = std::env::var("REWAKE_KILLS").map_or(3, |kills| kills.parse().unwrap());
        for moment in 1..moments {
            stage.is_killed_at(Moment::After(whole * moment / moments));
        }
        stage.restores();
    });
}

#[test]
fn a_refused_call_is_reported_and_nothing_is_left() {
    isolated(1, |_| {
        let stage = need!(Stage::set(Version::V4_2));
        stage.faults.count(CRIU);
        stage.restores();
        stage.faults.off();
        let mut calls = failing_calls(&stage.faults.calls());
        calls.retain(|call| every() || HALF_WAY.contains(&&*call.name));
        assert!(calls.len() >= HALF_WAY.len(), "{calls:?}");
        for (index, call) in calls.iter().enumerate() {
            let errno = ERRNOS[index % ERRNOS.len()];
            let streamer = stage.streamer();
            stage.faults.fail(call.nth, Fault::Errno(errno), Calls { call: Some(&call.name), ..CRIU });
            let restored = stage.restore().status().unwrap().success();
            let hit = stage.faults.hit();
            stage.faults.off();
            let after = format!("{errno} of {call:?}");
            assert_eq!(stage.is_restored(streamer, &after), restored, "{after}: {}", tail(&stage.log()));
            if !restored {
                says_why(&stage.dumped.criu, "restore", call, errno);
            }
            assert!(every() || (hit && !restored), "{after}: {}", tail(&stage.log()));
        }
        stage.restores();
    });
}
