// SPDX-License-Identifier: MIT OR Apache-2.0
//! What CRIU leaves when it is killed: processes that end by themselves, and some that must be ended.

use std::fs;
use std::path::Path;
use std::thread;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use rewake_testkit::process::{ProcessId as _, sleeps_or_is_stopped};

pub use rewake_testkit::process::named;

/// The process that the plugin leaves to look after a dump or a restore.
pub const GUARD: &str = "rewake-watch";
/// What CRIU's processes are called, by its version.
const CRIUS: [&str; 2] = ["criu", "criu-4.1"];
/// Rounds of [`sweep`], and time between looks: a minute.
const SWEEPS: u32 = 300;
const SWEEP: Duration = Duration::from_millis(200);

/// Waits until it is so.
///
/// # Panics
/// It is not so within a minute; with what is left of CRIU.
pub fn soon(what: &str, there: impl Fn() -> bool) {
    if !rewake_testkit::soon(there) {
        let left: Vec<String> = [of_criu(), named(GUARD)].concat().into_iter().map(doing).collect();
        panic!("{what}: not after a minute; left: {left:?}");
    }
}

/// Ends what CRIU's death can leave in its own program: children that try what the kernel can do. They wait for ever. Not the
/// guard, which has that name, too, until it takes its own: it runs or is about to until then, and its end is waited for. Nor
/// `task`, which ends or goes on by itself.
///
/// # Panics
/// Something does not end.
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
    soon("swept", || of_criu().is_empty() && named(GUARD).is_empty());
}

/// Whether a process has not ended, and is more than a number.
#[must_use]
pub fn runs(pid: u32) -> bool {
    Path::new("/proc").join(pid.to_string()).join("exe").exists()
}

/// What a process is at, for whoever looks for the reason.
#[must_use]
pub fn doing(pid: u32) -> String {
    let read = |name| fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap_or_default();
    format!("{}: {}: {}", read("stat"), read("syscall"), read("stack"))
}

/// Processes of CRIU's own program, whichever.
fn of_criu() -> Vec<u32> {
    CRIUS.into_iter().flat_map(named).collect()
}
