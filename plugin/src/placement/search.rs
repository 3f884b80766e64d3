// SPDX-License-Identifier: MIT OR Apache-2.0
//! Plain backtracking: a different place for each item, so that places are linked as their items are.
//!
//! The item with the fewest candidates is placed next. After each choice, the other items keep the candidates
//! that are linked to it as they are. A choice is undone when items have too few candidates together.

use super::links::replaces;

/// The most choices of one search. A host with 64 GPUs and 2 CPUs takes 66, and each takes 0.1 ms there.
pub(super) const MAX_STEPS: usize = 10_000;

/// The most nodes of a machine. KFD has at most 64 GPUs (`MAX_GPU_INSTANCE`); the others are CPUs.
pub(super) const MAX_NODES: usize = Places::BITS as usize;

/// A set of places: bit N is node N of the machine.
pub(super) type Places = u128;

/// Items, and the places that each of them may take.
#[derive(Debug)]
pub(super) struct Problem {
    /// The places that each item alone may take.
    pub(super) candidates: Vec<Places>,
    /// The place of each item that is tried first.
    pub(super) preferred: Vec<Option<usize>>,
    /// For each pair of items, the links that their places must have.
    pub(super) wanted: Vec<Vec<u8>>,
    /// For each pair of places, the links that they have.
    pub(super) offered: Vec<Vec<u8>>,
}

/// The reason why there is no solution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Failure {
    /// The links do not fit. This is the first choice that was undone.
    Links(DeadEnd),
    /// The search was ended after [`MAX_STEPS`] choices.
    Steps,
}

/// A choice after which items have too few candidates together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DeadEnd {
    /// One of these items.
    pub(super) item: usize,
    /// The item that was placed last.
    pub(super) last: usize,
    /// Its place.
    pub(super) place: usize,
}

struct Search<'a> {
    problem: &'a Problem,
    placed: Vec<Option<usize>>,
    steps: usize,
    first: Option<DeadEnd>,
}

impl Problem {
    /// Finds a place for each item.
    pub(super) fn solve(&self) -> Result<Vec<usize>, Failure> {
        let placed = vec![None; self.candidates.len()];
        let mut search = Search { problem: self, placed, steps: 0, first: None };
        match search.place_next(&self.candidates) {
            true => Ok(search.placed.into_iter().flatten().collect()),
            false if search.steps == MAX_STEPS => Err(Failure::Steps),
            false => Err(search.first.map_or(Failure::Steps, Failure::Links)),
        }
    }
}

impl Search<'_> {
    /// Places all items that have no place yet.
    fn place_next(&mut self, candidates: &[Places]) -> bool {
        let free = (0..candidates.len()).filter(|item| self.placed[*item].is_none());
        let Some(item) = free.min_by_key(|item| candidates[*item].count_ones()) else { return true };
        let preferred = self.problem.preferred[item].filter(|place| contains(candidates[item], *place));
        let others = (0..MAX_NODES).filter(|place| contains(candidates[item], *place));
        for place in preferred.into_iter().chain(others.filter(|place| Some(*place) != preferred)) {
            if self.steps == MAX_STEPS {
                return false;
            }
            self.steps += 1;
            self.placed[item] = Some(place);
            let narrower = self.narrow(candidates, item, place);
            match crowd(&narrower) {
                Some(crowd) => {
                    self.first.get_or_insert(DeadEnd { item: crowd[0], last: item, place });
                }
                None if self.place_next(&narrower) => return true,
                None => {}
            }
            self.placed[item] = None;
        }
        false
    }

    /// Returns the candidates after the item takes the place: others keep those that are linked to it.
    fn narrow(&self, candidates: &[Places], item: usize, place: usize) -> Vec<Places> {
        let narrow = |(other, candidates): (usize, &Places)| {
            if other == item {
                return 1 << place;
            }
            let wanted = self.problem.wanted[item][other];
            let fits = |(to, offered): (usize, &u8)| to != place && replaces(*offered, wanted);
            candidates & places(self.problem.offered[place].iter().enumerate().map(fits))
        };
        candidates.iter().enumerate().map(narrow).collect()
    }
}

/// Returns the set of the places for which `chosen` yields true.
pub(super) fn places(chosen: impl Iterator<Item = bool>) -> Places {
    chosen.zip(0..).fold(0, |set, (chosen, place)| set | Places::from(chosen) << place)
}

pub(super) fn contains(places: Places, place: usize) -> bool {
    places >> place & 1 == 1
}

/// Returns items that have fewer candidates together than they are, if any. The first one's candidates are
/// all that they have, and no smaller set of candidates is too small.
pub(super) fn crowd(candidates: &[Places]) -> Option<Vec<usize>> {
    let crowd = |item: usize| {
        let within = (0..candidates.len()).filter(|other| candidates[*other] & !candidates[item] == 0);
        let others = within.filter(|other| *other != item);
        let crowd: Vec<usize> = std::iter::once(item).chain(others).collect();
        (crowd.len() > candidates[item].count_ones() as usize).then_some(crowd)
    };
    let mut items: Vec<usize> = (0..candidates.len()).collect();
    items.sort_by_key(|item| candidates[*item].count_ones());
    items.into_iter().find_map(crowd)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the links of nodes in groups of these sizes: each to all others of its group.
    fn groups(sizes: &[usize]) -> Vec<Vec<u8>> {
        let group: Vec<usize> =
            sizes.iter().enumerate().flat_map(|(group, size)| vec![group; *size]).collect();
        let row = |a: usize| (0..group.len()).map(|b| u8::from(a != b && group[a] == group[b])).collect();
        (0..group.len()).map(row).collect()
    }

    fn problem(wanted: Vec<Vec<u8>>, offered: Vec<Vec<u8>>) -> Problem {
        let all = places(offered.iter().map(|_| true));
        Problem { candidates: vec![all; wanted.len()], preferred: vec![None; wanted.len()], wanted, offered }
    }

    #[test]
    fn every_item_gets_a_place_beside_its_group() {
        let places = problem(groups(&[2, 2]), groups(&[1, 2, 2])).solve().unwrap();
        assert_eq!(places, [1, 2, 3, 4]);
    }

    #[test]
    fn the_first_choice_that_was_undone_is_named() {
        let failure = problem(groups(&[1, 3]), groups(&[2, 2])).solve();
        // Item 0 took place 0. After that, item 1 cannot take place 1, because nothing is free beside it.
        assert_eq!(failure, Err(Failure::Links(DeadEnd { item: 2, last: 1, place: 1 })));
    }

    #[test]
    fn a_group_that_is_too_small_is_left_at_once() {
        // Each choice in the smaller group has thousands of continuations, and none of them ends well.
        let places = problem(groups(&[9, 7]), groups(&[7, 9])).solve().unwrap();
        assert!(places[..9].iter().all(|place| *place >= 7) && places[9..].iter().all(|place| *place < 7));
    }

    #[test]
    fn a_search_ends_after_the_most_choices() {
        // Three groups of three do not fit into groups of four and five, in many ways.
        assert_eq!(problem(groups(&[3; 5]), groups(&[4; 4])).solve(), Err(Failure::Steps));
    }
}
