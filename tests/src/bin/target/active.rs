// SPDX-License-Identifier: MIT OR Apache-2.0
//! A program that reads, writes, drops, moves and forks at random while its memory is loaded. It knows at any
//! time what each page must hold.

use rewake_tests::Random;

use crate::family::expect_all;
use crate::memory::{Expect, Region, fork};
use crate::moving::ELSEWHERE;
use crate::stage::Stage;

/// Longest run of pages that one operation drops or moves.
const RUN: usize = 32;
/// Pages that a forked child reads.
const GLANCES: usize = 64;

/// Random operations, two a page, again and again; one last time after the test says "stop", then a check of
/// all.
pub(crate) fn run(stage: &Stage) -> anyhow::Result<()> {
    let region = stage.filled()?;
    stage.ready_then_go()?;
    let mut world =
        World { stage, region, content: vec![Some(0); region.pages], random: Random::new(stage.seed) };
    loop {
        let last = stage.stop_asked();
        for _ in 0..region.pages * 2 {
            world.act()?;
        }
        if last || !stage.clean() {
            break;
        }
    }
    (0..region.pages).for_each(|page| world.check(page));
    Ok(())
}

struct World<'a> {
    stage: &'a Stage,
    region: Region,
    /// Generation of each page; none where it was dropped.
    content: Vec<Option<u64>>,
    random: Random,
}

impl World<'_> {
    fn act(&mut self) -> anyhow::Result<()> {
        let page = self.random.below(self.region.pages);
        match self.random.below(2000) {
            0 => self.glance_from_a_child(),
            1..40 => self.drop_run(page),
            40..80 => self.move_away_and_back(page),
            80..600 => {
                let generation = self.content[page].map_or(1, |old| old + 1);
                self.region.write(page, self.region.pattern.at(generation));
                self.content[page] = Some(generation);
                Ok(())
            }
            _ => {
                self.check(page);
                Ok(())
            }
        }
    }

    fn check(&self, page: usize) {
        let pattern = self.region.pattern;
        let of = |generation| Expect::Of(pattern.at(generation), page);
        self.region.check(self.stage, page, self.content[page].map_or(Expect::Zero, of));
    }

    fn run_from(&mut self, page: usize) -> usize {
        (1 + self.random.below(RUN)).min(self.region.pages - page)
    }

    fn drop_run(&mut self, page: usize) -> anyhow::Result<()> {
        let count = self.run_from(page);
        self.region.advise(page, count, libc::MADV_DONTNEED)?;
        self.content[page..page + count].fill(None);
        Ok(())
    }

    fn move_away_and_back(&mut self, page: usize) -> anyhow::Result<()> {
        let count = self.run_from(page);
        let moved = self.region.remap(page, count, count, ELSEWHERE)?;
        moved.remap(0, count, count, self.region.address(page))?;
        Ok(())
    }

    fn glance_from_a_child(&mut self) -> anyhow::Result<()> {
        let first = self.random.below(self.region.pages - GLANCES);
        let child = fork(|| {
            (first..first + GLANCES).for_each(|page| self.check(page));
            self.stage.status()
        })?;
        expect_all(self.stage, &[child])
    }
}
