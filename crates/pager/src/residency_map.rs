// SPDX-License-Identifier: MIT OR Apache-2.0
//! One address space: where each page of its plan is now, and whether it is there.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::bits::Bits;
use crate::remaps::{RemapPiece, RemapTable};
use crate::schedule::Schedule;
use crate::{BlockIx, Change, ChangeError, Finish, PAGE_SIZE, PageIx, Plan};

/// One address space.
///
/// Costs three bits a page while the program leaves its layout alone or only drops memory; pages moved by
/// `mremap` cost two map entries a piece.
#[derive(Debug)]
pub struct ResidencyMap {
    pub(crate) plan: Arc<Plan>,
    /// Pages that are resident or dropped.
    pub(crate) settled: Bits,
    /// Pages that are not at the address they were dumped from: in `moves`, or dropped.
    pub(crate) detached: Bits,
    pub(crate) moves: RemapTable,
    /// Pages not settled.
    missing: AtomicU64,
    /// Pages not dropped.
    mapped: u64,
    schedule: Schedule,
}

/// What stands behind an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Locate {
    /// An image page that is not there yet.
    Missing(Place),
    /// An image page that was filled, and since then neither moved away nor dropped.
    Resident(Place),
    /// No image page, or none any more: a zero page.
    Unbacked,
}

/// Where an image page's bytes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The page.
    pub page: PageIx,
    /// The block it lies in.
    pub block: BlockIx,
    /// Index of the file.
    pub file: u32,
    /// Where the page begins in the file. Bytes.
    pub file_offset: u64,
}

/// Missing pages that follow one another both in the address space and in the file, inside one extent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// Address of the first. Bytes.
    pub target: u64,
    /// The first.
    pub page: PageIx,
    /// How many.
    pub pages: u64,
    /// Where the first begins in its block. Bytes.
    pub block_offset: usize,
}

impl ResidencyMap {
    /// An address space as it was dumped, with nothing in it.
    #[must_use]
    pub fn new(plan: Arc<Plan>) -> Self {
        let pages = plan.pages();
        Self {
            settled: Bits::new(pages),
            detached: Bits::new(pages),
            moves: RemapTable::default(),
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

    /// What stands behind `address` (any byte of a page).
    #[must_use]
    pub fn locate(&self, address: u64) -> Locate {
        let Some(page) = self.page_at(address) else { return Locate::Unbacked };
        let placed = self.plan.extent_of(page);
        let place = Place {
            page: PageIx(page),
            block: self.plan.block_of(page),
            file: placed.extent.file,
            file_offset: placed.offset_of(page),
        };
        if self.settled.get(page) { Locate::Resident(place) } else { Locate::Missing(place) }
    }

    fn page_at(&self, address: u64) -> Option<u64> {
        if let Some(moved) = self.moves.at_target(address) {
            return Some(moved.page + (address - moved.target) / PAGE_SIZE);
        }
        self.plan.page_at(address).filter(|page| !self.detached.get(*page))
    }

    /// Appends to `out` the missing pages of `block` from `from` on (any page number, also one before the
    /// block), in page order, at most `max_pages` of them. Gives the page to go on at; none when the block
    /// has no more.
    pub fn runs(&self, block: BlockIx, from: PageIx, max_pages: u64, out: &mut Vec<Run>) -> Option<PageIx> {
        let pages = self.plan.block(block).range();
        let mut left = max_pages;
        for stretch in self.settled.clear_stretches(pages.start.max(from.0)..pages.end) {
            for (placed, piece) in self.plan.split(stretch) {
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

    /// Splits missing pages of one extent by where they are now. `original` is the dump address of the first.
    fn targets(&self, original: u64, pages: Range<u64>) -> impl Iterator<Item = (u64, Range<u64>)> {
        let mut at = pages.start;
        std::iter::from_fn(move || {
            if at >= pages.end {
                return None;
            }
            let start = at;
            if !self.detached.get(start) {
                at = self.detached.next_set(start..pages.end);
                return Some((original + (start - pages.start) * PAGE_SIZE, start..at));
            }
            // A missing page is mapped somewhere: dropped pages are settled.
            let moved = self.moves.at_page(start)?;
            at = pages.end.min(moved.page_end());
            Some((moved.target + (start - moved.page) * PAGE_SIZE, start..at))
        })
    }

    /// Notes that `pages` pages from `page` on are in place; gives how many of them were missing.
    pub fn set_resident(&self, page: PageIx, pages: u64) -> u64 {
        let end = page.0.saturating_add(pages).min(self.plan.pages());
        let new = self.settled.set(page.0..end);
        self.missing.fetch_sub(new, Ordering::AcqRel);
        new
    }

    /// Pages that are mapped and not resident.
    #[must_use]
    pub fn missing(&self) -> u64 {
        self.missing.load(Ordering::Acquire)
    }

    /// Pages that are mapped and resident.
    #[must_use]
    pub fn resident(&self) -> u64 {
        self.mapped.saturating_sub(self.missing())
    }

    /// Pages that are mapped: those of the plan that the program did not drop.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.mapped
    }

    /// Follows a change of the layout. Cheap however long its range is: what counts is how many extents lie
    /// in it.
    ///
    /// # Errors
    /// A change that no kernel reports; nothing was done.
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

    /// Notes that `pages`, which are at no address any more, stay so.
    pub(crate) fn settle_dropped(&mut self, pages: Range<u64>) {
        self.mapped -= pages.end - pages.start;
        let new = self.settled.set(pages);
        *self.missing.get_mut() -= new;
    }

    /// Takes what is mapped at the addresses `start..end` out of the mapping.
    fn take(&mut self, start: u64, end: u64) -> Vec<RemapPiece> {
        let mut taken = self.moves.take(start, end);
        for (placed, pages) in self.plan.pages_in(start, end) {
            for stretch in self.detached.clear_stretches(pages) {
                let target = placed.target_of(stretch.start);
                taken.push(RemapPiece { target, page: stretch.start, pages: stretch.end - stretch.start });
                self.detached.set(stretch);
            }
        }
        taken
    }

    /// Maps detached pages of one extent at addresses where nothing is mapped.
    pub(crate) fn put(&mut self, moved: RemapPiece) {
        if self.plan.extent_of(moved.page).target_of(moved.page) == moved.target {
            self.detached.clear(moved.page..moved.page_end());
        } else {
            self.moves.insert(moved);
        }
    }

    /// The address space of a child forked at this moment: what is resident here is resident there. (The
    /// kernel may leave out pages that were filled with zeros: a fault there is located as resident.)
    #[must_use]
    pub fn fork(&self) -> Self {
        let settled = self.settled.clone();
        Self {
            plan: Arc::clone(&self.plan),
            missing: AtomicU64::new(self.plan.pages() - settled.count()),
            settled,
            detached: self.detached.clone(),
            moves: self.moves.clone(),
            mapped: self.mapped,
            schedule: Schedule::new(self.plan.blocks()),
        }
    }

    /// Claims a block with missing pages: those that [`Space::promote`] put in front first, then those of
    /// [`Space::set_priority`], then the lowest.
    /// None when no such block is free.
    #[must_use]
    pub fn claim(&self) -> Option<BlockIx> {
        loop {
            let block = self.schedule.claim()?;
            if self.has_missing(block) {
                return Some(block);
            }
            self.schedule.release(block, Finish::Done);
        }
    }

    /// What was dumped from these addresses comes before the rest, in their order.
    pub fn set_priority(&mut self, addresses: &[Range<u64>]) {
        let pages = addresses.iter().flat_map(|range| self.plan.pages_in(range.start, range.end));
        let blocks = pages
            .map(|(_, pages)| self.plan.block_of(pages.start).0..self.plan.block_of(pages.end - 1).0 + 1);
        self.schedule.set_priority(blocks);
    }

    /// Whether some of it may be left to claim.
    #[must_use]
    pub fn has_priority(&self) -> bool {
        self.schedule.has_priority()
    }

    /// False when every block is claimed or done. Another thread may change that at any moment.
    #[must_use]
    pub fn has_claimable(&self) -> bool {
        self.schedule.has_claimable()
    }

    /// Where the claims in order have come to; None before the first and after the last.
    #[must_use]
    pub fn position(&self) -> Option<BlockIx> {
        self.schedule.position()
    }

    /// Claims in order go on from `block`, and come to those before it when they have been at the end.
    pub fn begin_at(&self, block: BlockIx) {
        self.schedule.begin_at(block);
    }

    /// Claims `block`, which a thread waits for. False when it is claimed, or nothing is missing in it.
    #[must_use]
    pub fn claim_block(&self, block: BlockIx) -> bool {
        self.has_missing(block) && self.schedule.claim_block(block)
    }

    /// A page of `block` was touched: it and the next one are claimed before others.
    pub fn promote(&self, block: BlockIx) {
        self.schedule.promote(block);
    }

    /// Ends a claim. `Done` with pages still missing counts as `Retry`, so that they are not forgotten.
    pub fn release(&self, block: BlockIx, finish: Finish) {
        let finish = if self.has_missing(block) { Finish::Retry } else { finish };
        self.schedule.release(block, finish);
    }

    /// True when no block has missing pages, claimed or not: the background work is finished.
    #[must_use]
    pub fn background_done(&self) -> bool {
        self.missing() == 0
    }

    /// Promotions that were lost because more than [`crate::PROMOTED_BLOCKS`] waited.
    #[must_use]
    pub fn promotions_lost(&self) -> u64 {
        self.schedule.overflows()
    }

    /// True when a page dumped from the addresses `start..end` is still there.
    pub(crate) fn has_attached(&self, start: u64, end: u64) -> bool {
        let attached = |(_, pages): (_, Range<u64>)| self.detached.next_clear(pages.clone()) < pages.end;
        self.plan.pages_in(start, end).any(attached)
    }

    fn has_missing(&self, block: BlockIx) -> bool {
        let pages = self.plan.block(block).range();
        let end = pages.end;
        self.settled.next_clear(pages) < end
    }

    /// Looks whether the invariants hold (see the crate's documentation); for tests. Not while another
    /// thread uses the space. O(pages).
    ///
    /// # Errors
    /// What does not hold.
    pub fn check(&self) -> Result<(), String> {
        self.moves.check()?;
        let all = 0..self.plan.pages();
        let missing: u64 =
            self.settled.clear_stretches(all.clone()).map(|pages| pages.end - pages.start).sum();
        if missing != self.missing() {
            return Err(format!("{missing} pages are missing, {} are counted", self.missing()));
        }
        let mut mapped: u64 = self.detached.clear_stretches(all.clone()).map(|p| p.end - p.start).sum();
        for moved in self.moves.iter() {
            mapped += moved.pages;
            if moved.page_end() > self.plan.extent_of(moved.page).end() {
                return Err(format!("{moved:x?} crosses an extent"));
            }
            if self.detached.next_clear(moved.page..moved.page_end()) < moved.page_end() {
                return Err(format!("{moved:x?} is in two places"));
            }
            if self.has_attached(moved.target, moved.target_end()) {
                return Err(format!("{moved:x?} lies over pages that never moved"));
            }
        }
        if mapped != self.mapped {
            return Err(format!("{mapped} pages are mapped, {} are counted", self.mapped));
        }
        for (_, pages) in self.settled.clear_stretches(all).flat_map(|pages| self.plan.split(pages)) {
            let placed: u64 = self.targets(0, pages.clone()).map(|(_, piece)| piece.end - piece.start).sum();
            if placed < pages.end - pages.start {
                return Err(format!("a page of {pages:?} is missing and mapped nowhere"));
            }
        }
        self.schedule.check(|block| self.has_missing(block))
    }
}
