// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a killed CRIU leaves: processes that end by themselves, and some that a test must end.

use std::fs;
use std::path::Path;
use std::thread;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use rewake_testkit::process::{ProcessId as _, sleeps_or_is_stopped};

pub use rewake_testkit::process::named;

/// The CRIU watchdog, which the plugin starts for a dump or a restore.
pub const WATCHDOG: &str = "rewake-watch";
/// Names of CRIU's processes, by its version.
const CRIUS: [&str; 2] = ["criu", "criu-4.1"];
/// Rounds of [`sweep`], and the time between them: a minute.
const SWEEPS: u32 = 300;
const SWEEP: Duration = Duration::from_millis(200);

/// Waits until `done` is true.
///
/// # Panics
/// It is not in time; with what is left of CRIU.
pub fn soon(what: &str, there: impl Fn() -> bool) {
    if !rewake_testkit::soon(there) {
        let left: Vec<String> = [of_criu(), named(WATCHDOG)].concat().into_iter().map(doing).collect();
        panic!("{what}: not in time; left: {left:?}");
    }
}

/// Ends children of CRIU's own program that its death leaves: they probe kernel features, and wait for ever.
/// It spares the CRIU watchdog, which has CRIU's name until it sets its own, and waits for its end. It spares
/// `task`, which ends or continues by itself.
///
/// # Panics
/// A process does not end.
pub fn sweep(task: u32) {
    for _ in 0..SWEEPS {
        let all = of_criu();
        if all.is_empty() {
            break;
        }
        let before: Vec<u32> =
            all.into_iter().filter(|pid| *pid != task && sleeps_or_is_stopped(*pid)).collect();
        thread::sleep(SWEEP);
        for pid in of_criu().into_iter().filter(|pid| before.contains(pid) && sleeps_or_is_stopped(*pid)) {
            let _ = kill(pid.pid(), Signal::SIGKILL);
        }
    }
    soon("swept", || of_criu().is_empty() && named(WATCHDOG).is_empty());
}

/// Whether a process has not ended, and is no zombie.
#[must_use]
pub fn runs(pid: u32) -> bool {
    Path::new("/proc").join(pid.to_string()).join("exe").exists()
}

/// The state of each thread of a process, for failure reports; empty when the process has ended.
#[must_use]
pub fn doing(pid: u32) -> String {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let state = |thread: fs::DirEntry| {
        let read = |name| fs::read_to_string(thread.path().join(name)).unwrap_or_default();
        format!("{}: {}: {}", read("stat"), read("syscall"), read("stack"))
    };
    threads.map(state).collect()
}

/// Processes of CRIU's own program, in both versions.
fn of_criu() -> Vec<u32> {
    CRIUS.into_iter().flat_map(named).collect()
}
