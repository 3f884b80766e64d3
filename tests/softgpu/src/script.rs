// SPDX-License-Identifier: MIT OR Apache-2.0
//! Scripts that CRIU runs at a moment of a restore (`--action-script`), and waits for.

use std::path::PathBuf;

use rewake_testkit::process::{stop_command, write_program};

use crate::Streamer;
use crate::criu::Criu;

/// No task is forked yet.
pub const BEFORE: &str = "pre-restore";
/// All tasks are restored. CRIU notifies page servers afterwards, which then begin the background load.
pub const RESTORED: &str = "post-restore";
/// The plugin has no more work; tasks are still stopped.
pub const ABOUT_TO_RUN: &str = "pre-resume";

/// Writes a script that runs this command at that moment.
///
/// # Panics
/// It cannot be written.
#[must_use]
pub fn at(criu: &Criu, moment: &str, act: &str) -> PathBuf {
    let path = criu.images().join("script");
    let text = format!("#!/bin/sh\n[ \"$CRTOOLS_SCRIPT_ACTION\" = {moment} ] || exit 0\n{act}\n");
    write_program(&path, &text).unwrap();
    path
}

/// Kills CRIU.
pub const KILLS: &str = "kill -KILL $PPID";

/// Stops a page server, and waits until all its threads are stopped.
#[must_use]
pub fn stops(pages: &Streamer) -> String {
    stop_command(&pages.processes())
}
