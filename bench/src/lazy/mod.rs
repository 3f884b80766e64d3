// SPDX-License-Identifier: MIT OR Apache-2.0
//! One comparison: dumps a process once, restores it alternately through each server, collects the figures of
//! both sides.

mod image;
mod round;
mod table;

use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::cache;
use crate::disk::{self, DiskLimits};
use crate::fill;
use crate::harness::{self, Place, Setting, Taken, existing, folder, in_turn, run_folder, write_json};
pub(crate) use image::Image;
use round::Sample;
pub(crate) use round::stop;

/// Arguments of `rewake-bench lazy`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Stock criu: dumps, restores, and serves in its own rounds
    #[arg(long, value_parser = existing)]
    criu: PathBuf,
    /// rewake; without it only stock is measured
    #[arg(long, value_parser = existing)]
    rewake: Option<PathBuf>,
    /// Memory of the restored process in MiB
    #[arg(long, default_value_t = 4096, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    size_mib: u64,
    /// Compare rewake with itself: the image as it is, and sealed, so that each block is checked
    #[arg(long, requires = "rewake")]
    sealed: bool,
    /// Microseconds that the process sleeps between two accesses. Without a pause, stock CRIU hardly loads in
    /// the background.
    #[arg(long, default_value_t = 0)]
    pause_us: u64,
    /// Restores through each server
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=100))]
    rounds: u64,
    /// Drop the image from the page cache before each restore, and measure the disk
    #[arg(long)]
    cold: bool,
    #[command(flatten)]
    place: Place,
    /// Write every sample as JSON
    #[arg(long)]
    json: Option<PathBuf>,
    /// Write the table as Markdown
    #[arg(long)]
    markdown: Option<PathBuf>,
    /// Keep images and logs
    #[arg(long)]
    keep: bool,
}

/// Which server serves a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Server {
    /// `criu lazy-pages`
    Stock,
    /// `rewake lazy-pages`
    Rewake,
    /// The same, with a manifest in the image
    Sealed,
}

impl Server {
    /// What its column is called.
    fn heading(self) -> &'static str {
        match self {
            Self::Stock => "stock",
            Self::Rewake => "rewake",
            Self::Sealed => "rewake, sealed image",
        }
    }
}

/// All results of one run; this, as JSON, is the machine-readable result.
#[derive(Debug, Serialize)]
struct Comparison {
    setting: Setting,
    /// What the two columns compare.
    servers: [Server; 2],
    /// The image was dropped from the page cache before each restore; otherwise it was all cached.
    cold: bool,
    limits: Limits,
    samples: Vec<Taken<Server, Sample>>,
}

/// The machine's limits, measured in the same run. GB is 10^9 bytes.
#[derive(Debug, Serialize)]
struct Limits {
    /// UFFDIO_COPY from a cached buffer with one and with two threads.
    fill_gb_per_s: [f64; 2],
    /// Measured for cold runs only.
    disk: Option<DiskLimits>,
}

/// Measures, prints the table, writes the files asked for.
pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    harness::begin("lazy")?;
    let mut directory = run_folder(&options.place.dir)?;
    directory.disable_cleanup(options.keep);
    if options.keep {
        eprintln!("images and logs: {}", directory.path().display());
    }
    let comparison = measure(options, directory.path())?;
    let text = table::text(&comparison);
    print!("{text}");
    write_json(options.json.as_ref(), &comparison)?;
    harness::write(options.markdown.as_ref(), || Ok(text))
}

fn measure(options: &Options, directory: &Path) -> anyhow::Result<Comparison> {
    let Options { criu, rewake, size_mib, .. } = options;
    let (servers, compared) = match rewake {
        Some(_) if options.sealed => ([Server::Rewake, Server::Sealed], 2),
        _ => ([Server::Stock, Server::Rewake], 1 + usize::from(rewake.is_some())),
    };
    let program = |server| if server == Server::Stock { criu } else { rewake.as_ref().unwrap_or(criu) };
    let programs: Vec<&PathBuf> = servers[..compared].iter().map(|server| program(*server)).collect();
    let setting = Setting::new(&programs, *size_mib)?;
    eprintln!("filling and dumping {size_mib} MiB");
    let image = Image::dump(criu, directory, *size_mib, options.pause_us)?;
    if let Some(rewake) = rewake.as_ref().filter(|_| options.sealed) {
        image.seal(rewake)?;
    }
    let pages = &image.dumped.page_files;
    let limits = limits(options, &image, directory)?;
    let samples = in_turn(
        options.rounds,
        |_| servers[..compared].to_vec(),
        |server, round| {
            let work = folder(directory, &format!("round-{round}-{server:?}"))?;
            cache::bring(pages, !options.cold)?;
            image.keep_manifest(server == Server::Sealed)?;
            round::run(&image, criu, program(server), &work)
        },
    )?;
    Ok(Comparison { setting, servers, cold: options.cold, limits, samples })
}

/// The machine's limits, on the same memory, disk and file, in the same run.
fn limits(options: &Options, image: &Image, directory: &Path) -> anyhow::Result<Limits> {
    eprintln!("measuring the machine's limits");
    let fill_gb_per_s = [fill::measure(options.size_mib, 1)?, fill::measure(options.size_mib, 2)?];
    let cold_disk = || {
        cache::drop_files(&image.dumped.page_files)?;
        disk::measure(image.largest_page_file()?, directory)
    };
    Ok(Limits { fill_gb_per_s, disk: options.cold.then(cold_disk).transpose()? })
}
