// SPDX-License-Identifier: MIT OR Apache-2.0
//! Becoming root: CRIU, userfaultfd for kernel faults and package installation need it.

use std::io::IsTerminal as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};

use anyhow::{Context as _, bail};

use crate::{program, repository};

/// The one platform that set-up knows.
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Returns as root, or not at all: otherwise this program starts again under `sudo`.
///
/// Below sudo, cargo builds into `.rewake/target`, so that no file of root's lands in the user's own build
/// folder.
pub(crate) fn become_root() -> anyhow::Result<()> {
    if is_root()? {
        return Ok(());
    }
    if !program::on_path("sudo") {
        bail!("this needs root (CRIU, packages) and there is no sudo: run the same command as root");
    }
    let mut probe = Command::new("sudo");
    if !std::io::stdin().is_terminal() {
        probe.arg("-n");
    }
    let works = probe.arg("true").stdout(Stdio::null()).status().context("start `sudo`")?.success();
    if !works {
        bail!(
            "this needs root (CRIU, packages) and `sudo true` fails: allow sudo, or run the same command as \
             root"
        );
    }
    // Cargo must download as the user, so that the user owns the files.
    program::run(repository::cargo().args(["fetch", "--quiet", "--target", TARGET]))?;
    Err(again_under_sudo()?.exec()).context("start `sudo` with this program")
}

/// `sudo -E` replaces PATH and HOME on most machines: without them it would miss the user's Rust.
fn again_under_sudo() -> anyhow::Result<Command> {
    let mut command = Command::new("sudo");
    command.args(["-E", "env"]);
    for name in ["PATH", "HOME"] {
        let value = std::env::var(name).with_context(|| format!("read the environment variable {name}"))?;
        command.arg(format!("{name}={value}"));
    }
    if std::env::var_os("CARGO_TARGET_DIR").is_none() {
        command.arg(format!("CARGO_TARGET_DIR={}", repository::scratch().join("target").display()));
    }
    command.arg(std::env::current_exe().context("find the path of this program")?);
    command.args(std::env::args_os().skip(1));
    Ok(command)
}

fn is_root() -> anyhow::Result<bool> {
    let status = std::fs::read_to_string("/proc/self/status").context("read /proc/self/status")?;
    Ok(effective_user(&status) == Some("0"))
}

/// The effective user, second of the four numbers after `Uid:`.
fn effective_user(status: &str) -> Option<&str> {
    status.lines().find_map(|line| line.strip_prefix("Uid:"))?.split_whitespace().nth(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_effective_user_decides() {
        assert_eq!(effective_user("Name:\tx\nUid:\t1000\t0\t0\t0\nGid:\t1\t2\t3\t4\n"), Some("0"));
        assert_eq!(effective_user("Name:\tx\n"), None);
    }
}
