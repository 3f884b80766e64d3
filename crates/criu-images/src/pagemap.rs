// SPDX-License-Identifier: MIT OR Apache-2.0
//! `pagemap-ID.img`: the pages of an image and their places in its pages file.

use std::io::Read;

use prost::Message;

use crate::PAGE;
use crate::error::{ImageError, Result};
use crate::frame::{self, Records, file_of};
use crate::generated::{PagemapEntry as Raw, PagemapHead};

/// The most entries that one pagemap may have: each takes 32 bytes of memory.
pub const MAX_PAGEMAP_ENTRIES: usize = 1 << 26;

/// The memory that a pagemap is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PagemapId {
    /// The private memory of the task with this pid, in the dumped pid namespace.
    Task(u32),
    /// The shared memory object with this number of CRIU's. Addresses in it count from 0.
    Shared(u64),
}

impl PagemapId {
    /// Returns the name of the pagemap's file in an image directory.
    #[must_use]
    pub fn file_name(self) -> String {
        match self {
            Self::Task(pid) => format!("pagemap-{pid}.img"),
            Self::Shared(id) => format!("pagemap-shmem-{id}.img"),
        }
    }
}

impl std::fmt::Display for PagemapId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Task(pid) => write!(f, "task {pid}"),
            Self::Shared(id) => write!(f, "shared memory {id}"),
        }
    }
}

/// Flags of a pagemap entry. Unknown bits are kept.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct PageFlags(pub u32);

impl PageFlags {
    /// The pages are in the parent image.
    pub const PARENT: Self = Self(1);
    /// The pages may be restored lazily.
    pub const LAZY: Self = Self(2);
    /// The pages are in the pages file.
    pub const PRESENT: Self = Self(4);

    /// Whether all of `flags` are set.
    #[must_use]
    pub fn has(self, flags: Self) -> bool {
        self.0 & flags.0 == flags.0
    }
}

impl std::ops::BitOr for PageFlags {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl std::fmt::Debug for PageFlags {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PageFlags({:#x})", self.0)
    }
}

/// The field that has an entry's number of pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Generation {
    /// CRIU up to 4.1.1: 32 bits.
    Narrow,
    /// CRIU 4.2 and later: 64 bits, and a zero in the old field.
    Wide,
}

/// A run of pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PagemapEntry {
    /// Address of the first page at the dump.
    pub vaddr: u64,
    /// Number of pages, at least 1.
    pub pages: u64,
    /// The place of the pages. PARENT has precedence over PRESENT, as in CRIU.
    pub flags: PageFlags,
    /// For PRESENT pages: byte offset in the pages file.
    pub file_offset: u64,
}

impl PagemapEntry {
    /// The first address after the run.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.vaddr + self.pages * PAGE
    }
}

/// The pages of one task or shared memory object in one image directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pagemap {
    /// N of `pages-N.img`.
    pub pages_id: u32,
    /// Runs in ascending order of address, without overlaps.
    pub entries: Vec<PagemapEntry>,
    /// How the counts are written; [`Generation::Wide`] without entries.
    pub generation: Generation,
    /// The least length of the pages file in bytes.
    pub file_len: u64,
}

impl Pagemap {
    /// Makes a pagemap of runs (address, pages, flags) in ascending order, and computes their offsets.
    ///
    /// # Panics
    /// A run ends beyond the address space.
    #[must_use]
    pub fn new(
        pages_id: u32,
        generation: Generation,
        runs: impl IntoIterator<Item = (u64, u64, PageFlags)>,
    ) -> Self {
        let mut map = Self { pages_id, entries: Vec::new(), generation, file_len: 0 };
        for (vaddr, pages, flags) in runs {
            map.push(PagemapEntry { vaddr, pages, flags, file_offset: map.file_len });
        }
        map
    }

    fn push(&mut self, entry: PagemapEntry) {
        if entry.flags.has(PageFlags::PRESENT) {
            // No overflow: entries do not overlap, so the sum is at most the end of the last.
            self.file_len += entry.pages * PAGE;
        }
        self.entries.push(entry);
    }
}

pub(crate) fn parse<R: Read>(records: Records<R>) -> Result<Pagemap> {
    let mut read = PagemapReader::new(records)?;
    let mut map =
        Pagemap { pages_id: read.pages_id, entries: Vec::new(), generation: Generation::Wide, file_len: 0 };
    while let Some((offset, entry)) = read.next()? {
        if map.entries.len() == MAX_PAGEMAP_ENTRIES {
            return Err(ImageError::TooMany {
                file: read.records.file().to_path_buf(),
                offset,
                what: "entries and more",
                found: MAX_PAGEMAP_ENTRIES as u64,
                limit_name: "MAX_PAGEMAP_ENTRIES",
                limit: MAX_PAGEMAP_ENTRIES as u64,
            });
        }
        map.push(entry);
    }
    map.generation = read.generation;
    Ok(map)
}

/// Reads a pagemap entry by entry, in bounded memory.
pub(crate) struct PagemapReader<R> {
    records: Records<R>,
    /// N of `pages-N.img`.
    pub(crate) pages_id: u32,
    generation: Generation,
    /// The address after the last entry.
    end: u64,
    file_offset: u64,
}

impl<R: Read> PagemapReader<R> {
    /// Reads the head.
    pub(crate) fn new(mut records: Records<R>) -> Result<Self> {
        let Some((offset, head)) = records.message::<PagemapHead>()? else { return Err(records.no_record()) };
        let Some(pages_id) = head.pages_id else {
            return Err(records.damaged(offset, "the number of the pages file", "none"));
        };
        Ok(Self { records, pages_id, generation: Generation::Wide, end: 0, file_offset: 0 })
    }

    /// Returns the next entry, and the offset of its record.
    pub(crate) fn next(&mut self) -> Result<Option<(u64, PagemapEntry)>> {
        let Some((offset, raw)) = self.records.message::<Raw>()? else { return Ok(None) };
        if raw.nr_pages.is_none() {
            self.generation = Generation::Narrow;
        }
        let entry = to_entry(&raw, self.file_offset).ok_or_else(|| {
            self.records.damaged(offset, "whole pages inside the address space", show(&raw))
        })?;
        if entry.vaddr < self.end {
            let expected = format!("an address from {:#x}, after the entry before", self.end);
            return Err(self.records.damaged(offset, expected, show(&raw)));
        }
        self.end = entry.end();
        if entry.flags.has(PageFlags::PRESENT) {
            // No overflow: entries do not overlap, so the sum is at most the end of the last.
            self.file_offset += entry.pages * PAGE;
        }
        Ok(Some((offset, entry)))
    }
}

/// Converts a record of any generation. Returns `None` when it is not whole pages inside the address space.
fn to_entry(raw: &Raw, file_offset: u64) -> Option<PagemapEntry> {
    let vaddr = raw.vaddr?;
    let pages = raw.nr_pages.or_else(|| raw.compat_nr_pages.map(u64::from))?;
    let flags = match (raw.in_parent, raw.flags) {
        (Some(true), flags) => PageFlags(flags.unwrap_or(0)) | PageFlags::PARENT,
        (_, Some(flags)) => PageFlags(flags),
        (_, None) => PageFlags::PRESENT,
    };
    let end = pages.checked_mul(PAGE).and_then(|len| vaddr.checked_add(len));
    (vaddr % PAGE == 0 && pages > 0 && end.is_some()).then_some(PagemapEntry {
        vaddr,
        pages,
        flags,
        file_offset,
    })
}

fn show(raw: &Raw) -> String {
    let pages = raw.nr_pages.or_else(|| raw.compat_nr_pages.map(u64::from));
    match (raw.vaddr, pages) {
        (Some(vaddr), Some(pages)) => format!("{pages} pages at {vaddr:#x}"),
        (vaddr, pages) => format!("address {vaddr:x?}, pages {pages:?}"),
    }
}

/// Encodes the start of a pagemap's file: the magic numbers, and the number of the pages file.
#[must_use]
pub fn pagemap_head(pages_id: u32) -> Vec<u8> {
    file_of(&frame::PAGEMAP, [PagemapHead { pages_id: Some(pages_id) }.encode_to_vec()])
}

/// Encodes one entry as the record that follows the others; `None` when it is too long for the generation.
#[must_use]
pub fn pagemap_record(entry: &PagemapEntry, generation: Generation) -> Option<Vec<u8>> {
    let (narrow, wide) = match generation {
        Generation::Narrow => (u32::try_from(entry.pages).ok()?, None),
        Generation::Wide => (0, Some(entry.pages)),
    };
    let raw = Raw {
        vaddr: Some(entry.vaddr),
        compat_nr_pages: Some(narrow),
        in_parent: None,
        flags: Some(entry.flags.0),
        nr_pages: wide,
    };
    Some(frame::record(&raw.encode_to_vec()))
}
