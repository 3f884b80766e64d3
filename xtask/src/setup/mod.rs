// SPDX-License-Identifier: MIT OR Apache-2.0
//! `cargo xtask setup`: installs what tests, demo and bench need beyond Rust; quick when nothing is missing.

mod criu;
mod fetch;
mod packages;
mod seaweedfs;
mod unpacked;

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::Context as _;

use crate::{apt, files, progress, repository, root};
pub(crate) use criu::Criu;
pub(crate) use fetch::Suite;

/// Packages and the CRIU to work with.
pub(crate) fn run() -> anyhow::Result<Criu> {
    root::become_root()?;
    let _lock = lock()?;
    packages::install(&[])?;
    let criu = criu::locate()?;
    say(&format!("CRIU {}: {}", criu.version, criu.path.display()));
    Ok(criu)
}

/// CRIU of one Debian suite, whatever other CRIU the machine has.
pub(crate) fn run_for(suite: Suite) -> anyhow::Result<Criu> {
    root::become_root()?;
    let _lock = lock()?;
    packages::install(&[])?;
    let criu = fetch::criu(suite)?;
    say(&format!("CRIU {}: {}", criu.version, criu.path.display()));
    Ok(criu)
}

/// A second CRIU, from before the page-server protocol changed in 4.2.
pub(crate) fn run_other_than(first: &Criu) -> anyhow::Result<Criu> {
    run_for(if first.version >= Suite::Sid.oldest() { Suite::Trixie } else { Suite::Sid })
}

/// Installs these packages of the system, in addition to the ones that every command needs.
pub(crate) fn install(packages: &[&'static str]) -> anyhow::Result<()> {
    let _lock = lock()?;
    packages::install(packages)
}

/// A store that answers as S3 does; `None` if it cannot be fetched because PyPI is not reached.
pub(crate) fn seaweedfs() -> anyhow::Result<Option<PathBuf>> {
    let _lock = lock()?;
    packages::install(&["python3-pip"])?;
    seaweedfs::program()
}

/// Debian's registry of OCI images.
pub(crate) fn docker_registry() -> anyhow::Result<PathBuf> {
    let _lock = lock()?;
    unpacked::program("docker-registry", "usr/bin/docker-registry")
}

/// The folder of the programs of a database server.
pub(crate) fn postgresql() -> anyhow::Result<PathBuf> {
    let _lock = lock()?;
    let server = unpacked::program("postgresql-15", "usr/lib/postgresql/15/bin/postgres")?;
    Ok(server.parent().context("the folder of a program")?.to_owned())
}

/// A web server that is a caching proxy.
pub(crate) fn nginx() -> anyhow::Result<PathBuf> {
    let _lock = lock()?;
    unpacked::program("nginx", "usr/sbin/nginx")
}

/// Debian's archive, as this machine's apt knows it; the most likely entry first.
pub(crate) fn archives() -> anyhow::Result<Vec<apt::Entry>> {
    let release = fs::read_to_string("/etc/os-release").context("read /etc/os-release")?;
    fetch::sources(&release, Path::new("/etc/apt"))
}

/// One set-up at a time; the lock goes with the process.
fn lock() -> anyhow::Result<File> {
    files::create_folder(repository::scratch())?;
    files::lock(&repository::scratch().join("setup.lock"))
}

fn say(line: &str) {
    progress::say(&format!("setup: {line}"));
}
