// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake serve`, which has streamers for those who ask it.

use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tempfile::TempDir;

use crate::dumped::{soon, streamer_of};
use crate::streamer::{children, program};

/// One with a socket and a process group of its own; killed when dropped, with its worker.
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
        let mut command = Command::new(program().unwrap());
        command
            .arg("serve")
            .arg("--socket")
            .arg(folder.path().join("socket"))
            .arg("-v4")
            .stdin(Stdio::null())
            .process_group(0);
        let daemon = Self { child: command.spawn().unwrap(), folder };
        assert!(soon(|| daemon.answers().is_some()), "rewake serve does not answer");
        daemon
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

    /// Its supervisor's number.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its worker's.
    ///
    /// # Panics
    /// It says nothing.
    #[must_use]
    pub fn worker(&self) -> u32 {
        u32::try_from(self.status()["daemon"]["worker_pid"].as_u64().unwrap()).unwrap()
    }

    /// The supervisor and the workers of the one streamer that it has.
    ///
    /// # Panics
    /// There is none.
    #[must_use]
    pub fn streamer(&self) -> (u32, Vec<u32>) {
        streamer_of(self.worker())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let workers = children(self.child.id());
        // Ended by a test, maybe.
        let _ = self.child.kill();
        let _ = self.child.wait();
        for worker in workers {
            let _ = kill(Pid::from_raw(worker.cast_signed()), Signal::SIGKILL);
        }
    }
}
