// SPDX-License-Identifier: MIT OR Apache-2.0
//! Restores whose pages another host has. Servers and clients of stock CRIU and of rewake, in turn, in one run.
//!
//! * [`round`]: one restore, from a server through a client, with its figures.
//! * [`certificates`]: for rounds with TLS. [`plain_loop`]: the limit of the background load.
//! * [`clients`]: several clients of one image at once.
//! * [`table`]: the tables.

mod certificates;
mod clients;
mod plain_loop;
mod round;
mod table;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, ensure};

use crate::cache;
use crate::criu;
use crate::fill;
use crate::lazy::Image;
use crate::pipes::PipeRoom;
use crate::processes::catch_interrupts;
use crate::report::Setting;
use certificates::Certificates;
use clients::ServedClients;
use round::{Conditions, Pairing, Programs, Sample};

/// The way there and back over the slow link.
const ROUND_TRIP: Duration = Duration::from_millis(1);

/// Arguments of `rewake-bench remote`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Stock criu: dumps, restores, serves, and is a client in its own rounds
    #[arg(long)]
    criu: PathBuf,
    /// rewake
    #[arg(long)]
    rewake: PathBuf,
    /// An earlier rewake, measured beside stock and rewake in the place of mixed pairs
    #[arg(long)]
    earlier: Option<PathBuf>,
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
    let earlier = options.earlier.as_ref().map(absolute).transpose()?;
    let programs = Programs { criu: absolute(&options.criu)?, rewake: absolute(&options.rewake)?, earlier };
    let versions = [&programs.criu, &programs.rewake].map(|path| criu::version(path));
    let setting =
        Setting::of_this_machine(versions.into_iter().collect::<anyhow::Result<_>>()?, options.size_mib);
    println!("{}", table::heading(&setting, options.rounds, options.pause_us));
    eprintln!("filling and dumping {} MiB", options.size_mib);
    let image = Image::dump(&programs.criu, directory.path(), options.size_mib, options.pause_us)?;
    let bench = Bench { options, programs, image, directory: directory.path() };
    let _room = PipeRoom::made()?;
    bench.run()
}

/// What all parts of a run share.
struct Bench<'a> {
    options: &'a Options,
    programs: Programs,
    image: Image,
    directory: &'a Path,
}

impl Bench<'_> {
    /// Measures part by part, and prints each.
    fn run(&self) -> anyhow::Result<()> {
        let local = self.samples("loopback", self.pairings(), Conditions::default())?;
        println!("{}", table::demand(&local));
        let slow = Conditions { is_slow: true, ..Conditions::default() };
        let slow = self.samples("1 Gbit/s, 1 ms", &[Pairing::STOCK, Pairing::REWAKE], slow)?;
        println!("{}", table::slow(&slow, &local));
        let background = self.background()?;
        println!("{}", table::background(&background));
        let clients = self.clients()?;
        println!("{}", table::clients(&clients, self.image.bytes()));
        let samples = local.iter().chain(&slow).chain(background.iter().map(|load| &load.sample));
        println!("{}", table::memory(&samples.collect::<Vec<_>>(), &clients));
        Ok(())
    }

    fn pairings(&self) -> &'static [Pairing] {
        match self.options.earlier {
            Some(_) => &[Pairing::STOCK, Pairing::EARLIER, Pairing::REWAKE],
            None => &Pairing::ALL,
        }
    }

    /// Restores in turn by each pairing.
    fn samples(
        &self,
        part: &str,
        pairings: &[Pairing],
        conditions: Conditions<'_>,
    ) -> anyhow::Result<Vec<Sample>> {
        let mut samples = Vec::new();
        for number in 1..=self.options.rounds {
            for pairing in pairings {
                samples.push(self.sample(part, *pairing, conditions, number)?);
            }
        }
        Ok(samples)
    }

    fn sample(
        &self,
        part: &str,
        pairing: Pairing,
        conditions: Conditions<'_>,
        number: u64,
    ) -> anyhow::Result<Sample> {
        let name = format!("{part}, round {number} of {}: {pairing}", self.options.rounds);
        eprintln!("{name}");
        let work = self.work()?;
        cache::load_files(self.image.page_files())?;
        let measured = round::run(&self.programs, &self.image, pairing, conditions, &work, number);
        measured.context(name)
    }

    /// Loads in the background alone, in clear and with TLS, in turn with plain loops.
    fn background(&self) -> anyhow::Result<Vec<BackgroundLoad>> {
        let certificates = Certificates::made();
        let configs = certificates.configs()?;
        let mut loads = Vec::new();
        for number in 1..=self.options.rounds {
            for is_encrypted in [false, true] {
                let tls = Some(&certificates).filter(|_| is_encrypted);
                let conditions = Conditions { tls, is_idle: true, ..Conditions::default() };
                let sample = self.sample("background", Pairing::REWAKE, conditions, number)?;
                let configs = Some(&configs).filter(|_| is_encrypted);
                let plain = plain_loop::measure(self.image.largest_page_file()?, &self.work()?, configs)?;
                let filled = fill::measure(self.options.size_mib, 2)?;
                loads.push(BackgroundLoad { is_encrypted, sample, plain, filled });
            }
        }
        Ok(loads)
    }

    /// Serves one client, then several at once, in each round.
    fn clients(&self) -> anyhow::Result<Vec<[ServedClients; 2]>> {
        let measure = |count| clients::measure(&self.programs.rewake, &self.image, count, &self.work()?);
        (1..=self.options.rounds)
            .map(|number| {
                eprintln!("clients, round {number} of {}", self.options.rounds);
                Ok([measure(1)?, measure(clients::CLIENTS)?])
            })
            .collect()
    }

    /// Makes a directory for logs, sockets and the cache file of a restore.
    fn work(&self) -> anyhow::Result<PathBuf> {
        let work = tempfile::Builder::new().prefix("work-").tempdir_in(self.directory)?;
        Ok(work.keep())
    }
}

/// A background load in one round, and the plain loop after it.
#[derive(Debug)]
struct BackgroundLoad {
    is_encrypted: bool,
    sample: Sample,
    /// GB/s.
    plain: f64,
    /// The rate at which two threads fill memory, in GB/s.
    filled: f64,
}

impl BackgroundLoad {
    /// The rate of the plain loop if it filled memory, too, in GB/s: both keep both processors of such a machine busy.
    fn plain_and_filled(&self) -> f64 {
        1.0 / (1.0 / self.plain + 1.0 / self.filled)
    }
}
