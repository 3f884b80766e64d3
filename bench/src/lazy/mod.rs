// SPDX-License-Identifier: MIT OR Apache-2.0
//! One comparison: dumps a process once, restores it alternately through each server, collects the figures of
//! both sides.

mod image;
mod round;

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use serde::Serialize;

use crate::cache;
use crate::criu;
use crate::disk::{self, DiskLimits};
use crate::fill;
use crate::processes::catch_interrupts;
use crate::report::{self, Comparison, Limits, Setting};
pub(crate) use image::Image;
pub(crate) use round::{Sample, stop};

/// Arguments of `rewake-bench lazy`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Stock criu: dumps, restores, and serves in its own rounds
    #[arg(long)]
    criu: PathBuf,
    /// rewake; without it only stock is measured
    #[arg(long)]
    rewake: Option<PathBuf>,
    /// Memory of the restored process in MiB
    #[arg(long, default_value_t = 4096, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    size_mib: u64,
    /// Compare rewake with itself: the image as it is, and sealed, so that each block is checked
    #[arg(long, requires = "rewake")]
    sealed: bool,
    /// Microseconds that the process sleeps between two accesses. Without a pause, stock CRIU hardly loads in the
    /// background.
    #[arg(long, default_value_t = 0)]
    pause_us: u64,
    /// Restores through each server
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=100))]
    rounds: u64,
    /// Drop the image from the page cache before each restore, and measure the disk
    #[arg(long)]
    cold: bool,
    /// Where images lie during the run: the disk that is measured [default: the directory for temporary files]
    #[arg(long)]
    dir: Option<PathBuf>,
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
    pub(crate) fn heading(self) -> &'static str {
        match self {
            Self::Stock => "stock",
            Self::Rewake => "rewake",
            Self::Sealed => "rewake, sealed image",
        }
    }
}

/// What a run compares.
const STOCK: [Server; 2] = [Server::Stock, Server::Rewake];
const SEALED: [Server; 2] = [Server::Rewake, Server::Sealed];

/// Measures, prints the table, writes the files asked for.
pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    if !nix::unistd::geteuid().is_root() {
        bail!("rewake-bench lazy dumps and restores processes with CRIU: run it as root");
    }
    catch_interrupts()?;
    let parent = options.dir.clone().unwrap_or_else(std::env::temp_dir);
    let parent = parent.canonicalize().with_context(|| parent.display().to_string())?;
    let mut directory = tempfile::Builder::new()
        .prefix("rewake-bench-")
        .tempdir_in(&parent)
        .with_context(|| format!("a directory for the images in {}", parent.display()))?;
    directory.disable_cleanup(options.keep);
    if options.keep {
        eprintln!("images and logs: {}", directory.path().display());
    }
    let comparison = measure(options, directory.path())?;
    print!("{}", report::terminal(&comparison));
    if let Some(path) = &options.json {
        let text = serde_json::to_string_pretty(&comparison)? + "\n";
        std::fs::write(path, text).with_context(|| path.display().to_string())?;
    }
    if let Some(path) = &options.markdown {
        std::fs::write(path, report::markdown(&comparison)).with_context(|| path.display().to_string())?;
    }
    Ok(())
}

fn measure(options: &Options, directory: &Path) -> anyhow::Result<Comparison> {
    let programs = Programs::find(options)?;
    let setting = Setting::of_this_machine(programs.versions()?, options.size_mib);
    // An orphaned process becomes a child of the nearest such ancestor: this one can then wait for it.
    nix::sys::prctl::set_child_subreaper(true).context("PR_SET_CHILD_SUBREAPER")?;
    eprintln!("filling and dumping {} MiB", options.size_mib);
    let image = Image::dump(&programs.criu, directory, options.size_mib, options.pause_us)?;
    if let Some(rewake) = programs.rewake.as_ref().filter(|_| options.sealed) {
        image.seal(rewake)?;
    }
    let limits = limits(options, &image, directory)?;
    let mut samples = Vec::new();
    for number in 1..=options.rounds {
        for (server, program) in programs.servers() {
            eprintln!("round {number} of {}: {server:?}", options.rounds);
            let work = directory.join(format!("round-{number}-{server:?}"));
            std::fs::create_dir(&work).with_context(|| work.display().to_string())?;
            if options.cold {
                cache::drop_files(image.page_files())?;
            } else {
                cache::load_files(image.page_files())?;
            }
            image.keep_manifest(server == Server::Sealed)?;
            let measured = round::run(&image, &programs.criu, server, program, &work, number);
            samples.push(measured.with_context(|| format!("round {number} with {server:?}"))?);
        }
    }
    Ok(Comparison { setting, servers: programs.servers, cold: options.cold, limits, samples })
}

/// The machine's limits, on the same memory, disk and file, in the same run.
fn limits(options: &Options, image: &Image, directory: &Path) -> anyhow::Result<Limits> {
    eprintln!("measuring the machine's limits");
    let fill_gb_per_s = [fill::measure(options.size_mib, 1)?, fill::measure(options.size_mib, 2)?];
    Ok(Limits { fill_gb_per_s, disk: cold_disk(options.cold, image, directory)? })
}

fn cold_disk(cold: bool, image: &Image, directory: &Path) -> anyhow::Result<Option<DiskLimits>> {
    if !cold {
        return Ok(None);
    }
    cache::drop_files(image.page_files())?;
    disk::measure(image.largest_page_file()?, directory).map(Some)
}

#[derive(Debug)]
struct Programs {
    criu: PathBuf,
    rewake: Option<PathBuf>,
    servers: [Server; 2],
}

impl Programs {
    /// Absolute, because every round has its own current directory.
    fn find(options: &Options) -> anyhow::Result<Self> {
        let absolute = |path: &PathBuf| path.canonicalize().with_context(|| path.display().to_string());
        let rewake = options.rewake.as_ref().map(absolute).transpose()?;
        Ok(Self {
            criu: absolute(&options.criu)?,
            rewake,
            servers: if options.sealed { SEALED } else { STOCK },
        })
    }

    /// The servers, in the order of a round.
    fn servers(&self) -> impl Iterator<Item = (Server, &Path)> {
        let program = |server: Server| match server {
            Server::Stock => Some(self.criu.as_path()),
            Server::Rewake | Server::Sealed => self.rewake.as_deref(),
        };
        self.servers.into_iter().filter_map(move |server| Some((server, program(server)?)))
    }

    /// First line of each program's `--version`.
    fn versions(&self) -> anyhow::Result<Vec<String>> {
        self.servers().map(|(_, path)| criu::version(path)).collect()
    }
}
