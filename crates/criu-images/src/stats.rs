// SPDX-License-Identifier: MIT OR Apache-2.0
//! Counts the pages of a task by place, for reports.

use std::os::unix::fs::FileExt;

use nix::errno::Errno;
use nix::unistd::{Whence, lseek};

use crate::dir::{ImageDir, io_error};
use crate::error::Result;
use crate::pagemap::{PageFlags, Pagemap};
use crate::plan::PagesFile;
use crate::{PAGE, PAGE_LEN};

/// Pages that are read at a time to count zeros.
const SCAN_PAGES: u64 = 256;

/// Pages of a task by place. Shared memory is not counted: it has its own pagemaps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PageStats {
    /// All pages that the pagemap lists.
    pub total: u64,
    /// Pages in this image's pages file.
    pub present: u64,
    /// Pages in a parent image.
    pub in_parent: u64,
    /// Pages in neither: the page server of a `criu dump --lazy-pages` has them.
    pub remote: u64,
    /// Pages that may be restored after the task runs, in any place.
    pub lazy: u64,
    /// Pages that must be restored before the task runs: `total` without `lazy`.
    pub eager: u64,
}

impl Pagemap {
    /// Counts the pages.
    #[must_use]
    pub fn stats(&self) -> PageStats {
        let mut stats = PageStats::default();
        for entry in &self.entries {
            let pages = entry.pages;
            stats.total += pages;
            if entry.flags.has(PageFlags::PARENT) {
                stats.in_parent += pages;
            } else if entry.flags.has(PageFlags::PRESENT) {
                stats.present += pages;
            } else {
                stats.remote += pages;
            }
            if entry.flags.has(PageFlags::LAZY) {
                stats.lazy += pages;
            } else {
                stats.eager += pages;
            }
        }
        stats
    }
}

impl ImageDir {
    /// Reads the whole pages file of a task and counts its pages of zeros; 0 for a task without pages.
    ///
    /// # Errors
    /// A file is missing, damaged or truncated, or cannot be read.
    pub fn zero_pages(&self, pid: u32) -> Result<u64> {
        let Some(map) = self.pagemap(pid)? else { return Ok(0) };
        let Some(pages) = self.pages_file(&map)? else { return Ok(0) };
        Ok(pages.zero_bytes(0, map.file_len)? / PAGE)
    }
}

impl PagesFile {
    /// Counts the bytes of those pages between `offset` and `end` that are all zeros. Pages are counted from
    /// `offset` on; the last one may be shorter. Holes of the file are not read.
    ///
    /// # Errors
    /// The file cannot be read, or ends before `end`.
    pub fn zero_bytes(&self, offset: u64, end: u64) -> Result<u64> {
        let mut buffer = Vec::new();
        let (mut zeros, mut at) = (0, offset);
        while at < end {
            let hole = self.next_data(at).clamp(at, end);
            let pages = if hole == end { end - at } else { (hole - at) / PAGE * PAGE };
            if pages > 0 {
                (zeros, at) = (zeros + pages, at + pages);
                continue;
            }
            let len = (end - at).min(SCAN_PAGES * PAGE);
            // At most 1 MiB, see SCAN_PAGES.
            buffer.resize(usize::try_from(len).unwrap_or(usize::MAX), 0);
            let read = self.file.read_exact_at(&mut buffer, at);
            read.map_err(|error| io_error("read", &self.path, error))?;
            let empty = buffer.chunks(PAGE_LEN).filter(|page| page.iter().all(|byte| *byte == 0));
            zeros += empty.map(|page| page.len() as u64).sum::<u64>();
            at += len;
        }
        Ok(zeros)
    }

    /// Returns the start of the first data at or after `at`, or the file's end. Returns `at` where the file
    /// system does not know.
    fn next_data(&self, at: u64) -> u64 {
        let Ok(offset) = i64::try_from(at) else { return at };
        match lseek(&self.file, offset, Whence::SeekData) {
            Ok(data) => u64::try_from(data).unwrap_or(at),
            Err(Errno::ENXIO) => self.len.max(at),
            Err(_) => at,
        }
    }
}
