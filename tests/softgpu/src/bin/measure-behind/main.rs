// SPDX-License-Identifier: MIT OR Apache-2.0
//! How long it takes until a process runs again, and until its CPU has what it touches at the end of its memory, by how much of that there
//! is, and in how many buffers. Images have few bytes of GPUs that are not zero, so that 8 GiB fit into memory, but for one. `cargo xtask bench behind`
//! runs it; tables come on standard output, each cell least, median and most.
//!
//! * When queues are resumed and how long touches wait, by the order in which buffers come. `measure-behind orders` ends after that.
//! * How soon it runs, by the memory of its GPU, which comes behind it; its last page is asked for at once.
//! * The same by memory of its CPU, which comes behind it, too. In the end all of that is looked at once.
//! * How long a touch waits, as the streamer counts it: of a buffer that is all there is, and of the last one of many while others are
//!   loaded. Beside it how long that one buffer takes to load with nothing else, as the streamer says (from the first engine's opening to the last
//!   byte). What the touch waits for beyond that is work that GPUs were given before, and the stop in which the device takes its place;
//!   the former is bytes, and shorter where GPUs are faster: so many at the rate at which the buffer alone was loaded.

mod far;
mod image;
mod orders;
mod text;

use std::time::Duration;

use anyhow::anyhow;
use softgpu_tests::toucher::{BYTES, Large};

use far::Far;
use image::{Image, Loads};
use text::{hundredths, spread};

/// 64 MiB, 1 GiB and 8 GiB in as many buffers, and 8 GiB in more.
const MEMORIES: [Large; 4] = [zeros(16, 4), zeros(16, 64), zeros(16, 512), zeros(128, 64)];
/// MiB of CPUs beside 1 GiB of the GPU.
const OWN: [usize; 2] = [0, 512];
/// Those at whose end something is touched; one of them has no zeros.
const FAR: [Large; 4] =
    [Large { full: true, ..zeros(128, 4) }, zeros(2048, 4), zeros(128, 64), zeros(16, 512)];
/// Even: half of them in the other direction.
const ROUNDS: usize = 16;
/// Of touches: most of their time is that of 512 MiB.
const FAR_ROUNDS: usize = 5;

const fn zeros(count: usize, mib: usize) -> Large {
    Large { count, mib, full: false }
}

/// An image, and when its process ran and had seen its last page.
struct Timed {
    image: Image,
    runs: Vec<Duration>,
    touched: Vec<Duration>,
}

impl Timed {
    fn new(memory: Large, own: usize) -> anyhow::Result<Self> {
        Ok(Self { image: Image::of(memory, own)?, runs: Vec::new(), touched: Vec::new() })
    }

    /// What is left is not waited for.
    fn comes_back(&mut self, loads: Loads) -> anyhow::Result<()> {
        let running = self.image.comes_back(loads)?;
        self.runs.push(running.alive);
        self.touched.push(running.touches_its_end()?);
        running.ends()
    }

    /// How soon it ran as shares of how soon another did in the same round.
    fn of(&self, other: &[Duration]) -> Vec<f64> {
        self.runs.iter().zip(other).map(|(runs, other)| runs.as_secs_f64() / other.as_secs_f64()).collect()
    }
}

/// In turns, there and back: none always follows the same other one.
fn rounds(all: &mut [Timed], loads: Loads) -> anyhow::Result<()> {
    let once = |timed: &mut Timed| {
        timed.comes_back(loads).map_err(|error| anyhow!("{:?}: {error:#}", timed.image.memory))
    };
    for _ in 0..ROUNDS / 2 {
        all.iter_mut().try_for_each(once)?;
        all.iter_mut().rev().try_for_each(once)?;
    }
    Ok(())
}

/// A line for each.
fn rows(all: &mut [Timed], name: impl Fn(usize, &Timed) -> String) {
    let first = all.first().map(|timed| timed.runs.clone()).unwrap_or_default();
    for (number, timed) in all.iter_mut().enumerate() {
        let (name, shares) = (name(number, timed), hundredths(timed.of(&first)));
        println!("| {name} | {} | {shares} | {} |", spread(&mut timed.runs), spread(&mut timed.touched));
    }
}

fn by_memory_of_gpus() -> anyhow::Result<Vec<Timed>> {
    let mut all = MEMORIES.map(|memory| Timed::new(memory, 0)).into_iter().collect::<Result<Vec<_>, _>>()?;
    rounds(&mut all, Loads::Gpus)?;
    println!(
        "| memory of the GPU | runs after, ms: least, median, most | of the first in the same round | has seen its last page after |"
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
        "\n| memory of the CPU, beside 1 GiB of the GPU | runs after, ms | of the first in the same round | has seen the GPU's last page after |"
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
        "\n| the last of | alone it is loaded in, ms | alone its touch waits | its touch waits | more than loaded alone, wanted at most 5 \
         | as bytes at that rate, MiB |"
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
