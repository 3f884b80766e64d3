// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake dump`: runs `criu dump`, with the plugin for GPUs where there is one.

use anyhow::{Context as _, bail};

use super::criu::{Act, NO_PLUGIN, Options, code, show_errors, starting};
use super::directory;
use crate::cli::Dump;
use crate::{gpu_plugin, holes, twins};

/// Options that are for `rewake dump` itself, not for CRIU.
const OURS: [&str; 6] = ["-t", "--tree", "-D", "--images-dir", "-W", "--work-dir"];

/// Runs the command; gives the exit code: 0 when the tree was dumped.
///
/// # Errors
/// Options or directories are wrong, there is no CRIU, or it failed: the last error lines of its log were shown.
pub fn run(options: &Dump) -> anyhow::Result<u8> {
    let images = directory(&options.images_dir, "-D")?;
    let work = match &options.work_dir {
        Some(path) => directory(path, "-W")?,
        None => images.clone(),
    };
    let given = Options::read(&options.criu_options, &OURS)?;
    let gpu = gpu_plugin::machine_has_gpu();
    let plugins = options.programs.plugins(gpu, &given)?;
    let tree = options.tree.to_string();
    let act = Act {
        name: "dump",
        images: &images,
        work: &work,
        ours: &["-t", &tree],
        plugins: plugins.as_deref(),
        given: &options.criu_options,
        options: &given,
    };
    let program = options.programs.criu();
    twins::forget(&images)?;
    // A signal to us alone does not reach it: a dump that is cut off can leave its tree stopped.
    let exit = act.command(&program).status().with_context(|| starting(&program))?;
    if exit.success() {
        if let Err(error) = holes::dig(&images) {
            eprintln!("rewake: zeros in the image are not left out: {error:#}");
        }
        match twins::find(&images) {
            Ok(0) => {}
            Ok(spared) => {
                eprintln!("rewake: {spared} buffers of GPUs have the bytes of others and need not be read");
            }
            Err(error) => {
                eprintln!(
                    "rewake: buffers of GPUs with the same bytes will be read more than once: {error:#}"
                );
            }
        }
        return Ok(code(exit));
    }
    show_errors(&act.log());
    let hint = if gpu && plugins.is_none() && !given.plugins { NO_PLUGIN } else { "" };
    bail!("criu dump failed ({exit}); its log is {}{hint}", act.log().display());
}
