// SPDX-License-Identifier: MIT OR Apache-2.0
//! A device that is mapped in many ways at once, for plugins that restore some of the mappings differently.

use std::fs::OpenOptions;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::ptr;

use anyhow::{Context, ensure};
use libc::{MAP_PRIVATE, MAP_SHARED, PROT_NONE, PROT_READ, PROT_WRITE};
use rewake_tests::pattern::{BASE, PAGE, Pattern, WORDS};

use crate::memory::Region;
use crate::stage::Stage;

/// Pages of each mapping.
const PAGES: usize = 8;
/// Rights and kind of each mapping. The last three are one mapping, cut by mprotect.
const KINDS: [(i32, i32); 10] = [
    (PROT_READ | PROT_WRITE, MAP_SHARED),
    (PROT_READ | PROT_WRITE, MAP_SHARED),
    (PROT_READ, MAP_SHARED),
    (PROT_NONE, MAP_SHARED),
    (PROT_READ | PROT_WRITE, MAP_SHARED),
    (PROT_READ, MAP_PRIVATE),
    (PROT_READ | PROT_WRITE, MAP_PRIVATE),
    (PROT_READ | PROT_WRITE, MAP_SHARED),
    (PROT_READ, MAP_SHARED),
    (PROT_READ | PROT_WRITE, MAP_SHARED),
];
/// The mapping that children do not get.
const NOT_FOR_CHILDREN: usize = 4;
/// The first part of the mapping that is cut.
const CUT: usize = 7;

/// Fills the device, maps it, and checks all mappings after the restore.
pub(crate) fn run(stage: &Stage, path: &Path) -> anyhow::Result<()> {
    let device = OpenOptions::new().read(true).write(true).open(path);
    let device = device.with_context(|| format!("open {}", path.display()))?;
    let regions: Vec<Region> = (0..KINDS.len()).map(|number| region(stage, number)).collect();
    for (number, region) in regions.iter().enumerate() {
        for page in 0..PAGES {
            let words = (0..WORDS).flat_map(|index| region.pattern.word(page, index).to_ne_bytes());
            let offset = (number * PAGES + page) * PAGE;
            device.write_all_at(&words.collect::<Vec<u8>>(), offset as u64).context("fill the device")?;
        }
        if number <= CUT {
            let pages = if number == CUT { (KINDS.len() - CUT) * PAGES } else { PAGES };
            map(region, pages, KINDS[number], device.as_raw_fd(), number * PAGES)?;
        } else {
            protect(region, KINDS[number].0)?;
        }
    }
    regions[NOT_FOR_CHILDREN].advise(0, PAGES, libc::MADV_DONTFORK)?;

    stage.ready_then_go()?;

    for (region, (rights, _)) in regions.iter().zip(KINDS) {
        if rights == PROT_NONE {
            protect(region, PROT_READ)?;
        }
        region.check_all(stage);
    }
    Ok(())
}

/// The address of mapping `number`: apart from the others, or after the part that it was cut from.
fn region(stage: &Stage, number: usize) -> Region {
    let place = number.min(CUT);
    let start = BASE + ((place + 1) << 36) + (number - place) * PAGES * PAGE;
    Region { start, pages: PAGES, pattern: Pattern::new(stage.seed + 1 + number as u64) }
}

fn map(
    region: &Region,
    pages: usize,
    (rights, kind): (i32, i32),
    fd: i32,
    first: usize,
) -> anyhow::Result<()> {
    let wanted = ptr::without_provenance_mut(region.start);
    let offset = libc::off_t::try_from(first * PAGE)?;
    let flags = kind | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: MAP_FIXED_NOREPLACE never replaces memory that Rust knows of.
    let got = unsafe { libc::mmap(wanted, pages * PAGE, rights, flags, fd, offset) };
    ensure!(got == wanted, "map the device: {}", std::io::Error::last_os_error());
    Ok(())
}

fn protect(region: &Region, rights: i32) -> anyhow::Result<()> {
    let start = ptr::without_provenance_mut(region.start);
    // SAFETY: the pages are this program's own, nothing in Rust refers to them.
    let result = unsafe { libc::mprotect(start, region.pages * PAGE, rights) };
    ensure!(result == 0, "mprotect: {}", std::io::Error::last_os_error());
    Ok(())
}
