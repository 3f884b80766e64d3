// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake restore` of a scene, by `rewake serve`.

use std::process::Command;

pub use rewake_testkit::daemon::{Daemon, DaemonOptions, in_namespaces, restore, timeline};
pub use rewake_testkit::process::processes_naming;
use rewake_testkit::process::{PATIENCE, run};

use crate::criu::Criu;
use crate::scene::Scene;

/// `rewake restore -- -d` with a scene's image and work directory, not yet started.
///
/// # Errors
/// No program to start.
pub fn detached(daemon: &Daemon, criu: &Criu, scene: &Scene) -> anyhow::Result<Command> {
    let mut command = daemon.restore(criu, &scene.images())?;
    command.arg("-W").arg(scene.work()).args(["--", "-d", "-v4"]);
    Ok(command)
}

/// Whether this machine can make pid and mount namespaces.
#[must_use]
pub fn has_namespaces() -> bool {
    let mut probe = Command::new("unshare");
    let probe = run(probe.args(["--mount", "--pid", "--fork", "--mount-proc", "true"]), PATIENCE);
    probe.is_ok_and(|status| status.success())
}
