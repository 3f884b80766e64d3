// SPDX-License-Identifier: MIT OR Apache-2.0
//! The search: items get different places, so that places relate as their items do.
//!
//! Depth first, the item with the fewest places next. After each choice the places of all other items are cut down to
//! those that relate to it and still have free neighbours enough, and there must be different ones for all
//! (`matching`). Places that nothing tells apart are tried once.

use std::cmp::Reverse;

use super::matching::Matching;
use super::set::Set;

/// Choices after which the search is given up. Where no choice has to be taken back there are as many as items: 66 for
/// 64 GPUs of 2 CPUs. One takes 0.1 ms there, and 2 ms with 250 GPUs.
pub(super) const STEPS: usize = 2_000;
/// Bits of a relation.
const BITS: u32 = 5;

/// Which place may take which item.
#[derive(Debug)]
pub(super) struct Problem {
    /// For each item, places that it may have.
    pub(super) domains: Vec<Set>,
    /// For each item, the place that is tried first.
    pub(super) preferred: Vec<Option<usize>>,
    /// By item and item: bits that their places' relation must have.
    pub(super) wanted: Vec<Vec<u8>>,
    /// By place and place: bits that there are.
    pub(super) offered: Vec<Vec<u8>>,
}

/// Why there is no answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Failure {
    /// These items have fewer places than they are.
    Crowded(Vec<usize>),
    /// Relations stand against it.
    Unrelated(Dead),
    /// So many choices did not suffice.
    Steps,
}

/// The dead end with the most items placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Dead {
    /// An item that had no place left.
    pub(super) item: usize,
    /// An item that it has a relation with, if one is to blame.
    pub(super) other: Option<usize>,
    /// How many had one.
    pub(super) placed: usize,
}

impl Problem {
    /// A place for each item, found with at most so many choices.
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

    /// By wanted bits and place: the places whose relation from there has these bits.
    fn related(&self) -> Vec<Vec<Set>> {
        let fits = |wanted: u8, offered: &[u8]| {
            (0..offered.len()).filter(|place| wanted & !offered[*place] == 0).collect()
        };
        let of = |wanted| self.offered.iter().map(|offered| fits(wanted, offered)).collect();
        (0..1 << BITS).map(of).collect()
    }
}

/// The first place of those that nothing tells apart: swapped, neither an item nor another place sees a difference.
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
    /// Choices left.
    steps: usize,
    gave_up: bool,
    dead: Option<Dead>,
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

    /// Domains with the item at the place: others have a place that relates to it.
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

    /// Domains without places that have fewer free neighbours of a kind than the item has items to place.
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

    /// Remembers a dead end, if it is deeper than those before.
    fn note(&mut self, item: usize) {
        let placed = self.placed.iter().flatten().count();
        if self.dead.is_some_and(|dead| dead.placed >= placed) {
            return;
        }
        let wanted = &self.problem.wanted[item];
        let related = (0..wanted.len()).filter(|other| wanted[*other] != 0);
        // The strongest relation, and of those the first to one that has its place.
        let other = related.min_by_key(|other| (Reverse(wanted[*other]), self.placed[*other].is_none()));
        self.dead = Some(Dead { item, other, placed });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sixteen items, each related to six, from a four by four board that goes round: to those at these steps.
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

    /// Row and column of a rook's moves, and those of Shrikhande's graph: the same numbers of neighbours, of common
    /// neighbours of any two, and yet not the same.
    fn rook_and_shrikhande() -> [Vec<Vec<u8>>; 2] {
        [board(&[(0, 1), (0, 2), (1, 0), (2, 0)]), board(&[(0, 1), (1, 0), (1, 1)])]
    }

    #[test]
    fn boards_that_only_look_alike_are_told_apart_with_few_choices() {
        let [rook, other] = rook_and_shrikhande();
        for board in [&rook, &other] {
            assert!(board.iter().all(|row| row.iter().filter(|bit| **bit == 1).count() == 6));
            problem(board.clone(), board.clone()).solve(STEPS).unwrap();
        }
        assert!(matches!(problem(rook, other).solve(STEPS / 2), Err(Failure::Unrelated(_))));
    }

    #[test]
    fn a_search_ends_with_its_choices() {
        let [rook, other] = rook_and_shrikhande();
        assert_eq!(problem(rook.clone(), other).solve(20), Err(Failure::Steps));
        assert_eq!(problem(rook.clone(), rook.clone()).solve(15), Err(Failure::Steps));
        problem(rook.clone(), rook).solve(16).expect("one choice each");
    }

    #[test]
    fn places_alike_are_tried_once() {
        // Three groups of three go into a group of four and one of five only if they are torn.
        let groups = |sizes: &[usize]| -> Vec<Vec<u8>> {
            let group: Vec<usize> =
                sizes.iter().enumerate().flat_map(|(group, size)| vec![group; *size]).collect();
            let row = |a: usize| (0..9).map(|b| u8::from(a != b && group[a] == group[b])).collect();
            (0..9).map(row).collect()
        };
        let problem = problem(groups(&[3, 3, 3]), groups(&[4, 5]));
        // Two choices of the first place, one for each group, and what follows from them.
        assert!(matches!(problem.solve(5), Err(Failure::Unrelated(_))));
    }
}
