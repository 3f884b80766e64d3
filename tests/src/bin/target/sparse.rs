// SPDX-License-Identifier: MIT OR Apache-2.0
//! Regions of which most was never written.

use rewake_tests::pattern::{BASE, Pattern};

use crate::memory::{Expect, Region};
use crate::stage::Stage;

/// Two pages of three were never written and read zero.
pub(crate) fn untouched(stage: &Stage) -> anyhow::Result<()> {
    let region = strided(stage, 3)?;
    stage.ready_then_go()?;
    check(stage, region, 3, 0);
    Ok(())
}

/// Unmaps five sixths of a region at once, of which every `stride`th page is in the image. Stays alive until
/// the test says "stop": only a living target shows whether the server finishes the rest.
pub(crate) fn unmap_most(stage: &Stage, stride: usize) -> anyhow::Result<()> {
    let region = strided(stage, stride)?;
    stage.ready_then_go()?;
    let gone = region.pages / 6 * 5;
    region.unmap(0, gone)?;
    check(stage, region, stride, gone);
    stage.wait_for_stop();
    Ok(())
}

/// As [`unmap_most`], with MADV_DONTNEED.
pub(crate) fn discard_most(stage: &Stage, stride: usize) -> anyhow::Result<()> {
    let region = strided(stage, stride)?;
    stage.ready_then_go()?;
    let gone = region.pages / 6 * 5;
    region.advise(0, gone, libc::MADV_DONTNEED)?;
    check(stage, region, stride, gone);
    (0..gone).step_by(stride).for_each(|page| region.check(stage, page, Expect::Zero));
    stage.wait_for_stop();
    Ok(())
}

fn strided(stage: &Stage, stride: usize) -> anyhow::Result<Region> {
    let region = Region::map(BASE, stage.pages, Pattern::new(stage.seed))?;
    region.advise(0, region.pages, libc::MADV_NOHUGEPAGE)?;
    (0..region.pages).step_by(stride).for_each(|page| region.write(page, region.pattern));
    Ok(region)
}

/// All written pages from `first` on, and for each the page after it, which reads zero if it was never
/// written.
fn check(stage: &Stage, region: Region, stride: usize, first: usize) {
    for page in (first..region.pages).filter(|page| page % stride < 2) {
        let written = page.is_multiple_of(stride);
        let expect = if written { Expect::Of(region.pattern, page) } else { Expect::Zero };
        region.check(stage, page, expect);
    }
}
