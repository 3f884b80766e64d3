// SPDX-License-Identifier: MIT OR Apache-2.0
//! `rewake dump`: runs `criu dump`, with the plugin for GPUs where there is one.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail};
use rewake_plugin_session::wait_for_tree;

use super::criu::{CriuInvocation, CriuOptions, NO_PLUGIN, code, show_errors, starting};
use super::directory;
use crate::cli::DumpArgs;
use crate::sparse;
use rewake_streamer::gpu::duplicates_file;
use rewake_streamer::gpu::duplicates_file::DuplicateSearch;
use rewake_streamer::gpu::plugin_folder;
use rewake_streamer::units;

/// Buffers that look the same are compared for that long, if the dump took less time.
const LEAST: Duration = Duration::from_secs(10);
/// Bytes whose comparison takes long enough to need a message.
const WORTH_A_LINE: u64 = 256 << 20;

/// Options that are for `rewake dump` itself, not for CRIU.
const OURS: [&str; 6] = ["-t", "--tree", "-D", "--images-dir", "-W", "--work-dir"];

/// Runs the command; gives the exit code: 0 when the tree was dumped.
///
/// # Errors
/// Options or directories are wrong, there is no CRIU, or it failed: the last error lines of its log were shown.
pub fn run(options: &DumpArgs) -> anyhow::Result<u8> {
    let images = directory(&options.images_dir, "-D")?;
    let work = match &options.work_dir {
        Some(path) => directory(path, "-W")?,
        None => images.clone(),
    };
    let given = CriuOptions::read(&options.criu_options, &OURS)?;
    let gpu = plugin_folder::machine_has_gpu();
    let plugins = options.programs.plugins(gpu, &given)?;
    let tree = options.tree.to_string();
    let act = CriuInvocation {
        name: "dump",
        images: &images,
        work: &work,
        ours: &["-t", &tree],
        plugins: plugins.as_deref(),
        given: &options.criu_options,
        options: &given,
    };
    let program = options.programs.criu();
    // CRIU's own plugin folder may lack rewake_plugin.so.
    let say = |line: &str| eprintln!("rewake: {line}");
    wait_for_tree(options.tree.cast_signed(), say).map_err(|error| anyhow!("{error}"))?;
    duplicates_file::forget(&images)?;
    // A signal to us alone does not reach it: a dump that is cut off can leave its tree stopped.
    let start = Instant::now();
    let exit = act.command(&program).status().with_context(|| starting(&program))?;
    if exit.success() {
        let took = start.elapsed();
        if let Err(error) = sparse::punch_zero_blocks(&images) {
            eprintln!("rewake: zeros in the image are not left out: {error:#}");
        }
        find_twins(&images, took);
        return Ok(code(exit));
    }
    show_errors(&act.log());
    let hint = if gpu && plugins.is_none() && !given.plugins { NO_PLUGIN } else { "" };
    bail!("criu dump failed ({exit}); its log is {}{hint}", act.log().display());
}

/// The dump took `took`; it is complete, whatever the result here.
fn find_twins(images: &Path, took: Duration) {
    let limit = time_to_compare(took);
    let within = || units::seconds(limit);
    let begins = |bytes: u64| {
        if bytes >= WORTH_A_LINE {
            let bytes = units::bytes(bytes);
            eprintln!(
                "rewake: comparing {bytes} of GPU buffers that look the same, for {} at most; the image is whole already",
                within()
            );
        }
        limit
    };
    let found = duplicates_file::find(images, begins);
    if let Ok(DuplicateSearch { spared: spared @ 1.., .. }) = found {
        eprintln!("rewake: {spared} GPU buffers have the bytes of others and need not be read");
    }
    match found {
        Ok(DuplicateSearch { cut_off: false, .. }) => {}
        Ok(DuplicateSearch { cut_off: true, .. }) => eprintln!(
            "rewake: not all GPU buffers that look the same could be compared in {}: the others will be read one by one",
            within()
        ),
        Err(error) => {
            eprintln!("rewake: GPU buffers with the same bytes will be read more than once: {error:#}");
        }
    }
}

/// A dump's bytes can be read in the time that it took to write them, so no user waits for more than twice
/// the dump.
fn time_to_compare(took: Duration) -> Duration {
    took.max(LEAST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_compared_for_as_long_as_the_dump_took_or_some_seconds() {
        let compared = |seconds| time_to_compare(Duration::from_secs(seconds)).as_secs();
        assert_eq!([0, 9, 11, 3600].map(compared), [10, 10, 11, 3600]);
    }
}
