// SPDX-License-Identifier: MIT OR Apache-2.0
//! `cargo xtask plugin`: the CRIU plugins, alone in a folder for `criu --libdir`. CRIU loads every `.so` of
//! that folder.

use std::fs;
use std::path::{Path, PathBuf};

use crate::{files, program, repository};

/// Each builds a library, whose file in the folder has the package's name.
const PACKAGES: [&str; 2] = ["amdgpu_plugin", "rewake_plugin"];
/// Below cargo's folder for the profile, beside the programs.
const FOLDER: &str = "criu-plugin";

/// How it is built.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Profile {
    Debug,
    Release,
    /// As [`repository::FOR_DEMO`].
    Demo,
}

impl Profile {
    /// Cargo's folder for it.
    fn folder(self) -> &'static str {
        match self {
            Self::Debug => "debug",
            Self::Release => "release",
            Self::Demo => "demo",
        }
    }

    /// Cargo's options for it.
    fn options(self) -> &'static [&'static str] {
        match self {
            Self::Debug => &[],
            Self::Release => &["--release"],
            Self::Demo => &repository::FOR_DEMO,
        }
    }
}

/// Builds the plugins and prints the folder.
pub(crate) fn run(profile: Profile) -> anyhow::Result<()> {
    println!("{}", make(profile, &[])?.display());
    Ok(())
}

/// Builds the plugins; returns the folder that has them and nothing else. Other packages are built by the
/// same run of cargo: in two runs, libraries that both use would be compiled twice, with different features.
pub(crate) fn make(profile: Profile, others: &[&str]) -> anyhow::Result<PathBuf> {
    let mut cargo = repository::cargo();
    cargo.arg("build").args(profile.options());
    for package in PACKAGES.iter().chain(others) {
        cargo.args(["--package", package]);
    }
    program::run(&mut cargo)?;
    place_all(profile)
}

/// Copies the built plugins into their folder, and returns it.
pub(crate) fn place_all(profile: Profile) -> anyhow::Result<PathBuf> {
    let folder = folder(profile)?;
    files::create_folder(&folder)?;
    PACKAGES.iter().try_for_each(|package| place(package, &folder))?;
    Ok(folder)
}

/// Copies a built plugin into the folder.
fn place(package: &str, folder: &Path) -> anyhow::Result<()> {
    let built = folder.with_file_name(format!("lib{package}.so"));
    // Renamed into place: a CRIU that has mapped the old file keeps it, and none loads half of the new one.
    let fresh = folder.with_added_extension(format!("new-{}", std::process::id()));
    files::copy(&built, &fresh)?;
    let place = folder.join(format!("{package}.so"));
    files::rename(&fresh, &place)
}

/// The folder whose plugins were placed last, whatever their profile.
pub(crate) fn latest() -> anyhow::Result<PathBuf> {
    let (debug, release) = (folder(Profile::Debug)?, folder(Profile::Release)?);
    Ok(if is_newer(&debug, &release) { debug } else { release })
}

/// Whether the plugins of one folder are newer than the plugins of another, which may have none.
fn is_newer(one: &Path, other: &Path) -> bool {
    let built =
        |folder: &Path| fs::metadata(folder.join("rewake_plugin.so")).and_then(|file| file.modified()).ok();
    built(one) > built(other)
}

/// The folder's path, built or not.
fn folder(profile: Profile) -> anyhow::Result<PathBuf> {
    Ok(repository::target()?.join(profile.folder()).join(FOLDER))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::time::{Duration, SystemTime};

    use super::*;

    #[test]
    fn a_plugin_is_newer_than_an_earlier_or_a_missing_one() {
        let home = std::env::temp_dir().join(format!("rewake-plugins-{}", std::process::id()));
        let (one, other) = (home.join("one"), home.join("other"));
        let build = |folder: &Path, second| {
            fs::create_dir_all(folder).unwrap();
            let file = File::create(folder.join("rewake_plugin.so")).unwrap();
            file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(second)).unwrap();
        };
        assert!(!is_newer(&one, &other));
        build(&one, 1);
        assert!(is_newer(&one, &other));
        build(&other, 2);
        assert!(!is_newer(&one, &other) && is_newer(&other, &one));
        fs::remove_dir_all(home).unwrap();
    }
}
