// SPDX-License-Identifier: MIT OR Apache-2.0
//! The engine that loads GPU memory (`crates/bo-contents`), on this machine and without a GPU: from an image
//! of real files into ordinary memory in a GPU's place. Compared, alternately, with memcpy where the image is
//! in the page cache, and with `fio` where it is not.
//!
//! * [`image`]: the files and the memory. [`pass`]: one pass over all of it. [`table`]:
//!   the figures, and their required values.
//! * [`replicas`]: GPUs that have the same bytes.
//! * [`far`]: a demand load of a large image's last buffer.

mod far;
mod image;
mod pass;
mod replicas;
mod table;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context as _;
use rewake_image_io::io_budget::IoBudget;

use crate::cache::{bring, load_files};
use crate::disk;
use crate::harness::{self, Taken, existing, in_turn, rotated, run_folder};
use image::Image;
use pass::Pass;

/// Arguments of `rewake-bench engine`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Memory of all buffers in MiB, all random; as much again is needed for the memory that it is loaded
    /// into
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
    #[arg(long, default_value = ".", value_parser = existing)]
    dir: PathBuf,
}

/// What moves the bytes. [`Way::Fio`] reads them only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Memcpy,
    Pread,
    Engine,
    Fio,
}

/// All results of one run.
#[derive(Debug)]
struct Comparison {
    mib: u64,
    buffers: usize,
    rounds: u64,
    /// With the image in the page cache.
    warm: Vec<Taken<Way, Pass>>,
    /// With the image on the disk.
    cold: Vec<Taken<Way, Pass>>,
}

/// Measures and prints the table.
pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    harness::begin("engine")?;
    let work = run_folder(&options.dir)?;
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
    load_files(&pages)?;
    // The host allocates pages at the first access: once, before anything is measured.
    pass::engine(&image)?;
    let pass = |way| match way {
        Way::Memcpy => pass::memcpy(&image),
        Way::Pread => pass::pread(&image),
        Way::Engine => pass::engine(&image),
        Way::Fio => Ok(Pass { gb_per_s: disk::sequential(&pages[0], work)?, cpu_s_per_gb: 0.0, memory: 0 }),
    };
    let passes = |ways: &[Way], cached| {
        eprintln!("{}", if cached { "in the page cache" } else { "on the disk" });
        in_turn(
            options.rounds,
            |round| rotated(ways, round),
            |way, _| {
                bring(&pages, cached)?;
                pass(way)
            },
        )
    };
    let warm = passes(&[Way::Memcpy, Way::Engine, Way::Pread], true)?;
    let cold = passes(&[Way::Fio, Way::Engine], false)?;
    std::fs::remove_file(&pages[0]).context("remove the pages file")?;
    Ok(Comparison { mib: options.mib, buffers: image.buffers(), rounds: options.rounds, warm, cold })
}
