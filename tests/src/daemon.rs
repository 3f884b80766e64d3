// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake restore` of a scene, by `rewake serve` and in namespaces of its own.

use std::path::Path;
use std::process::{Command, Stdio};

pub use rewake_testkit::daemon::{Daemon, DaemonOptions, restore, timeline};
pub use rewake_testkit::process::processes_naming;
use rewake_testkit::process::{MINUTE, run};

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

/// A command that runs `inner` as the first process of new pid and mount namespaces, where the folder `files`
/// lies over `place`. Several copies of one image can run in this way. When the first process ends,
/// the kernel kills all others.
#[must_use]
pub fn in_namespaces(inner: &Command, place: &Path, files: &Path) -> Command {
    let mut command = Command::new("unshare");
    command.args(["--mount", "--pid", "--fork", "--mount-proc", "sh", "-c"]);
    command.arg("mount --bind \"$0\" \"$1\" && shift && exec \"$@\"").arg(files).arg(place);
    command.arg(inner.get_program()).args(inner.get_args());
    for (name, value) in inner.get_envs() {
        command.env(name, value.unwrap_or_default());
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Whether this machine can make pid and mount namespaces.
#[must_use]
pub fn has_namespaces() -> bool {
    let mut probe = Command::new("unshare");
    let probe = run(probe.args(["--mount", "--pid", "--fork", "--mount-proc", "true"]), MINUTE);
    probe.is_ok_and(|status| status.success())
}
