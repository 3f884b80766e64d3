// SPDX-License-Identifier: MIT OR Apache-2.0
//! `cargo xtask package`: Debian packages of the release build, in `target/package`.
//!
//! Two runs of one commit make the same bytes: the compiler's paths are replaced, every file has the time of
//! the commit, and nothing else of the machine goes into a package.

mod deb;
mod sbom;
mod tree;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, ensure};

use self::tree::{Built, PackageTree};
use crate::{files, program, repository};

/// What makes the packages, each with the Debian package that has it.
const TOOLS: [(&str, &str); 4] =
    [("dpkg-deb", "dpkg"), ("objcopy", "binutils"), ("readelf", "binutils"), ("gzip", "gzip")];

/// The version of this workspace.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Makes the packages, and prints where they are.
pub(crate) fn run() -> anyhow::Result<()> {
    for (tool, package) in TOOLS {
        ensure!(program::on_path(tool), "{tool} is not on the path: apt-get install {package}");
    }
    let folder = repository::target()?.join("package");
    let built = build(&folder)?;
    let time = commit_time()?;
    let manual = folder.join("manual");
    files::empty_folder(&manual)?;
    program::run(Command::new(&built.rewake).arg("manual").arg(&manual))?;
    let tree = PackageTree { built: &built, manual: &manual, sbom: sbom::of_workspace(VERSION)?, time };
    for package in tree.packages(&folder)? {
        println!("{}", package.display());
    }
    Ok(())
}

/// Builds the program and the plugins into a folder of their own, because cargo compiles everything again
/// when its flags change.
fn build(folder: &Path) -> anyhow::Result<Built> {
    let mut cargo = repository::cargo();
    if let Ok(commit) = git(&["rev-parse", "--short=12", "HEAD"]) {
        cargo.env("REWAKE_COMMIT", commit);
    }
    cargo
        .env("RUSTFLAGS", remapped()?.join(" "))
        .arg("build")
        .arg("--release")
        .arg("--target-dir")
        .arg(folder);
    // The C code of zstd and ring names its files in assertions.
    cargo.env("CFLAGS", format!("-ffile-prefix-map={}=/cargo", cargo_home()?.display()));
    for package in ["rewake", "rewake_plugin", "amdgpu_plugin"] {
        cargo.args(["--package", package]);
    }
    program::run(&mut cargo)?;
    let release = folder.join("release");
    Ok(Built {
        rewake: release.join("rewake"),
        rewake_plugin: release.join("librewake_plugin.so"),
        amdgpu_plugin: release.join("libamdgpu_plugin.so"),
    })
}

/// Options of rustc that take this machine's paths out of messages and debug information.
fn remapped() -> anyhow::Result<[String; 2]> {
    let map = |from: &Path, to: &str| format!("--remap-path-prefix={}={to}", from.display());
    Ok([map(&cargo_home()?, "/cargo"), map(repository::root(), "/rewake")])
}

fn cargo_home() -> anyhow::Result<PathBuf> {
    let named = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let in_home = || std::env::var_os("HOME").map(|home| Path::new(&home).join(".cargo"));
    named.or_else(in_home).context("neither CARGO_HOME nor HOME is set: expected cargo's folder")
}

/// The time of the last commit, or of `SOURCE_DATE_EPOCH`.
fn commit_time() -> anyhow::Result<SystemTime> {
    let seconds = match std::env::var("SOURCE_DATE_EPOCH") {
        Ok(given) => given,
        Err(_) => git(&["log", "-1", "--format=%ct"])
            .context("the time of the commit: outside a git repository set SOURCE_DATE_EPOCH")?,
    };
    let seconds = seconds.trim().parse().context("SOURCE_DATE_EPOCH: expected seconds since 1970")?;
    Ok(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds))
}

fn git(arguments: &[&str]) -> anyhow::Result<String> {
    let text = program::capture(Command::new("git").args(arguments).current_dir(repository::root()))?;
    Ok(text.trim().to_owned())
}
