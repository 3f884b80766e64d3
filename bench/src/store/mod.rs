// SPDX-License-Identifier: MIT OR Apache-2.0
//! Restores from a store (SeaweedFS) behind a link of 1 Gbit/s and 5 ms, and the store itself.
//!
//! * [`stored`]: a program whose image is in a store. [`answer`]: the time of its first right answer.
//! * [`at_once`]: replicas of one image, restored at once.
//! * [`rates`]: `rewake push`, `verify` and `gc`, beside plain loops and `restic`. [`checkpoints`]: ten
//!   images of one program.

mod answer;
mod at_once;
mod checkpoints;
mod rates;
mod stored;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use nix::sys::statfs::{TMPFS_MAGIC, statfs};
use rewake_process::descriptors;
use rewake_testkit::hosts::own_tmpfs;
use rewake_testkit::process::output;

use crate::harness::{self, Place, Tools, existing, run_folder};
use crate::programs::Program;

/// Memory that compresses and that does not, of programs that read all of it or a part of it, in order or
/// not.
const PROGRAMS: [Program; 5] = [
    Program::PythonQuarter,
    Program::Python,
    Program::PythonNoiseQuarter,
    Program::PythonNoise,
    Program::Node,
];
/// The way there and back to the store.
const ROUND_TRIP: Duration = Duration::from_millis(5);

/// Arguments of `rewake-bench store`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    #[command(flatten)]
    tools: Tools,
    /// SeaweedFS, the store
    #[arg(long, value_parser = existing)]
    weed: PathBuf,
    /// Programs; may be given again
    #[arg(long = "program", value_enum, default_values_t = PROGRAMS)]
    programs: Vec<Program>,
    /// Memory that each program fills, in MiB
    #[arg(long, default_value_t = 640, value_parser = clap::value_parser!(u64).range(64..=1024))]
    mib: u64,
    /// Replicas that are restored at once
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u64).range(1..=64))]
    replicas: u64,
    /// Restores in each way
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=100))]
    rounds: u64,
    #[command(flatten)]
    place: Place,
}

/// Measures, and prints the tables.
pub(crate) fn run_all(options: &Options) -> anyhow::Result<()> {
    harness::check_root("store")?;
    make_run_tmpfs()?;
    harness::begin("store")?;
    println!(
        "{} MiB, {} rounds, 1 Gbit/s and {ROUND_TRIP:?}; {}\n\
         Each cell: median (min .. max). Shares are of one round each.\n",
        options.mib,
        options.rounds,
        options.tools.setting(options.mib)?
    );
    let directory = || run_folder(&options.place.dir);
    let mut programs = answer::table();
    for program in &options.programs {
        answer::measure(&mut programs, *program, options, directory()?.path())?;
    }
    println!("{programs}");
    println!("{}", at_once::measure(options, directory()?.path())?);
    println!("{}", rates::measure(options, directory()?.path())?);
    println!("{}", checkpoints::measure(options, directory()?.path())?);
    Ok(())
}

/// Pushes an image, with these variables.
fn push(tools: &Tools, image: &Path, url: &str, variables: &[(String, String)]) -> anyhow::Result<()> {
    output(tools.rewake(&["push"]).arg(image).arg(url).envs(variables.iter().cloned())).map(drop)
}

/// Makes `/run` a tmpfs, as it is on most hosts, for this process and all that it starts from now on. CRIU
/// keeps what it knows of the kernel there only on a tmpfs: elsewhere it examines the kernel in each restore,
/// 50 ms.
fn make_run_tmpfs() -> anyhow::Result<()> {
    const RUN: &str = "/run";
    if statfs(RUN).context(RUN)?.filesystem_type() == TMPFS_MAGIC {
        return Ok(());
    }
    // CRIU dumps no program with a descriptor of another mount namespace.
    // SAFETY: this program has just started, and has opened nothing.
    unsafe { descriptors::close_inherited()? };
    own_tmpfs(RUN)
}
