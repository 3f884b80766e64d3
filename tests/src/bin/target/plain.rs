// SPDX-License-Identifier: MIT OR Apache-2.0
//! One process, one region.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::fd::AsRawFd as _;
use std::os::unix::ffi::OsStrExt as _;

use anyhow::Context as _;
use rewake_tests::Random;
use rewake_tests::pattern::{BASE, PAGE, Pattern};
use rewake_tests::scene::ODD_NAME;

use crate::memory::{Expect, Region};
use crate::stage::Stage;

/// Adjacent pages of the quarter that [`quarter`] reads: 1 MiB.
const RUN: usize = 256;

/// Lowest page first.
pub(crate) fn sequential(stage: &Stage) -> anyhow::Result<()> {
    let region = stage.filled()?;
    stage.ready_then_go()?;
    region.check_all(stage);
    Ok(())
}

/// With a reservation without access that is longer than the machine's memory, as language runtimes make it.
pub(crate) fn reserved(stage: &Stage) -> anyhow::Result<()> {
    reserve()?;
    sequential(stage)
}

/// Reserves addresses without access.
pub(crate) fn reserve() -> anyhow::Result<()> {
    const LENGTH: usize = 4 << 40;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping that nothing accesses, at an address that the kernel chooses.
    let mapped = unsafe { libc::mmap(std::ptr::null_mut(), LENGTH, libc::PROT_NONE, flags, -1, 0) };
    anyhow::ensure!(mapped != libc::MAP_FAILED, "a reservation: {}", std::io::Error::last_os_error());
    Ok(())
}

/// Every page in random order, again and again; one last time after the test says "stop".
pub(crate) fn random(stage: &Stage) -> anyhow::Result<()> {
    let region = stage.filled()?;
    stage.ready_then_go()?;
    let mut random = Random::new(stage.seed);
    loop {
        let last = stage.stop_asked();
        for page in random.shuffled(region.pages) {
            region.check(stage, page, Expect::Of(region.pattern, page));
        }
        if last || !stage.clean() {
            return Ok(());
        }
    }
}

/// As [`random`], by a program whose own name is not UTF-8, nor is that of a file that it has open and
/// mapped.
pub(crate) fn odd_names(stage: &Stage) -> anyhow::Result<()> {
    let (_file, mapped) = odd_file(stage)?;
    random(stage)?;
    mapped.check_all(stage);
    Ok(())
}

/// Takes a name that is not UTF-8, and opens and maps a file with such a name.
pub(crate) fn odd_file(stage: &Stage) -> anyhow::Result<(File, Region)> {
    fs::write("/proc/self/comm", ODD_NAME).context("take another name")?;
    let path = stage.dir.join(OsStr::from_bytes(b"donn\xe9es"));
    let file = File::options().read(true).write(true).create_new(true).open(path).context("create a file")?;
    file.set_len(PAGE as u64).context("a page of the file")?;
    let (start, pattern) = (BASE + (stage.pages + 16) * PAGE, Pattern::new(stage.seed + 1));
    let mapped = Region::map_with(start, 1, pattern, libc::MAP_PRIVATE, file.as_raw_fd())?;
    mapped.fill_all();
    Ok((file, mapped))
}

/// A quarter of the pages in random order, in runs of [`RUN`]; then it writes "answered", and reads all after
/// the test says "stop".
pub(crate) fn quarter(stage: &Stage) -> anyhow::Result<()> {
    let region = stage.filled()?;
    stage.ready_then_go()?;
    let mut random = Random::new(stage.seed);
    for page in random.shuffled(region.pages / 4) {
        let page = page / RUN * 4 * RUN + page % RUN;
        region.check(stage, page, Expect::Of(region.pattern, page));
    }
    File::create(stage.dir.join("answered")).context("create the answered file")?;
    stage.wait_for_stop();
    region.check_all(stage);
    Ok(())
}

/// Random pages get read, half of them rewritten; no write may be lost to a late copy.
pub(crate) fn rewrite(stage: &Stage) -> anyhow::Result<()> {
    let region = stage.filled()?;
    stage.ready_then_go()?;
    let mut random = Random::new(stage.seed);
    let mut generation = vec![0; region.pages];
    for _ in 0..region.pages * 3 {
        let page = random.below(region.pages);
        if random.below(2) == 0 {
            generation[page] += 1;
            region.write(page, region.pattern.at(generation[page]));
        } else {
            region.check(stage, page, Expect::Of(region.pattern.at(generation[page]), page));
        }
    }
    for (page, generation) in generation.into_iter().enumerate() {
        region.check(stage, page, Expect::Of(region.pattern.at(generation), page));
    }
    Ok(())
}

/// Memory in transparent huge pages.
pub(crate) fn huge(stage: &Stage) -> anyhow::Result<()> {
    let region = Region::map(BASE, stage.pages, Pattern::new(stage.seed))?;
    region.advise(0, region.pages, libc::MADV_HUGEPAGE)?;
    region.fill_all();
    stage.ready_then_go()?;
    let mut random = Random::new(stage.seed);
    for page in random.shuffled(region.pages) {
        region.check(stage, page, Expect::Of(region.pattern, page));
    }
    Ok(())
}

/// Every third page was written with zeros: it is in the image, and may be a hole of the file there.
pub(crate) fn zeros(stage: &Stage) -> anyhow::Result<()> {
    let region = Region::map(BASE, stage.pages, Pattern::new(stage.seed))?;
    let zero = |page: usize| page % 3 == 1;
    for page in 0..region.pages {
        if zero(page) {
            region.put(page, 0, 0);
        } else {
            region.write(page, region.pattern);
        }
    }
    stage.ready_then_go()?;
    for page in 0..region.pages {
        let expect = if zero(page) { Expect::Zero } else { Expect::Of(region.pattern, page) };
        region.check(stage, page, expect);
    }
    Ok(())
}
