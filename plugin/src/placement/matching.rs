// SPDX-License-Identifier: MIT OR Apache-2.0
//! Bipartite matching by augmenting paths: a different place for each item.

use super::set::Set;

/// A partial matching.
#[derive(Debug, Clone)]
pub(super) struct Matching {
    /// The place of each item.
    place: Vec<Option<usize>>,
    /// The item at each place.
    item: Vec<Option<usize>>,
}

impl Matching {
    pub(super) fn new(items: usize, places: usize) -> Self {
        Self { place: vec![None; items], item: vec![None; places] }
    }

    /// Completes the matching, so that every item has a place in its domain. On failure, returns an item
    /// without a place, and all items that could have made room for it.
    pub(super) fn repair(&mut self, domains: &[Set]) -> Result<(), Vec<usize>> {
        for (place, domain) in self.place.iter_mut().zip(domains) {
            if let Some(left) = place.take_if(|place| !domain.contains(*place)) {
                self.item[left] = None;
            }
        }
        for item in 0..domains.len() {
            if self.place[item].is_none() {
                let mut seen = Set::default();
                if !self.put(item, domains, &mut seen) {
                    let others = seen.iter().filter_map(|place| self.item[place]);
                    return Err(std::iter::once(item).chain(others).collect());
                }
            }
        }
        Ok(())
    }

    fn put(&mut self, item: usize, domains: &[Set], seen: &mut Set) -> bool {
        for place in domains[item].iter() {
            if seen.contains(place) {
                continue;
            }
            seen.insert(place);
            if self.item[place].is_none_or(|other| self.put(other, domains, seen)) {
                (self.place[item], self.item[place]) = (Some(place), Some(item));
                return true;
            }
        }
        false
    }
}
