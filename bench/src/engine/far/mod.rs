// SPDX-License-Identifier: MIT OR Apache-2.0
//! How long a demand load of a large image's last buffer takes during the background load, compared with a
//! load of that buffer alone, alternately. A page fault waits for this, and for the stop of the process and
//! the swap of its mapping.
//!
//! * [`image`]: the files and the memory. [`table`]: the figures, and their required values.

mod image;
mod table;

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use rewake_bo_contents::{BackgroundLoad, Error, LoadEvent, ProcessBuffers};

use super::pace;
use crate::cache::{drop_files, load_files};
use crate::harness::{Taken, in_turn, rotated};
use image::{Front, Image, Pages};

/// MiB of each buffer, of an image.
const SHAPES: [u64; 2] = [image::LARGEST_MIB, 4];
/// The process that is loaded, and one without buffers, which is whole as soon as the load is ready.
const PROCESS: usize = 0;
const WITHOUT_BUFFERS: usize = 1;

/// Where the bytes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum From {
    PageCache,
    Disk,
    /// All but the last buffers.
    Holes,
}

/// When a last buffer is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Alone,
    /// During the background load.
    Meanwhile,
}

/// All rounds of one image.
#[derive(Debug)]
struct Far {
    from: From,
    buffers: usize,
    buffer_mib: u64,
    /// Time of a load of all buffers, without a demand load.
    all: Duration,
    times: Vec<Taken<Way, Duration>>,
}

/// Measures all kinds, with images of `mib` MiB, and prints the table.
pub(super) fn run(work: &Path, mib: u64, rounds: u64) -> anyhow::Result<()> {
    // A descriptor for each buffer.
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).context("getrlimit")?;
    setrlimit(Resource::RLIMIT_NOFILE, most, most).context("setrlimit")?;
    let mut all = Vec::new();
    for (name, front, ways) in [
        ("holes", Front::Hole, &[From::Holes][..]),
        // The kind that needs most memory is last.
        ("random", Front::Random, &[From::Disk, From::PageCache]),
    ] {
        eprintln!("the far end of {mib} MiB, {name}");
        let pages = Pages::make(work.join(name), mib, front)?;
        for from in ways {
            for buffer_mib in SHAPES {
                all.push(far(&pages, *from, buffer_mib, rounds)?);
            }
        }
        pages.remove()?;
    }
    print!("\n{}", table::text(&all));
    Ok(())
}

fn far(pages: &Pages, from: From, buffer_mib: u64, rounds: u64) -> anyhow::Result<Far> {
    let mut image = Image::open(pages, buffer_mib)?;
    let path = [pages.path()];
    let ready = || match from {
        From::Disk => drop_files(&path),
        // The first load reads from the disk. It takes so long that the kernel may have dropped the first
        // pages from the cache.
        From::PageCache => load_files(&path)
            .or_else(|_| load_files(&path))
            .context("there is too little memory: use a smaller --far-mib"),
        // Its bytes were just written, and reading holes would fill the page cache with zeros.
        From::Holes => Ok(()),
    };
    ready()?;
    let all = load_all(&image)?;
    let buffers = image.all.len();
    let times = in_turn(
        rounds,
        |round| rotated(&[Way::Alone, Way::Meanwhile], round),
        |way, round| {
            ready()?;
            // Moments all over the first third.
            let after = all.mul_f64((round as f64 - 0.5) / rounds as f64 / 3.0);
            let (of, after) =
                if way == Way::Alone { (&image.alone, None) } else { (&image.all, Some(after)) };
            image.last.fill(0);
            let took = demanded(&image, of, after)?;
            image.check()?;
            Ok(took)
        },
    )?;
    Ok(Far { from, buffers, buffer_mib, all, times })
}

/// Measures a load of all buffers, and checks the last one.
fn load_all(image: &Image<'_>) -> anyhow::Result<Duration> {
    let processes = [ProcessBuffers { files: &image.files, dmabufs: &image.all }];
    let start = Instant::now();
    BackgroundLoad::into_memory(&processes, &image.device, Some(pace()?))?
        .run(|_| ())?
        .context("the image has nothing to load")?;
    let took = start.elapsed();
    image.check()?;
    Ok(took)
}

/// Measures from the demand of the last buffer until the load reports it: demanded so long `after` the load
/// began, or at once. Cancels the rest.
fn demanded(image: &Image<'_>, of: &[Option<OwnedFd>], after: Option<Duration>) -> anyhow::Result<Duration> {
    let processes =
        [ProcessBuffers { files: &image.files, dmabufs: of }, ProcessBuffers { files: &[], dmabufs: &[] }];
    let last = of.len() - 1;
    let loading = BackgroundLoad::into_memory(&processes, &image.device, Some(pace()?))?;
    let (desk, at_once) = (loading.handle(), loading.handle());
    let (begins, begun) = mpsc::channel();
    let (mut from, mut whole) = (None, None);
    let demanded = thread::scope(|scope| {
        let demands = scope.spawn(move || {
            begun.recv().ok()?;
            thread::sleep(after?);
            let now = Instant::now();
            desk.demand(PROCESS, last);
            Some(now)
        });
        let loaded = loading.run(|what| match what {
            LoadEvent::Process { process: WITHOUT_BUFFERS } => {
                from = Some(Instant::now());
                if after.is_none() {
                    at_once.demand(PROCESS, last);
                }
                // The receiver waits for it, or the load has failed.
                let _ = begins.send(());
            }
            LoadEvent::Buffer { process: PROCESS, number } if number == last => {
                whole = Some(Instant::now());
                at_once.give_up();
            }
            _ => {}
        });
        match loaded {
            Ok(_) | Err(Error::GivenUp) => Ok(demands.join().expect("it only sleeps")),
            Err(error) => Err(error),
        }
    })?;
    let (whole, demanded) = whole.zip(demanded.or(from)).context("the last buffer was never resident")?;
    whole.checked_duration_since(demanded).context("it was resident before it was demanded")
}
