// SPDX-License-Identifier: MIT OR Apache-2.0
//! CRIU with plugins: a target that has a device open and mapped, dumped and restored at once.
//!
//! The device is a loop device: to CRIU everything mapped that is no regular file is one, and no character
//! device of an ordinary machine can be mapped.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use nix::unistd::Pid;
use tempfile::TempDir;

use crate::criu::Criu;
use crate::process::{adopt_orphans, kill_all, output, run, session, tail, until, wait_pid};
use crate::scene::ACT;
use crate::verdict::Verdict;
use rewake_testkit::programs;

/// Time that one CRIU command may take: only so that none hangs for ever.
const LIMIT: Duration = Duration::from_secs(300);
/// Size of the device in bytes.
const DEVICE: u64 = 1 << 20;

/// The plugin that logs CRIU's calls.
///
/// # Errors
/// It is not built.
pub fn observer() -> anyhow::Result<PathBuf> {
    built("examples/libobserver.so")
}

/// The plugin that replaces some mappings of a device by mappings of a file of its own.
///
/// # Errors
/// It is not built.
pub fn placeholders() -> anyhow::Result<PathBuf> {
    built("examples/libplaceholders.so")
}

/// A library with the symbols of a later CRIU.
///
/// # Errors
/// It is not built.
pub fn later_criu() -> anyhow::Result<PathBuf> {
    built("examples/liblater_criu.so")
}

/// A library that makes a program take itself for a user other than root.
///
/// # Errors
/// It is not built.
pub fn not_root() -> anyhow::Result<PathBuf> {
    built("examples/libnot_root.so")
}

/// The plugin for AMD GPUs.
///
/// # Errors
/// It is not built.
pub fn amdgpu() -> anyhow::Result<PathBuf> {
    built("deps/libamdgpu_plugin.so")
}

/// The plugin for lazily restored processes.
///
/// # Errors
/// It is not built.
pub fn rewake() -> anyhow::Result<PathBuf> {
    built("deps/librewake_plugin.so")
}

/// The folder `plugins` below `dir`, made, with that plugin alone.
///
/// # Errors
/// It is not built, or the folder cannot be made.
pub fn rewake_alone(dir: &Path) -> anyhow::Result<PathBuf> {
    let folder = dir.join("plugins");
    fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))?;
    fs::copy(rewake()?, folder.join("rewake_plugin.so")).context("copy rewake_plugin.so")?;
    Ok(folder)
}

fn built(name: &str) -> anyhow::Result<PathBuf> {
    let path = programs::folder()?.join(name);
    ensure!(
        path.exists(),
        "{} is not built: run `cargo test -p rewake-tests` without --test",
        path.display()
    );
    Ok(path)
}

/// A loop device on a file. Dropping it releases the file.
#[derive(Debug)]
pub struct Loop {
    /// `/dev/loopN`
    pub path: PathBuf,
}

impl Loop {
    /// A loop device on a new file in `dir`.
    ///
    /// # Errors
    /// Why this machine has none to give.
    pub fn new(dir: &Path) -> Result<Self, String> {
        let file = dir.join("device");
        let made = File::create(&file).and_then(|file| file.set_len(DEVICE));
        made.map_err(|error| format!("create {}: {error}", file.display()))?;
        let device = output(Command::new("losetup").args(["--find", "--show"]).arg(&file));
        let device = device.map_err(|error| format!("no loop device (package util-linux): {error:#}"))?;
        Ok(Self { path: device.into() })
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        // Its users were killed; losetup marks the device for removal when they have ended.
        let _ = Command::new("losetup").arg("--detach").arg(&self.path).status();
    }
}

/// A target with a device, and the plugins that CRIU loads. Dropping it kills the target.
#[derive(Debug)]
pub struct Rig {
    dir: TempDir,
    criu: Criu,
    scenario: &'static str,
    device: Loop,
    target: Child,
}

impl Rig {
    /// Starts the target `scenario` (`device`, or one without) and waits until it can be dumped.
    ///
    /// # Errors
    /// `Err(reason)` inside when the machine has no loop device.
    pub fn new(
        criu: &Criu,
        scenario: &'static str,
        plugins: &[PathBuf],
    ) -> anyhow::Result<Result<Self, String>> {
        adopt_orphans()?;
        let dir = tempfile::Builder::new().prefix("rewake-plugin-").tempdir().context("make a directory")?;
        for folder in ["images", "files", "plugins"] {
            fs::create_dir(dir.path().join(folder))?;
        }
        for plugin in plugins {
            let name = plugin.file_name().context("a plugin's name")?;
            fs::copy(plugin, dir.path().join("plugins").join(name))?;
        }
        let device = match Loop::new(dir.path()) {
            Ok(device) => device,
            Err(reason) => return Ok(Err(reason)),
        };
        let mut command = Command::new(programs::folder()?.join("target"));
        command.arg(scenario).args(["--mib", "4", "--dir"]).arg(dir.path().join("files"));
        command.arg("--device").arg(&device.path);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let target = command.spawn().context("start the target")?;
        let rig = Self { dir, criu: criu.clone(), scenario, device, target };
        let ready = rig.path("files/ready");
        until(ACT, || ready.exists().then_some(())).with_context(|| rig.written())?;
        Ok(Ok(rig))
    }

    /// The target's process id, before and after.
    #[must_use]
    pub fn pid(&self) -> Pid {
        Pid::from_raw(self.target.id().cast_signed())
    }

    /// `/dev/loopN`
    #[must_use]
    pub fn device(&self) -> &Path {
        &self.device.path
    }

    /// A file below this rig's folder: `images`, `files`, `plugins`, `calls`.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Runs `criu dump` with the plugins and this environment; a target that is dumped is collected.
    ///
    /// # Errors
    /// CRIU failed, with its log.
    pub fn dump(&mut self, environment: &[(&str, &str)]) -> anyhow::Result<()> {
        let mut command = self.criu.command("dump");
        command.arg("-t").arg(self.pid().to_string());
        self.finish(command, "dump", environment)?;
        self.target.wait().context("collect the dumped target")?;
        Ok(())
    }

    /// Runs `criu restore` with the plugins and this environment.
    ///
    /// # Errors
    /// CRIU failed, with its log.
    pub fn restore(&self, environment: &[(&str, &str)]) -> anyhow::Result<()> {
        let mut command = self.criu.command("restore");
        command.arg("-d");
        self.finish(command, "restore", environment)
    }

    fn finish(&self, mut command: Command, act: &str, environment: &[(&str, &str)]) -> anyhow::Result<()> {
        // Removes the log of an earlier attempt.
        let _ = fs::remove_file(self.path("calls"));
        let output = File::create(self.path("output"))?;
        command.arg("-D").arg(self.path("images")).arg("-L").arg(self.path("plugins"));
        command.args(["-v4", "-o", &format!("{act}.log")]);
        command.env("OBSERVER_LOG", self.path("calls")).envs(environment.iter().copied());
        let status = run(command.stdout(output.try_clone()?).stderr(output), LIMIT)?;
        if !status.success() {
            bail!("criu {act}: {status}\n{}", tail(&self.path(&format!("images/{act}.log")), 30));
        }
        Ok(())
    }

    /// Kills the restored process, for another restore.
    pub fn kill_restored(&self) {
        while let members = session(self.pid())
            && !members.is_empty()
        {
            kill_all(&members);
        }
        // A task that CRIU killed before it had a session of its own; otherwise no child is left.
        let _ = wait_pid(self.pid(), LIMIT);
    }

    /// The observer's log since the last command.
    #[must_use]
    pub fn calls(&self) -> Vec<String> {
        let text = fs::read_to_string(self.path("calls")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    /// The lines of a log of CRIU that hold a text.
    #[must_use]
    pub fn log_lines(&self, act: &str, text: &str) -> Vec<String> {
        let log = fs::read(self.path(&format!("images/{act}.log"))).unwrap_or_default();
        let log = String::from_utf8_lossy(&log).into_owned();
        log.lines().filter(|line| line.contains(text)).map(str::to_owned).collect()
    }

    /// Lets the target check everything, and returns how it ended.
    ///
    /// # Errors
    /// The target does not exist.
    pub fn verdict(&self) -> anyhow::Result<Verdict> {
        fs::write(self.path("files/go"), "")?;
        let status = wait_pid(self.pid(), ACT).context("wait for the target")?;
        Ok(Verdict::new(status, &self.written()))
    }

    fn written(&self) -> String {
        fs::read_to_string(self.path("files/verdict")).unwrap_or_default()
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for name in ["calls", "output", "images/dump.log", "images/restore.log", "files/verdict"] {
                eprintln!("{}: {}", self.scenario, tail(&self.path(name), 30));
            }
        }
        self.kill_restored();
    }
}
