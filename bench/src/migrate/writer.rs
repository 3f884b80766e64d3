// SPDX-License-Identifier: MIT OR Apache-2.0
//! The program that migrates: it writes its memory, and knows what each page must hold.

use std::fs;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::Duration;

/// Words of a page.
const WORDS: usize = 512;
/// Pages between two pauses.
const PAGES: usize = 16;
/// Pause of a program that does not write.
const IDLE: Duration = Duration::from_millis(5);
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

/// Which page is written next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum WriteOrder {
    /// None.
    Idle,
    /// From the first to the last, again and again.
    Sequential,
    /// Any.
    Random,
}

/// Arguments of the hidden command.
#[derive(Debug, clap::Args)]
pub(crate) struct WriterOptions {
    #[arg(long)]
    mib: usize,
    #[arg(long, value_enum)]
    order: WriteOrder,
    /// MiB a second
    #[arg(long)]
    rate: u64,
    /// Where it says "ready", is asked to "stop", and says whether its memory is right: "verdict"
    #[arg(long)]
    dir: PathBuf,
}

/// Writes until it is asked to stop, then checks every page.
pub(crate) fn run(options: &WriterOptions) -> anyhow::Result<()> {
    let pages = options.mib * 256;
    let mut memory = vec![0_u64; pages * WORDS];
    let mut generations = vec![0_u64; pages];
    for (page, words) in memory.chunks_exact_mut(WORDS).enumerate() {
        fill(words, page, 0);
    }
    fs::write(options.dir.join("ready"), "")?;
    let stop = options.dir.join("stop");
    let pause = Duration::from_nanos((PAGES as u64 * 4096 * 1_000_000_000) / (options.rate << 20));
    let mut step = 0_u64;
    while !stop.exists() {
        if options.order == WriteOrder::Idle {
            sleep(IDLE);
            continue;
        }
        for _ in 0..PAGES {
            let page = next(options.order, step, pages);
            step += 1;
            generations[page] += 1;
            fill(&mut memory[page * WORDS..][..WORDS], page, generations[page]);
        }
        sleep(pause);
    }
    let wrong =
        (0..pages).find(|page| !is_right(&memory[page * WORDS..][..WORDS], *page, generations[*page]));
    let verdict = wrong.map_or_else(|| "OK".to_owned(), |page| format!("page {page} is wrong"));
    fs::write(options.dir.join("verdict"), verdict)?;
    Ok(())
}

fn next(order: WriteOrder, step: u64, pages: usize) -> usize {
    let number = if order == WriteOrder::Random { step.wrapping_mul(SPREAD) >> 20 } else { step };
    usize::try_from(number).unwrap_or_default() % pages
}

fn word(page: usize, generation: u64, index: usize) -> u64 {
    (page as u64 ^ generation << 32).wrapping_mul(SPREAD).wrapping_add(index as u64)
}

fn fill(words: &mut [u64], page: usize, generation: u64) {
    for (index, found) in words.iter_mut().enumerate() {
        *found = word(page, generation, index);
    }
}

fn is_right(words: &[u64], page: usize, generation: u64) -> bool {
    words.iter().enumerate().all(|(index, found)| *found == word(page, generation, index))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_of_another_generation_is_wrong() {
        let mut words = [0; WORDS];
        fill(&mut words, 3, 7);
        assert!(is_right(&words, 3, 7) && !is_right(&words, 3, 6) && !is_right(&words, 4, 7));
    }
}
