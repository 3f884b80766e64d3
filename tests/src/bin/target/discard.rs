// SPDX-License-Identifier: MIT OR Apache-2.0
//! Giving memory back while it is missing.

use std::time::{Duration, Instant};

use crate::memory::{Expect, Region};
use crate::stage::Stage;

/// One large piece and many single pages are unmapped; the rest stays whole, and memory that is mapped there
/// again is zero.
pub(crate) fn unmap(stage: &Stage) -> anyhow::Result<()> {
    let region = stage.filled()?;
    let quarter = region.pages / 4;
    stage.ready_then_go()?;
    region.unmap(quarter, quarter)?;
    let single = |page: usize| page >= 2 * quarter && page < 3 * quarter && page.is_multiple_of(7);
    for page in (2 * quarter..3 * quarter).filter(|page| single(*page)) {
        region.unmap(page, 1)?;
    }
    let reborn = Region::map(region.address(quarter), quarter, region.pattern)?;
    for page in (0..quarter).chain(2 * quarter..region.pages).filter(|page| !single(*page)) {
        region.check(stage, page, Expect::Of(region.pattern, page));
    }
    reborn.check_zero(stage, 0, reborn.pages);
    Ok(())
}

/// MADV_DONTNEED on missing pages, resident pages and pages written after the restore: all read zero from
/// then on, also when the image still has bytes for them; a later write stays.
pub(crate) fn dontneed(stage: &Stage) -> anyhow::Result<()> {
    let region = stage.filled()?;
    let quarter = region.pages / 4;
    stage.ready_then_go()?;
    let new = region.pattern.at(1);
    (0..quarter / 2).for_each(|page| region.write(page, new));
    region.advise(0, quarter, libc::MADV_DONTNEED)?;
    for page in (2 * quarter..3 * quarter).step_by(2) {
        region.advise(page, 1, libc::MADV_DONTNEED)?;
    }
    let written_again = |page: usize| page < quarter && page.is_multiple_of(5);
    (0..quarter).filter(|page| written_again(*page)).for_each(|page| region.write(page, new));
    for _ in 0..2 {
        for page in 0..region.pages {
            let dropped = page < quarter || ((2 * quarter..3 * quarter).contains(&page) && page % 2 == 0);
            let expect = match (written_again(page), dropped) {
                (true, _) => Expect::Of(new, page),
                (false, true) => Expect::Zero,
                (false, false) => Expect::Of(region.pattern, page),
            };
            region.check(stage, page, expect);
        }
    }
    Ok(())
}

/// MADV_FREE: every page holds its old content or zeros, never anything else; a later write stays.
pub(crate) fn free(stage: &Stage) -> anyhow::Result<()> {
    let region = stage.filled()?;
    let half = region.pages / 2;
    stage.ready_then_go()?;
    (0..half).step_by(3).for_each(|page| region.check(stage, page, Expect::Of(region.pattern, page)));
    region.advise(0, half, libc::MADV_FREE)?;
    let new = region.pattern.at(1);
    (0..half).step_by(5).for_each(|page| region.write(page, new));
    for page in 0..region.pages {
        let expect = match (page < half, page.is_multiple_of(5)) {
            (true, true) => Expect::Of(new, page),
            (true, false) => Expect::OfOrZero(region.pattern, page),
            (false, _) => Expect::Of(region.pattern, page),
        };
        region.check(stage, page, expect);
    }
    Ok(())
}

/// The first MADV_DONTNEED after all CPU memory is resident: no streamer reads its event any more, so it must
/// not wait for one.
pub(crate) fn promptly(stage: &Stage) -> anyhow::Result<()> {
    let region = stage.filled()?;
    stage.ready_then_go()?;
    let begun = Instant::now();
    region.advise(0, 1, libc::MADV_DONTNEED)?;
    let took = begun.elapsed();
    // A call that waited for the event would wait for ever.
    if took > Duration::from_secs(60) {
        stage.bad(&format!("MADV_DONTNEED took {took:?}"));
    }
    region.check(stage, 0, Expect::Zero);
    Ok(())
}
