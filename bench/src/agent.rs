// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake serve` for one measurement.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use nix::sys::signal::Signal;
use rewake_testkit::process::output;
use rewake_testkit::until;

use crate::processes::{Process, Watch, anonymous_and_shared, check_interrupted, quiet};

/// Time until it answers, and until it has ended.
const LIMIT: Duration = Duration::from_secs(30);
/// Time until its cache has all of an image.
const COMPLETE: Duration = Duration::from_secs(120);
/// Between two questions whether it answers.
const PAUSE: Duration = Duration::from_millis(5);

/// A running agent.
#[derive(Debug)]
pub(crate) struct Agent {
    process: Process,
    rewake: PathBuf,
    socket: PathBuf,
    watch: Watch,
}

impl Agent {
    /// Starts it with these options and variables, and waits until it answers. `work` gets its socket and its
    /// log.
    pub(crate) fn start(
        rewake: &Path,
        work: &Path,
        options: &[&Path],
        variables: &[(String, String)],
    ) -> anyhow::Result<Self> {
        let socket = work.join("agent");
        let mut command = Command::new(rewake);
        command.arg("serve").arg("--socket").arg(&socket).arg("-o").arg(work.join("serve.log"));
        command.args(options).envs(variables.iter().cloned());
        let process = Process::spawn(quiet(&mut command))?;
        let watch = Watch::start(process.pid(), anonymous_and_shared);
        let agent = Self { process, rewake: rewake.to_owned(), socket, watch };
        let until = Instant::now() + LIMIT;
        while agent.says(&["status"]).is_err() {
            ensure!(Instant::now() < until, "rewake serve does not answer within {LIMIT:?}");
            check_interrupted()?;
            std::thread::sleep(PAUSE);
        }
        Ok(agent)
    }

    /// Its socket.
    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    /// Runs a command that asks the agent. Returns what it wrote.
    pub(crate) fn says(&self, arguments: &[&str]) -> anyhow::Result<String> {
        output(Command::new(&self.rewake).args(arguments).arg("--socket").arg(&self.socket))
    }

    /// Waits until its cache has all of an image.
    pub(crate) fn has_image(&self) -> anyhow::Result<()> {
        let done = || self.says(&["cache", "ls"]).is_ok_and(|list| list.contains(" complete "));
        until(COMPLETE, || done().then_some(())).context("the cache has not all of the image")
    }

    /// Ends it. Returns the largest anonymous and shared memory of one of its processes, in bytes.
    pub(crate) fn end(mut self) -> anyhow::Result<u64> {
        self.process.signal(Signal::SIGTERM)?;
        self.process.wait(LIMIT)?;
        Ok(self.watch.reap().largest())
    }
}
