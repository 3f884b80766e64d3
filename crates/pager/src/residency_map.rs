// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tracks one address space: where each page of its plan is now, and whether it is resident.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::bits::Bits;
use crate::remaps::{RemapPiece, RemapTable};
use crate::schedule::{PriorityPiece, Schedule};
use crate::{BlockIx, Change, ChangeError, FileRun, Finish, PAGE_SIZE, PageIx, Plan};

/// The residency of one address space.
///
/// It takes three bits a page while the program keeps its layout or only drops memory. Pages moved by
/// `mremap` take two map entries per piece.
#[derive(Debug)]
pub struct ResidencyMap {
    pub(crate) plan: Arc<Plan>,
    /// Pages that are resident or dropped.
    pub(crate) settled: Bits,
    /// Pages that are not at their address in the image: they are in `remaps`, or dropped.
    pub(crate) moved_or_dropped: Bits,
    pub(crate) remaps: RemapTable,
    /// Number of pages that are not settled.
    missing: AtomicU64,
    /// Number of pages that are not dropped.
    mapped: u64,
    schedule: Schedule,
}

/// The page at an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Locate {
    /// A missing page of the image.
    Missing(Place),
    /// A page of the image that was filled, and since then neither moved nor dropped.
    Resident(Place),
    /// No page of the image, or one that was dropped: a zero page.
    Unbacked,
}

/// The place of a page in the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The page.
    pub page: PageIx,
    /// The block that has it.
    pub block: BlockIx,
    /// Index of the file.
    pub file: u32,
    /// Byte offset of the page in the file.
    pub file_offset: u64,
}

/// Addresses whose blocks are loaded before others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prefetch {
    /// The addresses in the image, multiples of the page size.
    pub addresses: Range<u64>,
    /// Their place in the order of all address spaces: a lower rank is loaded first. Restores wait for rank
    /// 0.
    pub rank: u32,
}

/// Missing pages that are contiguous in the address space and in the file, inside one extent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// Address of the first page, in bytes.
    pub target: u64,
    /// The first page.
    pub page: PageIx,
    /// Number of pages.
    pub pages: u64,
    /// Byte offset of the first page in its block.
    pub block_offset: usize,
}

impl ResidencyMap {
    /// Makes the map of an address space as it was dumped, with all pages missing.
    #[must_use]
    pub fn new(plan: Arc<Plan>) -> Self {
        let pages = plan.pages();
        Self {
            settled: Bits::new(pages),
            moved_or_dropped: Bits::new(pages),
            remaps: RemapTable::default(),
            missing: AtomicU64::new(pages),
            mapped: pages,
            schedule: Schedule::new(plan.blocks()),
            plan,
        }
    }

    /// The plan.
    #[must_use]
    pub fn plan(&self) -> &Arc<Plan> {
        &self.plan
    }

    /// Finds the page at `address` (any byte of the page).
    #[must_use]
    pub fn locate(&self, address: u64) -> Locate {
        let Some(page) = self.page_at(address) else { return Locate::Unbacked };
        let placed = self.plan.extent_of(page);
        let place = Place {
            page: PageIx(page),
            block: self.plan.block_of(PageIx(page)),
            file: placed.extent.file,
            file_offset: placed.offset_of(page),
        };
        if self.settled.get(page) { Locate::Resident(place) } else { Locate::Missing(place) }
    }

    /// Returns the missing pages around the one at `address`, inside `window`, up to the next page that is
    /// not missing, or moved, or of another extent. Returns `None` if the page at `address` itself is such a
    /// page.
    #[must_use]
    pub fn missing_run(&self, address: u64, window: &Range<u64>) -> Option<FileRun> {
        let page = self.plan.page_at(address).filter(|_| self.remaps.at_target(address).is_none())?;
        let is_missing = |page: &u64| !self.settled.get(*page) && !self.moved_or_dropped.get(*page);
        if !is_missing(&page) {
            return None;
        }
        let placed = self.plan.extent_of(page);
        let before = address.saturating_sub(window.start) / PAGE_SIZE;
        let after = window.end.saturating_sub(address) / PAGE_SIZE;
        let lowest = page.saturating_sub(before).max(placed.first);
        let first = (lowest..page).rev().take_while(is_missing).last().unwrap_or(page);
        let end = placed.end().min(page + after.max(1));
        let end = self.settled.next_set(page..self.moved_or_dropped.next_set(page..end));
        Some(FileRun {
            target: placed.target_of(first),
            page: PageIx(first),
            pages: end - first,
            file: placed.extent.file,
            file_offset: placed.offset_of(first),
        })
    }

    fn page_at(&self, address: u64) -> Option<u64> {
        if let Some(moved) = self.remaps.at_target(address) {
            return Some(moved.page + (address - moved.target) / PAGE_SIZE);
        }
        self.plan.page_at(address).filter(|page| !self.moved_or_dropped.get(*page))
    }

    /// Appends the missing pages of `block` from `from` on to `out`, in page order, at most `max_pages` of
    /// them. `from` may be any page number, also one before the block. Returns the page to continue at, or
    /// none when the block has no more.
    pub fn runs(&self, block: BlockIx, from: PageIx, max_pages: u64, out: &mut Vec<Run>) -> Option<PageIx> {
        let pages = self.plan.block(block).range();
        let mut left = max_pages;
        for range in self.settled.clear_ranges(pages.start.max(from.0)..pages.end) {
            for (placed, piece) in self.plan.split(range) {
                for (target, piece) in self.targets(placed.target_of(piece.start), piece) {
                    if left == 0 {
                        return Some(PageIx(piece.start));
                    }
                    let pages = left.min(piece.end - piece.start);
                    let block_offset = placed.block_offset_of(piece.start);
                    out.push(Run { target, page: PageIx(piece.start), pages, block_offset });
                    left -= pages;
                    if pages < piece.end - piece.start {
                        return Some(PageIx(piece.start + pages));
                    }
                }
            }
        }
        None
    }

    /// Splits missing pages of one extent by their current addresses. `original` is the first page's address
    /// in the image.
    fn targets(&self, original: u64, pages: Range<u64>) -> impl Iterator<Item = (u64, Range<u64>)> {
        let mut at = pages.start;
        std::iter::from_fn(move || {
            if at >= pages.end {
                return None;
            }
            let start = at;
            if !self.moved_or_dropped.get(start) {
                at = self.moved_or_dropped.next_set(start..pages.end);
                return Some((original + (start - pages.start) * PAGE_SIZE, start..at));
            }
            // A missing page has an address: dropped pages are settled.
            let moved = self.remaps.at_page(start)?;
            at = pages.end.min(moved.page_end());
            Some((moved.target + (start - moved.page) * PAGE_SIZE, start..at))
        })
    }

    /// Marks `pages` pages from `page` on as resident. Returns how many of them were missing.
    pub fn set_resident(&self, page: PageIx, pages: u64) -> u64 {
        let end = page.0.saturating_add(pages).min(self.plan.pages());
        let new = self.settled.set(page.0..end);
        self.missing.fetch_sub(new, Ordering::AcqRel);
        new
    }

    /// Number of mapped pages that are not resident.
    #[must_use]
    pub fn missing(&self) -> u64 {
        self.missing.load(Ordering::Acquire)
    }

    /// Number of mapped pages that are resident.
    #[must_use]
    pub fn resident(&self) -> u64 {
        self.mapped.saturating_sub(self.missing())
    }

    /// Number of mapped pages: the pages of the plan that the program did not drop.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.mapped
    }

    /// Applies a change of the layout. Its cost depends on the number of extents in its range, not on the
    /// length.
    ///
    /// # Errors
    /// A change that no kernel reports. The map stays as it was.
    pub fn apply(&mut self, change: &Change) -> Result<(), ChangeError> {
        change.validate()?;
        match *change {
            Change::Remove { start, end } | Change::Unmap { start, end } => self.drop_range(start, end),
            Change::Remap { from, to, len } => {
                self.drop_range(to, to + len);
                for piece in self.take(from, from + len) {
                    self.put(RemapPiece { target: piece.target - from + to, ..piece });
                }
            }
        }
        Ok(())
    }

    fn drop_range(&mut self, start: u64, end: u64) {
        for piece in self.take(start, end) {
            self.settle_dropped(piece.page..piece.page_end());
        }
    }

    /// Settles `pages` that have lost their address.
    pub(crate) fn settle_dropped(&mut self, pages: Range<u64>) {
        self.mapped -= pages.end - pages.start;
        let new = self.settled.set(pages);
        *self.missing.get_mut() -= new;
    }

    /// Unmaps the pages at the addresses `start..end` and returns them.
    fn take(&mut self, start: u64, end: u64) -> Vec<RemapPiece> {
        let mut taken = self.remaps.take(start, end);
        for (placed, pages) in self.plan.pages_in(start, end) {
            for range in self.moved_or_dropped.clear_ranges(pages) {
                let target = placed.target_of(range.start);
                taken.push(RemapPiece { target, page: range.start, pages: range.end - range.start });
                self.moved_or_dropped.set(range);
            }
        }
        taken
    }

    /// Maps moved pages of one extent at free addresses.
    pub(crate) fn put(&mut self, moved: RemapPiece) {
        if self.plan.extent_of(moved.page).target_of(moved.page) == moved.target {
            self.moved_or_dropped.clear(moved.page..moved.page_end());
        } else {
            self.remaps.insert(moved);
        }
    }

    /// Makes the map of a child forked at this moment: pages that are resident here are resident there. The
    /// kernel may not copy pages that were filled with zeros: a fault there finds a resident page.
    #[must_use]
    pub fn fork(&self) -> Self {
        let settled = self.settled.clone();
        Self {
            plan: Arc::clone(&self.plan),
            missing: AtomicU64::new(self.plan.pages() - settled.count()),
            settled,
            moved_or_dropped: self.moved_or_dropped.clone(),
            remaps: self.remaps.clone(),
            mapped: self.mapped,
            schedule: Schedule::new(self.plan.blocks()),
        }
    }

    /// Returns the aligned ranges of `size` bytes, joined where they are adjacent, of which the program still
    /// has every page of the image at its address in the image.
    #[must_use]
    pub fn whole_ranges(&self, size: u64) -> Vec<Range<u64>> {
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for (placed, pages) in self.plan.pages_in(0, u64::MAX) {
            for pages in self.moved_or_dropped.clear_ranges(pages) {
                let start = placed.target_of(pages.start);
                let end = start + (pages.end - pages.start) * PAGE_SIZE;
                match ranges.last_mut() {
                    Some(last) if last.end == start => last.end = end,
                    _ => ranges.push(start..end),
                }
            }
        }
        let aligned = |range: Range<u64>| range.start.next_multiple_of(size)..range.end / size * size;
        ranges.into_iter().map(aligned).filter(|range| range.start < range.end).collect()
    }

    /// Claims a block with missing pages: first a block of [`ResidencyMap::promote`], then one of
    /// [`ResidencyMap::set_priority`], then the lowest. Returns `None` when no such block is free.
    #[must_use]
    pub fn claim(&self) -> Option<BlockIx> {
        self.with_missing(|| self.schedule.claim())
    }

    /// Claims blocks until one has missing pages.
    fn with_missing(&self, claim: impl Fn() -> Option<BlockIx>) -> Option<BlockIx> {
        loop {
            let block = claim()?;
            if self.has_missing(block) {
                return Some(block);
            }
            self.schedule.release(block, Finish::Done);
        }
    }

    /// Gives priority to the blocks of these addresses in the image, in their order.
    pub fn set_priority(&mut self, prefetch: &[Prefetch]) {
        let pieces = prefetch.iter().flat_map(|Prefetch { addresses, rank }| {
            let pages = self.plan.pages_in(addresses.start, addresses.end);
            pages.map(|(_, pages)| {
                let blocks = self.plan.block_of(PageIx(pages.start)).0
                    ..self.plan.block_of(PageIx(pages.end - 1)).0 + 1;
                PriorityPiece { blocks, rank: *rank }
            })
        });
        self.schedule.set_priority(pieces);
    }

    /// Returns whether a block was given priority, with a rank above 0.
    #[must_use]
    pub fn is_prefetched(&self, block: BlockIx) -> bool {
        self.schedule.is_prefetched(block)
    }

    /// The rank of the next blocks with priority; none when none are left to claim.
    #[must_use]
    pub fn next_rank(&self) -> Option<u32> {
        self.schedule.next_rank()
    }

    /// Claims a block with priority and missing pages, of this rank at most. Returns none when no such block
    /// is free.
    #[must_use]
    pub fn claim_first(&self, most_rank: u32) -> Option<BlockIx> {
        self.with_missing(|| self.schedule.claim_first(most_rank))
    }

    /// Whether all blocks with priority are resident.
    #[must_use]
    pub fn is_priority_resident(&self) -> bool {
        self.schedule.is_priority_resident(|block| self.has_missing(block))
    }

    /// Returns false when every block is claimed or done. Another thread may change that at any moment.
    #[must_use]
    pub fn has_claimable(&self) -> bool {
        self.schedule.has_claimable()
    }

    /// The block at which claims in order continue; None before the first and after the last claim.
    #[must_use]
    pub fn position(&self) -> Option<BlockIx> {
        self.schedule.position()
    }

    /// Continues claims in order at `block`. The blocks before it follow after the last one.
    pub fn begin_at(&self, block: BlockIx) {
        self.schedule.begin_at(block);
    }

    /// Makes the background load continue ahead of `page`, where a thread sweeps: with `windows`, after the
    /// pages that the sweep fills itself.
    pub fn follow(&self, page: PageIx, windows: bool) {
        let last = self.plan.pages().saturating_sub(1);
        self.schedule.follow(self.plan.block_of(PageIx(page.0.min(last))), windows);
    }

    /// Claims `block` for a demand load. Returns false when it is claimed, or has no missing page.
    #[must_use]
    pub fn claim_block(&self, block: BlockIx) -> bool {
        self.has_missing(block) && self.schedule.claim_block(block)
    }

    /// Notes a page fault in `block`: it and the next block are claimed before others.
    pub fn promote(&self, block: BlockIx) {
        self.schedule.promote(block);
    }

    /// Ends a claim. `Done` with missing pages counts as `Retry`, so that they are not forgotten.
    pub fn release(&self, block: BlockIx, finish: Finish) {
        let finish = if self.has_missing(block) { Finish::Retry } else { finish };
        self.schedule.release(block, finish);
    }

    /// Returns true when no block has missing pages, claimed or not: the background load is finished.
    #[must_use]
    pub fn background_done(&self) -> bool {
        self.missing() == 0
    }

    /// Number of promotions that were lost because more than [`crate::PROMOTED_BLOCKS`] waited.
    #[must_use]
    pub fn promotions_lost(&self) -> u64 {
        self.schedule.overflows()
    }

    /// Returns true when a page of the image is mapped at its original address in `start..end`.
    pub(crate) fn has_unmoved(&self, start: u64, end: u64) -> bool {
        let unmoved =
            |(_, pages): (_, Range<u64>)| self.moved_or_dropped.next_clear(pages.clone()) < pages.end;
        self.plan.pages_in(start, end).any(unmoved)
    }

    fn has_missing(&self, block: BlockIx) -> bool {
        let pages = self.plan.block(block).range();
        let end = pages.end;
        self.settled.next_clear(pages) < end
    }

    /// Checks the invariants (see the crate's documentation), for tests. No other thread may use the map
    /// meanwhile. O(pages).
    ///
    /// # Errors
    /// A description of the violated invariant.
    pub fn check(&self) -> Result<(), String> {
        self.remaps.check()?;
        let all = 0..self.plan.pages();
        let missing: u64 = self.settled.clear_ranges(all.clone()).map(|pages| pages.end - pages.start).sum();
        if missing != self.missing() {
            return Err(format!("{missing} pages are missing, {} are counted", self.missing()));
        }
        let mut mapped: u64 = self.moved_or_dropped.clear_ranges(all.clone()).map(|p| p.end - p.start).sum();
        for moved in self.remaps.iter() {
            mapped += moved.pages;
            if moved.page_end() > self.plan.extent_of(moved.page).end() {
                return Err(format!("{moved:x?} crosses an extent"));
            }
            if self.moved_or_dropped.next_clear(moved.page..moved.page_end()) < moved.page_end() {
                return Err(format!("{moved:x?} has two addresses"));
            }
            if self.has_unmoved(moved.target, moved.target_end()) {
                return Err(format!("{moved:x?} overlaps pages that never moved"));
            }
        }
        if mapped != self.mapped {
            return Err(format!("{mapped} pages are mapped, {} are counted", self.mapped));
        }
        for (_, pages) in self.settled.clear_ranges(all).flat_map(|pages| self.plan.split(pages)) {
            let placed: u64 = self.targets(0, pages.clone()).map(|(_, piece)| piece.end - piece.start).sum();
            if placed < pages.end - pages.start {
                return Err(format!("a page of {pages:?} is missing and has no address"));
            }
        }
        self.schedule.check(|block| self.has_missing(block))
    }
}
