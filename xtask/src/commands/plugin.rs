// SPDX-License-Identifier: MIT OR Apache-2.0
//! `cargo xtask plugin`: the CRIU plugin, alone in a folder for `criu --libdir`. CRIU loads every `.so` of that folder,
//! and takes the plugin by the name that it has there.

use std::fs;
use std::path::PathBuf;

use anyhow::Context as _;

use crate::{program, repository};

const PACKAGE: &str = "amdgpu_plugin";
/// Below cargo's folder for the profile, beside the programs.
const FOLDER: &str = "criu-plugin";
const NAME: &str = "amdgpu_plugin.so";

/// How it is built.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Profile {
    Debug,
    Release,
}

impl Profile {
    /// Cargo's folder for it.
    fn folder(self) -> &'static str {
        match self {
            Self::Debug => "debug",
            Self::Release => "release",
        }
    }
}

/// Builds the plugin and prints the folder.
pub(crate) fn run(profile: Profile) -> anyhow::Result<()> {
    println!("{}", make(profile)?.display());
    Ok(())
}

/// Builds the plugin; gives the folder that has it and nothing else.
pub(crate) fn make(profile: Profile) -> anyhow::Result<PathBuf> {
    let mut cargo = repository::cargo();
    cargo.args(["build", "--package", PACKAGE, "--lib"]);
    if profile == Profile::Release {
        cargo.arg("--release");
    }
    program::run(&mut cargo)?;
    let folder = folder(profile)?;
    let built = folder.with_file_name(format!("lib{PACKAGE}.so"));
    fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))?;
    // Renamed into place: a CRIU that has the old file mapped keeps it, and none loads half of the new one.
    let fresh = folder.with_added_extension(format!("new-{}", std::process::id()));
    fs::copy(&built, &fresh).with_context(|| format!("copy {} to {}", built.display(), fresh.display()))?;
    let place = folder.join(NAME);
    fs::rename(&fresh, &place)
        .with_context(|| format!("rename {} to {}", fresh.display(), place.display()))?;
    Ok(folder)
}

/// Where it is, or would be.
pub(crate) fn folder(profile: Profile) -> anyhow::Result<PathBuf> {
    Ok(repository::target()?.join(profile.folder()).join(FOLDER))
}
