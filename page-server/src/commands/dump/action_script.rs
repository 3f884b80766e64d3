// SPDX-License-Identifier: MIT OR Apache-2.0
//! This program as an action script of CRIU (`--action-script`). After a dump and before the tree is killed,
//! the script completes the image: if it cannot, CRIU leaves the tree running.
//!
//! A dump that is complete by then does not depend on the `rewake dump` that started it.

use std::env;
use std::ffi::OsString;
use std::io::{self, Write as _};
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, ensure};
use serde::{Deserialize, Serialize};

use super::super::print;
use super::complete::complete;
use super::place;

/// What the script must know, as JSON.
const VARIABLE: &str = "REWAKE_DUMP";
/// CRIU says here at which moment it runs the script.
const ACTION: &str = "CRTOOLS_SCRIPT_ACTION";
/// After the image is written.
const POST_DUMP: &str = "post-dump";

/// What the script does. In JSON a path is a list of bytes: it need not be UTF-8.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ActionScript {
    /// Where CRIU writes.
    pub(super) images: OsString,
    /// The user's directory, which becomes `images`.
    pub(super) target: OsString,
    /// The user's own scripts: they run first, and one that fails makes the dump fail.
    pub(super) scripts: Vec<OsString>,
}

impl ActionScript {
    /// Has a `criu dump` run this program as its script.
    ///
    /// # Errors
    /// This program's own path is not known.
    pub(super) fn add_to(&self, criu: &mut Command) -> anyhow::Result<()> {
        let this = env::current_exe().context("finding this program")?;
        let text = serde_json::to_string(self)?;
        criu.arg("--action-script").arg(this).env(VARIABLE, text);
        Ok(())
    }

    fn run(&self, action: &str) -> anyhow::Result<()> {
        for script in &self.scripts {
            let status = Command::new(script).env_remove(VARIABLE).status();
            let status = status.with_context(|| format!("running {}", script.display()))?;
            ensure!(status.success(), "{} at {action}: {status}", script.display());
        }
        if action == POST_DUMP {
            // Into CRIU's log: `rewake dump` itself reports to the user.
            let (images, target) = (Path::new(&self.images), Path::new(&self.target));
            print::say(complete(images)?);
            place::commit(images, target)?;
        }
        Ok(())
    }
}

/// Runs as a script if CRIU has started this program as one, and returns the exit code.
#[must_use]
pub fn run_if_called() -> Option<u8> {
    let (text, action) = (env::var(VARIABLE).ok()?, env::var(ACTION).ok()?);
    if env::args_os().len() > 1 {
        return None;
    }
    let script = serde_json::from_str::<ActionScript>(&text).context(VARIABLE);
    let Err(error) = script.and_then(|script| script.run(&action)) else { return Some(0) };
    // CRIU's log is standard error, and `rewake dump` shows such lines of it.
    let _ = writeln!(io::stderr(), "Error (rewake): {error:#}");
    Some(1)
}

/// The user's scripts by full paths: CRIU runs this program in its work directory.
///
/// # Errors
/// One does not exist.
pub(super) fn full_paths(scripts: &[OsString]) -> anyhow::Result<Vec<OsString>> {
    let full = |script: &OsString| {
        let path = Path::new(script).canonicalize();
        path.map(OsString::from).with_context(|| format!("--action-script {}", script.display()))
    };
    scripts.iter().map(full).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt as _;

    use super::*;

    #[test]
    fn the_script_gets_paths_that_are_not_utf_8() {
        let path = |bytes: &[u8]| OsString::from_vec(bytes.to_vec());
        let script = ActionScript {
            images: path(b"/images/caf\xe9"),
            target: path("/images/café".as_bytes()),
            scripts: vec![path(b"/\xff")],
        };
        let mut criu = Command::new("criu");
        script.add_to(&mut criu).unwrap();
        let (_, text) = criu.get_envs().find(|(name, _)| *name == VARIABLE).unwrap();
        let read: ActionScript = serde_json::from_str(text.unwrap().to_str().unwrap()).unwrap();
        assert_eq!(read, script);
    }
}
