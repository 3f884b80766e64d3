// SPDX-License-Identifier: MIT OR Apache-2.0
//! Real programs, restored alternately from one image by CRIU alone, through `criu lazy-pages` and through
//! `rewake lazy-pages`. The figure is the time of the first right answer.
//!
//! * [`program`]: the programs, their runtimes and their requests. [`answer`]: the right answers.
//! * [`dumped`]: a program from its start to its dump. [`client`]: the client that sends requests; [`redis`]: that of
//!   redis. [`check`]: sends requests and checks the answers.
//! * [`round`]: one restore. [`table`]: from samples to Markdown tables. [`floor`]: the time that no restore can beat.

mod answer;
mod check;
mod client;
mod dumped;
mod floor;
mod program;
mod redis;
mod round;
mod table;

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use serde::Serialize;

use crate::cache;
use crate::criu::version;
use crate::processes::catch_interrupts;
use crate::report::Setting;
pub(crate) use answer::Question;
pub(crate) use check::Check;
pub(crate) use client::Client;
pub(crate) use dumped::{Dumped, Running};
pub(crate) use program::Program;
use round::{ImageState, Sample, Way};

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
    /// Measure only images in this state; may be given again [default: all of them]
    #[arg(long = "state", value_enum)]
    states: Vec<ImageState>,
    /// Memory that each program fills, in MiB
    #[arg(long, default_value_t = 640, value_parser = clap::value_parser!(u64).range(16..=answer::MAX_MIB))]
    mib: u64,
    /// Restores in each way and of each state of the image
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
    let chosen = if options.programs.is_empty() { Program::LOCAL.to_vec() } else { options.programs.clone() };
    let chosen = chosen.into_iter().map(|program| Ok((program, program.version()?)));
    let chosen: Vec<_> = chosen.collect::<anyhow::Result<_>>()?;
    let states = if options.states.is_empty() { ImageState::ALL.to_vec() } else { options.states.clone() };
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
        let restores = Restores { program, dumped: &dumped, tools: &tools, directory: directory.path() };
        results.samples.extend(restores.measure(options.rounds, &states)?);
    }
    print!("{}", table::text(&results));
    if let Some(path) = &options.json {
        let text = serde_json::to_string_pretty(&results)? + "\n";
        std::fs::write(path, text).with_context(|| path.display().to_string())?;
    }
    Ok(())
}

/// The restores of one program.
#[derive(Debug)]
struct Restores<'a> {
    program: Program,
    dumped: &'a Dumped,
    tools: &'a Tools,
    /// For logs.
    directory: &'a Path,
}

impl Restores<'_> {
    /// Restores the program in every way, round by round, with its image in these states.
    fn measure(&self, rounds: u64, states: &[ImageState]) -> anyhow::Result<Vec<Sample>> {
        let mut samples = Vec::new();
        let mut ways = Way::ALL;
        for round in 1..=rounds {
            // A restore of a cold image is the one that a second restore follows.
            for states_of_turn in [&[ImageState::Warm][..], &[ImageState::Cold, ImageState::Again]] {
                let mut chosen = states_of_turn.to_vec();
                chosen.retain(|state| states.contains(state));
                for way in ways {
                    samples.extend(self.turn(round, way, &chosen)?);
                }
            }
            // Each way is the first one in some rounds.
            ways.rotate_left(1);
        }
        Ok(samples)
    }

    /// Restores in one way with the image in each of these states.
    fn turn(&self, round: u64, way: Way, states: &[ImageState]) -> anyhow::Result<Vec<Sample>> {
        if states == [ImageState::Again] {
            self.sample(round, way, ImageState::Cold).context("before the restore that is measured")?;
        }
        states.iter().map(|state| self.sample(round, way, *state)).collect()
    }

    /// Brings the image into this state, or leaves it as the restore before left it, and restores once.
    fn sample(&self, round: u64, way: Way, state: ImageState) -> anyhow::Result<Sample> {
        let Self { program, dumped, tools, directory } = *self;
        let what = format!("{program}, round {round}, image {state}, {way}");
        eprintln!("{what}");
        let work = directory.join(format!("{round}-{state}-{way}"));
        std::fs::create_dir(&work).with_context(|| work.display().to_string())?;
        let files = cache::files(&dumped.image.directory)?;
        match state {
            ImageState::Warm => cache::load_files(&files)?,
            ImageState::Cold => cache::drop_files(&files)?,
            ImageState::Again => {}
        }
        let figures = round::run(dumped, tools, way, &work).context(what)?;
        Ok(Sample { program, way, state, round, figures })
    }
}
