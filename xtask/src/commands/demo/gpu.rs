// SPDX-License-Identifier: MIT OR Apache-2.0
//! `cargo xtask demo`, outside the virtual machine that it runs in. The machine is virtual even with real
//! GPUs: the server's kernels are the software GPU's.

use std::thread;

use anyhow::{Context as _, ensure};

use crate::commands::plugin::{self, Profile};
use crate::{root, vm};

/// Builds everything, and runs [`super::scene`] in a virtual machine.
pub(crate) fn run() -> anyhow::Result<()> {
    root::become_root()?;
    if !vm::is_made() {
        println!(
            "The first time, programs are built, and a virtual machine is made beside: about three minutes."
        );
    }
    // One waits for the processors, the other mostly for downloads.
    let (plugin, prepared) = thread::scope(|scope| {
        let prepared = scope.spawn(vm::prepare);
        let plugin = plugin::make(Profile::Demo, &["gpu-app", "rewake"]);
        (plugin, prepared.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    });
    let plugin = plugin?;
    prepared?;
    let [app, rewake] = ["gpu-app", "rewake"].map(|program| plugin.with_file_name(program));
    println!("Starting a virtual machine with a software GPU.");
    let own = std::env::current_exe().context("find the path of this program")?;
    let words = [own.display().to_string(), "demo".to_owned(), "--scene".to_owned()];
    let paths = [app, plugin, rewake].map(|path| path.display().to_string());
    let code = vm::boot(&vm::Options::new(words.into_iter().chain(paths).collect()))?;
    ensure!(code == 0, "the demo failed (exit code {code})");
    Ok(())
}
