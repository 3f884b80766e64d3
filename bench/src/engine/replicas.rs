// SPDX-License-Identifier: MIT OR Apache-2.0
//! Replicas of a model, a process and a GPU each, with the same bytes: loaded from the disk with all files
//! read, and with one file read.

use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use rewake_bo_contents::{BackgroundLoad, MemoryDevice, ProcessBuffers};

use super::image::{Image, MINOR};
use super::pace;
use crate::cache::drop_files;
use crate::processes::check_interrupted;
use crate::report::{Spread, spread};

const COUNT: u32 = 4;
/// Required speed-up, by the median: the bytes to copy stay the same.
const WANTED: f64 = 0.75 * COUNT as f64;

/// Sets of buffers with the same bytes.
type Sets = Vec<Vec<(usize, usize)>>;

/// Measures all replicas, with `mib` together; the figures as a Markdown table.
pub(super) fn run(work: &Path, mib: u64, rounds: u64) -> anyhow::Result<String> {
    let each = mib / u64::from(COUNT);
    eprintln!("{COUNT} replicas of {each} MiB");
    let make = |number| {
        let folder = work.join(format!("replica-{number}"));
        std::fs::create_dir(&folder).context("make a folder")?;
        Image::make(&folder, each, MINOR + number)
    };
    let images: Vec<Image> = (0..COUNT).map(make).collect::<anyhow::Result<_>>()?;
    let paths: Vec<PathBuf> = images.iter().map(Image::pages).collect();
    let memory = images.iter().flat_map(|image| image.memfds.iter().flatten());
    let device = MemoryDevice::new(memory.map(|memfd| memfd.as_fd())).context("map the memory")?;
    let sets = sets(&images);
    let mut times = [Vec::new(), Vec::new()];
    for round in 0..rounds {
        check_interrupted()?;
        let mut ways = [(0, Sets::new()), (1, sets.clone())];
        ways.rotate_left(usize::from(!round.is_multiple_of(2)));
        for (way, sets) in ways {
            drop_files(&paths)?;
            times[way].push(load(&images, &device, sets)?.as_secs_f64());
        }
    }
    for path in paths {
        std::fs::remove_file(path).context("remove a pages file")?;
    }
    let shorter = times[0].iter().zip(&times[1]).map(|(each, once)| each / once).collect();
    let [each_read, once] = times.map(Spread::of);
    Ok(table(each, [each_read, once, Spread::of(shorter)]))
}

/// Each buffer has the bytes of those with its number.
fn sets(images: &[Image]) -> Sets {
    let buffers = images.first().map_or(0, |image| image.memfds.len());
    (0..buffers).map(|buffer| (0..images.len()).map(|process| (process, buffer)).collect()).collect()
}

/// Every byte is compared.
fn load(images: &[Image], device: &Arc<MemoryDevice>, sets: Sets) -> anyhow::Result<Duration> {
    images.iter().try_for_each(Image::poison)?;
    let processes: Vec<ProcessBuffers<'_>> =
        images.iter().map(|image| ProcessBuffers { files: &image.files, dmabufs: &image.memfds }).collect();
    let start = Instant::now();
    let loading = BackgroundLoad::into_memory(&processes, device, Some(pace()?))?.duplicates(sets);
    loading.run(|_| ())?.context("the image has nothing to load")?;
    let took = start.elapsed();
    images.iter().try_for_each(Image::check)?;
    Ok(took)
}

fn table(mib: u64, [each, once, shorter]: [Option<Spread>; 3]) -> String {
    let met = if shorter.is_some_and(|shorter| shorter.median >= WANTED) { "yes" } else { "**MISSED**" };
    let cells =
        [spread(each), spread(once), spread(shorter), format!("at least {WANTED:.1}"), met.to_owned()];
    format!(
        "| replicas, on the disk | each read, s | read once, s | times shorter | wanted | met |\n\
         |---|---|---|---|---|---|\n| {COUNT} x {mib} MiB | {} |\n",
        cells.join(" | ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_little_gain_is_marked() {
        let of = |value: f64| Spread::of(vec![value]);
        let text = table(512, [of(2.0), of(0.5), of(4.0)]);
        let row = "| 4 x 512 MiB | 2.00 (2.00 .. 2.00) | 0.500 (0.500 .. 0.500) | 4.00 (4.00 .. 4.00) | at least 3.0 | yes |";
        assert!(text.contains(row), "{text}");
        assert!(table(512, [of(2.0), of(1.0), of(2.0)]).contains("| **MISSED** |"));
    }
}
