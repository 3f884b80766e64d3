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
use crate::harness::{Taken, folder, in_turn, of, pairs, rotated};
use crate::report::{Spread, Table, Wanted, spread};

const COUNT: u32 = 4;
/// Required speed-up, by the median: the bytes to copy stay the same.
const WANTED: Wanted = Wanted::AtLeast(0.75 * COUNT as f64);

/// How files with the same bytes are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Each,
    Once,
}

/// Sets of buffers with the same bytes.
type Sets = Vec<Vec<(usize, usize)>>;

/// Measures all replicas, with `mib` together; the figures as a Markdown table.
pub(super) fn run(work: &Path, mib: u64, rounds: u64) -> anyhow::Result<String> {
    let each = mib / u64::from(COUNT);
    eprintln!("{COUNT} replicas of {each} MiB");
    let make = |number| Image::make(&folder(work, &format!("replica-{number}"))?, each, MINOR + number);
    let images: Vec<Image> = (0..COUNT).map(make).collect::<anyhow::Result<_>>()?;
    let paths: Vec<PathBuf> = images.iter().map(Image::pages).collect();
    let memory = images.iter().flat_map(|image| image.memfds.iter().flatten());
    let device = MemoryDevice::new(memory.map(|memfd| memfd.as_fd())).context("map the memory")?;
    let sets = sets(&images);
    let times = in_turn(
        rounds,
        |round| rotated(&[Way::Each, Way::Once], round),
        |way, _| {
            drop_files(&paths)?;
            let sets = if way == Way::Once { sets.clone() } else { Sets::new() };
            Ok(load(&images, &device, sets)?.as_secs_f64())
        },
    )?;
    for path in paths {
        std::fs::remove_file(path).context("remove a pages file")?;
    }
    Ok(table(each, &times))
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

fn table(mib: u64, times: &[Taken<Way, f64>]) -> String {
    let heads = ["replicas, on the disk", "each read, s", "read once, s", "times shorter", "wanted", "met"];
    let mut table = Table::new(&heads);
    let shorter = Spread::of(pairs(times, [Way::Each, Way::Once]).map(|(each, once)| each / once));
    let [each, once] = [Way::Each, Way::Once].map(|way| spread(Spread::of(of(times, way).copied())));
    let [wanted, met] = WANTED.cells(shorter);
    table.row(&[format!("{COUNT} x {mib} MiB"), each, once, spread(shorter), wanted, met]);
    table.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_little_gain_is_marked() {
        let text = |once| {
            let taken = |way, sample| Taken { way, round: 1, sample };
            table(512, &[taken(Way::Each, 2.0), taken(Way::Once, once)])
        };
        let row = "| 4 x 512 MiB | 2.00 (2.00 .. 2.00) | 0.500 (0.500 .. 0.500) | 4.00 (4.00 .. 4.00) | at \
            least 3.00 | yes |";
        assert!(text(0.5).contains(row), "{}", text(0.5));
        assert!(text(1.0).contains("| **MISSED** |"));
    }
}
