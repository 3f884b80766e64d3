// SPDX-License-Identifier: MIT OR Apache-2.0
//! A layout in few words, to hand an address space over to a successor.

use std::sync::Arc;

use crate::remaps::RemapPiece;
use crate::{PAGE_SIZE, PageIx, Plan, ResidencyMap};

/// Pages that are not at the address they were dumped from. What no segment names is where the plan has it:
/// a program that never drops or moves memory has an empty snapshot, whatever the size of its image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Address of the first page, or [`Segment::DROPPED`].
    pub target: u64,
    /// The first page.
    pub page: PageIx,
    /// How many.
    pub pages: u64,
}

/// Why segments are not a layout of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RestoreError {
    /// Not in page order, without pages, or with pages that the plan does not have.
    #[error("restoring a layout: {0:x?} is out of order or beyond the plan; the record is of another image")]
    BadPages(Segment),
    /// Not aligned, beyond the last address, or where other pages are.
    #[error("restoring a layout: {0:x?} has a bad or occupied address; the record is damaged")]
    BadTarget(Segment),
}

impl Segment {
    /// Target of pages that are nowhere: not a multiple of the page size.
    pub const DROPPED: u64 = u64::MAX;
}

impl ResidencyMap {
    /// The layout, in page order. Which pages are resident is not in it.
    #[must_use]
    pub fn snapshot(&self) -> Vec<Segment> {
        let mut segments = Vec::new();
        let end = self.plan.pages();
        let mut at = 0;
        while at < end {
            let start = self.detached.next_set(at..end);
            at = self.detached.next_clear(start..end);
            self.append_detached(start, at, &mut segments);
        }
        segments
    }

    fn append_detached(&self, mut start: u64, end: u64, out: &mut Vec<Segment>) {
        for moved in self.moves.starting_at(start).take_while(|moved| moved.page < end) {
            if start < moved.page {
                out.push(dropped(start, moved.page));
            }
            append_moved(moved, out);
            start = moved.page_end();
        }
        if start < end {
            out.push(dropped(start, end));
        }
    }

    /// An address space of `plan` with the layout of [`Space::snapshot`]. All its pages are missing: the
    /// kernel says which are not when they are filled again.
    ///
    /// # Errors
    /// Segments that are not a layout of `plan`.
    pub fn restore(plan: Arc<Plan>, segments: &[Segment]) -> Result<Self, RestoreError> {
        let mut space = Self::new(plan);
        let mut next = 0;
        for segment in segments {
            let end = segment.page.0.checked_add(segment.pages).filter(|end| *end <= space.plan.pages());
            let Some(end) = end.filter(|_| segment.pages > 0 && segment.page.0 >= next) else {
                return Err(RestoreError::BadPages(*segment));
            };
            next = end;
            space.detached.set(segment.page.0..end);
            if segment.target == Segment::DROPPED {
                space.settle_dropped(segment.page.0..end);
            }
        }
        for segment in segments.iter().filter(|segment| segment.target != Segment::DROPPED) {
            space.put_segment(segment)?;
        }
        Ok(space)
    }

    fn put_segment(&mut self, segment: &Segment) -> Result<(), RestoreError> {
        let len = segment.pages * PAGE_SIZE; // of pages that exist, so at most 2^44
        let end = segment.target.checked_add(len).filter(|_| segment.target.is_multiple_of(PAGE_SIZE));
        let free = |end: &u64| !self.occupied(segment.target, *end);
        if end.filter(free).is_none() {
            return Err(RestoreError::BadTarget(*segment));
        }
        let plan = Arc::clone(&self.plan);
        for (_, pages) in plan.split(segment.page.0..segment.page.0 + segment.pages) {
            let target = segment.target + (pages.start - segment.page.0) * PAGE_SIZE;
            self.put(RemapPiece { target, page: pages.start, pages: pages.end - pages.start });
        }
        Ok(())
    }

    fn occupied(&self, start: u64, end: u64) -> bool {
        self.moves.overlaps(start, end) || self.has_attached(start, end)
    }
}

fn dropped(start: u64, end: u64) -> Segment {
    Segment { target: Segment::DROPPED, page: PageIx(start), pages: end - start }
}

/// Pieces are cut at extents and by past changes; what follows in both orders is told as one.
fn append_moved(moved: RemapPiece, out: &mut Vec<Segment>) {
    if let Some(last) = out.last_mut()
        && last.target != Segment::DROPPED
        && last.page.0 + last.pages == moved.page
        && last.target + last.pages * PAGE_SIZE == moved.target
    {
        last.pages += moved.pages;
        return;
    }
    out.push(Segment { target: moved.target, page: PageIx(moved.page), pages: moved.pages });
}
