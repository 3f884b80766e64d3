// SPDX-License-Identifier: MIT OR Apache-2.0
//! The CRIU commands that the tests drive.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use nix::unistd::Pid;

use crate::process::{output, run, tail};

/// Time that one CRIU command may take: only so that none hangs for ever.
const LIMIT: Duration = Duration::from_secs(300);

/// One CRIU program.
#[derive(Clone, Debug)]
pub struct Criu {
    path: PathBuf,
}

impl AsRef<OsStr> for Criu {
    fn as_ref(&self) -> &OsStr {
        self.path.as_os_str()
    }
}

impl Criu {
    /// The CRIU of the environment variable `CRIU`, or `criu` from the path.
    ///
    /// # Errors
    /// Why it cannot be used here.
    pub fn main() -> Result<Self, String> {
        Self::probed(env::var_os("CRIU").unwrap_or_else(|| "criu".into()))
    }

    /// A second version of CRIU, of the environment variable `CRIU_ALT`.
    ///
    /// # Errors
    /// Why it cannot be used here.
    pub fn alternative() -> Result<Self, String> {
        Self::probed(env::var_os("CRIU_ALT").ok_or("CRIU_ALT does not name a second CRIU")?)
    }

    /// Both.
    pub fn both() -> [Result<Self, String>; 2] {
        [Self::main(), Self::alternative()]
    }

    fn probed(path: OsString) -> Result<Self, String> {
        if !nix::unistd::geteuid().is_root() {
            return Err("CRIU needs root".to_owned());
        }
        let criu = Self { path: path.into() };
        let mut command = criu.command("check");
        let status = run(command.stdout(Stdio::null()).stderr(Stdio::null()), LIMIT);
        match status {
            Ok(status) if status.success() => Ok(criu),
            other => Err(format!("{} check: {other:?}", criu.path.display())),
        }
    }

    /// What `criu --version` says.
    ///
    /// # Errors
    /// It cannot be run.
    pub fn version(&self) -> anyhow::Result<String> {
        let text = output(Command::new(&self.path).arg("--version"))?;
        Ok(text.lines().next().unwrap_or_default().to_owned())
    }

    /// A command of this CRIU.
    #[must_use]
    pub fn command(&self, act: &str) -> Command {
        let mut command = Command::new(&self.path);
        command.arg(act).stdin(Stdio::null());
        command
    }

    /// Dumps the tree below `pid` into `images`; the tree ends.
    ///
    /// # Errors
    /// CRIU failed; with the end of its log.
    pub fn dump(&self, pid: Pid, images: &Path) -> anyhow::Result<()> {
        self.dump_with(pid, images, &[])
    }

    /// [`Criu::dump`] with further options.
    ///
    /// # Errors
    /// CRIU failed; with the end of its log.
    pub fn dump_with(&self, pid: Pid, images: &Path, options: &[&OsStr]) -> anyhow::Result<()> {
        let mut command = self.command("dump");
        command.arg("-t").arg(pid.to_string()).arg("-D").arg(images).args(["-v4", "-o", "dump.log"]);
        command.args(options);
        self.finish(command, images, "dump")
    }

    /// Restores from `images` with lazy pages and returns when the tree runs; the page server's socket is in
    /// `work`.
    ///
    /// # Errors
    /// CRIU failed; with the end of its log.
    pub fn restore(&self, images: &Path, work: &Path) -> anyhow::Result<()> {
        self.restore_with(images, work, &[])
    }

    /// [`Criu::restore`] with further options.
    ///
    /// # Errors
    /// CRIU failed; with the end of its log.
    pub fn restore_with(&self, images: &Path, work: &Path, options: &[&OsStr]) -> anyhow::Result<()> {
        let mut command = self.command("restore");
        command.arg("-d").arg("-D").arg(images).arg("-W").arg(work);
        command.args(["--lazy-pages", "-v4", "-o", "restore.log"]).args(options);
        self.finish(command, work, "restore")
    }

    fn finish(&self, mut command: Command, logs: &Path, act: &str) -> anyhow::Result<()> {
        let output = logs.join(format!("{act}.out"));
        let file = File::create(&output).with_context(|| format!("create {}", output.display()))?;
        command.stdout(file.try_clone()?).stderr(file);
        let log = logs.join(format!("{act}.log"));
        match run(&mut command, LIMIT) {
            Ok(status) if status.success() => Ok(()),
            Ok(status) => bail!("criu {act}: {status}\n{}{}", tail(&log, 20), tail(&output, 10)),
            Err(error) => Err(error.context(format!("criu {act}\n{}", tail(&log, 20)))),
        }
    }

    /// Checks that two CRIUs are of different versions.
    ///
    /// # Errors
    /// They are the same.
    pub fn ensure_differs(&self, other: &Self) -> anyhow::Result<()> {
        let (one, two) = (self.version()?, other.version()?);
        ensure!(one != two, "CRIU and CRIU_ALT are both {one}");
        Ok(())
    }
}
