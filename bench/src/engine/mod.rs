// SPDX-License-Identifier: MIT OR Apache-2.0
//! The engine that loads GPU memory (`crates/bo-contents`), on this machine and without a GPU: from an image
//! of real files into ordinary memory in a GPU's place. Compared, alternately, with memcpy where the image is
//! in the page cache, and with `fio` where it is not.
//!
//! * [`image`]: the files and the memory, through [`view`]s. [`pass`]: one pass over all of it. [`table`]:
//!   the figures, and their required values.
//! * [`replicas`]: GPUs that have the same bytes.
//! * [`far`]: a demand load of a large image's last buffer.

mod far;
mod image;
mod pass;
mod replicas;
mod table;
mod view;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, ensure};
use rewake_image_io::io_budget::IoBudget;

use crate::cache::{drop_files, load_files};
use crate::disk;
use crate::processes::{catch_interrupts, check_interrupted};
use image::Image;
use pass::Pass;

/// Arguments of `rewake-bench engine`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Memory of all buffers in MiB, all random; as much again is needed for the memory that it is loaded into
    #[arg(long, default_value_t = 2048, value_parser = clap::value_parser!(u64).range(32..=1 << 20))]
    mib: u64,
    /// Passes of each kind; 0: none
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(0..=100))]
    rounds: u64,
    /// Loads of replicas' memory, read for each and read once, in turns; 0: none
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(0..=100))]
    replicas_rounds: u64,
    /// MiB of an image whose last buffer is demanded while all of it is loaded: as much of the disk and of
    /// the page cache is needed, and 1 GiB of memory
    #[arg(long, default_value_t = 8192, value_parser = clap::value_parser!(u64).range(128..=1 << 20))]
    far_mib: u64,
    /// Loads of that buffer alone and of all, in turns; 0: none
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(0..=1000))]
    far_rounds: u64,
    /// Where the image is made and removed: the disk that is measured
    #[arg(long, default_value = ".")]
    dir: PathBuf,
}

/// A round with the image in the page cache.
#[derive(Debug, Clone, Copy)]
struct Warm {
    memcpy: Pass,
    pread: Pass,
    engine: Pass,
}

/// A round with the image on the disk.
#[derive(Debug, Clone, Copy)]
struct Cold {
    fio_gb_per_s: f64,
    engine: Pass,
}

/// All results of one run.
#[derive(Debug)]
struct Comparison {
    mib: u64,
    buffers: usize,
    warm: Vec<Warm>,
    cold: Vec<Cold>,
}

/// Measures and prints the table.
pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    ensure!(
        nix::unistd::geteuid().is_root(),
        "rewake-bench engine drops files from the page cache: run it as root"
    );
    catch_interrupts()?;
    let work = tempfile::Builder::new().prefix("rewake-bench-").tempdir_in(&options.dir);
    let work = work.with_context(|| format!("make a directory in {}", options.dir.display()))?;
    if options.rounds > 0 {
        print!("{}", table::text(&compare(options, work.path())?));
    }
    if options.replicas_rounds > 0 {
        print!("\n{}", replicas::run(work.path(), options.mib, options.replicas_rounds)?);
    }
    if options.far_rounds > 0 {
        far::run(work.path(), options.far_mib, options.far_rounds)?;
    }
    Ok(())
}

/// The I/O budget of a background load without CPU memory.
fn pace() -> anyhow::Result<Arc<IoBudget>> {
    Ok(Arc::new(IoBudget::new(Vec::new())?))
}

fn compare(options: &Options, work: &Path) -> anyhow::Result<Comparison> {
    eprintln!("an image of {} MiB", options.mib);
    let image = Image::make(work, options.mib, image::MINOR)?;
    let pages = [image.pages()];
    let (mut warm, mut cold) = (Vec::new(), Vec::new());
    load_files(&pages)?;
    // The host allocates pages at the first access: once, before anything is measured.
    pass::engine(&image)?;
    for round in 0..options.rounds {
        check_interrupted()?;
        eprintln!("round {}: in the page cache", round + 1);
        warm.push(warm_round(&image, round)?);
    }
    for round in 0..options.rounds {
        check_interrupted()?;
        eprintln!("round {}: on the disk", round + 1);
        cold.push(cold_round(&image, round, work)?);
    }
    std::fs::remove_file(image.pages()).context("remove the pages file")?;
    Ok(Comparison { mib: options.mib, buffers: image.buffers(), warm, cold })
}

/// The order changes from round to round.
fn warm_round(image: &Image, round: u64) -> anyhow::Result<Warm> {
    load_files(&[image.pages()])?;
    let (first, memcpy) = if round.is_multiple_of(2) {
        (None, pass::memcpy(image)?)
    } else {
        (Some(pass::engine(image)?), pass::memcpy(image)?)
    };
    let engine = first.map_or_else(|| pass::engine(image), Ok)?;
    Ok(Warm { memcpy, pread: pass::pread(image)?, engine })
}

fn cold_round(image: &Image, round: u64, work: &Path) -> anyhow::Result<Cold> {
    let pages = image.pages();
    let fio = || disk::sequential(&pages, work);
    drop_files(std::slice::from_ref(&pages))?;
    let first = if round.is_multiple_of(2) { Some(fio()?) } else { None };
    let engine = pass::engine(image)?;
    let fio_gb_per_s = first.map_or_else(fio, Ok)?;
    Ok(Cold { fio_gb_per_s, engine })
}
