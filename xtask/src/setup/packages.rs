// SPDX-License-Identifier: MIT OR Apache-2.0
//! The system's own packages.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};

use super::say;
use crate::{files, program};

/// The packages that every command needs, and their purpose.
const PACKAGES: [&str; 3] = [
    "libclang-dev",           // the `userfaultfd` crate generates its bindings with it
    "libc6-dev",              // the headers that it generates them from
    "debian-archive-keyring", // signatures of the suites that CRIU comes from
];

/// How long another apt or dpkg may run, and the polling interval.
const PATIENCE: Duration = Duration::from_secs(600);
const BETWEEN: Duration = Duration::from_secs(2);

/// Installs missing packages: those that every command needs, and these; changes nothing when none is
/// missing.
pub(super) fn install(more: &[&'static str]) -> anyhow::Result<()> {
    if std::env::consts::ARCH != "x86_64" {
        bail!(
            "set-up knows amd64 only, and this machine is {}: CRIU's wrapper names its loader",
            std::env::consts::ARCH
        );
    }
    if !program::on_path("dpkg-query") || !program::on_path("apt-get") {
        bail!(
            "this is no Debian (dpkg-query or apt-get is missing): set-up works on Debian 12 or newer, on \
             amd64"
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
    update()?;
    alone(|| {
        let mut install = apt_get();
        install.args(["install", "--yes", "--no-install-recommends"]).args(&missing);
        install
    })
    .with_context(|| {
        format!("install the Debian packages {list}; install them by hand if this machine must not")
    })
}

fn update() -> anyhow::Result<()> {
    alone(|| {
        let mut update = apt_get();
        update.arg("update");
        update
    })
    .context("refresh the package lists of this machine")
}

/// Downloads a package into a folder, and returns its file. Nothing is installed.
pub(super) fn download(package: &str, folder: &Path) -> anyhow::Result<PathBuf> {
    let fetch = || {
        alone(|| {
            let mut download = apt_get();
            // The user `_apt` may not be allowed to write into the folder. Then apt reports that, and
            // downloads as root.
            download.args(["download", package]).current_dir(folder);
            download
        })
    };
    // This machine's lists may be too old, or missing.
    fetch()
        .or_else(|_| update().and_then(|()| fetch()))
        .with_context(|| format!("download the Debian package {package}"))?;
    let found = files::list(folder)?
        .into_iter()
        .find(|path| path.extension().is_some_and(|extension| extension == "deb"));
    found.with_context(|| format!("apt-get left no package in {}", folder.display()))
}

fn is_installed(package: &str) -> anyhow::Result<bool> {
    let mut command = Command::new("dpkg-query");
    command.args(["--show", "--showformat=${db:Status-Status}", package]).stderr(Stdio::null());
    // dpkg-query's status 1 means an unknown package.
    let output = command.output().context("start `dpkg-query`")?;
    Ok(output.status.success() && output.stdout == b"installed")
}

/// Repeats a step of apt-get while another apt or dpkg runs. apt waits by itself for dpkg's lock, without any
/// output; for that of the package lists it does not wait at all.
fn alone(step: impl Fn() -> Command) -> anyhow::Result<()> {
    let start = Instant::now();
    let mut waits = false;
    loop {
        let Err(failed) = program::step(&mut step()) else { return Ok(()) };
        if !is_locked(&failed) || start.elapsed() >= PATIENCE {
            return Err(failed.shown("setup: apt-get"));
        }
        if !waits {
            say(&format!("another apt or dpkg is running: waiting for it, {} s at most", PATIENCE.as_secs()));
            waits = true;
        }
        thread::sleep(BETWEEN);
    }
}

/// Whether apt reports that another program has its locks.
fn is_locked(failed: &program::Failed) -> bool {
    let words = ["Could not get lock", "Unable to lock", "Unable to acquire the dpkg frontend lock"];
    words.iter().any(|words| failed.says(words))
}

/// Reports a held lock at once, and never prompts.
fn apt_get() -> Command {
    let mut command = Command::new("apt-get");
    command.args(["--quiet", "-o", "DPkg::Lock::Timeout=0"]);
    command.env("DEBIAN_FRONTEND", "noninteractive").env("LC_ALL", "C");
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A step that finds a lock until the file at `path` has `tries` bytes.
    fn locked_until(path: &std::path::Path, tries: u32) -> impl Fn() -> Command {
        let script = format!(
            "printf x >> \"$0\"; [ $(wc -c < \"$0\") -ge {tries} ] || {{ echo 'E: Could not get lock /l' \
             >&2; exit 100; }}"
        );
        let path = path.to_owned();
        move || {
            let mut command = Command::new("sh");
            command.args(["-c", &script]).arg(&path);
            command
        }
    }

    #[test]
    fn another_apt_at_work_is_waited_for() {
        let path = std::env::temp_dir().join(format!("rewake-apt-lock-{}", std::process::id()));
        alone(locked_until(&path, 3)).unwrap();
        let tries = std::fs::read(&path).unwrap().len();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(tries, 3);
    }

    #[test]
    fn another_failure_is_one_at_once() {
        let step = || {
            let mut command = Command::new("sh");
            command.args(["-c", "echo 'E: Unable to locate package x' >&2; exit 100"]);
            command
        };
        let start = Instant::now();
        assert!(alone(step).unwrap_err().to_string().contains("Unable to locate package x"));
        assert!(start.elapsed() < BETWEEN);
    }
}
