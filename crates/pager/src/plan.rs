// SPDX-License-Identifier: MIT OR Apache-2.0
//! The lazy pages of one process in an image, and their order in the files.

use std::ops::Range;

use crate::{BLOCK_PAGES, PAGE_SIZE, index};

/// The most pages of one plan: 16 TiB, which is far more than any dumped process has, and needs 1 GiB of page
/// state.
const MAX_PAGES: u64 = 1 << 32;

/// Bytes in a block.
const BLOCK: u64 = BLOCK_PAGES * PAGE_SIZE;

/// Pages that are contiguous in a file and in the address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Address at dump time, in bytes. It is the target address until the program moves the page.
    pub target: u64,
    /// Index of the file in a list that the caller keeps.
    pub file: u32,
    /// Byte offset of the first page in the file, a multiple of the page size.
    pub file_offset: u64,
    /// Length in pages, at least one. An extent lies inside one mapping.
    pub pages: u64,
}

/// A page of a plan: 0, 1, 2… in the order of (file, offset in the file).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageIx(pub u64);

/// A block of a plan: 0, 1, 2… in the order of (file, offset).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockIx(pub usize);

/// An aligned range of [`BLOCK_PAGES`] pages of a file with at least one page of the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    /// Index of the file.
    pub file: u32,
    /// Offset in the file, in blocks.
    pub index: u64,
    /// The first page of the plan in the block.
    pub first: PageIx,
    /// Number of pages of the plan in the block: `first`, `first + 1`…
    pub pages: u64,
}

impl Block {
    /// The pages of the plan in the block.
    #[must_use]
    pub fn range(&self) -> Range<u64> {
        self.first.0..self.first.0 + self.pages
    }
}

/// Pages that are contiguous in the address space and in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileRun {
    /// Address of the first page, in bytes.
    pub target: u64,
    /// The first page.
    pub page: PageIx,
    /// Number of pages.
    pub pages: u64,
    /// Index of the file.
    pub file: u32,
    /// Byte offset of the first page in the file.
    pub file_offset: u64,
}

/// The place of every lazy page of one process in its image. It never changes.
///
/// It takes about 70 bytes per extent and nothing per page: an image may claim 16 TiB in one record of a
/// sparse file.
#[derive(Debug)]
pub struct Plan {
    /// The extents in the order of (file, file offset), which is page order.
    extents: Vec<Extent>,
    /// First page of each extent.
    first_pages: Vec<u64>,
    /// Targets of the extents, ascending, with the number of each extent in `by_target`.
    targets: Vec<u64>,
    by_target: Vec<u32>,
    /// The block of each extent's first page: the block that the extent before ends in, or the next.
    first_blocks: Vec<usize>,
    blocks: usize,
    pages: u64,
}

/// Why extents are not a plan.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// An address or offset is not a multiple of the page size.
    #[error("making a page plan: {0:x?} is not aligned to pages of 4096 bytes; the image is damaged")]
    Unaligned(Extent),
    /// An extent without pages.
    #[error("making a page plan: {0:x?} has no pages; leave it out")]
    Empty(Extent),
    /// An extent ends beyond the last address or offset.
    #[error("making a page plan: {0:x?} ends beyond the last 64-bit address or offset; the image is damaged")]
    Overflow(Extent),
    /// Two extents have the same address.
    #[error("making a page plan: {0:x?} and {1:x?} have an address in common; the image is damaged")]
    TargetOverlap(Extent, Extent),
    /// Two extents have bytes of a file in common.
    #[error("making a page plan: {0:x?} and {1:x?} have file bytes in common; the image is damaged")]
    FileOverlap(Extent, Extent),
    /// More than 2^32 pages.
    #[error("making a page plan: more than {MAX_PAGES} pages (16 TiB) in one process; the image is damaged")]
    TooLarge,
}

impl Extent {
    pub(crate) fn target_end(&self) -> u64 {
        self.target + self.pages * PAGE_SIZE
    }

    fn file_end(&self) -> u64 {
        self.file_offset + self.pages * PAGE_SIZE
    }

    /// The block of the file that has the first page.
    fn first_block(&self) -> u64 {
        self.file_offset / BLOCK
    }

    /// The block of the file that has the last page.
    fn last_block(&self) -> u64 {
        (self.file_end() - 1) / BLOCK
    }

    fn validate(&self) -> Result<(), PlanError> {
        if !self.target.is_multiple_of(PAGE_SIZE) || !self.file_offset.is_multiple_of(PAGE_SIZE) {
            return Err(PlanError::Unaligned(*self));
        }
        if self.pages == 0 {
            return Err(PlanError::Empty(*self));
        }
        if self.pages > MAX_PAGES {
            return Err(PlanError::TooLarge);
        }
        let bytes = self.pages * PAGE_SIZE; // at most 2^44
        match (self.target.checked_add(bytes), self.file_offset.checked_add(bytes)) {
            (Some(_), Some(_)) => Ok(()),
            _ => Err(PlanError::Overflow(*self)),
        }
    }
}

impl Plan {
    /// Makes a plan of `extents`, given in any order. O(n log n).
    ///
    /// # Errors
    /// Extents that are unaligned, empty, too long, or overlap in memory or in a file.
    pub fn new(mut extents: Vec<Extent>) -> Result<Self, PlanError> {
        extents.iter().try_for_each(Extent::validate)?;
        extents.sort_unstable_by_key(|extent| (extent.file, extent.file_offset));
        for pair in extents.windows(2) {
            let [a, b] = [pair[0], pair[1]];
            if a.file == b.file && a.file_end() > b.file_offset {
                return Err(PlanError::FileOverlap(a, b));
            }
        }
        let mut pages = 0;
        let mut first_pages = Vec::with_capacity(extents.len());
        for extent in &extents {
            first_pages.push(pages);
            pages += extent.pages;
            if pages > MAX_PAGES {
                return Err(PlanError::TooLarge);
            }
        }
        let (targets, by_target) = sort_targets(&extents)?;
        let (first_blocks, blocks) = first_blocks(&extents);
        Ok(Self { extents, first_pages, targets, by_target, first_blocks, blocks, pages })
    }

    /// Number of pages.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// The extents, in the order of (file, offset), which is page order.
    #[must_use]
    pub fn extents(&self) -> &[Extent] {
        &self.extents
    }

    /// The extents alone, for a process that only checks a plan.
    #[must_use]
    pub fn into_extents(self) -> Vec<Extent> {
        self.extents
    }

    /// Number of blocks.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// The first block at or after offset `index` (in blocks) of a file; None when the file has no further
    /// block.
    #[must_use]
    pub fn block_from(&self, file: u32, index: u64) -> Option<BlockIx> {
        let at = self.extents.partition_point(|extent| (extent.file, extent.last_block()) < (file, index));
        let extent = self.extents.get(at).filter(|extent| extent.file == file)?;
        Some(BlockIx(self.first_blocks[at] + crate::index(index.saturating_sub(extent.first_block()))))
    }

    /// Returns one block. O(log n).
    ///
    /// # Panics
    /// `block` is not in this plan.
    #[must_use]
    pub fn block(&self, block: BlockIx) -> Block {
        assert!(block.0 < self.blocks, "{block:?} of a plan of {} blocks", self.blocks);
        let last = self.first_blocks.partition_point(|first| *first <= block.0) - 1;
        // Each extent has a page of its own in the block: this takes fewer than BLOCK_PAGES steps.
        let begins_in = |number: usize| number > 0 && self.last_block_of(number - 1) == block.0;
        let mut first = last;
        while self.first_blocks[first] == block.0 && begins_in(first) {
            first -= 1;
        }
        let extent = self.extents[first];
        let index = extent.first_block() + (block.0 - self.first_blocks[first]) as u64;
        let from = self.placed(first).page_from(index * BLOCK);
        let end = self.placed(last).page_from((index + 1).saturating_mul(BLOCK));
        Block { file: extent.file, index, first: PageIx(from), pages: end - from }
    }

    /// The block that has an extent's last page.
    fn last_block_of(&self, number: usize) -> usize {
        let extent = self.extents[number];
        self.first_blocks[number] + index(extent.last_block() - extent.first_block())
    }

    /// The block that has `page`, which must be in this plan. O(log n).
    #[must_use]
    pub fn block_of(&self, page: PageIx) -> BlockIx {
        let page = page.0;
        let number = self.first_pages.partition_point(|first| *first <= page) - 1;
        let placed = self.placed(number);
        let blocks = placed.offset_of(page) / BLOCK - placed.extent.first_block();
        BlockIx(self.first_blocks[number] + index(blocks))
    }

    /// The extent that has `page`, with its first page. `page` must be in this plan.
    pub(crate) fn extent_of(&self, page: u64) -> Placed {
        self.placed(self.first_pages.partition_point(|first| *first <= page) - 1)
    }

    /// The page that was dumped from `address`.
    pub(crate) fn page_at(&self, address: u64) -> Option<u64> {
        let order = self.targets.partition_point(|target| *target <= address).checked_sub(1)?;
        let placed = self.placed(self.by_target[order] as usize);
        let page = (address - placed.extent.target) / PAGE_SIZE;
        (page < placed.extent.pages).then_some(placed.first + page)
    }

    /// The pages dumped from the addresses `start..end`, extent by extent in address order.
    pub(crate) fn pages_in(&self, start: u64, end: u64) -> impl Iterator<Item = (Placed, Range<u64>)> {
        let from = self.targets.partition_point(|target| *target <= start).saturating_sub(1);
        let extents = self.by_target[from..].iter().map(|number| self.placed(*number as usize));
        extents.take_while(move |placed| placed.extent.target < end).filter_map(move |placed| {
            let first = start.max(placed.extent.target);
            let last = end.min(placed.extent.target_end());
            (first < last).then(|| (placed, placed.page_at(first)..placed.page_at(last)))
        })
    }

    /// Finds the page that was dumped from `address`, and those after it in its extent.
    #[must_use]
    pub fn file_run(&self, address: u64) -> Option<FileRun> {
        let page = self.page_at(address)?;
        let placed = self.extent_of(page);
        Some(FileRun {
            target: placed.target_of(page),
            page: PageIx(page),
            pages: placed.end() - page,
            file: placed.extent.file,
            file_offset: placed.offset_of(page),
        })
    }

    /// The pages around one in its block and extent: the address of the first, and their number. `page` must
    /// be in this plan.
    #[must_use]
    pub fn in_block(&self, page: PageIx) -> (u64, u64) {
        let placed = self.extent_of(page.0);
        let start = placed.offset_of(page.0) / BLOCK * BLOCK;
        let (first, end) = (placed.page_from(start), placed.page_from(start.saturating_add(BLOCK)));
        (placed.target_of(first), end - first)
    }

    /// Splits a range of pages of the plan at extents.
    pub(crate) fn split(&self, pages: Range<u64>) -> impl Iterator<Item = (Placed, Range<u64>)> {
        let mut at = pages.start;
        std::iter::from_fn(move || {
            if at >= pages.end {
                return None;
            }
            let placed = self.extent_of(at);
            let piece = at..pages.end.min(placed.end());
            at = piece.end;
            Some((placed, piece))
        })
    }

    fn placed(&self, number: usize) -> Placed {
        Placed { extent: self.extents[number], first: self.first_pages[number] }
    }
}

/// An extent and the number of its first page.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Placed {
    pub(crate) extent: Extent,
    pub(crate) first: u64,
}

impl Placed {
    /// The page after the last.
    pub(crate) fn end(&self) -> u64 {
        self.first + self.extent.pages
    }

    /// The address that one of its pages was dumped from.
    pub(crate) fn target_of(&self, page: u64) -> u64 {
        self.extent.target + (page - self.first) * PAGE_SIZE
    }

    /// The byte offset of one of its pages in the file.
    pub(crate) fn offset_of(&self, page: u64) -> u64 {
        self.extent.file_offset + (page - self.first) * PAGE_SIZE
    }

    /// The byte offset of one of its pages in its block.
    pub(crate) fn block_offset_of(&self, page: u64) -> usize {
        index(self.offset_of(page) % BLOCK)
    }

    fn page_at(&self, address: u64) -> u64 {
        self.first + (address - self.extent.target) / PAGE_SIZE
    }

    /// The first page at or after an offset in the file, or the page after the last one.
    fn page_from(&self, offset: u64) -> u64 {
        let pages = offset.saturating_sub(self.extent.file_offset) / PAGE_SIZE;
        self.first + pages.min(self.extent.pages)
    }
}

fn sort_targets(extents: &[Extent]) -> Result<(Vec<u64>, Vec<u32>), PlanError> {
    // At most MAX_PAGES extents, so that their numbers fit; the last number is 2^32 - 1.
    let mut by_target: Vec<u32> = (0..=u32::MAX).take(extents.len()).collect();
    by_target.sort_unstable_by_key(|number| extents[*number as usize].target);
    for pair in by_target.windows(2) {
        let [a, b] = [extents[pair[0] as usize], extents[pair[1] as usize]];
        if a.target_end() > b.target {
            return Err(PlanError::TargetOverlap(a, b));
        }
    }
    let targets = by_target.iter().map(|number| extents[*number as usize].target).collect();
    Ok((targets, by_target))
}

/// The block of each extent's first page, and the number of blocks.
fn first_blocks(extents: &[Extent]) -> (Vec<usize>, usize) {
    let mut blocks = 0;
    let mut before = None;
    let number = |extent: &Extent| {
        let (file, first, last) = (extent.file, extent.first_block(), extent.last_block());
        if before == Some((file, first)) {
            blocks -= 1;
        }
        before = Some((file, last));
        let number = blocks;
        blocks += index(last - first) + 1;
        number
    };
    let firsts = extents.iter().map(number).collect();
    (firsts, blocks)
}
