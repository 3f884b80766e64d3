// SPDX-License-Identifier: MIT OR Apache-2.0
//! A device, open and mapped twice: what CRIU leaves to plugins.

use std::fs::OpenOptions;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::ptr;

use anyhow::{Context, ensure};
use rewake_tests::pattern::{BASE, PAGE, Pattern};

use crate::memory::Region;
use crate::stage::Stage;

/// Pages of each of the two mappings.
const PAGES: usize = 8;

/// Writes through both mappings, and checks them and the open file after the restore.
pub(crate) fn run(stage: &Stage, path: &Path) -> anyhow::Result<()> {
    let memory = stage.filled()?;
    let device = OpenOptions::new().read(true).write(true).open(path);
    let device = device.with_context(|| format!("open {}", path.display()))?;
    let regions: Vec<Region> = (0..2)
        .map(|number| {
            let region = Region {
                start: BASE + ((number + 1) << 36),
                pages: PAGES,
                pattern: Pattern::new(stage.seed + 1 + number as u64),
            };
            map(&region, device.as_raw_fd(), number * PAGES)?;
            region.fill_all();
            Ok(region)
        })
        .collect::<anyhow::Result<_>>()?;

    stage.ready_then_go()?;

    memory.check_all(stage);
    for (number, region) in regions.iter().enumerate() {
        region.check_all(stage);
        let mut bytes = [0; 8];
        device.read_exact_at(&mut bytes, (number * PAGES * PAGE) as u64).context("read the device")?;
        if u64::from_ne_bytes(bytes) != region.pattern.word(0, 0) {
            stage.bad("the device, as its open file reads it");
        }
    }
    Ok(())
}

/// Maps a region's pages of the file, from page `first` on.
fn map(region: &Region, fd: i32, first: usize) -> anyhow::Result<()> {
    let wanted = ptr::without_provenance_mut(region.start);
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_SHARED | libc::MAP_FIXED_NOREPLACE;
    let offset = libc::off_t::try_from(first * PAGE)?;
    // SAFETY: MAP_FIXED_NOREPLACE never replaces memory that Rust knows of.
    let got = unsafe { libc::mmap(wanted, region.pages * PAGE, rights, flags, fd, offset) };
    ensure!(got == wanted, "map the device: {}", std::io::Error::last_os_error());
    Ok(())
}
