// SPDX-License-Identifier: MIT OR Apache-2.0
//! A page fault at the far end of a large image, compared with an image of that buffer alone.

use std::thread;
use std::time::Duration;

use softgpu_tests::accessor::Large;

use super::image::{Image, Loads};
use super::text::{spread, tenths};

/// Time from the start of the process to the access: the background load is in full flow then.
const LATER: Duration = Duration::from_millis(300);

/// Both images, and their measurements.
pub(crate) struct Far {
    all: Image,
    alone: Image,
    /// How long the image of one buffer took to load.
    loaded: Vec<Duration>,
    waited_alone: Vec<Duration>,
    waited: Vec<Duration>,
}

impl Far {
    /// Measures the last buffer of this image.
    pub(crate) fn of(all: Image) -> anyhow::Result<Self> {
        let alone = Image::of(Large { count: 1, ..all.memory }, 0)?;
        Ok(Self { all, alone, loaded: Vec::new(), waited_alone: Vec::new(), waited: Vec::new() })
    }

    /// One round of each.
    pub(crate) fn measure(&mut self) -> anyhow::Result<()> {
        let running = self.all.restores(Loads::Gpus)?;
        thread::sleep(LATER);
        running.accesses_its_end()?;
        self.waited.push(running.waited()?);
        running.ends()?;
        let mut running = self.alone.restores(Loads::Gpus)?;
        running.accesses_its_end()?;
        let (loaded, waited) = running.loaded()?;
        self.loaded.push(loaded);
        self.waited_alone.push(waited);
        running.ends()
    }

    /// A row of the table. Each difference is of one round.
    pub(crate) fn row(&mut self) {
        let Large { count, mib, full } = self.all.memory;
        let bytes = if full { "not zero" } else { "zeros" };
        let pairs = || self.waited.iter().zip(&self.loaded);
        let more = |(waited, loaded): (&Duration, &Duration)| waited.as_secs_f64() - loaded.as_secs_f64();
        let ms = tenths(pairs().map(|pair| more(pair) * 1e3).collect());
        let ahead = tenths(pairs().map(|pair| more(pair) * mib as f64 / pair.1.as_secs_f64()).collect());
        println!(
            "| {count} x {mib} MiB, {bytes} | {} | {} | {} | {ms} | {ahead} |",
            spread(&mut self.loaded),
            spread(&mut self.waited_alone),
            spread(&mut self.waited),
        );
    }
}
