// SPDX-License-Identifier: MIT OR Apache-2.0
//! Commands that find files of a test in `/etc/rewake`, where no other process sees them.

use std::ffi::OsStr;
use std::fs;
use std::process::Command;

use anyhow::Context as _;
use tempfile::TempDir;

/// The files of a node.
#[derive(Debug)]
pub struct NodeEtc(TempDir);

impl NodeEtc {
    /// Makes files, each with its name and its text.
    ///
    /// # Errors
    /// The temporary folder cannot be written.
    pub fn with(files: &[(&str, &str)]) -> anyhow::Result<Self> {
        let folder = tempfile::Builder::new().prefix("rewake-etc-").tempdir()?;
        let rewake = folder.path().join("rewake");
        fs::create_dir(&rewake)?;
        for (name, text) in files {
            fs::write(rewake.join(name), text).with_context(|| rewake.join(name).display().to_string())?;
        }
        Ok(Self(folder))
    }

    /// Returns a command that runs `command` in a mount namespace of its own, in which these files are in
    /// `/etc/rewake`.
    #[must_use]
    pub fn around(&self, command: &Command) -> Command {
        let mut around = Command::new("unshare");
        let mount = "mount -t overlay overlay -o \"lowerdir=$0:/etc\" /etc && exec \"$@\"";
        around.args(["--mount", "sh", "-c", mount]).arg(self.0.path());
        around.arg(command.get_program()).args(command.get_args());
        let set = |(name, value): (&OsStr, Option<&OsStr>)| Some((name.to_owned(), value?.to_owned()));
        around.envs(command.get_envs().filter_map(set));
        if let Some(folder) = command.get_current_dir() {
            around.current_dir(folder);
        }
        around
    }
}
