// SPDX-License-Identifier: MIT OR Apache-2.0
//! The real CRIU with its stock plugin for GPUs: programs that are not this project's.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use rewake_kfd::topology::{Node, Topology};

/// Where `cargo xtask vm` puts the plugin that it builds from Debian's source of CRIU.
const STOCK_PLUGIN: &str = "/usr/local/lib/criu";
/// Lines of CRIU's log that an error quotes.
const QUOTED: usize = 12;
/// Looks for the end of a restored process, and time between them: a minute.
const LOOKS: u32 = 600;
const LOOK: Duration = Duration::from_millis(100);

/// CRIU with one plugin and one folder of images.
#[derive(Debug)]
pub struct Criu {
    program: PathBuf,
    plugin: PathBuf,
    images: PathBuf,
}

impl Criu {
    /// `CRIU` (or `criu` on the path) and the stock plugin in `STOCK_PLUGIN` (or where the machine has it).
    ///
    /// # Errors
    /// The plugin is not there, or the folder cannot be made.
    pub fn stock(images: &Path) -> anyhow::Result<Self> {
        let place = |name: &str, default: &str| {
            std::env::var_os(name).map_or_else(|| PathBuf::from(default), PathBuf::from)
        };
        let plugin = place("STOCK_PLUGIN", STOCK_PLUGIN);
        ensure!(
            plugin.join("amdgpu_plugin.so").is_file(),
            "no amdgpu_plugin.so in {}: set STOCK_PLUGIN to its folder",
            plugin.display()
        );
        fs::create_dir_all(images).with_context(|| format!("create {}", images.display()))?;
        Ok(Self { program: place("CRIU", "criu"), plugin, images: images.to_owned() })
    }

    /// Dumps a process with its children; they end.
    ///
    /// # Errors
    /// What CRIU complained about.
    pub fn dump(&self, pid: u32) -> anyhow::Result<()> {
        self.run(&["dump", "--tree", &pid.to_string()], "dump.log")
    }

    /// Restores what was dumped; it runs when this returns, as nobody's child.
    ///
    /// # Errors
    /// What CRIU complained about.
    pub fn restore(&self) -> anyhow::Result<()> {
        self.run(&["restore", "--restore-detached"], "restore.log")
    }

    fn run(&self, arguments: &[&str], log: &str) -> anyhow::Result<()> {
        let mut command = Command::new(&self.program);
        command.args(arguments).arg("--images-dir").arg(&self.images).arg("--libdir").arg(&self.plugin);
        command.args(["-v4", "--log-file", log]).stdin(Stdio::null()).stdout(Stdio::null());
        let status = command.status().with_context(|| format!("start {}", self.program.display()))?;
        if status.success() {
            return Ok(());
        }
        let text = fs::read(self.images.join(log)).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let errors: Vec<&str> = text.lines().filter(|line| line.contains("Error")).take(QUOTED).collect();
        bail!("criu {arguments:?}: {status}:\n{}", errors.join("\n"))
    }
}

/// Whether queues of these GPUs can be restored at all. MES has no way, and Linux 7.2 compares the size of all XCCs'
/// MQDs with that of one (`kfd_criu_restore_queue`).
///
/// # Panics
/// The machine cannot be asked.
#[must_use]
pub fn queues_come_back() -> bool {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let strict = fs::read_to_string("/sys/module/softgpu/parameters/strict");
    let lenient = strict.is_ok_and(|strict| strict.trim() == "N") || release.starts_with("6.12");
    let one = |node: &Node| node.property("num_xcc") < 2 || lenient;
    Topology::read().unwrap().gpus().all(|node| node.gfx_version().major < 11 && one(node))
}

/// Waits until a restored process has ended.
///
/// # Errors
/// It does not end.
pub fn wait_for_the_end_of(pid: u32) -> anyhow::Result<()> {
    for _ in 0..LOOKS {
        if !Path::new("/proc").join(pid.to_string()).exists() {
            return Ok(());
        }
        thread::sleep(LOOK);
    }
    bail!("the restored process {pid} does not end")
}
