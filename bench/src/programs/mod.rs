// SPDX-License-Identifier: MIT OR Apache-2.0
//! Real programs, restored alternately from one image by CRIU alone, through `criu lazy-pages` and through
//! `rewake lazy-pages`. The figure is the time of the first right answer.
//!
//! * [`program`]: the programs, their runtimes and their requests. [`answer`]: the right answers.
//! * [`dumped`]: a program from its start to its dump. [`client`]: the client that sends requests; [`redis`]:
//!   that of redis. [`check`]: sends requests and checks the answers.
//! * [`round`]: one restore. [`table`]: from samples to Markdown tables. [`floor`]: the time that no restore
//!   can beat.

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

use anyhow::Context as _;
use serde::Serialize;

use crate::cache;
use crate::harness::{self, Place, Setting, Taken, Tools, folder, in_turn, rotated, run_folder, write_json};
pub(crate) use check::Check;
pub(crate) use client::Client;
pub(crate) use dumped::{Dumped, Running};
pub(crate) use program::Program;
pub(crate) use program::Question;
use round::{ImageState, Sample, Way};

/// Arguments of `rewake-bench programs`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    #[command(flatten)]
    tools: Tools,
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
    #[command(flatten)]
    place: Place,
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
    samples: Vec<Taken<Way, Sample>>,
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

/// Measures, prints the tables, writes the file asked for.
pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    harness::begin("programs")?;
    let chosen = if options.programs.is_empty() { Program::LOCAL.to_vec() } else { options.programs.clone() };
    let chosen = chosen.into_iter().map(|program| Ok((program, program.version()?)));
    let chosen: Vec<_> = chosen.collect::<anyhow::Result<_>>()?;
    let states = if options.states.is_empty() { ImageState::ALL.to_vec() } else { options.states.clone() };
    let setting = options.tools.setting(options.mib)?;
    let mut results = Results { setting, rounds: options.rounds, images: Vec::new(), samples: Vec::new() };
    for (program, version) in chosen {
        // Each program has a directory of its own, which is deleted before the next program starts.
        let directory = run_folder(&options.place.dir)?;
        eprintln!("{program} ({version}): fills {} MiB and is dumped", options.mib);
        let dumped = Dumped::new(program, options.mib, &options.tools.criu, directory.path())
            .with_context(|| program.to_string())?;
        results.images.push(ProgramImage { program, version, page_bytes: dumped.page_bytes()? });
        let samples = measure(options, &dumped, &states, directory.path());
        results.samples.extend(samples.with_context(|| program.to_string())?);
    }
    print!("{}", table::text(&results));
    write_json(options.json.as_ref(), &results)
}

/// Restores the program in every way, round by round, with its image in these states. `directory` is for
/// logs.
fn measure(
    options: &Options,
    dumped: &Dumped,
    states: &[ImageState],
    directory: &Path,
) -> anyhow::Result<Vec<Taken<Way, Sample>>> {
    // A restore of a cold image is the one that a second restore follows.
    let turns = [&[ImageState::Warm][..], &[ImageState::Cold, ImageState::Again]];
    let order = |round| {
        let ways = rotated(&Way::ALL, round);
        let of_turn = |turn: &[ImageState]| {
            let chosen: Vec<ImageState> =
                turn.iter().copied().filter(|state| states.contains(state)).collect();
            let of_way = |way: &Way| chosen.iter().map(|state| (*state, *way)).collect::<Vec<_>>();
            ways.iter().flat_map(of_way).collect::<Vec<_>>()
        };
        turns.iter().flat_map(|turn| of_turn(turn)).collect()
    };
    let sample = |state, way, round: u64| {
        let work = folder(directory, &format!("{round}-{state}-{way:?}"))?;
        // Again: the image stays as the restore before has left it.
        if state != ImageState::Again {
            cache::bring(&cache::files(&dumped.image.directory)?, state == ImageState::Warm)?;
        }
        round::run(dumped, state, &options.tools, way, &work)
    };
    let samples = in_turn(options.rounds, order, |(state, way), round| {
        if state == ImageState::Again && !states.contains(&ImageState::Cold) {
            sample(ImageState::Cold, way, round).context("before the restore that is measured")?;
        }
        sample(state, way, round)
    })?;
    let taken =
        |of: Taken<(ImageState, Way), Sample>| Taken { way: of.way.1, round: of.round, sample: of.sample };
    Ok(samples.into_iter().map(taken).collect())
}
