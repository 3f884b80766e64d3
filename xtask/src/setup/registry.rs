// SPDX-License-Identifier: MIT OR Apache-2.0
//! Debian's `docker-registry`: one program, in `.rewake/docker-registry`. Its package is unpacked and not installed:
//! that would start a registry on this machine.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;

use super::{packages, say};
use crate::{program, repository};

const PACKAGE: &str = "docker-registry";

/// Returns the program, which apt fetches unless an earlier set-up did so.
pub(super) fn program() -> anyhow::Result<PathBuf> {
    let folder = repository::scratch().join(PACKAGE);
    let (home, partial) = (folder.join("root"), folder.join("partial"));
    let program = home.join("usr/bin").join(PACKAGE);
    if program.is_file() {
        return Ok(program);
    }
    say("fetching docker-registry");
    // A killed set-up has left it.
    let _ = fs::remove_dir_all(&partial);
    fs::create_dir_all(&partial).with_context(|| format!("create {}", partial.display()))?;
    let package = packages::download(PACKAGE, &partial)?;
    program::capture(Command::new("dpkg-deb").arg("-x").arg(package).arg(&partial))?;
    // A program that is missing there was removed by hand.
    let _ = fs::remove_dir_all(&home);
    fs::rename(&partial, &home).with_context(|| format!("rename {}", partial.display()))?;
    Ok(program)
}
