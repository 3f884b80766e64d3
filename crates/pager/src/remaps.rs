// SPDX-License-Identifier: MIT OR Apache-2.0
//! Pages that the program moved away from their address in the image.

use std::collections::BTreeMap;

use crate::PAGE_SIZE;

/// Moved pages that are contiguous in the image and in memory, inside one extent.
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

    /// The part at the addresses `start..end`, which must overlap the piece.
    fn clip(&self, start: u64, end: u64) -> Self {
        let target = self.target.max(start);
        let pages = (self.target_end().min(end) - target) / PAGE_SIZE;
        Self { target, page: self.page + (target - self.target) / PAGE_SIZE, pages }
    }
}

/// A partial injection from addresses to pages, searchable from both sides. It is empty unless the program
/// uses `mremap`.
#[derive(Debug, Default, Clone)]
pub(crate) struct RemapTable {
    by_target: BTreeMap<u64, RemapPiece>,
    /// Page to target; always the same set as `by_target`.
    by_page: BTreeMap<u64, u64>,
}

impl RemapTable {
    /// The piece that covers `address`.
    pub(crate) fn at_target(&self, address: u64) -> Option<RemapPiece> {
        let (_, piece) = self.by_target.range(..=address).next_back()?;
        (address < piece.target_end()).then_some(*piece)
    }

    /// The piece that has `page`.
    pub(crate) fn at_page(&self, page: u64) -> Option<RemapPiece> {
        let (_, target) = self.by_page.range(..=page).next_back()?;
        let piece = self.by_target[target];
        (page < piece.page_end()).then_some(piece)
    }

    /// Returns true when a piece has an address in `start..end`.
    pub(crate) fn overlaps(&self, start: u64, end: u64) -> bool {
        start < end
            && self.by_target.range(..end).next_back().is_some_and(|(_, last)| last.target_end() > start)
    }

    /// Adds a piece whose addresses and pages are in no other piece.
    pub(crate) fn insert(&mut self, piece: RemapPiece) {
        self.by_target.insert(piece.target, piece);
        self.by_page.insert(piece.page, piece.target);
    }

    /// Removes and returns everything at the addresses `start..end`. Pieces across a border are cut.
    pub(crate) fn take(&mut self, start: u64, end: u64) -> Vec<RemapPiece> {
        let mut taken = Vec::new();
        while self.overlaps(start, end) {
            let Some((_, &piece)) = self.by_target.range(..end).next_back() else { break };
            self.by_target.remove(&piece.target);
            self.by_page.remove(&piece.page);
            if piece.target < start {
                self.insert(piece.clip(piece.target, start));
            }
            if piece.target_end() > end {
                self.insert(piece.clip(end, piece.target_end()));
            }
            taken.push(piece.clip(start, end));
        }
        taken
    }

    /// The pieces whose first page is `page` or later, in page order.
    pub(crate) fn starting_at(&self, page: u64) -> impl Iterator<Item = RemapPiece> {
        self.by_page.range(page..).map(|(_, target)| self.by_target[target])
    }

    /// Every piece, in page order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = RemapPiece> {
        self.starting_at(0)
    }

    /// Checks that both sides are the same set without overlaps; the error says why not.
    pub(crate) fn check(&self) -> Result<(), String> {
        let (mut target, mut page) = (0, 0);
        for piece in self.by_target.values() {
            if piece.target < target
                || piece.pages == 0
                || self.by_page.get(&piece.page) != Some(&piece.target)
            {
                return Err(format!("moved piece {piece:x?} overlaps or is not found by its page"));
            }
            target = piece.target_end();
        }
        for piece in self.iter() {
            if piece.page < page {
                return Err(format!("moved piece {piece:x?} has pages of another piece"));
            }
            page = piece.page_end();
        }
        if self.by_page.len() == self.by_target.len() { Ok(()) } else { Err("a moved piece is lost".into()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const P: u64 = PAGE_SIZE;

    #[test]
    fn taking_the_middle_leaves_both_ends() {
        let mut remaps = RemapTable::default();
        remaps.insert(RemapPiece { target: 10 * P, page: 100, pages: 10 });
        assert_eq!(remaps.take(13 * P, 15 * P), [RemapPiece { target: 13 * P, page: 103, pages: 2 }]);
        assert_eq!(remaps.at_target(12 * P).map(|m| m.page), Some(100));
        assert_eq!(remaps.at_target(13 * P), None);
        assert_eq!(remaps.at_page(104), None);
        assert_eq!(remaps.at_page(107), Some(RemapPiece { target: 15 * P, page: 105, pages: 5 }));
        remaps.check().unwrap();
    }

    #[test]
    fn adjacent_ranges_do_not_overlap() {
        let mut remaps = RemapTable::default();
        remaps.insert(RemapPiece { target: 10 * P, page: 0, pages: 2 });
        assert!(!remaps.overlaps(12 * P, 20 * P));
        assert!(!remaps.overlaps(0, 10 * P));
        assert!(!remaps.overlaps(11 * P, 11 * P));
        assert!(remaps.overlaps(11 * P, 12 * P));
    }
}
