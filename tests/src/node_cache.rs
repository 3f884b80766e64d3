// SPDX-License-Identifier: MIT OR Apache-2.0
//! A store with the image of a scene, and a node agent that has a cache.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use anyhow::{Context as _, ensure};
use nix::unistd::Pid;
use rewake_testkit::process::{PATIENCE, children, until};
use rewake_testkit::programs::rewake;
use tempfile::TempDir;

use crate::criu::Criu;
use crate::daemon::{Daemon, DaemonOptions};
use crate::export::seal;
use crate::scene::Scene;

/// A scene whose image is in a store alone, and an agent.
#[derive(Debug)]
pub struct StoredScene {
    /// The dumped target.
    pub scene: Scene,
    /// The agent.
    pub daemon: Daemon,
    /// The image in the store.
    pub url: String,
    /// The image's id.
    pub id: String,
    /// The bytes of the image's files.
    pub bytes: u64,
    folder: TempDir,
}

impl StoredScene {
    /// Dumps a target and pushes its image into a directory.
    ///
    /// # Errors
    /// The target, CRIU, the push or the agent failed.
    pub fn new(criu: &Criu, scenario: &str, mib: usize) -> anyhow::Result<Self> {
        let folder = tempfile::Builder::new().prefix("rewake-cache-").tempdir()?;
        let url = format!("file://{}/store/web", folder.path().display());
        Self::with(criu, scenario, mib, (folder, url), |command| command, DaemonOptions::default())
    }

    /// [`StoredScene::new`], with the store of a URL, which `push` writes to.
    ///
    /// # Errors
    /// As for [`StoredScene::new`].
    pub fn with(
        criu: &Criu,
        scenario: &str,
        mib: usize,
        (folder, url): (TempDir, String),
        push: impl FnOnce(Command) -> Command,
        mut options: DaemonOptions,
    ) -> anyhow::Result<Self> {
        let scene = Scene::dumped(criu, scenario, mib)?;
        seal(&scene)?;
        let bytes = fs::read_dir(scene.images())?.flatten();
        let bytes = bytes.map(|entry| entry.metadata().map_or(0, |found| found.len())).sum();
        let mut command = Command::new(rewake()?);
        command.arg("push").arg(scene.images()).arg(&url);
        let pushed = push(command).output().context("rewake push")?;
        ensure!(pushed.status.success(), "{}", said(&pushed));
        let id = id_of(&scene)?;
        fs::remove_dir_all(scene.images())?;
        options.arguments.extend([OsString::from("--cache"), folder.path().join("cache").into()]);
        let daemon = Daemon::with(options)?;
        Ok(Self { scene, daemon, url, id, bytes, folder })
    }

    /// The directory of the image in the cache.
    #[must_use]
    pub fn cached(&self) -> PathBuf {
        let cache = self.folder.path().join("cache");
        let names = fs::read_dir(&cache).into_iter().flatten().flatten().map(|entry| entry.file_name());
        let mut names = names.filter_map(|name| name.into_string().ok());
        let name = names.find(|name| name.starts_with(&self.id) && name.len() == 64);
        cache.join(name.unwrap_or_else(|| self.id.clone()))
    }

    /// A folder next to the store and the cache.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// `rewake restore URL` with these options, in the scene's work directory; not yet started.
    ///
    /// # Errors
    /// No program to start.
    pub fn restore(&self, options: &[&str]) -> anyhow::Result<Command> {
        let mut command = self.replica(options)?;
        command.arg("-W").arg(self.scene.work()).args(["--", "-d", "-v4"]);
        Ok(command)
    }

    /// The same with a work directory of its own, and without options for CRIU.
    ///
    /// # Errors
    /// No program to start.
    pub fn replica(&self, options: &[&str]) -> anyhow::Result<Command> {
        let mut command = Command::new(rewake()?);
        command.args(["restore", &self.url, "--json", "--socket"]).arg(self.daemon.socket()).args(options);
        command.env("CRIU", self.scene.criu());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Ok(command)
    }

    /// Runs `rewake cache`. Returns whether it succeeded, and what it wrote.
    ///
    /// # Errors
    /// No program to start.
    pub fn cache(&self, arguments: &[&str]) -> anyhow::Result<(bool, String)> {
        let mut command = Command::new(rewake()?);
        command.arg("cache").args(arguments).arg("--socket").arg(self.daemon.socket());
        let output = command.stdin(Stdio::null()).output().context("rewake cache")?;
        Ok((output.status.success(), said(&output)))
    }

    /// Waits until the cache has all of the image.
    ///
    /// # Errors
    /// It has not, with the agent's log.
    pub fn is_complete(&self) -> anyhow::Result<()> {
        let complete = until(PATIENCE, || self.cached().join("rewake-manifest").exists().then_some(()));
        complete.with_context(|| format!("the image is not complete\n{}", self.daemon.log()))
    }

    /// The fetchers of the agent.
    #[must_use]
    pub fn fetchers(&self) -> Vec<Pid> {
        let is_fetcher = |pid: &Pid| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            line.ends_with(b"\0fetcher\0")
        };
        children(self.daemon.pid()).into_iter().filter(is_fetcher).collect()
    }
}

/// What a command wrote.
#[must_use]
pub fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr].concat()).into_owned()
}

/// The id of a scene's sealed image.
fn id_of(scene: &Scene) -> anyhow::Result<String> {
    let output = Command::new(rewake()?).arg("verify").arg(scene.images()).output()?;
    let text = said(&output);
    let is_id = |word: &&str| word.len() == 64 && word.bytes().all(|byte| byte.is_ascii_hexdigit());
    let id = text.split_whitespace().find(is_id).map(str::to_owned);
    id.with_context(|| format!("an image id in {text}"))
}
