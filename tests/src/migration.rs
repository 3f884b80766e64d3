// SPDX-License-Identifier: MIT OR Apache-2.0
//! A target on one of two hosts, and both agents of its migration.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};

use anyhow::{Context, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rewake_testkit::hosts::{DESTINATION, HostPair, entered};
use serde_json::Value;

use crate::Criu;
use crate::process::{PATIENCE, output, tail, until, write_program};
use crate::scene::{ACT, Scene};
use crate::server::rewake;
use crate::sessions::holds_a_socket;

const PORT: &str = "7700";
/// Where `rewake receive` listens.
pub const RECEIVER: &str = "10.77.0.2:7700";

/// A target that waits on the source host.
#[derive(Debug)]
pub struct Migration {
    /// Its hosts.
    pub hosts: HostPair,
    scene: Scene,
    target: Child,
    pid: i32,
    /// Options of both agents.
    security: [Vec<String>; 2],
    /// For `rewake migrate`; none: the scene's.
    source_criu: Option<PathBuf>,
}

/// An agent of a host.
#[derive(Debug)]
pub struct HostAgent {
    child: Option<Child>,
}

impl Migration {
    /// Starts the hosts, and a target on one of them.
    ///
    /// # Errors
    /// The machine or the target is broken.
    pub fn started(criu: &Criu, scenario: &str, mib: usize) -> anyhow::Result<Self> {
        let scene = Scene::planned(criu, scenario, mib)?;
        let hosts = HostPair::start(&scene.files())?;
        let mut command = hosts.source.alone(&scene.target()?);
        let target = command.spawn().context("start the target")?;
        until(ACT, || scene.files().join("ready").exists().then_some(()))
            .context("the target is not ready")?;
        let first = hosts.source.named(scene.name()).into_iter().min().context("the target has ended")?;
        let pid = hosts.source.own_number(first)?;
        let security = [(); 2].map(|()| vec!["--insecure".to_owned()]);
        Ok(Self { hosts, scene, target, pid, security, source_criu: None })
    }

    /// The folder of the target's files, which both hosts share.
    #[must_use]
    pub fn files(&self) -> PathBuf {
        self.scene.files()
    }

    /// The target's number on its host.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Has `rewake migrate` use this CRIU.
    pub fn dump_by(&mut self, criu: PathBuf) {
        self.source_criu = Some(criu);
    }

    /// Has `rewake migrate` use these options instead of `--insecure`.
    pub fn secure_migrate(&mut self, options: Vec<String>) {
        self.security[0] = options;
    }

    /// Has `rewake receive` use these options instead of `--insecure`.
    pub fn secure_receive(&mut self, options: Vec<String>) {
        self.security[1] = options;
    }

    /// The cgroup of the target on the source.
    ///
    /// # Errors
    /// It has ended.
    pub fn source_cgroup(&self) -> anyhow::Result<String> {
        let pid =
            self.hosts.source.named(self.scene.name()).into_iter().min().context("the target has ended")?;
        Ok(fs::read_to_string(format!("/proc/{pid}/cgroup"))?)
    }

    /// Starts `rewake receive` on the destination, and waits until it listens.
    ///
    /// # Errors
    /// It does not.
    pub fn receive(&self, criu: &Path) -> anyhow::Result<HostAgent> {
        let mut command = self.hosts.destination.command(rewake()?);
        command.args(["receive", "--address", DESTINATION, "--port", PORT]).args(&self.security[1]);
        command.arg("--criu").arg(criu);
        let log = self.scene.files().join("receive.log");
        let file = fs::File::create(&log)?;
        let child = command.stdout(file.try_clone()?).stderr(file).spawn().context("start rewake receive")?;
        let listens = || fs::read_to_string(&log).is_ok_and(|text| text.contains("listening on"));
        until(PATIENCE, || listens().then_some(())).context("rewake receive does not listen")?;
        Ok(HostAgent { child: Some(child) })
    }

    /// What `rewake receive` has written.
    #[must_use]
    pub fn received(&self) -> String {
        tail(&self.scene.files().join("receive.log"), 20)
    }

    /// Starts `rewake migrate` on the source.
    ///
    /// # Errors
    /// No program to start.
    pub fn migrate(&self) -> anyhow::Result<HostAgent> {
        self.migrate_to(RECEIVER)
    }

    /// Starts `rewake migrate` on the source with another destination.
    ///
    /// # Errors
    /// No program to start.
    pub fn migrate_to(&self, destination: &str) -> anyhow::Result<HostAgent> {
        self.migrate_with(destination, &[])
    }

    /// Starts `rewake migrate` on the source with further options.
    ///
    /// # Errors
    /// No program to start.
    pub fn migrate_with(&self, destination: &str, options: &[&str]) -> anyhow::Result<HostAgent> {
        let mut command = self.hosts.source.command(rewake()?);
        command.args(["migrate", "-t", &self.pid.to_string(), "--to", destination]);
        let criu = self.source_criu.as_deref().unwrap_or_else(|| self.scene.criu().as_ref().as_ref());
        command.args(&self.security[0]).arg("--criu").arg(criu).args(options);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        Ok(HostAgent { child: Some(command.spawn().context("start rewake migrate")?) })
    }

    /// Starts a process on the destination that has the target's number.
    ///
    /// # Errors
    /// It has another one.
    pub fn take_pid_at_destination(&self) -> anyhow::Result<()> {
        let before = self.pid - 1;
        let take =
            format!("echo {before} > /proc/sys/kernel/ns_last_pid; sleep 1000 >/dev/null 2>&1 & echo $!");
        let number = output(self.hosts.destination.command("sh").args(["-c", &take]))?;
        ensure!(number.trim() == self.pid.to_string(), "{number:?}, expected {}", self.pid);
        Ok(())
    }

    /// A CRIU whose restores wait until [`Migration::proceed`].
    ///
    /// # Errors
    /// It cannot be written.
    pub fn criu_that_waits(&self) -> anyhow::Result<PathBuf> {
        self.criu_with(
            "criu-that-waits",
            "if [ \"$1\" = restore ]; then\n  touch $files/restoring\n  \
             until [ -e $files/proceed ]; do sleep 0.01; done\nfi\nexec $real \"$@\"",
        )
    }

    /// A shell script in CRIU's place: `$real` is CRIU, `$files` the folder of the scene's files.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn criu_with(&self, name: &str, script: &str) -> anyhow::Result<PathBuf> {
        let program = self.scene.files().join(name);
        let files = self.scene.files().display().to_string();
        let real = Path::new(self.scene.criu().as_ref()).display().to_string();
        write_program(&program, &format!("#!/bin/sh\nfiles={files}\nreal={real}\n{script}\n"))?;
        Ok(program)
    }

    /// Waits until the restore waits: the tree is frozen then, and GRANT was not asked for.
    ///
    /// # Errors
    /// That does not happen.
    pub fn restoring(&self) -> anyhow::Result<()> {
        let file = self.scene.files().join("restoring");
        until(ACT, || file.exists().then_some(())).context("the restore does not begin")
    }

    /// Lets the restore of [`Migration::criu_that_waits`] begin.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn proceed(&self) -> anyhow::Result<()> {
        fs::write(self.scene.files().join("proceed"), "").context("say proceed")
    }

    /// The record of the source; none before a migration and after it.
    #[must_use]
    pub fn source_record(&self) -> Option<Value> {
        let folder = self.hosts.source.path("/run/rewake/migrations");
        let folder = fs::read_dir(folder).ok()?.next()?.ok()?.path();
        serde_json::from_slice(&fs::read(folder.join("record")).ok()?).ok()
    }

    /// Whether the source has written GRANT.
    #[must_use]
    pub fn is_granted(&self) -> bool {
        self.source_record().is_some_and(|record| record["source"]["record"] == "granted")
    }

    /// Whether the destination has written RELEASE.
    #[must_use]
    pub fn is_released(&self) -> bool {
        self.destination_wrote("released")
    }

    /// Whether the destination has written that its program does not run there, after it was released.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.destination_wrote("\"has_ended\":true")
    }

    fn destination_wrote(&self, words: &str) -> bool {
        let folder = self.hosts.destination.path("/run/rewake/migrations");
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        entries.into_iter().any(|entry| {
            let text = fs::read(entry.path().join("record")).unwrap_or_default();
            String::from_utf8_lossy(&text).contains(words)
        })
    }

    /// The number of the target's processes on the destination that have a session's fd store parked.
    #[must_use]
    pub fn parked(&self) -> usize {
        self.hosts.destination.named(self.scene.name()).into_iter().filter(|pid| holds_a_socket(*pid)).count()
    }

    /// Lets the target act, and then end.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn act(&self) -> anyhow::Result<()> {
        self.scene.go()?;
        self.scene.stop()
    }

    /// The cgroup that the source's agent uses for the tree; none before a migration and after it.
    #[must_use]
    pub fn tree_cgroup(&self) -> Option<PathBuf> {
        let record = self.source_record()?;
        record["source"]["cgroup"]["path"].as_str().map(PathBuf::from)
    }

    /// Whether the source's tree is frozen.
    #[must_use]
    pub fn is_frozen(&self) -> bool {
        let path = self.tree_cgroup().unwrap_or_default();
        let events = fs::read_to_string(path.join("cgroup.events")).unwrap_or_default();
        events.lines().any(|line| line == "frozen 1")
    }

    /// The number of the target's processes on the source and on the destination.
    #[must_use]
    pub fn processes(&self) -> (usize, usize) {
        (
            self.hosts.source.named(self.scene.name()).len(),
            self.hosts.destination.named(self.scene.name()).len(),
        )
    }

    /// Whether the target's processes on the destination miss no memory: no range of theirs has a
    /// userfaultfd.
    #[must_use]
    pub fn is_resident(&self) -> bool {
        let targets = self.hosts.destination.named(self.scene.name());
        let maps = |pid: &Pid| fs::read_to_string(format!("/proc/{pid}/smaps"));
        !targets.is_empty() && targets.iter().all(|pid| maps(pid).is_ok_and(|maps| !maps.contains(" um ")))
    }

    /// Lets the target act, and waits until it has checked its memory.
    ///
    /// # Errors
    /// It saw wrong bytes, or did not end.
    pub fn expect_right_bytes(&self) -> anyhow::Result<()> {
        self.scene.go()?;
        self.scene.stop()?;
        let is_done = || self.scene.written().lines().last().is_some_and(|line| line == "OK");
        until(ACT, || is_done().then_some(()))
            .with_context(|| format!("the target: {:?}\n{}", self.scene.written(), self.received()))
    }

    /// Lets the target act, again and again, from now on.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn go(&self) -> anyhow::Result<()> {
        self.scene.go()
    }

    /// Runs `rewake migrate --abort` on the source.
    ///
    /// # Errors
    /// It does not end.
    pub fn abort(&self) -> anyhow::Result<Output> {
        let mut command = self.hosts.source.command(rewake()?);
        command.args(["migrate", "--abort", "-t", &self.pid.to_string()]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        HostAgent { child: Some(command.spawn()?) }.ended()
    }

    /// What the target has written.
    #[must_use]
    pub fn written(&self) -> String {
        self.scene.written()
    }
}

impl Drop for Migration {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.received());
        }
        let _ = self.target.kill();
        let _ = self.target.wait();
    }
}

impl HostAgent {
    /// Its process.
    ///
    /// # Errors
    /// It has ended.
    pub fn pid(&self) -> anyhow::Result<Pid> {
        entered(self.child.as_ref().context("it was collected")?)
    }

    /// Sends it a signal.
    ///
    /// # Errors
    /// It has ended.
    pub fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        let child = self.child.as_ref().context("it was collected")?;
        kill(entered(child)?, signal).context("a signal to an agent")
    }

    /// Whether it has ended.
    pub fn has_ended(&mut self) -> bool {
        self.child.as_mut().is_none_or(|child| child.try_wait().is_ok_and(|status| status.is_some()))
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// It does not end in time.
    pub fn ended(&mut self) -> anyhow::Result<Output> {
        let mut child = self.child.take().context("it was collected")?;
        let ended = until(PATIENCE, || child.try_wait().ok().flatten());
        if ended.is_none() {
            let _ = entered(&child).map(|pid| kill(pid, Signal::SIGKILL));
        }
        let output = child.wait_with_output()?;
        ensure!(ended.is_some(), "an agent did not end: {}", String::from_utf8_lossy(&output.stderr));
        Ok(output)
    }
}

impl Drop for HostAgent {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = entered(&child).map(|pid| kill(pid, Signal::SIGKILL));
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
