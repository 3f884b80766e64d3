// SPDX-License-Identifier: MIT OR Apache-2.0
//! Pages that the program moved away from the address they were dumped from.

use std::collections::BTreeMap;

use crate::PAGE_SIZE;

/// Pages that follow one another in the image and in memory, inside one extent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RemapPiece {
    pub(crate) target: u64,
    pub(crate) page: u64,
    pub(crate) pages: u64,
}

impl RemapPiece {
    pub(crate) fn target_end(&self) -> u64 {
        self.target + self.pages * PAGE_SIZE
    }

    pub(crate) fn page_end(&self) -> u64 {
        self.page + self.pages
    }

    /// The part at the addresses `start..end`, which must overlap it.
    fn clip(&self, start: u64, end: u64) -> Self {
        let target = self.target.max(start);
        let pages = (self.target_end().min(end) - target) / PAGE_SIZE;
        Self { target, page: self.page + (target - self.target) / PAGE_SIZE, pages }
    }
}

/// A partial injection from addresses to pages, found from both sides. Empty unless the program uses
/// `mremap`.
#[derive(Debug, Default, Clone)]
pub(crate) struct RemapTable {
    by_target: BTreeMap<u64, RemapPiece>,
    /// Page to target; always the same set as `by_target`.
    by_page: BTreeMap<u64, u64>,
}

impl RemapTable {
    /// The piece that covers `address`.
    pub(crate) fn at_target(&self, address: u64) -> Option<RemapPiece> {
        let (_, moved) = self.by_target.range(..=address).next_back()?;
        (address < moved.target_end()).then_some(*moved)
    }

    /// The piece that `page` is in.
    pub(crate) fn at_page(&self, page: u64) -> Option<RemapPiece> {
        let (_, target) = self.by_page.range(..=page).next_back()?;
        let moved = self.by_target[target];
        (page < moved.page_end()).then_some(moved)
    }

    /// True when a piece has an address in `start..end`.
    pub(crate) fn overlaps(&self, start: u64, end: u64) -> bool {
        start < end
            && self.by_target.range(..end).next_back().is_some_and(|(_, last)| last.target_end() > start)
    }

    /// Adds a piece whose addresses and pages are not in any other.
    pub(crate) fn insert(&mut self, moved: RemapPiece) {
        self.by_target.insert(moved.target, moved);
        self.by_page.insert(moved.page, moved.target);
    }

    /// Takes out everything at the addresses `start..end`, cutting pieces that lie across a border.
    pub(crate) fn take(&mut self, start: u64, end: u64) -> Vec<RemapPiece> {
        let mut taken = Vec::new();
        while self.overlaps(start, end) {
            let Some((_, &moved)) = self.by_target.range(..end).next_back() else { break };
            self.by_target.remove(&moved.target);
            self.by_page.remove(&moved.page);
            if moved.target < start {
                self.insert(moved.clip(moved.target, start));
            }
            if moved.target_end() > end {
                self.insert(moved.clip(end, moved.target_end()));
            }
            taken.push(moved.clip(start, end));
        }
        taken
    }

    /// Pieces whose first page is `page` or later, in page order.
    pub(crate) fn starting_at(&self, page: u64) -> impl Iterator<Item = RemapPiece> {
        self.by_page.range(page..).map(|(_, target)| self.by_target[target])
    }

    /// Every piece, in page order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = RemapPiece> {
        self.starting_at(0)
    }

    /// Why the two sides do not tell the same, or overlap.
    pub(crate) fn check(&self) -> Result<(), String> {
        let (mut target, mut page) = (0, 0);
        for moved in self.by_target.values() {
            if moved.target < target
                || moved.pages == 0
                || self.by_page.get(&moved.page) != Some(&moved.target)
            {
                return Err(format!("moved piece {moved:x?} overlaps or is not found by its page"));
            }
            target = moved.target_end();
        }
        for moved in self.iter() {
            if moved.page < page {
                return Err(format!("moved piece {moved:x?} has pages of another"));
            }
            page = moved.page_end();
        }
        if self.by_page.len() == self.by_target.len() { Ok(()) } else { Err("a moved piece is lost".into()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const P: u64 = PAGE_SIZE;

    #[test]
    fn taking_the_middle_leaves_both_ends_in_place() {
        let mut moves = RemapTable::default();
        moves.insert(RemapPiece { target: 10 * P, page: 100, pages: 10 });
        assert_eq!(moves.take(13 * P, 15 * P), [RemapPiece { target: 13 * P, page: 103, pages: 2 }]);
        assert_eq!(moves.at_target(12 * P).map(|m| m.page), Some(100));
        assert_eq!(moves.at_target(13 * P), None);
        assert_eq!(moves.at_page(104), None);
        assert_eq!(moves.at_page(107), Some(RemapPiece { target: 15 * P, page: 105, pages: 5 }));
        moves.check().unwrap();
    }

    #[test]
    fn a_border_that_only_touches_is_no_overlap() {
        let mut moves = RemapTable::default();
        moves.insert(RemapPiece { target: 10 * P, page: 0, pages: 2 });
        assert!(!moves.overlaps(12 * P, 20 * P));
        assert!(!moves.overlaps(0, 10 * P));
        assert!(!moves.overlaps(11 * P, 11 * P));
        assert!(moves.overlaps(11 * P, 12 * P));
    }
}
