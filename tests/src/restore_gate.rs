// SPDX-License-Identifier: MIT OR Apache-2.0
//! Restores that wait for the test at a known step.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use anyhow::Context as _;

use crate::criu::Criu;
use crate::process::{until, write_program};
use crate::scene::{ACT, Scene};

/// A program in CRIU's place: a shell script that ends by running the real one, `$criu`.
///
/// # Errors
/// It cannot be written.
pub fn script(criu: &Criu, path: PathBuf, body: &str) -> anyhow::Result<PathBuf> {
    let program = criu.command("").get_program().to_owned();
    let text = format!("#!/bin/sh\ncriu={}\n{body}\n", program.display());
    write_program(&path, &text)?;
    Ok(path)
}

/// A CRIU that begins when the file `starter` exists.
///
/// # Errors
/// It cannot be written.
pub fn latecomer(criu: &Criu, folder: &Path, starter: &Path) -> anyhow::Result<PathBuf> {
    let wait = format!("while [ ! -e {} ]; do sleep 0.01; done", starter.display());
    script(criu, folder.join("criu"), &format!("{wait}\nexec $criu \"$@\""))
}

/// A step between "all tasks are restored" and "they may run", where CRIU waits.
#[derive(Debug)]
pub struct Gate {
    folder: PathBuf,
}

impl Gate {
    /// A closed one, with its files in a new folder at `path`.
    ///
    /// # Errors
    /// They cannot be written.
    pub fn closed(path: PathBuf) -> anyhow::Result<Self> {
        let gate = Self { folder: path };
        fs::create_dir_all(gate.waiting()).with_context(|| format!("create {}", gate.folder.display()))?;
        let text = format!(
            "#!/bin/sh\n[ \"$CRTOOLS_SCRIPT_ACTION\" = post-restore ] || exit 0\n\
             mktemp -p {} || exit 1\nwhile [ ! -e {} ]; do sleep 0.01; done\n",
            gate.waiting().display(),
            gate.file().display()
        );
        write_program(&gate.script(), &text)?;
        Ok(gate)
    }

    /// For CRIU's `--action-script`.
    #[must_use]
    pub fn script(&self) -> PathBuf {
        self.folder.join("wait")
    }

    /// Restores a scene, and does something when CRIU waits at this gate.
    ///
    /// # Errors
    /// CRIU failed.
    ///
    /// # Panics
    /// CRIU does not come to the gate.
    pub fn restore_and(&self, scene: &Scene, act: impl FnOnce()) -> anyhow::Result<()> {
        let script = self.script();
        let options = ["--action-script".as_ref(), script.as_os_str()];
        thread::scope(|scope| {
            let restore = scope.spawn(|| scene.restore_with(&options));
            assert!(self.is_reached_by(1, ACT), "{}", scene.logs());
            act();
            self.open()?;
            restore.join().expect("the restore's thread")
        })
    }

    /// Waits until `count` restores wait: false when that takes longer than `limit`.
    #[must_use]
    pub fn is_reached_by(&self, count: usize, limit: Duration) -> bool {
        let waiting = || fs::read_dir(self.waiting()).map_or(0, Iterator::count);
        until(limit, || (waiting() == count).then_some(())).is_some()
    }

    /// Lets CRIU notify the streamer that the restore has finished.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn open(&self) -> anyhow::Result<()> {
        fs::write(self.file(), "").context("open the gate")
    }

    fn waiting(&self) -> PathBuf {
        self.folder.join("waiting")
    }

    fn file(&self) -> PathBuf {
        self.folder.join("open")
    }
}
