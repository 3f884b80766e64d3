// SPDX-License-Identifier: MIT OR Apache-2.0
//! Restores whose pages another host has. Servers and clients of stock CRIU and of rewake, in turn, in one
//! run.
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

use std::path::PathBuf;
use std::time::Duration;

use crate::cache;
use crate::fill;
use crate::harness::{self, Place, Taken, Tools, existing, in_turn, run_folder};
use crate::lazy::Image;
use crate::pipes::PipeRoom;
use certificates::Certificates;
use clients::ServedClients;
use round::{Conditions, Pairing, Sample};

/// The way there and back over the slow link.
const ROUND_TRIP: Duration = Duration::from_millis(1);

/// Arguments of `rewake-bench remote`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    #[command(flatten)]
    tools: Tools,
    /// An earlier rewake, measured beside stock and rewake in the place of mixed pairs
    #[arg(long, value_parser = existing)]
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
    #[command(flatten)]
    place: Place,
}

/// Measures part by part, and prints the table of each.
pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    harness::begin("remote")?;
    let directory = run_folder(&options.place.dir)?;
    let setting = options.tools.setting(options.size_mib)?;
    println!(
        "{} MiB in the page cache, loopback, {} rounds, {} µs between accesses; {setting}\n\
         Each cell: median (least .. most). Shares are of one round each.\n",
        options.size_mib, options.rounds, options.pause_us
    );
    eprintln!("filling and dumping {} MiB", options.size_mib);
    let image = Image::dump(&options.tools.criu, directory.path(), options.size_mib, options.pause_us)?;
    let bench = Bench { options, image, directory: directory.path().to_owned() };
    let _room = PipeRoom::made()?;
    let pairings = match options.earlier {
        Some(_) => &[Pairing::STOCK, Pairing::EARLIER, Pairing::REWAKE][..],
        None => &Pairing::ALL,
    };
    let local = bench.samples("loopback", pairings, Conditions::default())?;
    println!("{}", table::demand(pairings, &local));
    let slow = Conditions { is_slow: true, ..Conditions::default() };
    let slow = bench.samples("1 Gbit/s, 1 ms", &[Pairing::STOCK, Pairing::REWAKE], slow)?;
    println!("{}", table::slow(&slow, &local));
    let background = bench.background()?;
    println!("{}", table::background(&background));
    let clients = bench.clients()?;
    println!("{}", table::clients(&clients, bench.image.bytes()));
    let samples = local.iter().chain(&slow).map(|taken| (taken.way, &taken.sample));
    let loads = background.iter().map(|taken| (Pairing::REWAKE, &taken.sample.sample));
    println!("{}", table::memory(&samples.chain(loads).collect::<Vec<_>>(), &clients));
    Ok(())
}

/// What all parts of a run share.
struct Bench<'a> {
    options: &'a Options,
    image: Image,
    directory: PathBuf,
}

impl Bench<'_> {
    /// Restores in turn by each pairing.
    fn samples(
        &self,
        part: &str,
        pairings: &[Pairing],
        conditions: Conditions<'_>,
    ) -> anyhow::Result<Vec<Taken<Pairing, Sample>>> {
        eprintln!("{part}");
        in_turn(self.options.rounds, |_| pairings.to_vec(), |pairing, _| self.sample(pairing, conditions))
    }

    fn sample(&self, pairing: Pairing, conditions: Conditions<'_>) -> anyhow::Result<Sample> {
        cache::load_files(&self.image.dumped.page_files)?;
        round::run(self.options, &self.image, pairing, conditions, &self.work()?)
    }

    /// Loads in the background alone, in clear and with TLS, in turn with plain loops.
    fn background(&self) -> anyhow::Result<Vec<Taken<Link, BackgroundLoad>>> {
        eprintln!("background");
        let certificates = Certificates::made();
        let configs = certificates.configs()?;
        in_turn(
            self.options.rounds,
            |_| vec![Link::Clear, Link::Tls],
            |link, _| {
                let tls = Some(&certificates).filter(|_| link == Link::Tls);
                let conditions = Conditions { tls, is_idle: true, ..Conditions::default() };
                let sample = self.sample(Pairing::REWAKE, conditions)?;
                let configs = Some(&configs).filter(|_| link == Link::Tls);
                let plain = plain_loop::measure(self.image.largest_page_file()?, &self.work()?, configs)?;
                Ok(BackgroundLoad { sample, plain, filled: fill::measure(self.options.size_mib, 2)? })
            },
        )
    }

    /// Serves one client, then several at once, in each round.
    fn clients(&self) -> anyhow::Result<Vec<Taken<usize, ServedClients>>> {
        eprintln!("clients");
        in_turn(
            self.options.rounds,
            |_| table::COUNTS.to_vec(),
            |count, _| clients::measure(&self.options.tools.rewake, &self.image, count, &self.work()?),
        )
    }

    /// Makes a directory for logs, sockets and the cache file of a restore.
    fn work(&self) -> anyhow::Result<PathBuf> {
        Ok(tempfile::Builder::new().prefix("work-").tempdir_in(&self.directory)?.keep())
    }
}

/// How pages of a background load travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Link {
    Clear,
    Tls,
}

/// A background load in one round, and the plain loop after it.
#[derive(Debug)]
struct BackgroundLoad {
    sample: Sample,
    /// GB/s.
    plain: f64,
    /// The rate at which two threads fill memory, in GB/s.
    filled: f64,
}

impl BackgroundLoad {
    /// The rate of the plain loop if it filled memory, too, in GB/s: both keep both processors of such a
    /// machine busy.
    fn plain_and_filled(&self) -> f64 {
        1.0 / (1.0 / self.plain + 1.0 / self.filled)
    }
}
