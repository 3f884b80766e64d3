// SPDX-License-Identifier: MIT OR Apache-2.0
//! One file a command.

pub mod doctor;
pub mod inspect;
pub mod lazy_pages;
mod print;
pub mod restore;
pub mod serve;
pub mod status;

mod detach;

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};

/// The full path of a directory that `option` names.
fn directory(path: &Path, option: &str) -> anyhow::Result<PathBuf> {
    let full = path.canonicalize().with_context(|| format!("{option} {}", path.display()))?;
    if !full.is_dir() {
        bail!("{option} {}: expected a directory", path.display());
    }
    Ok(full)
}
