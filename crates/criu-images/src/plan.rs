// SPDX-License-Identifier: MIT OR Apache-2.0
//! Finds the bytes of every lazy page of a task.

use std::fs::File;
use std::path::PathBuf;

use crate::PAGE;
use crate::dir::ImageDir;
use crate::error::{ImageError, Result};
use crate::mm::Vma;
use crate::overcommit::LazyMappings;
use crate::pagemap::{Generation, PageFlags, Pagemap, PagemapEntry, PagemapId};

/// An open file of pages: `pages-N.img`, or the contents of a GPU's buffers.
#[derive(Debug)]
pub struct PagesFile {
    /// The path for messages.
    pub path: PathBuf,
    /// The file, open for reading.
    pub file: File,
    /// Its length in bytes at open: at least what the image requires.
    pub len: u64,
}

/// A run of lazy pages that is contiguous in memory, in one mapping, and in one file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LazyExtent {
    /// Address of the first page at the dump.
    pub vaddr: u64,
    /// Number of pages, at least 1.
    pub pages: u64,
    /// Offset of the first page in the file, in bytes.
    pub file_offset: u64,
    /// Index in [`LazyPlan::files`].
    pub file: u32,
}

impl LazyExtent {
    /// The first address after the run.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.vaddr + self.pages * PAGE
    }
}

/// The data that serves one task's missing pages.
#[derive(Debug)]
pub struct LazyPlan {
    /// The pages files of the image and of its parents, each once. Some may be unused.
    pub files: Vec<PagesFile>,
    /// The lazy pages in ascending order of address. No extent crosses a border between mappings.
    pub extents: Vec<LazyExtent>,
    /// Lazy pages that are in no file: `criu dump --lazy-pages` left them to its page server.
    pub remote_pages: u64,
    /// What CRIU maps for them.
    pub mappings: LazyMappings,
}

/// The lazy pages of a task, for a restore that gets all of them from a page server.
#[derive(Debug)]
pub struct RemotePlan {
    /// The lazy pages in ascending order of address, wherever the image has them. `file_offset` counts them
    /// from 0, without gaps; `file` is 0. No extent crosses a border between mappings.
    pub extents: Vec<LazyExtent>,
    /// The age of the CRIU that wrote the pagemap; none without pages.
    pub generation: Option<Generation>,
}

impl ImageDir {
    /// Finds a task's lazy pages, for a restore that gets all of them from a page server. No pages file is
    /// needed.
    ///
    /// # Errors
    /// A file is missing or damaged; or a lazy page lies where lazy restore cannot put it.
    pub fn remote_plan(&self, pid: u32) -> Result<RemotePlan> {
        let mm = self.mm(pid)?;
        let map = self.pagemap(pid)?.ok_or_else(|| self.no_pagemap(pid))?;
        let pagemap = self.path().join(pagemap_name(pid));
        let mut planner =
            ExtentPlanner { pagemap, levels: &[], vmas: &mm.vmas, extents: Vec::new(), remote: 0 };
        let mut file_offset = 0;
        for entry in map.entries.iter().filter(|entry| entry.flags.has(PageFlags::LAZY)) {
            planner.push(0, file_offset, entry.vaddr, entry.end())?;
            file_offset += entry.pages * PAGE;
        }
        let generation = (!map.entries.is_empty()).then_some(map.generation);
        Ok(RemotePlan { extents: planner.extents, generation })
    }

    /// Finds the places of a task's lazy pages.
    ///
    /// # Errors
    /// A needed file is missing, damaged or truncated; a page is in no parent; or a lazy page lies where lazy
    /// restore cannot put it.
    pub fn lazy_plan(&self, pid: u32) -> Result<LazyPlan> {
        let mm = self.mm(pid)?;
        let (levels, files) = self.chain(pid)?;
        let pagemap = self.path().join(pagemap_name(pid));
        let mut planner =
            ExtentPlanner { pagemap, levels: &levels, vmas: &mm.vmas, extents: Vec::new(), remote: 0 };
        planner.run()?;
        let ExtentPlanner { mut extents, remote: remote_pages, .. } = planner;
        extents.shrink_to_fit();
        let mut mappings = LazyMappings::default();
        mappings.add(pid, &mm);
        Ok(LazyPlan { files, extents, remote_pages, mappings })
    }

    fn no_pagemap(&self, pid: u32) -> ImageError {
        let expected = "the pages of a task that has memory";
        ImageError::Missing { file: self.path().join(pagemap_name(pid)), expected }
    }

    /// Reads the task's pages in this directory, then in the parents as far as they can have lazy pages.
    fn chain(&self, pid: u32) -> Result<(Vec<Level>, Vec<PagesFile>)> {
        let (mut levels, mut files) = (Vec::new(), Vec::new());
        let map = self.pagemap(pid)?.ok_or_else(|| self.no_pagemap(pid))?;
        let lazy = PageFlags::PARENT | PageFlags::LAZY;
        let mut ancestor = self.add_level(map, &mut levels, &mut files, lazy)?;
        while let Some(dir) = ancestor {
            let Some(map) = dir.pagemap(pid)? else { break };
            ancestor = dir.add_level(map, &mut levels, &mut files, PageFlags::PARENT)?;
        }
        Ok((levels, files))
    }

    /// Adds this directory's pages to the chain. Returns the parent when it may have pages with the flags
    /// `wanted`.
    fn add_level(
        &self,
        map: Pagemap,
        levels: &mut Vec<Level>,
        files: &mut Vec<PagesFile>,
        wanted: PageFlags,
    ) -> Result<Option<ImageDir>> {
        // The number of levels is below MAX_PARENTS + 2.
        let file = u32::try_from(files.len()).unwrap_or(u32::MAX);
        let parent =
            if map.entries.iter().any(|entry| entry.flags.has(wanted)) { self.parent()? } else { None };
        files.extend(self.pages_file(&map)?);
        levels.push(Level { dir: self.path().to_path_buf(), map, file });
        Ok(parent)
    }

    /// Opens the pages file of a pagemap and checks its length; `None` when it has no page.
    pub(crate) fn pages_file(&self, map: &Pagemap) -> Result<Option<PagesFile>> {
        if map.file_len == 0 {
            return Ok(None);
        }
        let name = pages_name(map.pages_id);
        let Some((path, file, len)) = self.file(&name)? else {
            let expected = "the pages that a pagemap lists";
            return Err(ImageError::Missing { file: self.path().join(name), expected });
        };
        if len < map.file_len {
            return Err(ImageError::PagesTruncated { file: path, len, expected: map.file_len });
        }
        Ok(Some(PagesFile { path, file, len }))
    }
}

/// One image directory of the chain.
#[derive(Debug)]
struct Level {
    dir: PathBuf,
    map: Pagemap,
    /// Index of its pages file. It is not used when no page is present in the file.
    file: u32,
}

/// Places the lazy entries in order of address.
struct ExtentPlanner<'a> {
    pagemap: PathBuf,
    levels: &'a [Level],
    /// Mappings that end after the pages placed so far.
    vmas: &'a [Vma],
    extents: Vec<LazyExtent>,
    remote: u64,
}

impl ExtentPlanner<'_> {
    fn run(&mut self) -> Result<()> {
        let levels = self.levels;
        for entry in levels.iter().take(1).flat_map(|level| &level.map.entries) {
            if entry.flags.has(PageFlags::LAZY) {
                self.place(0, entry, entry.vaddr, entry.end())?;
            }
        }
        Ok(())
    }

    /// Places the pages of `start..end`, which `entry` of the level covers.
    fn place(&mut self, level: usize, entry: &PagemapEntry, start: u64, end: u64) -> Result<()> {
        if entry.flags.has(PageFlags::PARENT) {
            self.place_in_parent(level + 1, start, end)
        } else if entry.flags.has(PageFlags::PRESENT) {
            self.push(self.levels[level].file, entry.file_offset + (start - entry.vaddr), start, end)
        } else if entry.flags.has(PageFlags::LAZY) {
            self.remote += (end - start) / PAGE;
            Ok(())
        } else {
            Err(self.not_in_parent(level, start, end))
        }
    }

    /// Places the pages of `start..end` in a parent, whose entries may be shorter.
    fn place_in_parent(&mut self, level: usize, start: u64, end: u64) -> Result<()> {
        let levels = self.levels;
        let Some(parent) = levels.get(level) else { return Err(self.not_in_parent(level, start, end)) };
        let first = parent.map.entries.partition_point(|entry| entry.end() <= start);
        let mut at = start;
        for entry in &parent.map.entries[first..] {
            if at == end {
                break;
            }
            if entry.vaddr > at {
                return Err(self.not_in_parent(level, at, entry.vaddr.min(end)));
            }
            let stop = entry.end().min(end);
            self.place(level, entry, at, stop)?;
            at = stop;
        }
        if at == end { Ok(()) } else { Err(self.not_in_parent(level, at, end)) }
    }

    /// Adds placed pages, split at the borders of mappings.
    fn push(&mut self, file: u32, mut file_offset: u64, mut vaddr: u64, end: u64) -> Result<()> {
        while vaddr < end {
            let vma = self.vma(vaddr, end)?;
            let stop = vma.end.min(end);
            let pages = (stop - vaddr) / PAGE;
            match self.extents.last_mut() {
                Some(last)
                    if vaddr != vma.start
                        && (last.end(), last.file) == (vaddr, file)
                        && last.file_offset + last.pages * PAGE == file_offset =>
                {
                    last.pages += pages;
                }
                _ => self.extents.push(LazyExtent { vaddr, pages, file_offset, file }),
            }
            file_offset += stop - vaddr;
            vaddr = stop;
        }
        Ok(())
    }

    /// Returns the mapping at `vaddr`, which CRIU must be able to register.
    fn vma(&mut self, vaddr: u64, end: u64) -> Result<Vma> {
        let done = self.vmas.iter().take_while(|vma| vma.end <= vaddr).count();
        self.vmas = &self.vmas[done..];
        let (found, stop) = match self.vmas.first() {
            Some(vma) if vma.start <= vaddr && vma.can_be_lazy() => return Ok(*vma),
            Some(vma) if vma.start <= vaddr => (vma.kind(), vma.end.min(end)),
            Some(vma) => ("no mapping", vma.start.min(end)),
            None => ("no mapping", end),
        };
        let file = self.pagemap.clone();
        Err(ImageError::NotLazyable { file, vaddr, pages: (stop - vaddr) / PAGE, found })
    }

    fn not_in_parent(&self, level: usize, vaddr: u64, end: u64) -> ImageError {
        let last =
            |levels: &[Level]| levels.last().map_or_else(PathBuf::new, |level| level.dir.join("parent"));
        let parent = self.levels.get(level).map_or_else(|| last(self.levels), |level| level.dir.clone());
        ImageError::NotInParent { file: self.pagemap.clone(), vaddr, pages: (end - vaddr) / PAGE, parent }
    }
}

pub(crate) fn pagemap_name(pid: u32) -> String {
    PagemapId::Task(pid).file_name()
}

/// Returns the name of a file of pages in an image directory.
#[must_use]
pub fn pages_name(pages_id: u32) -> String {
    format!("pages-{pages_id}.img")
}
