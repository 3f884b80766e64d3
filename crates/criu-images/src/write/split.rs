// SPDX-License-Identifier: MIT OR Apache-2.0
//! Turns a plain dump into an incremental pair, as if the chosen pages had not changed since an earlier dump.
//! So parent images can be tested where the kernel cannot track changes (no soft-dirty bits).

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};

use super::pagemap;
use crate::dir::{ImageDir, io_error};
use crate::error::{ImageError, Result};
use crate::pagemap::{PageFlags, Pagemap};
use crate::plan::{pagemap_name, pages_name};
use crate::{PAGE, PAGE_LEN};

/// The place of a page after the split.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PagePlace {
    /// The page stays in the image.
    Here,
    /// The page moves to the parent, and is restored before the task runs: CRIU marks unchanged pages like
    /// this.
    Parent,
    /// The page moves to the parent; a lazy page stays lazy.
    LazyParent,
}

/// Moves pages of one task from the image `dir` to the image `parent_dir`, and links that as `parent`. The
/// parent is made if it does not exist. `place` is called for every page in the image's own pages file, in
/// ascending order, with the page's address and flags.
///
/// Call it for each task in turn; split the parent again for a longer chain. Entries stay as CRIU of the same
/// generation writes them.
///
/// # Errors
/// The image is damaged, has no pages of the task, has another parent, or the parent has the task already.
pub fn split_into_parent(
    dir: &Path,
    pid: u32,
    parent_dir: &Path,
    mut place: impl FnMut(u64, PageFlags) -> PagePlace,
) -> Result<()> {
    let image = ImageDir::open(dir)?;
    let missing =
        || ImageError::Missing { file: dir.join(pagemap_name(pid)), expected: "the pages of the task" };
    let map = image.pagemap(pid)?.ok_or_else(missing)?;
    link(dir, parent_dir)?;
    let parent_pagemap = parent_dir.join(pagemap_name(pid));
    if parent_pagemap.exists() {
        let (expected, found) = ("a parent without this task".into(), "one that has it".into());
        return Err(ImageError::Unsupported { file: parent_pagemap, expected, found });
    }
    let (child_runs, parent_runs) = split_runs(&map, &mut place);
    let child = Pagemap::new(map.pages_id, map.generation, child_runs);
    let parent = Pagemap::new(map.pages_id, map.generation, parent_runs);
    if let Some(pages) = image.pages_file(&map)? {
        let rewritten = dir.join(format!("{}.new", pages_name(map.pages_id)));
        copy_pages(&map, &child, &pages.file, &rewritten)?;
        copy_pages(&map, &parent, &pages.file, &parent_dir.join(pages_name(map.pages_id)))?;
        fs::rename(&rewritten, &pages.path).map_err(|error| io_error("replace", &pages.path, error))?;
    }
    pagemap(parent_dir, pid, &parent)?;
    pagemap(dir, pid, &child)
}

type Runs = Vec<(u64, u64, PageFlags)>;

/// Returns the runs of the child and of the parent.
fn split_runs(map: &Pagemap, place: &mut impl FnMut(u64, PageFlags) -> PagePlace) -> (Runs, Runs) {
    let (mut child, mut parent) = (Runs::new(), Runs::new());
    for entry in &map.entries {
        if entry.flags.has(PageFlags::PARENT) || !entry.flags.has(PageFlags::PRESENT) {
            child.push((entry.vaddr, entry.pages, entry.flags));
            continue;
        }
        let (child_first, parent_first) = (child.len(), parent.len());
        for page in 0..entry.pages {
            let vaddr = entry.vaddr + page * PAGE;
            let lazy = PageFlags(entry.flags.0 & PageFlags::LAZY.0);
            match place(vaddr, entry.flags) {
                PagePlace::Here => add_page(&mut child, child_first, vaddr, entry.flags),
                PagePlace::Parent => {
                    add_page(&mut child, child_first, vaddr, PageFlags::PARENT);
                    add_page(&mut parent, parent_first, vaddr, entry.flags);
                }
                PagePlace::LazyParent => {
                    add_page(&mut child, child_first, vaddr, PageFlags::PARENT | lazy);
                    add_page(&mut parent, parent_first, vaddr, entry.flags);
                }
            }
        }
    }
    (child, parent)
}

/// Adds a page to the last run when it continues it. Runs before `first` belong to other entries: an entry
/// longer than CRIU's own might not fit its pipes.
fn add_page(runs: &mut Runs, first: usize, vaddr: u64, flags: PageFlags) {
    if let Some((start, pages, same)) = runs[first..].last_mut()
        && *start + *pages * PAGE == vaddr
        && *same == flags
    {
        *pages += 1;
    } else {
        runs.push((vaddr, 1, flags));
    }
}

/// Copies the pages that are present in `part` from the pages file of `whole`.
fn copy_pages(whole: &Pagemap, part: &Pagemap, from: &File, to: &Path) -> Result<()> {
    let copy = || -> io::Result<()> {
        let mut out = BufWriter::new(File::create(to)?);
        let mut page = [0; PAGE_LEN];
        let mut sources = whole.entries.iter();
        let mut source = sources.next();
        for run in part.entries.iter().filter(|run| run.flags.has(PageFlags::PRESENT)) {
            while source.is_some_and(|entry| entry.end() <= run.vaddr) {
                source = sources.next();
            }
            let Some(entry) = source else { break };
            let offset = entry.file_offset + (run.vaddr - entry.vaddr);
            for index in 0..run.pages {
                from.read_exact_at(&mut page, offset + index * PAGE)?;
                out.write_all(&page)?;
            }
        }
        out.flush()
    };
    copy().map_err(|error| io_error("write", to, error))
}

/// Makes the parent directory and links it; the link is relative when both lie in one directory.
fn link(dir: &Path, parent_dir: &Path) -> Result<()> {
    fs::create_dir_all(parent_dir).map_err(|error| io_error("create", parent_dir, error))?;
    let real = |path: &Path| path.canonicalize().map_err(|error| io_error("resolve", path, error));
    let (dir, parent) = (real(dir)?, real(parent_dir)?);
    let link = dir.join("parent");
    if let Ok(found) = link.canonicalize() {
        if found == parent {
            return Ok(());
        }
        let (expected, found) = (format!("a link to {}", parent.display()), found.display().to_string());
        return Err(ImageError::Unsupported { file: link, expected, found });
    }
    let target = match (dir.parent() == parent.parent(), parent.file_name()) {
        (true, Some(name)) => PathBuf::from("..").join(name),
        _ => parent,
    };
    symlink(target, &link).map_err(|error| io_error("link", &link, error))
}
