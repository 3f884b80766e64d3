// SPDX-License-Identifier: MIT OR Apache-2.0
//! A compact record of a layout, with which a successor takes over an address space.

use std::sync::Arc;

use crate::remaps::RemapPiece;
use crate::{PAGE_SIZE, PageIx, Plan, ResidencyMap};

/// Pages that are not at their address in the image. All other pages are where the plan has them: a program
/// that never drops or moves memory has an empty snapshot, whatever the size of its image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Address of the first page, or [`Segment::DROPPED`].
    pub target: u64,
    /// The first page.
    pub page: PageIx,
    /// Number of pages.
    pub pages: u64,
}

/// Why segments are not a layout of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RestoreError {
    /// Segments that are out of page order, empty, or beyond the plan.
    #[error("restoring a layout: {0:x?} is out of order or beyond the plan; the record is of another image")]
    BadPages(Segment),
    /// An address that is unaligned, beyond the last address, or occupied.
    #[error("restoring a layout: {0:x?} has a bad or occupied address; the record is damaged")]
    BadTarget(Segment),
}

impl Segment {
    /// The target of dropped pages: not a multiple of the page size.
    pub const DROPPED: u64 = u64::MAX;
}

impl ResidencyMap {
    /// The layout, in page order. It does not say which pages are resident.
    #[must_use]
    pub fn snapshot(&self) -> Vec<Segment> {
        let mut segments = Vec::new();
        let end = self.plan.pages();
        let mut at = 0;
        while at < end {
            let start = self.moved_or_dropped.next_set(at..end);
            at = self.moved_or_dropped.next_clear(start..end);
            self.append_moved_or_dropped(start, at, &mut segments);
        }
        segments
    }

    fn append_moved_or_dropped(&self, mut start: u64, end: u64, out: &mut Vec<Segment>) {
        for moved in self.remaps.starting_at(start).take_while(|moved| moved.page < end) {
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

    /// Makes the map of an address space of `plan` with the layout of [`ResidencyMap::snapshot`]. All its
    /// pages are missing: the kernel reports resident ones when they are filled again.
    ///
    /// # Errors
    /// Segments that are not a layout of `plan`.
    pub fn restore(plan: Arc<Plan>, segments: &[Segment]) -> Result<Self, RestoreError> {
        let mut map = Self::new(plan);
        let mut next = 0;
        for segment in segments {
            let end = segment.page.0.checked_add(segment.pages).filter(|end| *end <= map.plan.pages());
            let Some(end) = end.filter(|_| segment.pages > 0 && segment.page.0 >= next) else {
                return Err(RestoreError::BadPages(*segment));
            };
            next = end;
            map.moved_or_dropped.set(segment.page.0..end);
            if segment.target == Segment::DROPPED {
                map.settle_dropped(segment.page.0..end);
            }
        }
        for segment in segments.iter().filter(|segment| segment.target != Segment::DROPPED) {
            map.put_segment(segment)?;
        }
        Ok(map)
    }

    fn put_segment(&mut self, segment: &Segment) -> Result<(), RestoreError> {
        let len = segment.pages * PAGE_SIZE; // of pages that exist, so at most 2^44
        let end = segment.target.checked_add(len).filter(|_| segment.target.is_multiple_of(PAGE_SIZE));
        let free = |end: &u64| !self.is_occupied(segment.target, *end);
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

    fn is_occupied(&self, start: u64, end: u64) -> bool {
        self.remaps.overlaps(start, end) || self.has_unmoved(start, end)
    }
}

fn dropped(start: u64, end: u64) -> Segment {
    Segment { target: Segment::DROPPED, page: PageIx(start), pages: end - start }
}

/// Appends moved pages. Pieces are cut at extents and by past changes: contiguous ones become one segment.
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
