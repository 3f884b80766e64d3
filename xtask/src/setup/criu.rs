// SPDX-License-Identifier: MIT OR Apache-2.0
//! Finds a CRIU: the caller's, the machine's, or Debian's own, unpacked.

use std::env;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail};

use super::fetch::{self, Suite};
use super::say;
use crate::program;

/// A release of CRIU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Version(pub(crate) [u32; 3]);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            [major, minor, 0] => write!(f, "{major}.{minor}"),
            [major, minor, patch] => write!(f, "{major}.{minor}.{patch}"),
        }
    }
}

/// The oldest that the tests are written against.
pub(super) const OLDEST: Version = Version([4, 1, 1]);

/// A CRIU that runs on this machine, its kernel included.
#[derive(Debug, Clone)]
pub(crate) struct Criu {
    /// Absolute.
    pub(crate) path: PathBuf,
    /// Its version text.
    pub(crate) version: Version,
}

impl Criu {
    /// Asks the program at `path` for its version and whether the kernel has what it needs.
    pub(super) fn probe(path: &Path, oldest: Version) -> anyhow::Result<Self> {
        let version = version_of(Command::new(path))?;
        if version < oldest {
            bail!("{} is CRIU {version}, and {oldest} or newer is needed", path.display());
        }
        program::capture(Command::new(path).arg("check"))
            .with_context(|| format!("CRIU {version} cannot work here (root? kernel features? seccomp?)"))?;
        Ok(Self { path: path.to_owned(), version })
    }
}

/// `CRIU=/path` wins and must be right; then `criu` on the path if it is good enough; then Debian sid's.
pub(super) fn locate() -> anyhow::Result<Criu> {
    if let Some(path) = env::var_os("CRIU").filter(|path| !path.is_empty()) {
        let path = PathBuf::from(path);
        let path = path.canonicalize().with_context(|| format!("CRIU={}: no such file", path.display()));
        return path.and_then(|path| Criu::probe(&path, OLDEST)).context(
            "the environment variable CRIU must name a usable CRIU; unset it to let set-up find one",
        );
    }
    if let Some(path) = on_path() {
        match Criu::probe(&path, OLDEST) {
            Ok(criu) => return Ok(criu),
            Err(error) => say(&format!("not using {}: {error:#}", path.display())),
        }
    }
    fetch::criu(Suite::Sid)
}

fn on_path() -> Option<PathBuf> {
    let path = env::var_os("PATH")?;
    env::split_paths(&path).map(|directory| directory.join("criu")).find(|path| path.is_file())
}

/// Runs `criu --version`; the command may name a loader and its arguments first.
pub(super) fn version_of(mut command: Command) -> anyhow::Result<Version> {
    let text = program::capture(command.arg("--version"))?;
    let first = || text.lines().next().unwrap_or_default();
    parse_version(&text).with_context(|| format!("`--version` gives no version of CRIU but {:?}", first()))
}

/// `Version: 4.2.1` in the first line; a missing patch number is 0.
fn parse_version(text: &str) -> Option<Version> {
    let number = text.lines().find_map(|line| line.strip_prefix("Version:"))?.trim();
    let mut version = [0; 3];
    let mut parts = number.split('.');
    for place in &mut version[..2] {
        *place = parts.next()?.parse().ok()?;
    }
    if let Some(patch) = parts.next() {
        let digits = patch.split(|c: char| !c.is_ascii_digit()).next()?;
        version[2] = digits.parse().ok()?;
    }
    Some(Version(version))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_and_ordered() {
        let parse = |text| parse_version(text).expect("a version");
        assert_eq!(parse("Version: 4.2.1\nGitID: x\n"), Version([4, 2, 1]));
        assert_eq!(parse("Version: 4.2\n"), Version([4, 2, 0]));
        assert_eq!(parse("Version: 4.1.1-dev\n"), Version([4, 1, 1]));
        assert!(parse("Version: 4.10\n") > parse("Version: 4.2.1\n"));
        assert!(parse("Version: 3.17.1\n") < OLDEST);
        assert_eq!(parse_version("criu: command not found"), None);
        assert_eq!(Version([4, 2, 0]).to_string(), "4.2");
    }

    #[test]
    fn a_criu_that_is_too_old_is_refused_by_name() {
        let path = env::temp_dir().join(format!("rewake-old-criu-{}", std::process::id()));
        let text = "#!/bin/sh\necho 'Version: 3.17.1'\n";
        // Written by a shell: a program that this process writes cannot be run while a child of another test
        // has it open too.
        let mut write = Command::new("sh");
        write.args(["-c", "printf %s \"$1\" > \"$0\" && chmod 755 \"$0\""]).arg(&path).arg(text);
        assert!(write.status().unwrap().success());
        let error = Criu::probe(&path, OLDEST).unwrap_err().to_string();
        std::fs::remove_file(&path).unwrap();
        assert!(error.contains("CRIU 3.17.1") && error.contains("4.1.1 or newer"), "{error}");
    }
}
