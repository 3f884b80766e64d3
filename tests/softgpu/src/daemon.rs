// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake serve`, which has streamers for those who ask it.

use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};

use serde_json::Value;
use tempfile::TempDir;

use crate::dumped::{soon, streamer_of};
use crate::streamer::program;

/// One with a socket and a process group of its own. It is killed when dropped; its streamers run on.
#[derive(Debug)]
pub struct Daemon {
    folder: TempDir,
    child: Child,
}

impl Daemon {
    /// Starts it; it answers when this returns.
    ///
    /// # Panics
    /// It does not.
    #[must_use]
    pub fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let daemon = Self { child: spawn(&folder), folder };
        assert!(soon(|| daemon.answers().is_some()), "rewake serve does not answer");
        daemon
    }

    /// Kills it, and starts another in its place.
    ///
    /// # Panics
    /// That does not answer.
    pub fn replace(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.child = spawn(&self.folder);
        assert!(soon(|| self.answers().is_some()), "rewake serve does not answer");
    }

    /// Its control socket.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    /// What it says of itself.
    ///
    /// # Panics
    /// It says nothing.
    #[must_use]
    pub fn status(&self) -> Value {
        self.answers().expect("an answer of rewake serve")
    }

    fn answers(&self) -> Option<Value> {
        let mut status = Command::new(program().unwrap());
        let said = status.args(["status", "--json", "--socket"]).arg(self.socket()).output().unwrap();
        serde_json::from_slice(&said.stdout).ok()
    }

    /// Waits for its end.
    ///
    /// # Panics
    /// It does not end.
    #[must_use]
    pub fn end(&mut self) -> ExitStatus {
        assert!(soon(|| self.has_ended()), "rewake serve does not end");
        self.child.wait().unwrap()
    }

    /// Whether it has ended.
    ///
    /// # Panics
    /// It cannot be looked at.
    #[must_use]
    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// Its number.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The supervisor and the workers of the one streamer that it has.
    ///
    /// # Panics
    /// There is none.
    #[must_use]
    pub fn streamer(&self) -> (u32, Vec<u32>) {
        streamer_of(self.pid())
    }
}

fn spawn(folder: &TempDir) -> Child {
    let mut command = Command::new(program().unwrap());
    command.arg("serve").arg("--socket").arg(folder.path().join("socket")).arg("-v4");
    command.stdin(Stdio::null()).process_group(0).spawn().unwrap()
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Ended by a test, maybe.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
