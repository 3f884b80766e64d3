// SPDX-License-Identifier: MIT OR Apache-2.0
//! Programs that tests use and that are not installed, but fetched into a folder of `.rewake`. Packages of
//! Debian would start their servers on this machine.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::{packages, say};
use crate::{files, program, repository};

/// Returns a program of a package, which apt fetches unless an earlier set-up did so.
pub(super) fn program(package: &str, path: &str) -> anyhow::Result<PathBuf> {
    let home = repository::scratch().join(package).join("root");
    fetched(package, &home, path, |partial| {
        let file = packages::download(package, partial)?;
        program::capture(Command::new("dpkg-deb").arg("-x").arg(file).arg(partial)).map(drop)
    })
}

/// Returns `home/path`, which `fetch` makes in an empty folder unless an earlier set-up did so.
pub(super) fn fetched(
    what: &str,
    home: &Path,
    path: &str,
    fetch: impl FnOnce(&Path) -> anyhow::Result<()>,
) -> anyhow::Result<PathBuf> {
    let program = home.join(path);
    if !program.is_file() {
        say(&format!("fetching {what}"));
        // A killed set-up has left it.
        let partial = home.with_file_name("partial");
        files::empty_folder(&partial)?;
        fetch(&partial)?;
        // A program that is missing there was removed by hand.
        files::remove(home)?;
        files::rename(&partial, home)?;
    }
    Ok(program)
}
