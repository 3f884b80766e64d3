// SPDX-License-Identifier: MIT OR Apache-2.0
//! Lazy memory in addition to memory that CRIU restores at once: stack, file-private, shared, locked.

use std::fs::File;
use std::hint::black_box;
use std::os::fd::AsRawFd;

use anyhow::ensure;
use rewake_tests::pattern::{BASE, PAGE, Pattern, WORDS};

use crate::memory::{Expect, Region};
use crate::stage::Stage;

/// Pages of every side region.
const SIDE: usize = 256;

/// Fills one region of each kind and checks all after the restore.
pub(crate) fn run(stage: &Stage) -> anyhow::Result<()> {
    let lazy = stage.filled()?;
    let file = file_private(stage)?;
    let side = |number: usize| (BASE + (number << 36), Pattern::new(stage.seed + number as u64));
    let (start, pattern) = side(2);
    let shared = Region::map_with(start, SIDE, pattern, libc::MAP_SHARED | libc::MAP_ANONYMOUS, -1)?;
    shared.fill_all();
    let (start, pattern) = side(3);
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_LOCKED;
    let locked = Region::map_with(start, SIDE, pattern, flags, -1)?;
    locked.fill_all();
    let heap: Vec<u64> = (0..SIDE * WORDS).map(|at| pattern.word(at / WORDS, at % WORDS)).collect();

    on_the_stack(stage)?;

    lazy.check_all(stage);
    shared.check_all(stage);
    locked.check_all(stage);
    for page in 0..SIDE {
        file.check(stage, page, Expect::Of(file.pattern.at(u64::from(page % 2 == 0)), page));
    }
    let heap_good = heap.iter().enumerate().all(|(at, word)| *word == pattern.word(at / WORDS, at % WORDS));
    if !heap_good {
        stage.bad("the heap");
    }
    Ok(())
}

/// A private mapping of a file: even pages written by this program (generation 1), odd ones the file's.
fn file_private(stage: &Stage) -> anyhow::Result<Region> {
    let pattern = Pattern::new(stage.seed + 1);
    let bytes: Vec<u8> =
        (0..SIDE * WORDS).flat_map(|at| pattern.word(at / WORDS, at % WORDS).to_ne_bytes()).collect();
    ensure!(bytes.len() == SIDE * PAGE);
    let path = stage.dir.join("mapped");
    std::fs::write(&path, bytes)?;
    let file = File::open(path)?;
    let region = Region::map_with(BASE + (1 << 36), SIDE, pattern, libc::MAP_PRIVATE, file.as_raw_fd())?;
    (0..SIDE).step_by(2).for_each(|page| region.write(page, pattern.at(1)));
    Ok(region)
}

/// Sleeps through dump and restore with half a MiB of content on the stack.
#[inline(never)]
fn on_the_stack(stage: &Stage) -> anyhow::Result<()> {
    let pattern = Pattern::new(stage.seed + 4);
    let mut words = [0_u64; 128 * WORDS];
    for (at, word) in words.iter_mut().enumerate() {
        *word = pattern.word(at / WORDS, at % WORDS);
    }
    stage.ready_then_go()?;
    let words = black_box(&words);
    if !words.iter().enumerate().all(|(at, word)| *word == pattern.word(at / WORDS, at % WORDS)) {
        stage.bad("the stack");
    }
    Ok(())
}
