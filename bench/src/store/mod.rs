// SPDX-License-Identifier: MIT OR Apache-2.0
//! Restores from a store (SeaweedFS) behind a link of 1 Gbit/s and 5 ms, and the store itself.
//!
//! * [`stored`]: a program whose image is in a store. [`answer`]: the time of its first right answer.
//! * [`at_once`]: replicas of one image, restored at once.
//! * [`rates`]: `rewake push`, `verify` and `gc`, beside plain loops and `restic`. [`checkpoints`]: ten images of one
//!   program.

mod answer;
mod at_once;
mod checkpoints;
mod rates;
mod stored;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use nix::sys::statfs::{TMPFS_MAGIC, statfs};
use rewake_process::descriptors;
use rewake_testkit::hosts::own_tmpfs;

use crate::criu::version;
use crate::processes::catch_interrupts;
use crate::programs::Program;
use crate::report::Setting;

/// Memory that compresses and that does not, of programs that read all of it or a part of it, in order or not.
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
    /// CRIU: dumps and restores
    #[arg(long)]
    criu: PathBuf,
    /// rewake
    #[arg(long)]
    rewake: PathBuf,
    /// SeaweedFS, the store
    #[arg(long)]
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
    /// Where images, the store and the cache lie during the run [default: the directory for temporary files]
    #[arg(long)]
    dir: Option<PathBuf>,
}

/// The programs that are measured.
#[derive(Debug)]
struct Tools {
    criu: PathBuf,
    rewake: PathBuf,
    weed: PathBuf,
}

impl Tools {
    /// `rewake` with these arguments.
    fn rewake(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.rewake);
        command.args(arguments);
        command
    }

    /// Pushes an image, with these variables.
    fn push(&self, image: &Path, url: &str, variables: &[(String, String)]) -> anyhow::Result<()> {
        run(self.rewake(&["push"]).arg(image).arg(url).envs(variables.iter().cloned())).map(drop)
    }

    /// Writes the manifest of an image.
    fn seal(&self, image: &Path) -> anyhow::Result<()> {
        run(self.rewake(&["seal"]).arg(image)).map(drop)
    }
}

/// Measures, and prints the tables.
pub(crate) fn run_all(options: &Options) -> anyhow::Result<()> {
    ensure!(
        nix::unistd::geteuid().is_root(),
        "rewake-bench store dumps and restores with CRIU: run it as root"
    );
    make_run_tmpfs()?;
    catch_interrupts()?;
    // A restored process becomes a child of the nearest such ancestor, which can then wait for it.
    nix::sys::prctl::set_child_subreaper(true).context("PR_SET_CHILD_SUBREAPER")?;
    let absolute = |path: &Path| path.canonicalize().with_context(|| path.display().to_string());
    let parent = absolute(&options.dir.clone().unwrap_or_else(std::env::temp_dir))?;
    let tools = Tools {
        criu: absolute(&options.criu)?,
        rewake: absolute(&options.rewake)?,
        weed: absolute(&options.weed)?,
    };
    let setting = Setting::of_this_machine(vec![version(&tools.criu)?, version(&tools.rewake)?], options.mib);
    println!(
        "{} MiB, {} rounds, 1 Gbit/s and {ROUND_TRIP:?}; {} x {}, Linux {}; {}\n\
         Each cell: median (min .. max). Shares are of one round each.\n",
        options.mib,
        options.rounds,
        setting.cpus,
        setting.cpu,
        setting.kernel,
        setting.versions.join(" and ")
    );
    let directory = || {
        let made = tempfile::Builder::new().prefix("rewake-bench-").tempdir_in(&parent);
        made.with_context(|| format!("make a directory in {}", parent.display()))
    };
    println!("{}", answer::HEADING);
    for program in &options.programs {
        println!("{}", answer::measure(*program, options.mib, options.rounds, &tools, directory()?.path())?);
    }
    println!("\n{}", at_once::measure(options, &tools, directory()?.path())?);
    println!("{}", rates::measure(options, &tools, directory()?.path())?);
    println!("{}", checkpoints::measure(options.mib, &tools, directory()?.path())?);
    Ok(())
}

/// Makes `/run` a tmpfs, as it is on most hosts, for this process and all that it starts from now on. CRIU keeps what
/// it knows of the kernel there only on a tmpfs: elsewhere it examines the kernel in each restore, 50 ms.
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

/// Runs a command to its end. Returns what it wrote.
fn run(command: &mut Command) -> anyhow::Result<String> {
    let output = command.output().with_context(|| format!("{command:?}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?}: {}\n{said}", output.status);
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
