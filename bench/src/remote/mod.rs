// SPDX-License-Identifier: MIT OR Apache-2.0
//! Restores whose pages another host has. Servers and clients of stock CRIU and of rewake, in turn, in one run.
//!
//! * [`round`]: one restore, from a server through a client, with its figures.
//! * [`watch`]: memory of the processes of a round. [`pipes`]: what CRIU's page server needs of the machine.
//! * [`table`]: the tables.

mod pipes;
mod round;
mod table;
mod watch;

use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};

use crate::cache;
use crate::criu;
use crate::lazy::Image;
use crate::processes::catch_interrupts;
use crate::report::Setting;
use pipes::PipeRoom;
use round::{Pairing, Programs, Sample};

/// Arguments of `rewake-bench remote`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Stock criu: dumps, restores, serves, and is a client in its own rounds
    #[arg(long)]
    criu: PathBuf,
    /// rewake
    #[arg(long)]
    rewake: PathBuf,
    /// Memory of the restored process in MiB
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    size_mib: u64,
    /// Microseconds that the process sleeps between two accesses
    #[arg(long, default_value_t = 300)]
    pause_us: u64,
    /// Restores by each pair of a server and a client
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=100))]
    rounds: u64,
    /// Where images and cache files lie during the run [default: the directory for temporary files]
    #[arg(long)]
    dir: Option<PathBuf>,
}

/// Measures and prints the tables.
pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    ensure!(
        nix::unistd::geteuid().is_root(),
        "rewake-bench remote dumps and restores with CRIU: run it as root"
    );
    catch_interrupts()?;
    // Orphans become children of this process: it waits for them, and counts their CPU time.
    nix::sys::prctl::set_child_subreaper(true).context("PR_SET_CHILD_SUBREAPER")?;
    let parent = options.dir.clone().unwrap_or_else(std::env::temp_dir);
    let parent = parent.canonicalize().with_context(|| parent.display().to_string())?;
    let directory = tempfile::Builder::new().prefix("rewake-bench-").tempdir_in(&parent)?;
    let absolute = |path: &PathBuf| path.canonicalize().with_context(|| path.display().to_string());
    let programs = Programs { criu: absolute(&options.criu)?, rewake: absolute(&options.rewake)? };
    let versions = [&programs.criu, &programs.rewake].map(|path| criu::version(path));
    let setting =
        Setting::of_this_machine(versions.into_iter().collect::<anyhow::Result<_>>()?, options.size_mib);
    println!("{}", table::heading(&setting, options.rounds, options.pause_us));
    eprintln!("filling and dumping {} MiB", options.size_mib);
    let image = Image::dump(&programs.criu, directory.path(), options.size_mib, options.pause_us)?;
    let bench = Bench { options, programs, image, directory: directory.path() };
    let _room = PipeRoom::made()?;
    let samples = bench.samples("demand", &Pairing::ALL)?;
    println!("{}", table::demand(&samples));
    println!("{}", table::memory(&samples));
    Ok(())
}

/// What all parts of a run share.
struct Bench<'a> {
    options: &'a Options,
    programs: Programs,
    image: Image,
    directory: &'a Path,
}

impl Bench<'_> {
    /// Restores in turn by each pairing.
    fn samples(&self, part: &str, pairings: &[Pairing]) -> anyhow::Result<Vec<Sample>> {
        let rounds = self.options.rounds;
        let mut samples = Vec::new();
        for number in 1..=rounds {
            for pairing in pairings {
                eprintln!("{part}, round {number} of {rounds}: {pairing}");
                let work = self.work(&format!("{part}-{number}-{pairing}"))?;
                cache::load_files(self.image.page_files())?;
                let measured = round::run(&self.programs, &self.image, *pairing, &work, number);
                samples.push(measured.with_context(|| format!("{part}, round {number}: {pairing}"))?);
            }
        }
        Ok(samples)
    }

    /// Makes a directory for logs, sockets and the cache file of a restore.
    fn work(&self, name: &str) -> anyhow::Result<PathBuf> {
        let work = self.directory.join(name.replace(", ", "-"));
        std::fs::create_dir(&work).with_context(|| work.display().to_string())?;
        Ok(work)
    }
}
