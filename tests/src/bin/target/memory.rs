// SPDX-License-Identifier: MIT OR Apache-2.0
//! Regions of memory at fixed addresses, and the reading and writing of them.

use std::ptr;

use anyhow::{Context, ensure};
use rewake_tests::pattern::{PAGE, Pattern, WORDS};

use crate::stage::Stage;

/// What a page must hold.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Expect {
    /// The content of page number `.1` of a pattern.
    Of(Pattern, usize),
    /// Nothing but zeros.
    Zero,
    /// Either of the above: the kernel may or may not have dropped it.
    OfOrZero(Pattern, usize),
}

/// Anonymous private memory of this program; stays mapped until the scenario unmaps it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Region {
    /// First byte.
    pub(crate) start: usize,
    /// Pages.
    pub(crate) pages: usize,
    /// Content that [`Region::fill_all`] writes.
    pub(crate) pattern: Pattern,
}

impl Region {
    /// Maps `pages` pages at exactly `start`, where nothing may be mapped yet.
    pub(crate) fn map(start: usize, pages: usize, pattern: Pattern) -> anyhow::Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        Self::map_with(start, pages, pattern, flags, -1)
    }

    /// As [`Region::map`], with mapping flags and a file of the caller's.
    pub(crate) fn map_with(
        start: usize,
        pages: usize,
        pattern: Pattern,
        flags: i32,
        fd: i32,
    ) -> anyhow::Result<Self> {
        let wanted = ptr::without_provenance_mut(start);
        let flags = flags | libc::MAP_FIXED_NOREPLACE;
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: MAP_FIXED_NOREPLACE never replaces memory that Rust knows of.
        let got = unsafe { libc::mmap(wanted, pages * PAGE, rights, flags, fd, 0) };
        ensure!(got == wanted, "map {pages} pages at {start:#x}: {}", std::io::Error::last_os_error());
        Ok(Self { start, pages, pattern })
    }

    /// The address of one page.
    pub(crate) fn address(&self, page: usize) -> usize {
        self.start + page * PAGE
    }

    /// Writes the region's content to all of it.
    pub(crate) fn fill_all(&self) {
        for page in 0..self.pages {
            self.write(page, self.pattern);
        }
    }

    /// Writes `pattern` to one page.
    pub(crate) fn write(&self, page: usize, pattern: Pattern) {
        for index in 0..WORDS {
            self.put(page, index, pattern.word(page, index));
        }
    }

    /// Writes one word.
    pub(crate) fn put(&self, page: usize, index: usize, word: u64) {
        assert!(page < self.pages && index < WORDS);
        let place = ptr::without_provenance_mut::<u64>(self.address(page) + index * 8);
        // SAFETY: inside a mapping that this program made for itself and accesses only through raw pointers.
        unsafe { place.write_volatile(word) };
    }

    /// Checks all of it against the region's content.
    pub(crate) fn check_all(&self, stage: &Stage) {
        self.check_from(stage, 0, 0, self.pages);
    }

    /// Checks `count` pages from `page` on, which hold the content of `content` and following.
    pub(crate) fn check_from(&self, stage: &Stage, page: usize, content: usize, count: usize) {
        for step in 0..count {
            self.check(stage, page + step, Expect::Of(self.pattern, content + step));
        }
    }

    /// Checks that `count` pages from `page` on are zero.
    pub(crate) fn check_zero(&self, stage: &Stage, page: usize, count: usize) {
        for step in page..page + count {
            self.check(stage, step, Expect::Zero);
        }
    }

    /// Checks every byte of one page, and reports what it holds instead.
    pub(crate) fn check(&self, stage: &Stage, page: usize, expect: Expect) {
        let expect = match expect {
            Expect::OfOrZero(..) if self.word(page, 0) == 0 => Expect::Zero,
            Expect::OfOrZero(pattern, content) => Expect::Of(pattern, content),
            other => other,
        };
        let wanted = |index| match expect {
            Expect::Of(pattern, content) | Expect::OfOrZero(pattern, content) => pattern.word(content, index),
            Expect::Zero => 0,
        };
        for index in 0..WORDS {
            let (found, wanted) = (self.word(page, index), wanted(index));
            if found != wanted {
                stage.bad(&format!(
                    "page {page} ({:#x}) word {index}: expected {wanted:#x} found {found:#x}, {}",
                    self.address(page),
                    self.describe(page, index)
                ));
                return;
            }
        }
    }

    fn word(&self, page: usize, index: usize) -> u64 {
        assert!(page < self.pages && index < WORDS);
        let place = ptr::without_provenance::<u64>(self.address(page) + index * 8);
        // SAFETY: as in `put`.
        unsafe { place.read_volatile() }
    }

    fn describe(&self, page: usize, index: usize) -> String {
        if (0..WORDS).all(|at| self.word(page, at) == 0) {
            return "a page of zeros".to_owned();
        }
        let found = self.word(page, index);
        for generation in 0..4 {
            let pattern = self.pattern.at(generation);
            let other = (0..self.pages).find(|other| pattern.word(*other, index) == found);
            if let Some(other) = other {
                return format!("the content of page {other}, generation {generation}");
            }
        }
        "bytes of no page of this region".to_owned()
    }

    /// `madvise` on `count` pages from `page` on.
    pub(crate) fn advise(&self, page: usize, count: usize, advice: i32) -> anyhow::Result<()> {
        let start = ptr::without_provenance_mut(self.address(page));
        // SAFETY: the pages are this program's own, nothing in Rust refers to them.
        let result = unsafe { libc::madvise(start, count * PAGE, advice) };
        ensure!(result == 0, "madvise {advice}: {}", std::io::Error::last_os_error());
        Ok(())
    }

    /// `mprotect` of `count` pages from `page` on.
    pub(crate) fn protect(&self, page: usize, count: usize, rights: i32) -> anyhow::Result<()> {
        let start = ptr::without_provenance_mut(self.address(page));
        // SAFETY: as in `advise`; the scenario writes to them no more.
        let result = unsafe { libc::mprotect(start, count * PAGE, rights) };
        ensure!(result == 0, "mprotect: {}", std::io::Error::last_os_error());
        Ok(())
    }

    /// Unmaps `count` pages from `page` on.
    pub(crate) fn unmap(&self, page: usize, count: usize) -> anyhow::Result<()> {
        let start = ptr::without_provenance_mut(self.address(page));
        // SAFETY: as in `advise`; the scenario does not touch them again.
        let result = unsafe { libc::munmap(start, count * PAGE) };
        ensure!(result == 0, "munmap: {}", std::io::Error::last_os_error());
        Ok(())
    }

    /// Moves `old` pages from `page` on to `target`, making them `new` pages, and returns that region.
    pub(crate) fn remap(&self, page: usize, old: usize, new: usize, target: usize) -> anyhow::Result<Self> {
        let start = ptr::without_provenance_mut(self.address(page));
        let to = ptr::without_provenance_mut::<libc::c_void>(target);
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        // SAFETY: the pages are this program's own, and the scenario keeps `target` free.
        let got = unsafe { libc::mremap(start, old * PAGE, new * PAGE, flags, to) };
        ensure!(got == to, "mremap to {target:#x}: {}", std::io::Error::last_os_error());
        Ok(Self { start: target, pages: new, pattern: self.pattern })
    }

    /// Resizes `old` pages from `page` on in place.
    pub(crate) fn resize(&self, page: usize, old: usize, new: usize) -> anyhow::Result<()> {
        let start = ptr::without_provenance_mut(self.address(page));
        // SAFETY: the pages are this program's own; without MREMAP_MAYMOVE nothing else is touched.
        let got = unsafe { libc::mremap(start, old * PAGE, new * PAGE, 0) };
        ensure!(got == start, "mremap in place");
        Ok(())
    }
}

/// Forks; `child` runs in the child, and returns its exit status.
pub(crate) fn fork(child: impl FnOnce() -> u8) -> anyhow::Result<nix::unistd::Pid> {
    // SAFETY: scenarios that fork have one thread, so every lock is free in the child.
    match unsafe { nix::unistd::fork() }.context("fork")? {
        nix::unistd::ForkResult::Parent { child } => Ok(child),
        nix::unistd::ForkResult::Child => std::process::exit(child().into()),
    }
}
