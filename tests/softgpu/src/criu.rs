// SPDX-License-Identifier: MIT OR Apache-2.0
//! The real CRIU, in two versions, with a plugin for GPUs: this project's, or the stock one that is written
//! in C.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, bail, ensure};
use rewake_amdgpu_uapi::criu::queues::QueueSupport;
use rewake_amdgpu_uapi::topology::Topology;
use rewake_testkit::process::{last_lines, output};
use rewake_testkit::programs::{beside, rewake};
use rewake_testkit::soon;

use crate::criu_leftovers::doing;

/// Where `cargo xtask vm` puts the plugin that it builds from Debian's source of CRIU.
const STOCK_PLUGIN: &str = "/usr/local/lib/criu";
/// Where `cargo xtask plugin` puts this project's plugin, beside the test programs.
const OWN_PLUGIN: &str = "criu-plugin";
/// What our plugin logs when it waits, after the number of pages.
pub const WAITS: &str = " missing pages of its memory";
/// Lines of CRIU's log that an error quotes.
const QUOTED: usize = 12;

/// Which plugin CRIU loads. Both read and write the same images.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plugin {
    /// This project's; `REWAKE_PLUGIN` names its folder, otherwise beside the tests.
    Ours,
    /// CRIU's own, of 4.2; `STOCK_PLUGIN` names its folder.
    Stock,
}

/// Which CRIU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    /// 4.2; `CRIU`, or `criu` on the path.
    V4_2,
    /// 4.1; `CRIU_4_1`, or `criu-4.1` on the path.
    V4_1,
}

/// CRIU with one plugin and one folder of images; several may share the folder.
#[derive(Debug, Clone)]
pub struct Criu {
    program: PathBuf,
    plugin: PathBuf,
    images: PathBuf,
    environment: Vec<(String, String)>,
}

impl Criu {
    /// Makes the folder `images` if it does not exist.
    ///
    /// # Errors
    /// No plugin, or the folder cannot be made.
    pub fn with(plugin: Plugin, version: Version, images: &Path) -> anyhow::Result<Self> {
        let program = match version {
            Version::V4_2 => place("CRIU").unwrap_or_else(|| "criu".into()),
            Version::V4_1 => place("CRIU_4_1").unwrap_or_else(|| "criu-4.1".into()),
        };
        fs::create_dir_all(images).with_context(|| format!("create {}", images.display()))?;
        Ok(Self { program, plugin: plugin.folder()?, images: images.to_owned(), environment: Vec::new() })
    }

    /// Sets an environment variable for CRIU and its plugin, for example to skip a check of the topology.
    #[must_use]
    pub fn variable(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    /// The name of its processes, and of the tasks that it restores until they have their own.
    ///
    /// # Panics
    /// Its program has no name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.program.file_name().and_then(|name| name.to_str()).expect("a program with a name")
    }

    /// Where the images are.
    #[must_use]
    pub fn images(&self) -> &Path {
        &self.images
    }

    /// Dumps a process with its children; they end.
    ///
    /// # Errors
    /// The error of CRIU.
    pub fn dump(&self, pid: u32) -> anyhow::Result<()> {
        self.run(&["dump", "--tree", &pid.to_string()])
    }

    /// Dumps a process with its children by `rewake dump`; they end.
    ///
    /// # Errors
    /// The error of CRIU.
    pub fn dump_by_rewake(&self, pid: u32) -> anyhow::Result<()> {
        output(self.of_rewake("dump")?.args(["-t", &pid.to_string()])).map(drop)
    }

    /// Dumps a process with its children; they continue.
    ///
    /// # Errors
    /// The error of CRIU.
    pub fn dump_running(&self, pid: u32) -> anyhow::Result<()> {
        self.run(&["dump", "--leave-running", "--tree", &pid.to_string()])
    }

    /// Restores the dumped process; it runs when this returns, as no child of this process.
    ///
    /// # Errors
    /// The error of CRIU.
    pub fn restore(&self) -> anyhow::Result<()> {
        self.run(&["restore", "--restore-detached"])
    }

    /// As [`Criu::restore`], with lazy CPU memory.
    ///
    /// # Errors
    /// The error of CRIU.
    pub fn restore_lazily(&self) -> anyhow::Result<()> {
        self.run(&["restore", "--restore-detached", "--lazy-pages"])
    }

    /// Runs CRIU to its end with the images, the plugin and a log; the first argument is its command.
    ///
    /// # Errors
    /// The error of CRIU: it failed, or did not start.
    pub fn run(&self, arguments: &[&str]) -> anyhow::Result<()> {
        let mut command = self.command(arguments);
        let status = command.status().with_context(|| format!("start {}", self.program.display()))?;
        if status.success() {
            return Ok(());
        }
        let log = self.log(arguments[0]);
        bail!("{} {arguments:?}: {status}:\n{}", self.program.display(), quoted(&log))
    }

    /// The command that [`Criu::run`] runs, for a test that does something else with it. Removes the log of
    /// the last one.
    ///
    /// # Panics
    /// There are no arguments.
    #[must_use]
    pub fn command(&self, arguments: &[&str]) -> Command {
        let act = arguments.first().expect("CRIU's command");
        // A CRIU that is killed early does not remove it itself.
        let _ = fs::remove_file(self.images.join(format!("{act}.log")));
        let mut command = Command::new(&self.program);
        command.args(arguments).arg("--images-dir").arg(&self.images).arg("--libdir").arg(&self.plugin);
        command.args(["-v4", "--log-file", &format!("{act}.log")]);
        let environment = self.environment.iter().map(|(name, value)| (name, value));
        command.envs(environment).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command
    }

    /// `rewake dump` or `rewake restore` with the same CRIU, plugin and images. CRIU's own options follow
    /// `--`.
    ///
    /// # Errors
    /// There is no such program.
    pub fn of_rewake(&self, act: &str) -> anyhow::Result<Command> {
        self.of_rewake_in(act, &self.images)
    }

    /// The same with this work directory.
    ///
    /// # Errors
    /// There is no such program.
    pub fn of_rewake_in(&self, act: &str, work: &Path) -> anyhow::Result<Command> {
        let mut command = self.of_rewake_with(act, work)?;
        command.arg("-D").arg(&self.images);
        Ok(command)
    }

    /// `rewake restore` of a store's image, with the same CRIU and plugin.
    ///
    /// # Errors
    /// There is no such program.
    pub fn restore_from_store(&self, url: &str, work: &Path) -> anyhow::Result<Command> {
        let mut command = self.of_rewake_with("restore", work)?;
        command.arg(url);
        Ok(command)
    }

    fn of_rewake_with(&self, act: &str, work: &Path) -> anyhow::Result<Command> {
        let mut command = Command::new(rewake()?);
        command.arg(act).arg("--criu").arg(&self.program).arg("--plugin-dir").arg(&self.plugin);
        command.arg("-W").arg(work).stdin(Stdio::null());
        Ok(command)
    }

    /// What `rewake status` says now of the restore whose work directory is that of the images.
    ///
    /// # Panics
    /// Its output is no status.
    #[must_use]
    pub fn status(&self) -> serde_json::Value {
        let program = rewake().unwrap();
        let said = Command::new(program).args(["status", "--json", "-W"]).arg(&self.images).output().unwrap();
        serde_json::from_slice(&said.stdout).unwrap()
    }

    /// Resident bytes and all bytes of GPU memory, of each process and GPU, as users see them.
    ///
    /// # Panics
    /// As [`Criu::status`].
    #[must_use]
    pub fn memory_of_gpus(&self) -> Vec<(u64, u64)> {
        let status = self.status();
        let processes = status["processes"].as_array().unwrap().iter();
        let memory = processes.flat_map(|process| process["memory"].as_array().unwrap());
        let of_gpus = memory.filter(|of| !of["minor"].is_null());
        let number = |of: &serde_json::Value, name: &str| of[name].as_u64().unwrap();
        of_gpus.map(|of| (number(of, "resident"), number(of, "bytes"))).collect()
    }

    /// CPU pages that the last restore awaited before any task ran, from the plugin's log.
    ///
    /// # Panics
    /// The log has no number.
    #[must_use]
    pub fn pages_waited_for(&self) -> u64 {
        let log = self.log("restore");
        let before = log.lines().filter_map(|line| Some(line.split_once(WAITS)?.0));
        before.map(|before| before.rsplit(' ').next().unwrap().parse::<u64>().unwrap()).sum()
    }

    /// Whether the plugin left buffers to the background load in the last restore.
    #[must_use]
    pub fn left_buffers(&self) -> bool {
        let log = self.log("restore");
        log.lines().any(|line| {
            line.contains(" buffers are loaded in the background")
                && !line.contains(" 0 buffers are loaded in the background")
        })
    }

    /// The log of the last `dump`, `restore`...; empty if there is none.
    #[must_use]
    pub fn log(&self, act: &str) -> String {
        let text = fs::read(self.images.join(format!("{act}.log"))).unwrap_or_default();
        String::from_utf8_lossy(&text).into_owned()
    }
}

impl Plugin {
    /// The folder of this plugin.
    pub(crate) fn folder(self) -> anyhow::Result<PathBuf> {
        let folder = match self {
            Self::Ours => beside("REWAKE_PLUGIN", OWN_PLUGIN, "cargo xtask plugin")?,
            Self::Stock => place("STOCK_PLUGIN").unwrap_or_else(|| STOCK_PLUGIN.into()),
        };
        let found = folder.join("amdgpu_plugin.so").is_file();
        ensure!(found, "no amdgpu_plugin.so in {}", folder.display());
        Ok(folder)
    }
}

fn place(variable: &str) -> Option<PathBuf> {
    std::env::var_os(variable).map(PathBuf::from)
}

/// The error lines of a log; the last lines if there are none.
fn quoted(log: &str) -> String {
    let errors: Vec<&str> = log.lines().filter(|line| line.contains("Error")).take(QUOTED).collect();
    if errors.is_empty() {
        return last_lines(log, QUOTED);
    }
    errors.join("\n")
}

/// Whether queues of these GPUs can be restored at all.
///
/// # Panics
/// The topology cannot be read.
#[must_use]
pub fn queues_can_be_restored() -> bool {
    let strict = fs::read_to_string("/sys/module/softgpu/parameters/strict");
    let lenient = strict.is_ok_and(|strict| strict.trim() == "N");
    Topology::read().unwrap().gpus().all(|gpu| match QueueSupport::here(gpu) {
        QueueSupport::Restored => true,
        QueueSupport::Refused => lenient,
        _ => false,
    })
}

/// The reason where queues of these GPUs cannot be restored.
///
/// # Errors
/// They cannot.
///
/// # Panics
/// As [`queues_can_be_restored`].
pub fn queues() -> Result<(), &'static str> {
    if queues_can_be_restored() { Ok(()) } else { Err("this kernel restores no queues of these GPUs") }
}

/// Waits until a restored process has ended.
///
/// # Errors
/// It does not end.
pub fn wait_for_the_end_of(pid: u32) -> anyhow::Result<()> {
    let ended = soon(|| !Path::new("/proc").join(pid.to_string()).exists());
    ensure!(ended, "process {pid} does not end: {}", doing(pid));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_quoted_and_without_any_the_end_of_the_log() {
        let noise = |count: u32| (0..count).map(|line| format!("(00.1) line {line}\n")).collect::<String>();
        let log = noise(50) + "(00.2) Error (criu/a.c:1): no\n" + &noise(50);
        assert_eq!(quoted(&log), "(00.2) Error (criu/a.c:1): no");
        assert_eq!(quoted(&noise(50)).lines().count(), QUOTED);
        assert!(quoted(&noise(50)).ends_with("line 49"));
        assert_eq!(quoted(""), "");
    }
}
