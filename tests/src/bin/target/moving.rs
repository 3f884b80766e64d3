// SPDX-License-Identifier: MIT OR Apache-2.0
//! mremap of memory that is still missing.

use rewake_tests::pattern::BASE;

use crate::memory::Region;
use crate::stage::Stage;

/// The target of moved memory.
pub(crate) const ELSEWHERE: usize = BASE + (1 << 36);

/// Moves the second quarter (making it longer), moves half of that once more, shrinks the last quarter.
pub(crate) fn mremap(stage: &Stage) -> anyhow::Result<()> {
    let region = stage.filled()?;
    let quarter = region.pages / 4;
    let extra = 16;
    stage.ready_then_go()?;

    let moved = region.remap(quarter, quarter, quarter + extra, ELSEWHERE)?;
    region.resize(3 * quarter, quarter, quarter / 2)?;
    let again = moved.remap(0, quarter / 2, quarter / 2, ELSEWHERE + (1 << 36))?;

    again.check_from(stage, 0, quarter, again.pages);
    moved.check_from(stage, again.pages, quarter + again.pages, quarter - again.pages);
    moved.check_zero(stage, quarter, extra);
    region.check_from(stage, 0, 0, quarter);
    region.check_from(stage, 2 * quarter, 2 * quarter, quarter + quarter / 2);

    // The old places are new memory now: no byte of the image may appear in it.
    let reborn = Region::map(region.address(quarter), quarter, region.pattern)?;
    let grown = Region::map(region.address(3 * quarter + quarter / 2), quarter / 2, region.pattern)?;
    reborn.check_zero(stage, 0, reborn.pages);
    grown.check_zero(stage, 0, grown.pages);
    Ok(())
}
