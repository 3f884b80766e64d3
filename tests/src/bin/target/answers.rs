// SPDX-License-Identifier: MIT OR Apache-2.0
//! Programs that compare their memory each time they are asked, and answer in a file, until they are killed:
//! what they are made of is what differs. `rewake_tests::programs` asks.

use std::fs::{File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::sync::Barrier;

use anyhow::{Context as _, ensure};
use nix::errno::Errno;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use rewake_tests::pattern::{BASE, PAGE, Pattern};

use crate::memory::{Expect, Region};
use crate::plain;
use crate::stage::Stage;

/// Threads of [`threads`].
const THREADS: usize = 300;
/// Mappings of [`mappings`]. A process may have 65,530 of them.
const MAPPINGS: usize = 30_000;
/// Length of the memory of [`terabyte`], and the pages from one that is written to the next.
const TERABYTE: usize = 1 << 40;
const STRIDE: usize = (4 << 30) / PAGE;
/// A huge page of this architecture.
const HUGE: usize = (2 << 20) / PAGE;

/// The pipe of questions, and the file of answers.
struct Questions {
    asks: File,
    answers: File,
}

impl Questions {
    fn new(stage: &Stage) -> anyhow::Result<Self> {
        let (asks, answers) = (stage.dir.join("asks"), stage.dir.join("answers"));
        mkfifo(&asks, Mode::from_bits_truncate(0o600)).context("make the pipe")?;
        // With a writer of its own, it reads no end of the file.
        let asks = OpenOptions::new().read(true).write(true).open(asks).context("open the pipe")?;
        let answers =
            OpenOptions::new().create(true).append(true).open(answers).context("open the answers")?;
        File::create(stage.dir.join("ready")).context("create the ready file")?;
        Ok(Self { asks, answers })
    }

    /// Compares whenever it is asked. Neither this nor `check` makes another system call than `read` and
    /// `write`.
    fn answer(mut self, stage: &Stage, check: impl Fn()) -> anyhow::Result<()> {
        loop {
            self.asks.read_exact(&mut [0]).context("read a question")?;
            check();
            self.answers.write_all(if stage.clean() { b"OK\n" } else { b"BAD\n" }).context("answer")?;
        }
    }
}

/// One thread and one region, after `prepare`.
pub(crate) fn plain(stage: &Stage) -> anyhow::Result<()> {
    let region = stage.filled()?;
    Questions::new(stage)?.answer(stage, || region.check_all(stage))
}

/// A command and a mapped file whose names are not UTF-8.
pub(crate) fn odd_names(stage: &Stage) -> anyhow::Result<()> {
    let (region, (_file, mapped)) = (stage.filled()?, plain::odd_file(stage)?);
    Questions::new(stage)?.answer(stage, || [region, mapped].iter().for_each(|of| of.check_all(stage)))
}

/// A reservation without access that is longer than the machine's memory.
pub(crate) fn reserved(stage: &Stage) -> anyhow::Result<()> {
    plain::reserve()?;
    plain(stage)
}

/// Many threads, each of which compares pages of its own.
pub(crate) fn threads(stage: &Stage) -> anyhow::Result<()> {
    let region = stage.filled()?;
    let (asked, done) = (Barrier::new(THREADS + 1), Barrier::new(THREADS + 1));
    std::thread::scope(|scope| {
        for number in 0..THREADS {
            let (asked, done) = (&asked, &done);
            scope.spawn(move || {
                loop {
                    asked.wait();
                    let own = (number..region.pages).step_by(THREADS);
                    own.for_each(|page| region.check(stage, page, Expect::Of(region.pattern, page)));
                    done.wait();
                }
            });
        }
        Questions::new(stage)?.answer(stage, || {
            asked.wait();
            done.wait();
        })
    })
}

/// Many mappings of one page: every second one is read-only, and every fourth was written.
pub(crate) fn mappings(stage: &Stage) -> anyhow::Result<()> {
    let region = Region::map(BASE, MAPPINGS, Pattern::new(stage.seed))?;
    region.advise(0, region.pages, libc::MADV_NOHUGEPAGE)?;
    let written = || (0..region.pages).step_by(4);
    written().for_each(|page| region.write(page, region.pattern));
    (0..region.pages).step_by(2).try_for_each(|page| region.protect(page, 1, libc::PROT_READ))?;
    Questions::new(stage)?.answer(stage, || {
        for page in written() {
            region.check(stage, page, Expect::Of(region.pattern, page));
            region.check(stage, page + 1, Expect::Zero);
        }
    })
}

/// A region of 1 TiB, of which few pages were written.
pub(crate) fn terabyte(stage: &Stage) -> anyhow::Result<()> {
    let region = Region::map(BASE, TERABYTE / PAGE, Pattern::new(stage.seed))?;
    region.advise(0, region.pages, libc::MADV_NOHUGEPAGE)?;
    let written = || (0..region.pages).step_by(STRIDE);
    written().for_each(|page| region.write(page, region.pattern));
    Questions::new(stage)?.answer(stage, || {
        written().for_each(|page| region.check(stage, page, Expect::Of(region.pattern, page)));
    })
}

/// Huge pages that the machine's user has reserved (MAP_HUGETLB), in addition to ordinary memory.
pub(crate) fn huge_pages(stage: &Stage) -> anyhow::Result<()> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB;
    let start = BASE + (1 << 36);
    let huge = Region::map_with(start, 2 * HUGE, Pattern::new(stage.seed + 1), flags, -1)?;
    huge.fill_all();
    let region = stage.filled()?;
    Questions::new(stage)?.answer(stage, || [region, huge].iter().for_each(|of| of.check_all(stage)))
}

/// A program that may read, write and exit (SECCOMP_MODE_STRICT): the kernel kills it at any other system
/// call.
pub(crate) fn strict(stage: &Stage) -> anyhow::Result<()> {
    let region = stage.filled()?;
    let questions = Questions::new(stage)?;
    // SAFETY: it restricts this thread, the only one.
    let result = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_STRICT) };
    ensure!(result == 0, "seccomp: {}", Errno::last());
    questions.answer(stage, || region.check_all(stage))
}
