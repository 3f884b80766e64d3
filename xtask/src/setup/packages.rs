// SPDX-License-Identifier: MIT OR Apache-2.0
//! The system's own packages.

use std::process::{Command, Stdio};

use anyhow::{Context as _, bail};

use super::say;
use crate::program;

/// What is needed, and what for.
const PACKAGES: [&str; 4] = [
    "libclang-dev",           // the `userfaultfd` crate generates its bindings with it
    "libc6-dev",              // the headers that it generates them from
    "fio",                    // the disk's own speed, beside which the bench puts its figures
    "debian-archive-keyring", // signatures of the suites that CRIU comes from
];

/// Installs what is missing of the packages that everything needs, and of these; touches nothing when nothing is.
pub(super) fn install(more: &[&'static str]) -> anyhow::Result<()> {
    if std::env::consts::ARCH != "x86_64" {
        bail!(
            "set-up knows amd64 only, and this machine is {}: CRIU's wrapper names its loader",
            std::env::consts::ARCH
        );
    }
    if !program::on_path("dpkg-query") || !program::on_path("apt-get") {
        bail!(
            "this is no Debian (dpkg-query or apt-get is missing): set-up works on Debian 12 or newer, on amd64"
        );
    }
    let mut missing = Vec::new();
    for package in PACKAGES.iter().chain(more).copied() {
        if !is_installed(package)? {
            missing.push(package);
        }
    }
    if !program::on_path("cc") {
        missing.push("gcc");
    }
    if missing.is_empty() {
        return Ok(());
    }
    let list = missing.join(" ");
    say(&format!("installing {list}"));
    program::capture(apt_get().arg("update")).context("refresh the package lists of this machine")?;
    let install = ["install", "--yes", "--no-install-recommends"];
    program::capture(apt_get().args(install).args(missing)).with_context(|| {
        format!("install the Debian packages {list}; install them by hand if this machine must not")
    })?;
    Ok(())
}

fn is_installed(package: &str) -> anyhow::Result<bool> {
    let mut command = Command::new("dpkg-query");
    command.args(["--show", "--showformat=${db:Status-Status}", package]).stderr(Stdio::null());
    // Status 1 is dpkg-query's word for a package that it has never heard of.
    let output = command.output().context("start `dpkg-query`")?;
    Ok(output.status.success() && output.stdout == b"installed")
}

/// Waits for another apt instead of failing beside it, and never asks.
fn apt_get() -> Command {
    let mut command = Command::new("apt-get");
    command.args(["--quiet", "-o", "DPkg::Lock::Timeout=300"]);
    command.env("DEBIAN_FRONTEND", "noninteractive").env("LC_ALL", "C");
    command
}
