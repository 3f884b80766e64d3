// SPDX-License-Identifier: MIT OR Apache-2.0
//! Scripts that CRIU runs at a moment of a restore (`--action-script`), and waits for.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

use crate::Streamer;
use crate::criu::Criu;

/// No task is forked yet.
pub const BEFORE: &str = "pre-restore";
/// All tasks are restored. Page servers hear so afterwards, and then begin to bring what nobody asks for.
pub const RESTORED: &str = "post-restore";
/// The plugin has nothing more to do; tasks are still stopped.
pub const ABOUT_TO_RUN: &str = "pre-resume";

/// One that does this at that moment.
///
/// # Panics
/// It cannot be written.
#[must_use]
pub fn at(criu: &Criu, moment: &str, act: &str) -> PathBuf {
    let path = criu.images().join("script");
    fs::write(&path, format!("#!/bin/sh\n[ \"$CRTOOLS_SCRIPT_ACTION\" = {moment} ] || exit 0\n{act}\n"))
        .unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

/// Kills CRIU.
pub const KILLS: &str = "kill -KILL $PPID";

/// Stops a page server and waits until it stands still.
#[must_use]
pub fn stops(pages: &Streamer) -> String {
    let pids: Vec<String> = pages.processes().iter().map(u32::to_string).collect();
    let stop = format!("kill -STOP {}", pids.join(" "));
    let threads = pids.iter().map(|pid| format!("/proc/{pid}/task/*/status")).collect::<Vec<_>>().join(" ");
    format!("{stop} && while grep '^State:' {threads} | grep -qv 'T (stopped)'; do sleep 0.01; done")
}
