// SPDX-License-Identifier: MIT OR Apache-2.0
//! The programs that are built beside the tests.

use std::env;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};

/// Finds a file or folder by its name, in the folder of this test program or in one above it. An environment
/// variable, if it is set, names another place.
///
/// # Errors
/// It does not exist; the error names the command that builds it.
pub fn beside(variable: &str, name: &str, command: &str) -> anyhow::Result<PathBuf> {
    let found = match env::var_os(variable) {
        Some(given) => Some(given.into()).filter(|path: &PathBuf| path.exists()),
        None => {
            let own = env::current_exe().context("find this program")?;
            own.ancestors().skip(1).take(2).map(|folder| folder.join(name)).find(|path| path.exists())
        }
    };
    found.with_context(|| format!("no {name} beside the tests: run `{command}`, or set {variable}"))
}

/// The program `rewake`: `REWAKE_BIN`, or `rewake` in the folder of built programs.
///
/// # Errors
/// It is not built.
pub fn rewake() -> anyhow::Result<PathBuf> {
    beside("REWAKE_BIN", "rewake", "cargo build -p rewake")
}

/// The folder of the built programs. Tests are in its `deps`.
///
/// # Errors
/// This program has no folder.
pub fn folder() -> anyhow::Result<PathBuf> {
    let test = env::current_exe().context("find this program")?;
    let folder = test.parent().and_then(Path::parent).context("the folder of the built programs")?;
    ensure!(folder.is_dir(), "{}: no folder", folder.display());
    Ok(folder.to_owned())
}
