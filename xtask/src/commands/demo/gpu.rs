// SPDX-License-Identifier: MIT OR Apache-2.0
//! `cargo xtask demo`, outside the virtual machine that it runs in. The machine is virtual even with real
//! GPUs: the server's kernels are the software GPU's.

use anyhow::{Context as _, ensure};

use crate::commands::plugin::{self, Profile};
use crate::{root, vm};

/// Builds everything, and runs [`super::scene`] in a virtual machine.
pub(crate) fn run() -> anyhow::Result<()> {
    root::become_root()?;
    let plugin = plugin::make(Profile::Demo, &["gpu-app", "rewake"])?;
    let [app, rewake] = ["gpu-app", "rewake"].map(|program| plugin.with_file_name(program));
    if !vm::is_made() {
        println!("The first time, a virtual machine is made from Debian's packages: about three minutes.");
    }
    println!("Starting a virtual machine with a software GPU.");
    let own = std::env::current_exe().context("find the path of this program")?;
    let words = [own.display().to_string(), "demo".to_owned(), "--scene".to_owned()];
    let paths = [app, plugin, rewake].map(|path| path.display().to_string());
    let code = vm::boot(&vm::Options::new(words.into_iter().chain(paths).collect()))?;
    ensure!(code == 0, "the demo failed (exit code {code})");
    Ok(())
}
