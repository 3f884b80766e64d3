// SPDX-License-Identifier: MIT OR Apache-2.0
//! Printed commands, as two users run them at the terminals of their hosts: [`recipe`] finds them.

use std::env;
use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};

use anyhow::{Context as _, ensure};
use nix::sys::signal::{Signal, kill};
pub use rewake_testkit::printed::{PrintedBlock, PrintedCommand, recipe};

use crate::Criu;
use crate::migration::Migration;
use crate::process::{PATIENCE, until, wait_child, write_program};
use crate::server::rewake;

/// Where host A is reached.
pub const HOST_A: &str = "10.77.0.1";
/// Where host B is reached.
pub const HOST_B: &str = rewake_testkit::hosts::DESTINATION;

/// Two hosts, with a folder on each in which a user types commands. A program to dump runs on host A.
#[derive(Debug)]
pub struct Terminals {
    /// The program, and the hosts: A is the source.
    pub migration: Migration,
    folder: PathBuf,
    path: OsString,
    /// The number of commands.
    typed: u32,
}

/// A command that runs.
#[derive(Debug)]
pub struct Typed {
    line: String,
    child: Child,
    output: PathBuf,
}

impl Terminals {
    /// Starts the hosts and the program, with `rewake` and `criu` on the path of both users.
    ///
    /// # Errors
    /// The machine or the program is broken.
    pub fn open(criu: &Criu, mib: usize) -> anyhow::Result<Self> {
        let migration = Migration::started(criu, "random", mib)?;
        let folder = migration.files().join("terminals");
        for name in ["tools", "hostA", "hostB"] {
            fs::create_dir_all(folder.join(name))?;
        }
        for (name, program) in [("rewake", rewake()?), ("criu", PathBuf::from(criu.as_ref()))] {
            let program = program.canonicalize().with_context(|| format!("finding {name}"))?;
            let script = format!("#!/bin/sh\nexec {} \"$@\"\n", program.display());
            write_program(&folder.join("tools").join(name), &script)?;
        }
        let mut path = folder.join("tools").into_os_string();
        path.push(":");
        path.push(env::var_os("PATH").unwrap_or_default());
        Ok(Self { migration, folder, path, typed: 0 })
    }

    /// The folder of a host's user.
    #[must_use]
    pub fn folder(&self, host: &str) -> PathBuf {
        self.folder.join(if host == "hostB" { "hostB" } else { "hostA" })
    }

    /// Makes certificates by the printed commands. Each `--tls` that is typed later has the options for its
    /// host's.
    ///
    /// # Errors
    /// OpenSSL fails.
    pub fn make_certificates(&mut self) -> anyhow::Result<()> {
        let block = recipe("certificates", &[("192.0.2.1", HOST_A), ("192.0.2.2", HOST_B)]);
        let made = self.start("hostA", &block.text)?.ended()?;
        ensure!(made.success(), "{}: {made}", block.place);
        Ok(())
    }

    /// Types a printed command at its host's terminal.
    ///
    /// # Errors
    /// There is no shell.
    pub fn type_in(&mut self, command: &PrintedCommand) -> anyhow::Result<Typed> {
        let (keys, name) = (self.folder("hostA"), if command.host == "hostB" { "host-b" } else { "host-a" });
        let keys = keys.display();
        let files = format!(
            "--tls-cacert {keys}/cacert.pem --tls-cert {keys}/{name}.pem --tls-key {keys}/{name}-key.pem"
        );
        let words = command.line.split_whitespace();
        let words =
            words.map(|word| if word == "--tls" { format!("--tls {files}") } else { word.to_owned() });
        self.start(&command.host, &words.collect::<Vec<_>>().join(" "))
    }

    /// Types a printed command, and waits until it has ended with success.
    ///
    /// # Errors
    /// It fails.
    pub fn run(&mut self, command: &PrintedCommand) -> anyhow::Result<String> {
        let mut typed = self.type_in(command)?;
        let status = typed.ended()?;
        ensure!(status.success(), "{}: {status}: {}", typed.line, typed.text());
        Ok(typed.text())
    }

    /// Kills all programs of a name on both hosts, and waits for their end.
    ///
    /// # Errors
    /// They do not end.
    pub fn end(&self, name: &str) -> anyhow::Result<()> {
        let hosts = &self.migration.hosts;
        let all = || [hosts.source.named(name), hosts.destination.named(name)].concat();
        for pid in all() {
            // It may have ended.
            let _ = kill(pid, Signal::SIGKILL);
        }
        until(PATIENCE, || all().is_empty().then_some(())).with_context(|| format!("{name} does not end"))
    }

    fn start(&mut self, host: &str, line: &str) -> anyhow::Result<Typed> {
        let folder = self.folder(host);
        let place =
            if host == "hostB" { &self.migration.hosts.destination } else { &self.migration.hosts.source };
        let output = self.folder.join(format!("output-{}", self.typed));
        self.typed += 1;
        let file = File::create(&output)?;
        // With a session of its own: CRIU dumps no program of another one.
        let mut command = place.command("setsid");
        command.args(["--wait", "bash", "-c", &format!("cd {} && {line}", folder.display())]);
        command.env("PATH", &self.path).stdout(file.try_clone()?).stderr(file).stdin(Stdio::null());
        let child = command.spawn().with_context(|| line.to_owned())?;
        Ok(Typed { line: line.to_owned(), child, output })
    }

    /// Waits until a port of a host is listened on.
    ///
    /// # Errors
    /// It is not, or the command that should has ended.
    pub fn listens(&self, typed: &mut Typed, host: &str, port: u16) -> anyhow::Result<()> {
        let place =
            if host == "hostB" { &self.migration.hosts.destination } else { &self.migration.hosts.source };
        let listens = || {
            let mut look = place.command("grep");
            look.args(["-q", &format!(":{port:04X} [0-9A-F:]* 0A"), "/proc/net/tcp"]);
            look.status().is_ok_and(|status| status.success()).then_some(())
        };
        typed.waits_for(&format!("port {port}"), listens)
    }
}

impl Typed {
    /// Waits until the command has done something, and runs on.
    ///
    /// # Errors
    /// It has ended, or does not do it.
    pub fn waits_for(&mut self, what: &str, mut is_done: impl FnMut() -> Option<()>) -> anyhow::Result<()> {
        let child = &mut self.child;
        let done = until(PATIENCE, || match is_done() {
            Some(()) => Some(true),
            None => matches!(child.try_wait(), Ok(Some(_))).then_some(false),
        });
        ensure!(done == Some(true), "{}: no {what}: {}", self.line, self.text());
        Ok(())
    }

    /// Waits for a file that the command makes.
    ///
    /// # Errors
    /// As [`Typed::waits_for`].
    pub fn makes(&mut self, file: &Path) -> anyhow::Result<()> {
        self.waits_for(&file.display().to_string(), || file.exists().then_some(()))
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// It does not end.
    pub fn ended(&mut self) -> anyhow::Result<ExitStatus> {
        wait_child(&mut self.child, PATIENCE)
            .with_context(|| format!("{} does not end: {}", self.line, self.text()))
    }

    /// What it has printed.
    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.output).unwrap_or_default()).into_owned()
    }
}

impl Drop for Typed {
    fn drop(&mut self) {
        // What it has started ends with its host.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
