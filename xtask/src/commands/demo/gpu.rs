// SPDX-License-Identifier: MIT OR Apache-2.0
//! `cargo xtask demo`, outside the virtual machine that it runs in. The machine is virtual even with real
//! GPUs: the server's kernels are the software GPU's.

use std::thread;
use std::time::Duration;

use anyhow::{Context as _, ensure};

use super::scene::{PROMPT, TOKENS};
use super::server::Server;
use crate::commands::plugin::{self, Profile};
use crate::progress::{say, step};
use crate::{root, vm};

/// How long the preparation usually takes, the first time and later.
const FIRST: Duration = Duration::from_secs(120);
const LATER: Duration = Duration::from_secs(2);
/// As `bench behind` has it: disk and copies are the limit, and not an emulated processor. One copy ring, so
/// that the GPU copies at that rate.
const DISK: vm::Disk = vm::Disk { mib: 512, mbps: Some(20) };
const GPU: &str = "sdma_rings=1 copy_mbps=20";

/// Builds everything, and runs [`super::scene`] in a virtual machine.
pub(crate) fn run() -> anyhow::Result<()> {
    root::become_root()?;
    let usual = if vm::is_made_for_demo() { LATER } else { FIRST };
    let plugin =
        step("Builds rewake and an inference server; makes a virtual machine as well", usual, || {
            thread::scope(|scope| {
                let prepared = scope.spawn(vm::prepare_for_demo);
                let plugin = plugin::make(Profile::Demo, &["gpu-app", "rewake"]);
                prepared.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
                plugin
            })
        })?;
    let [app, rewake] = ["gpu-app", "rewake"].map(|program| plugin.with_file_name(program));
    let own = std::env::current_exe().context("find the path of this program")?;
    let words = [own.display().to_string(), "demo".to_owned(), "--scene".to_owned()];
    // Here, because an emulated processor computes for a minute.
    let right = Server::expected(&app, TOKENS, &PROMPT)?;
    let paths = [app, plugin, rewake].map(|path| path.display().to_string());
    let mut machine = vm::Options::for_demo(words.into_iter().chain(paths).chain([right]).collect());
    machine.disk = Some(DISK);
    GPU.clone_into(&mut machine.module_arguments);
    say(
        "==> Starts the virtual machine: a software GPU, its disk and its copies at 20 MB/s each (usually 7 \
         s)",
    );
    let code = vm::boot(&machine)?;
    ensure!(code == 0, "the demo failed (exit code {code})");
    Ok(())
}
