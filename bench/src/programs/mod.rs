// SPDX-License-Identifier: MIT OR Apache-2.0
//! Real programs, restored alternately from one image by CRIU alone, through `criu lazy-pages` and through
//! `rewake lazy-pages`. The figure is the time of the first right answer.
//!
//! * [`program`]: the three programs, their runtimes and their requests. [`answer`]: the right answers.
//! * [`dumped`]: a program from its start to its dump. [`client`]: the client that sends requests.
//! * [`round`]: one restore. [`table`]: from samples to Markdown tables.

mod answer;
mod client;
mod dumped;
mod program;
mod round;
mod table;

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use serde::Serialize;

use crate::cache;
use crate::criu::version;
use crate::processes::catch_interrupts;
use crate::report::Setting;
use dumped::Dumped;
use program::Program;
use round::{Sample, Way};

/// Arguments of `rewake-bench programs`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Stock criu: dumps, restores, and serves in its own rounds
    #[arg(long)]
    criu: PathBuf,
    /// rewake, which serves in its rounds
    #[arg(long)]
    rewake: PathBuf,
    /// Measure only this program; may be given again [default: all of them]
    #[arg(long = "program", value_enum)]
    programs: Vec<Program>,
    /// Memory that each program fills, in MiB
    #[arg(long, default_value_t = 640, value_parser = clap::value_parser!(u64).range(16..=answer::MAX_MIB))]
    mib: u64,
    /// Restores in each way with the image cached, and as many with it dropped from the page cache
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=100))]
    rounds: u64,
    /// Where images lie during the run: the disk that is measured [default: the directory for temporary files]
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Write every sample as JSON
    #[arg(long)]
    json: Option<PathBuf>,
}

/// All results of one run; this, as JSON, is the machine-readable result.
#[derive(Debug, Serialize)]
struct Results {
    setting: Setting,
    rounds: u64,
    /// One for each program, in the order of the tables.
    images: Vec<ProgramImage>,
    samples: Vec<Sample>,
}

/// A dumped program.
#[derive(Debug, Serialize)]
struct ProgramImage {
    program: Program,
    /// Version of the program's runtime.
    version: String,
    /// The size of all `pages-*.img`.
    page_bytes: u64,
}

/// The programs that dump, restore and serve.
#[derive(Debug)]
struct Tools {
    criu: PathBuf,
    rewake: PathBuf,
}

/// Measures, prints the tables, writes the file asked for.
pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    if !nix::unistd::geteuid().is_root() {
        bail!("rewake-bench programs dumps and restores processes with CRIU: run it as root");
    }
    catch_interrupts()?;
    // A restored process becomes a child of the nearest such ancestor, which can then wait for it.
    nix::sys::prctl::set_child_subreaper(true).context("PR_SET_CHILD_SUBREAPER")?;
    let parent = options.dir.clone().unwrap_or_else(std::env::temp_dir);
    let absolute = |path: &Path| path.canonicalize().with_context(|| path.display().to_string());
    let parent = absolute(&parent)?;
    let tools = Tools { criu: absolute(&options.criu)?, rewake: absolute(&options.rewake)? };
    let chosen = if options.programs.is_empty() { Program::ALL.to_vec() } else { options.programs.clone() };
    let chosen = chosen.into_iter().map(|program| Ok((program, program.version()?)));
    let chosen: Vec<_> = chosen.collect::<anyhow::Result<_>>()?;
    let versions = vec![version(&tools.criu)?, version(&tools.rewake)?];
    let setting = Setting::of_this_machine(versions, options.mib);
    let mut results = Results { setting, rounds: options.rounds, images: Vec::new(), samples: Vec::new() };
    for (program, version) in chosen {
        // Each program has a directory of its own, which is deleted before the next program starts.
        let directory = tempfile::Builder::new()
            .prefix("rewake-bench-")
            .tempdir_in(&parent)
            .with_context(|| format!("make a directory for the images in {}", parent.display()))?;
        eprintln!("{program} ({version}): fills {} MiB and is dumped", options.mib);
        let dumped = Dumped::new(program, options.mib, &tools.criu, directory.path())
            .with_context(|| program.to_string())?;
        results.images.push(ProgramImage { program, version, page_bytes: dumped.page_bytes()? });
        measure(program, &dumped, options.rounds, &tools, directory.path(), &mut results.samples)?;
    }
    print!("{}", table::text(&results));
    if let Some(path) = &options.json {
        let text = serde_json::to_string_pretty(&results)? + "\n";
        std::fs::write(path, text).with_context(|| path.display().to_string())?;
    }
    Ok(())
}

/// Restores a program in every way, round by round, with its image warm and cold. Logs lie in `directory`.
fn measure(
    program: Program,
    dumped: &Dumped,
    rounds: u64,
    tools: &Tools,
    directory: &Path,
    samples: &mut Vec<Sample>,
) -> anyhow::Result<()> {
    let files = cache::files(&dumped.image.directory)?;
    let mut ways = Way::ALL;
    for round in 1..=rounds {
        for cold in [false, true] {
            for way in ways {
                let what = format!("{program}, round {round}, image {}, {way}", table::cache_state(cold));
                eprintln!("{what}");
                let work = directory.join(format!("{round}-{}-{way}", table::cache_state(cold)));
                std::fs::create_dir(&work).with_context(|| work.display().to_string())?;
                let prepare = if cold { cache::drop_files } else { cache::load_files };
                prepare(&files)?;
                let figures = round::run(dumped, tools, way, &work).with_context(|| what)?;
                samples.push(Sample { program, way, cold, round, figures });
            }
        }
        // Each way is the first one in some rounds.
        ways.rotate_left(1);
    }
    Ok(())
}
