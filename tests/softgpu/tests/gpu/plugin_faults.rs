// SPDX-License-Identifier: MIT OR Apache-2.0
//! A dump or a restore that fails, or is killed, at any call to the GPU drivers. The dumped process
//! continues, no restored process is left, and the log says why.
//!
//! One call of each kind is tried; `PLUGIN_EVERY_FAULT=1` tries each call.

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

use gpu_app::shape::Shape;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;
use rewake_skip::need;
use softgpu_tests::app::App;
use softgpu_tests::criu::{Criu, Plugin, Version, queues, wait_for_the_end_of};
use softgpu_tests::criu_leftovers::{WATCHDOG, doing, named, runs, soon, sweep};
use softgpu_tests::failing_calls::{CRIU, ERRNOS, FailingCall, every, failing_calls, says_why, tail};
use softgpu_tests::faults::{Call, Calls, Fault};
use softgpu_tests::streamer::children;
use softgpu_tests::{Faults, Judge, REAL_GPUS, isolated};

const PAUSE: &str = "kfd/CRIU_OP/PROCESS_INFO";
const GO_ON: &str = "kfd/CRIU_OP/UNPAUSE";
const RESUME: &str = "kfd/CRIU_OP/RESUME";
/// What CRIU logs when all tasks are whole, and stopped.
const LATE: &str = "Run late stage hook";
/// Checks for stopped processes, of a dozen seconds each.
const LONG_LOOKS: u32 = 6;
/// How long restores are repeated until CRIU is stopped before the watchdog starts, or killed after.
const TRIES: Duration = Duration::from_secs(60);
/// Far more than a task takes from its fork to its queues.
const TIME_TO_COME_TO_LIFE: Duration = Duration::from_secs(3);

fn shape() -> Shape {
    Shape { layers: 1, layer_kib: 64, cache_mib: 1, queues: 1, ..Shape::small() }
}

/// Before and after each call where all are tried, otherwise alternately.
fn kills(index: usize) -> Vec<Fault> {
    let both = [Fault::KillBefore, Fault::KillAfter];
    if every() { both.to_vec() } else { vec![both[index % 2]] }
}

fn moments() -> u32 {
    if every() { 60 } else { 2 }
}

/// A server that is dumped or restored again and again.
struct Stage {
    faults: Faults,
    judge: Judge,
    criu: Criu,
    app: App,
    pid: u32,
    alive: BTreeMap<String, u64>,
    _folder: tempfile::TempDir,
}

impl Stage {
    /// The reason where GPUs are real: their drivers inject no faults.
    fn set() -> Result<Self, &'static str> {
        let (faults, judge) = (Faults::find().ok_or(REAL_GPUS)?, Judge::find().ok_or(REAL_GPUS)?);
        let alive = judge.alive();
        let folder = tempfile::tempdir().unwrap();
        let criu = Criu::with(Plugin::Ours, Version::V4_2, &folder.path().join("images")).unwrap();
        let app = App::start(&shape(), folder.path()).unwrap();
        app.answers(&[1], 1).unwrap();
        let pid = app.pid().unwrap();
        Ok(Self { faults, judge, criu, app, pid, alive, _folder: folder })
    }

    /// A stage whose server is dumped and ended, where it can be restored.
    fn left() -> Result<Self, &'static str> {
        let mut stage = Self::set()?;
        stage.leave();
        queues().map(|()| stage)
    }

    fn dump(&self) -> Command {
        self.criu.command(&["dump", "--leave-running", "--tree", &self.pid.to_string()])
    }

    fn restore(&self) -> Command {
        self.criu.command(&["restore", "--restore-detached"])
    }

    /// The driver calls of CRIU while `act` runs.
    fn calls(&self, mut act: Command) -> Vec<Call> {
        self.faults.count(CRIU);
        assert!(act.status().unwrap().success(), "without a fault");
        self.faults.off();
        self.faults.calls()
    }

    /// Runs `act` with a fault at a call; `None` if the call did not happen.
    fn with(&self, call: &FailingCall, fault: Fault, mut act: Command) -> Option<ExitStatus> {
        self.faults.fail(call.nth, fault, Calls { call: Some(&call.name), ..CRIU });
        let status = act.status().unwrap();
        let hit = self.faults.hit();
        self.faults.off();
        hit.then_some(status)
    }

    /// Nothing is stopped, and no process of CRIU is left.
    fn continues(&self, after: &str) {
        soon(after, || named("criu").is_empty() && named(WATCHDOG).is_empty());
        self.no_queue_stays_stopped(after);
        self.app.answers(&[3], 1).unwrap_or_else(|error| panic!("{after}: {error:#}"));
    }

    fn no_queue_stays_stopped(&self, after: &str) {
        if (0..LONG_LOOKS).any(|_| self.judge.stopped().is_empty()) {
            return;
        }
        let still = self.judge.stopped();
        let tasks: Vec<String> = still.iter().map(|gate| doing(gate.pid)).collect();
        let logs = ["dump", "restore"].map(|act| tail(&self.criu.log(act)));
        panic!("{after}: {still:?}: {tasks:#?}\n{}", logs.join("\n"));
    }

    /// The image can be restored as before.
    fn restores(&self) {
        let restored = self.restore().status().unwrap();
        assert!(restored.success(), "{}", tail(&self.criu.log("restore")));
        self.continues("restored");
    }

    /// The process that was to be restored has ended, and has no GPU state.
    fn is_gone(&self, after: &str) {
        let (task, number) =
            (Path::new("/proc").join(self.pid.to_string()), Pid::from_raw(self.pid.cast_signed()));
        soon(after, || {
            // It is a child of this process where it was restored as CRIU's sibling.
            let _ = waitpid(number, Some(WaitPidFlag::WNOHANG));
            !task.exists() && named("criu").is_empty() && self.judge.alive() == self.alive
        });
    }

    /// Restores, with these further arguments, until `kills` has killed CRIU at its moment. What CRIU leaves
    /// must end by itself.
    fn killed(&self, arguments: &[&str], mut kills: impl FnMut(&mut Child) -> bool) {
        let start = Instant::now();
        let mut done = false;
        while !done {
            assert!(
                start.elapsed() < TRIES,
                "CRIU never reached that moment: {}",
                tail(&self.criu.log("restore"))
            );
            let mut criu = self.restore().args(arguments).spawn().unwrap();
            done = kills(&mut criu);
            criu.kill().unwrap();
            criu.wait().unwrap();
            if !done {
                // The task may run.
                let _ = kill(Pid::from_raw(self.pid.cast_signed()), Signal::SIGKILL);
            }
            self.is_gone("killed");
        }
    }

    /// Ends the process, started or restored.
    fn end(&mut self) {
        kill(Pid::from_raw(self.pid.cast_signed()), Signal::SIGKILL).unwrap();
        self.app.was_dumped();
        wait_for_the_end_of(self.pid).unwrap();
    }

    /// Dumps it and ends it.
    fn leave(&mut self) {
        self.criu.dump(self.pid).unwrap();
        self.app.was_dumped();
        wait_for_the_end_of(self.pid).unwrap();
    }
}

#[test]
fn a_dump_that_fails_says_why_and_leaves_all_running() {
    isolated(1, |_| {
        let mut stage = need!(Stage::set());
        let calls = stage.calls(stage.dump());
        let mut failed = 0;
        for (index, call) in failing_calls(&calls).iter().enumerate() {
            let errno = ERRNOS[index % ERRNOS.len()];
            let Some(status) = stage.with(call, Fault::Errno(errno), stage.dump()) else { continue };
            if !status.success() {
                failed += 1;
                says_why(&stage.criu, "dump", call, errno);
            }
            stage.continues(&format!("{errno} of {call:?}"));
        }
        assert!(failed > 1, "of {}", calls.len());
        stage.end();
    });
}

#[test]
fn criu_killed_in_a_dump_leaves_all_running() {
    isolated(1, |_| {
        let mut stage = need!(Stage::set());
        let calls = stage.calls(stage.dump());
        for (index, call) in failing_calls(&calls).iter().enumerate() {
            for fault in kills(index) {
                let Some(status) = stage.with(call, fault, stage.dump()) else { continue };
                assert_eq!(status.signal(), Some(libc::SIGKILL), "{call:?}");
                stage.continues(&format!("{fault:?} {call:?}"));
                let log = stage.criu.log("dump");
                assert!(
                    log.contains("the queues of a process are resumed"),
                    "{fault:?} {call:?}: {}",
                    tail(&log)
                );
                // The watchdog cannot know whether CRIU died just before it paused the process, or just after
                // it resumed it. The kernel knows, and returns EINVAL.
                let edge = [(PAUSE, Fault::KillBefore), (GO_ON, Fault::KillAfter)];
                if edge.contains(&(call.name.as_str(), fault)) {
                    assert_eq!(stage.judge.take("unpause-out-of-turn").len(), 1);
                }
            }
        }
        stage.end();
    });
}

#[test]
fn criu_killed_at_any_moment_of_a_dump_leaves_nothing_paused() {
    isolated(1, |_| {
        let mut stage = need!(Stage::set());
        let start = Instant::now();
        assert!(stage.dump().status().unwrap().success());
        let (whole, moments) = (start.elapsed(), moments());
        let mut survived = 0;
        for moment in 0..moments {
            let mut criu = stage.dump().spawn().unwrap();
            thread::sleep(whole * moment / moments);
            let _ = criu.kill();
            criu.wait().unwrap();
            let after = format!("killed after {:?} of {whole:?}", whole * moment / moments);
            soon(&after, || named(WATCHDOG).is_empty());
            sweep(stage.pid);
            stage.no_queue_stays_stopped(&after);
            // As where CRIU is killed before or after a call: the watchdog cannot know that it had not paused
            // yet, or had resumed already. The kernel does, and returns EINVAL.
            if !stage.judge.violations().is_empty() {
                assert_eq!(stage.judge.take("unpause-out-of-turn").len(), 1, "{after}");
            }
            if let Err(error) = stage.app.answers(&[3], 1) {
                // The code that CRIU injects does not survive CRIU at every moment: the task has ended, or is
                // about to.
                soon(&format!("{after}: {error:#}"), || !runs(stage.pid));
                stage.app.was_dumped();
                stage = Stage::set().unwrap();
            } else {
                survived += 1;
            }
        }
        // How many survive depends on the machine's speed. The test that kills at each call checks that the
        // plugin ends none.
        assert!(survived > 0, "none of {moments}");
        stage.end();
    });
}

#[test]
fn a_restore_that_fails_says_why_and_leaves_nothing() {
    isolated(1, |_| {
        let mut stage = need!(Stage::left());
        let calls = stage.calls(stage.restore());
        stage.continues("without a fault");
        stage.end();
        let mut failed = 0;
        for (index, call) in failing_calls(&calls).iter().enumerate() {
            let errno = ERRNOS[index % ERRNOS.len()];
            let after = format!("{errno} of {call:?}");
            let Some(status) = stage.with(call, Fault::Errno(errno), stage.restore()) else {
                stage.end();
                continue;
            };
            // Calls of its own kind alone are counted.
            let again = call.name == RESUME && stage.faults.seen() != 1;
            assert!(!again, "{after}: never a second time");
            if status.success() {
                stage.continues(&after);
                stage.end();
            } else {
                failed += 1;
                says_why(&stage.criu, "restore", call, errno);
            }
            stage.is_gone(&after);
        }
        assert!(failed > 1, "of {}", calls.len());
        stage.restores();
        stage.end();
    });
}

#[test]
fn criu_killed_in_a_restore_leaves_nothing() {
    isolated(1, |_| {
        let mut stage = need!(Stage::left());
        let calls = stage.calls(stage.restore());
        stage.end();
        for (index, call) in failing_calls(&calls).iter().enumerate() {
            for fault in kills(index) {
                let after = format!("{fault:?} {call:?}");
                let Some(status) = stage.with(call, fault, stage.restore()) else {
                    stage.end();
                    continue;
                };
                // A killed task ends the restore; CRIU itself cannot end it any more.
                assert!(!status.success(), "{after}");
                stage.is_gone(&after);
                // The watchdog logs what it has done afterwards.
                soon(&after, || named(WATCHDOG).is_empty());
                if status.signal().is_some() {
                    let log = stage.criu.log("restore");
                    // The kernel kills tasks that CRIU has stopped by then.
                    let is_reported = log.contains("the restored tasks are killed") || log.contains(LATE);
                    assert!(is_reported, "{after}: {}", tail(&log));
                }
            }
        }
        stage.restores();
        stage.end();
    });
}

#[test]
fn criu_killed_before_the_watchdog_starts_leaves_nothing() {
    isolated(1, |_| {
        let mut stage = need!(Stage::left());
        let task = Path::new("/proc").join(stage.pid.to_string());
        stage.killed(&[], |criu| {
            while !task.exists() && criu.try_wait().unwrap().is_none() {}
            let _ = kill(Pid::from_raw(criu.id().cast_signed()), Signal::SIGSTOP);
            // CRIU's only child is the task: the watchdog would be another.
            let alone = children(criu.id()) == [stage.pid];
            if alone {
                thread::sleep(TIME_TO_COME_TO_LIFE);
                assert!(runs(stage.pid) && stage.judge.gates().is_empty(), "it waits, without GPU state");
            }
            alone
        });
        stage.restores();
        stage.end();
    });
}

#[test]
fn criu_killed_in_a_restore_for_its_parent_leaves_nothing() {
    isolated(1, |_| {
        let mut stage = need!(Stage::left());
        // As runc does: the task is CRIU's sibling.
        stage.killed(&["--restore-sibling"], |criu| {
            while stage.judge.gates().is_empty() && criu.try_wait().unwrap().is_none() {}
            criu.try_wait().unwrap().is_none()
        });
        let log = stage.criu.log("restore");
        assert!(log.contains("the restored tasks are killed"), "{}", tail(&log));
        stage.restores();
        stage.end();
    });
}

#[test]
fn criu_killed_at_any_moment_of_a_restore_runs_no_partial_task() {
    isolated(1, |_| {
        let mut stage = need!(Stage::left());
        let start = Instant::now();
        assert!(stage.restore().status().unwrap().success());
        let (whole, moments) = (start.elapsed(), moments());
        stage.end();
        let task = Path::new("/proc").join(stage.pid.to_string());
        for moment in 0..moments {
            let mut criu = stage.restore().spawn().unwrap();
            thread::sleep(whole * moment / moments);
            // CRIU may have finished.
            let _ = criu.kill();
            criu.wait().unwrap();
            let after = format!("killed after {:?} of {whole:?}", whole * moment / moments);
            soon(&after, || named(WATCHDOG).is_empty());
            sweep(stage.pid);
            if task.exists() && !stage.criu.log("restore").contains("the restored tasks are killed") {
                stage.continues(&after);
                let _ = kill(Pid::from_raw(stage.pid.cast_signed()), Signal::SIGKILL);
            }
            stage.is_gone(&after);
        }
        stage.restores();
        stage.end();
    });
}
