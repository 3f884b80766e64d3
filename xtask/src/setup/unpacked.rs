// SPDX-License-Identifier: MIT OR Apache-2.0
//! Servers of Debian that tests use. Their packages are unpacked in `.rewake` and not installed: that would start the
//! servers on this machine.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;

use super::{packages, say};
use crate::{program, repository};

/// Returns a program of a package, which apt fetches unless an earlier set-up did so.
pub(super) fn program(package: &str, path: &str) -> anyhow::Result<PathBuf> {
    let folder = repository::scratch().join(package);
    let (home, partial) = (folder.join("root"), folder.join("partial"));
    let program = home.join(path);
    if program.is_file() {
        return Ok(program);
    }
    say(&format!("fetching {package}"));
    // A killed set-up has left it.
    let _ = fs::remove_dir_all(&partial);
    fs::create_dir_all(&partial).with_context(|| format!("create {}", partial.display()))?;
    let file = packages::download(package, &partial)?;
    program::capture(Command::new("dpkg-deb").arg("-x").arg(file).arg(&partial))?;
    // A program that is missing there was removed by hand.
    let _ = fs::remove_dir_all(&home);
    fs::rename(&partial, &home).with_context(|| format!("rename {}", partial.display()))?;
    Ok(program)
}
