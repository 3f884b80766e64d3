// SPDX-License-Identifier: MIT OR Apache-2.0
//! Searches different places for items, so that places are linked as their items are.
//!
//! The search is depth first, and takes the item with the fewest places next. After each choice, the places
//! of all other items are cut to those that are linked to it and still have enough free neighbours. Different
//! places for all must remain (`matching`). Of interchangeable places, one is tried.

use std::cmp::Reverse;

use super::matching::Matching;
use super::set::Set;

/// The most choices of a search. Without dead ends, it needs one for each item: 66 for 64 GPUs of 2 CPUs. One
/// takes 0.1 ms there, and 2 ms with 250 GPUs.
pub(super) const STEPS: usize = 2_000;
/// Bits of a relation.
const BITS: u32 = 5;

/// The places that each item may take.
#[derive(Debug)]
pub(super) struct Problem {
    /// The places of each item.
    pub(super) domains: Vec<Set>,
    /// The place of each item that is tried first.
    pub(super) preferred: Vec<Option<usize>>,
    /// For each pair of items, the bits that their places' relation must have.
    pub(super) wanted: Vec<Vec<u8>>,
    /// For each pair of places, the bits of their relation.
    pub(super) offered: Vec<Vec<u8>>,
}

/// The reason why there is no solution.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Failure {
    /// These items have too few places.
    Crowded(Vec<usize>),
    /// The relations cannot be met.
    Unrelated(DeadEnd),
    /// The search was ended after the most choices.
    Steps,
}

/// The dead end with the most items placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DeadEnd {
    /// An item without a place.
    pub(super) item: usize,
    /// An item whose relation with it cannot be met, if one is the cause.
    pub(super) other: Option<usize>,
    /// The number of items that had a place.
    pub(super) placed: usize,
}

impl Problem {
    /// Finds a place for each item, with at most `steps` choices.
    pub(super) fn solve(&self, steps: usize) -> Result<Vec<usize>, Failure> {
        let mut matching = Matching::new(self.domains.len(), self.offered.len());
        matching.repair(&self.domains).map_err(Failure::Crowded)?;
        let mut search = Search {
            related: self.related(),
            class: Vec::new(),
            steps,
            gave_up: false,
            dead: None,
            placed: vec![None; self.domains.len()],
            problem: self,
        };
        let domains = search.with_neighbours(self.domains.clone());
        search.class = classes(&domains, &self.offered);
        if search.place_next(&domains, &matching) {
            return Ok(search.placed.into_iter().flatten().collect());
        }
        match search.dead {
            Some(dead) if !search.gave_up => Err(Failure::Unrelated(dead)),
            _ => Err(Failure::Steps),
        }
    }

    /// Returns, for each set of bits and each place, the places whose relation from there has these bits.
    fn related(&self) -> Vec<Vec<Set>> {
        let fits = |wanted: u8, offered: &[u8]| {
            (0..offered.len()).filter(|place| wanted & !offered[*place] == 0).collect()
        };
        let of = |wanted| self.offered.iter().map(|offered| fits(wanted, offered)).collect();
        (0..1 << BITS).map(of).collect()
    }
}

/// Returns the first place of each class of interchangeable places: a swap of two changes nothing for items
/// and other places.
fn classes(domains: &[Set], offered: &[Vec<u8>]) -> Vec<usize> {
    let alike = |a: usize, b: usize| {
        domains.iter().all(|domain| domain.contains(a) == domain.contains(b))
            && offered[a][b] == offered[b][a]
            && (0..offered.len()).all(|c| c == a || c == b || offered[a][c] == offered[b][c])
    };
    let mut class: Vec<usize> = Vec::new();
    for place in 0..offered.len() {
        let first = (0..place).find(|other| class[*other] == *other && alike(*other, place));
        class.push(first.unwrap_or(place));
    }
    class
}

struct Search<'a> {
    problem: &'a Problem,
    related: Vec<Vec<Set>>,
    class: Vec<usize>,
    placed: Vec<Option<usize>>,
    /// The remaining choices.
    steps: usize,
    gave_up: bool,
    dead: Option<DeadEnd>,
}

impl Search<'_> {
    /// Places all items that have no place yet.
    fn place_next(&mut self, domains: &[Set], matching: &Matching) -> bool {
        let mut matching = matching.clone();
        if let Err(items) = matching.repair(domains) {
            self.note(items[0]);
            return false;
        }
        let free = (0..domains.len()).filter(|item| self.placed[*item].is_none());
        let Some(item) = free.min_by_key(|item| domains[*item].len()) else { return true };
        let mut failed = Set::default();
        let preferred = self.problem.preferred[item].filter(|place| domains[item].contains(*place));
        for place in preferred.into_iter().chain(domains[item].iter()) {
            if failed.contains(self.class[place]) {
                continue;
            }
            let Some(left) = self.steps.checked_sub(1) else {
                self.gave_up = true;
                return false;
            };
            self.steps = left;
            self.placed[item] = Some(place);
            let narrower = self.with_neighbours(self.related_to(domains, item, place));
            if self.place_next(&narrower, &matching) {
                return true;
            }
            self.placed[item] = None;
            failed.insert(self.class[place]);
        }
        false
    }

    /// Returns the domains after the item takes the place: others keep the places that are linked to it.
    fn related_to(&self, domains: &[Set], item: usize, place: usize) -> Vec<Set> {
        let wanted = &self.problem.wanted[item];
        let narrow = |(other, domain): (usize, &Set)| {
            if other == item {
                return std::iter::once(place).collect();
            }
            let mut domain = domain.and(&self.related[usize::from(wanted[other])][place]);
            domain.remove(place);
            domain
        };
        domains.iter().enumerate().map(narrow).collect()
    }

    /// Removes places that have fewer free neighbours of a kind than the item has items to place.
    fn with_neighbours(&self, mut domains: Vec<Set>) -> Vec<Set> {
        let free: Vec<usize> = (0..domains.len()).filter(|item| self.placed[*item].is_none()).collect();
        let wanted = |item: &usize| {
            let count = |bit: u32| free.iter().filter(|other| self.wants(*item, **other, bit)).count();
            (0..BITS).map(|bit| (bit, count(bit))).filter(|(_, count)| *count != 0).collect::<Vec<_>>()
        };
        let wanted: Vec<Vec<(u32, usize)>> = free.iter().map(wanted).collect();
        loop {
            let places = free.iter().fold(Set::default(), |all, item| all.or(&domains[*item]));
            let enough = |place: &usize, wanted: &[(u32, usize)]| {
                let count = |bit: u32| self.related[1 << bit][*place].and(&places).len();
                wanted.iter().all(|(bit, wanted)| *wanted <= count(*bit))
            };
            let mut changed = false;
            for (item, wanted) in free.iter().zip(&wanted) {
                let narrower = domains[*item].iter().filter(|place| enough(place, wanted)).collect();
                changed |= std::mem::replace(&mut domains[*item], narrower) != narrower;
            }
            if !changed {
                return domains;
            }
        }
    }

    fn wants(&self, item: usize, other: usize, bit: u32) -> bool {
        self.problem.wanted[item][other] & 1 << bit != 0
    }

    /// Records a dead end, if it is deeper than earlier ones.
    fn note(&mut self, item: usize) {
        let placed = self.placed.iter().flatten().count();
        if self.dead.is_some_and(|dead| dead.placed >= placed) {
            return;
        }
        let wanted = &self.problem.wanted[item];
        let related = (0..wanted.len()).filter(|other| wanted[*other] != 0);
        // The strongest relation, and of those the first to an item with a place.
        let other = related.min_by_key(|other| (Reverse(wanted[*other]), self.placed[*other].is_none()));
        self.dead = Some(DeadEnd { item, other, placed });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns sixteen items on a four by four torus, each related to six at these steps.
    fn board(steps: &[(usize, usize)]) -> Vec<Vec<u8>> {
        let place = |row: usize, column: usize| row % 4 * 4 + column % 4;
        let mut relations = vec![vec![0; 16]; 16];
        for (row, column) in (0..4).flat_map(|row| (0..4).map(move |column| (row, column))) {
            for (down, right) in steps {
                let (here, there) = (place(row, column), place(row + down, column + right));
                (relations[here][there], relations[there][here]) = (1, 1);
            }
        }
        relations
    }

    fn problem(wanted: Vec<Vec<u8>>, offered: Vec<Vec<u8>>) -> Problem {
        let all: Set = (0..offered.len()).collect();
        Problem { domains: vec![all; wanted.len()], preferred: vec![None; wanted.len()], wanted, offered }
    }

    /// Returns the rook's graph (row and column) and Shrikhande's graph. They have the same numbers of
    /// neighbours and of common neighbours, and are not isomorphic.
    fn rook_and_shrikhande() -> [Vec<Vec<u8>>; 2] {
        [board(&[(0, 1), (0, 2), (1, 0), (2, 0)]), board(&[(0, 1), (1, 0), (1, 1)])]
    }

    #[test]
    fn similar_boards_are_distinguished_with_few_choices() {
        let [rook, other] = rook_and_shrikhande();
        for board in [&rook, &other] {
            assert!(board.iter().all(|row| row.iter().filter(|bit| **bit == 1).count() == 6));
            problem(board.clone(), board.clone()).solve(STEPS).unwrap();
        }
        assert!(matches!(problem(rook, other).solve(STEPS / 2), Err(Failure::Unrelated(_))));
    }

    #[test]
    fn a_search_ends_after_the_most_choices() {
        let [rook, other] = rook_and_shrikhande();
        assert_eq!(problem(rook.clone(), other).solve(20), Err(Failure::Steps));
        assert_eq!(problem(rook.clone(), rook.clone()).solve(15), Err(Failure::Steps));
        problem(rook.clone(), rook).solve(16).expect("one choice each");
    }

    #[test]
    fn interchangeable_places_are_tried_once() {
        // Three groups of three fit into a group of four and one of five only if they are split.
        let groups = |sizes: &[usize]| -> Vec<Vec<u8>> {
            let group: Vec<usize> =
                sizes.iter().enumerate().flat_map(|(group, size)| vec![group; *size]).collect();
            let row = |a: usize| (0..9).map(|b| u8::from(a != b && group[a] == group[b])).collect();
            (0..9).map(row).collect()
        };
        let problem = problem(groups(&[3, 3, 3]), groups(&[4, 5]));
        // Two choices for the first place, one for each group, and their consequences.
        assert!(matches!(problem.solve(5), Err(Failure::Unrelated(_))));
    }
}
