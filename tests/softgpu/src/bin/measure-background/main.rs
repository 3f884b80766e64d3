// SPDX-License-Identifier: MIT OR Apache-2.0
//! Time until a process runs again, and until its CPU has read the end of its memory, by size and number of
//! buffers. All images but one have few GPU bytes that are not zero, so that 8 GiB fit into memory. `cargo
//! xtask bench behind` runs it; tables are written to standard output, each cell least, median and most.
//!
//! * When queues are resumed and how long page faults wait, by the order of the background load.
//!   `measure-background orders` ends after that.
//! * How soon the process runs, by the size of its GPU memory, which is loaded in the background; its last
//!   page is accessed at once.
//! * The same by the size of its CPU memory, which is loaded in the background, too. At the end the process
//!   reads all of it.
//! * How long a page fault waits, as the streamer counts it: in an image of one buffer, and in the last
//!   buffer of many during the background load. Next to it is the load time of that one buffer alone, from
//!   the streamer's log (from the first engine's opening to the last byte). The rest of the wait is work that
//!   GPUs had before, and the stop in which the mapping replaces the placeholder. The former is given in
//!   bytes, at the rate at which the buffer alone was loaded.

mod far;
mod image;
mod orders;
mod text;

use std::time::Duration;

use anyhow::anyhow;
use softgpu_tests::accessor::{BYTES, Large};

use far::Far;
use image::{Image, Loads};
use text::{hundredths, spread};

/// 64 MiB, 1 GiB and 8 GiB in as many buffers, and 8 GiB in more.
const MEMORIES: [Large; 4] = [zeros(16, 4), zeros(16, 64), zeros(16, 512), zeros(128, 64)];
/// MiB of CPU memory in addition to 1 GiB of GPU memory.
const OWN: [usize; 2] = [0, 512];
/// Images whose far end is accessed; one of them has no zeros.
const FAR: [Large; 4] =
    [Large { full: true, ..zeros(128, 4) }, zeros(2048, 4), zeros(128, 64), zeros(16, 512)];
/// Even: half of the rounds run in the other direction.
const ROUNDS: usize = 16;
/// Rounds of page faults: most of their time is that of 512 MiB.
const FAR_ROUNDS: usize = 5;

const fn zeros(count: usize, mib: usize) -> Large {
    Large { count, mib, full: false }
}

/// An image, when its process ran, and when it had read its last page.
struct Timed {
    image: Image,
    runs: Vec<Duration>,
    accessed: Vec<Duration>,
}

impl Timed {
    fn new(memory: Large, own: usize) -> anyhow::Result<Self> {
        Ok(Self { image: Image::of(memory, own)?, runs: Vec::new(), accessed: Vec::new() })
    }

    /// Does not wait for the rest of the load.
    fn restores(&mut self, loads: Loads) -> anyhow::Result<()> {
        let running = self.image.restores(loads)?;
        self.runs.push(running.alive);
        self.accessed.push(running.accesses_its_end()?);
        running.ends()
    }

    /// How soon it ran, relative to another image in the same round.
    fn of(&self, other: &[Duration]) -> Vec<f64> {
        self.runs.iter().zip(other).map(|(runs, other)| runs.as_secs_f64() / other.as_secs_f64()).collect()
    }
}

/// Alternates the direction of rounds, so that no image always follows the same other one.
fn rounds(all: &mut [Timed], loads: Loads) -> anyhow::Result<()> {
    let once = |timed: &mut Timed| {
        timed.restores(loads).map_err(|error| anyhow!("{:?}: {error:#}", timed.image.memory))
    };
    for _ in 0..ROUNDS / 2 {
        all.iter_mut().try_for_each(once)?;
        all.iter_mut().rev().try_for_each(once)?;
    }
    Ok(())
}

/// A row for each.
fn rows(all: &mut [Timed], name: impl Fn(usize, &Timed) -> String) {
    let first = all.first().map(|timed| timed.runs.clone()).unwrap_or_default();
    for (number, timed) in all.iter_mut().enumerate() {
        let (name, shares) = (name(number, timed), hundredths(timed.of(&first)));
        println!("| {name} | {} | {shares} | {} |", spread(&mut timed.runs), spread(&mut timed.accessed));
    }
}

fn by_memory_of_gpus() -> anyhow::Result<Vec<Timed>> {
    let mut all = MEMORIES.map(|memory| Timed::new(memory, 0)).into_iter().collect::<Result<Vec<_>, _>>()?;
    rounds(&mut all, Loads::Gpus)?;
    println!(
        "| GPU memory | runs after, ms: least, median, most | of the first in the same round | has read its \
         last page after |"
    );
    println!("|---|---|---|---|");
    rows(&mut all, |_, timed| {
        let Large { count, mib, .. } = timed.image.memory;
        format!("{count} x {mib} MiB")
    });
    Ok(all)
}

fn by_memory_of_cpus() -> anyhow::Result<()> {
    let memory = MEMORIES[1];
    let of = |mib: usize| Timed::new(memory, (mib << 20) / BYTES);
    let mut all = OWN.map(of).into_iter().collect::<Result<Vec<_>, _>>()?;
    rounds(&mut all, Loads::Both)?;
    all[1].image.is_whole()?;
    println!(
        "\n| CPU memory, with 1 GiB of GPU memory | runs after, ms | of the first in the same round | has \
         read the last page of GPU memory after |"
    );
    println!("|---|---|---|---|");
    rows(&mut all, |number, _| format!("{} MiB", OWN[number]));
    Ok(())
}

fn at_the_far_end(mut images: Vec<Image>) -> anyhow::Result<()> {
    let mut all = Vec::new();
    for memory in FAR {
        let made = images.iter().position(|image| image.memory == memory);
        let image = made.map_or_else(|| Image::of(memory, 0), |made| Ok(images.swap_remove(made)))?;
        all.push(Far::of(image)?);
    }
    for _ in 0..FAR_ROUNDS {
        all.iter_mut().try_for_each(Far::measure)?;
    }
    println!(
        "\n| the last of | alone it is loaded in, ms | alone its page fault waits | its page fault waits | \
         more than loaded alone, wanted at most 5 | as bytes at that rate, MiB |"
    );
    println!("|---|---|---|---|---|---|");
    all.iter_mut().for_each(Far::row);
    Ok(())
}

fn main() -> anyhow::Result<()> {
    orders::table()?;
    if std::env::args().nth(1).as_deref() == Some("orders") {
        return Ok(());
    }
    let images = by_memory_of_gpus()?.into_iter().map(|timed| timed.image).collect();
    by_memory_of_cpus()?;
    at_the_far_end(images)
}
