// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which chunk comes next: what was demanded, in the order of demands; then the rest, group by group, the files of one in turn. Each is
//! taken once.

use std::collections::VecDeque;
use std::ops::RangeInclusive;

/// A chunk of one of the files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Chunk {
    /// Which file of all processes'.
    pub(crate) file: usize,
    /// Which chunk of it.
    pub(crate) number: u64,
}

/// The order of all chunks of all files.
#[derive(Debug)]
pub(crate) struct ChunkSchedule {
    files: Vec<File>,
    /// Each file once: those of the first group come before those of the second.
    groups: Vec<Group>,
    /// Demands so far.
    demands: u64,
    /// Chunks that were not taken.
    left: u64,
}

/// Files that come in turn.
#[derive(Debug)]
struct Group {
    files: Vec<usize>,
    /// Whose turn it is among them.
    turn: usize,
}

#[derive(Debug)]
struct File {
    /// Every chunk once.
    sequence: Vec<u64>,
    /// All before this place were taken.
    at: usize,
    taken: Bits,
    demanded: Bits,
    /// What was demanded and not taken yet, each once, behind how many demands of all files it was the next.
    queue: VecDeque<(u64, u64)>,
}

impl ChunkSchedule {
    /// The chunks of every file, in the order in which they come if nothing is demanded; and which files come in turn, each once.
    pub(crate) fn new(sequences: impl Iterator<Item = Vec<u64>>, groups: Vec<Vec<usize>>) -> Self {
        let file = |sequence: Vec<u64>| {
            let bits = Bits::new(sequence.len());
            File { sequence, at: 0, taken: bits.clone(), demanded: bits, queue: VecDeque::new() }
        };
        let files: Vec<File> = sequences.map(file).collect();
        let left = files.iter().map(|file| file.sequence.len() as u64).sum();
        let groups = groups.into_iter().map(|files| Group { files, turn: 0 }).collect();
        Self { files, groups, demands: 0, left }
    }

    /// The next chunk of a file of which one can be begun now; None if there is none. It takes as long as there are files,
    /// however much is demanded.
    pub(crate) fn next(&self, ready: impl Fn(usize) -> bool) -> Option<Chunk> {
        let fronts = self.files.iter().enumerate();
        let fronts =
            fronts.filter_map(|(file, of)| of.queue.front().map(|(demand, number)| (demand, file, *number)));
        let first = fronts.filter(|(_, file, _)| ready(*file)).min();
        first.map(|(_, file, number)| Chunk { file, number }).or_else(|| {
            self.groups.iter().flat_map(Group::in_turn).find_map(|file| {
                let number = *self.files[file].sequence.get(self.files[file].at)?;
                ready(file).then_some(Chunk { file, number })
            })
        })
    }

    /// Takes what [`ChunkSchedule::next`] gave.
    pub(crate) fn take(&mut self, chunk: Chunk) {
        let file = &mut self.files[chunk.file];
        file.taken.set(chunk.number);
        while file.sequence.get(file.at).is_some_and(|number| file.taken.has(*number)) {
            file.at += 1;
        }
        self.left -= 1;
        // What is demanded of a file goes before the rest of it.
        if file.queue.pop_front().is_none() {
            self.groups.iter_mut().for_each(|group| group.had_its_turn(chunk.file));
        }
    }

    /// These chunks of a file are wanted before all that nobody has demanded, and after what was demanded already.
    pub(crate) fn demand(&mut self, file: usize, numbers: RangeInclusive<u64>) {
        for number in numbers {
            let file = &mut self.files[file];
            if !file.demanded.set(number) && !file.taken.has(number) {
                file.queue.push_back((self.demands, number));
                self.demands += 1;
            }
        }
    }

    /// Whether a file has chunks that were not taken.
    pub(crate) fn has_left(&self, file: usize) -> bool {
        self.files[file].at < self.files[file].sequence.len()
    }

    /// Whether it was ever demanded.
    pub(crate) fn is_demanded(&self, chunk: Chunk) -> bool {
        self.files[chunk.file].demanded.has(chunk.number)
    }

    /// Whether no chunk is left.
    pub(crate) fn all_taken(&self) -> bool {
        self.left == 0
    }
}

impl Group {
    fn in_turn(&self) -> impl Iterator<Item = usize> {
        let (before, next) = self.files.split_at(self.turn);
        next.iter().chain(before).copied()
    }

    fn had_its_turn(&mut self, file: usize) {
        if let Some(place) = self.files.iter().position(|of| *of == file) {
            self.turn = (place + 1) % self.files.len();
        }
    }
}

/// The chunks of a file in which there are so many small buffers: where there are most of them first, those without any last,
/// otherwise as in the file.
pub(crate) fn small_first(small: &[usize]) -> Vec<u64> {
    let mut sequence: Vec<u64> = (0..small.len() as u64).collect();
    sequence.sort_by_key(|number| {
        let small = usize::try_from(*number).ok().and_then(|number| small.get(number));
        std::cmp::Reverse(small.copied())
    });
    sequence
}

/// These chunks of a file first, as far as there are such, each once; then the others in their sequence.
pub(crate) fn put_first(first: &[u64], sequence: Vec<u64>) -> Vec<u64> {
    let mut is_first = Bits::new(sequence.len());
    let there = |number: &&u64| **number < sequence.len() as u64;
    let mut all: Vec<u64> =
        first.iter().filter(there).copied().filter(|number| !is_first.set(*number)).collect();
    all.extend(sequence.into_iter().filter(|number| !is_first.has(*number)));
    all
}

/// A bit for each chunk.
#[derive(Debug, Clone)]
struct Bits(Vec<u64>);

impl Bits {
    fn new(count: usize) -> Self {
        Self(vec![0; count.div_ceil(64)])
    }

    fn has(&self, number: u64) -> bool {
        self.0[word(number)] & mask(number) != 0
    }

    /// Whether it was set before.
    fn set(&mut self, number: u64) -> bool {
        let before = self.has(number);
        self.0[word(number)] |= mask(number);
        before
    }
}

fn word(number: u64) -> usize {
    usize::try_from(number / 64).unwrap_or(usize::MAX)
}

fn mask(number: u64) -> u64 {
    1 << (number % 64)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use nix::time::{ClockId, clock_gettime};

    use super::*;

    /// Files with so many chunks, in file order.
    fn order(chunks: &[u64]) -> ChunkSchedule {
        in_groups(chunks, vec![(0..chunks.len()).collect()])
    }

    fn in_groups(chunks: &[u64], groups: Vec<Vec<usize>>) -> ChunkSchedule {
        ChunkSchedule::new(chunks.iter().map(|chunks| (0..*chunks).collect()), groups)
    }

    fn take(order: &mut ChunkSchedule, ready: impl Fn(usize) -> bool) -> Option<(usize, u64)> {
        let chunk = order.next(ready)?;
        order.take(chunk);
        Some((chunk.file, chunk.number))
    }

    fn rest(order: &mut ChunkSchedule) -> Vec<(usize, u64)> {
        std::iter::from_fn(|| take(order, |_| true)).collect()
    }

    #[test]
    fn without_demands_files_come_in_turn_and_their_chunks_in_sequence() {
        let mut order = ChunkSchedule::new([vec![2, 0, 1], vec![], vec![0]].into_iter(), vec![vec![0, 1, 2]]);
        assert!(!order.all_taken());
        assert_eq!(rest(&mut order), [(0, 2), (2, 0), (0, 0), (0, 1)]);
        assert!(order.all_taken());
    }

    #[test]
    fn a_group_comes_when_of_those_before_none_can_be_begun() {
        let mut order = in_groups(&[2, 1, 2], vec![vec![2], vec![0, 1]]);
        assert_eq!(take(&mut order, |file| file != 2), Some((0, 0)));
        assert_eq!(take(&mut order, |_| true), Some((2, 0)));
        assert_eq!(rest(&mut order), [(2, 1), (1, 0), (0, 1)]);
    }

    #[test]
    fn what_is_not_taken_is_next_again() {
        let order = order(&[2]);
        assert_eq!(order.next(|_| true), Some(Chunk { file: 0, number: 0 }));
        assert_eq!(order.next(|_| true), Some(Chunk { file: 0, number: 0 }));
    }

    #[test]
    fn demands_come_before_all_others_and_in_their_order() {
        let mut order = order(&[100, 3]);
        assert_eq!(take(&mut order, |_| true), Some((0, 0)));
        order.demand(0, 98..=99);
        order.demand(1, 2..=2);
        assert_eq!(take(&mut order, |_| true), Some((0, 98)));
        order.demand(0, 7..=7);
        let next: Vec<_> = (0..5).filter_map(|_| take(&mut order, |_| true)).collect();
        assert_eq!(next, [(0, 99), (1, 2), (0, 7), (1, 0), (0, 1)], "then where it was left");
    }

    #[test]
    fn of_a_demanded_buffer_only_what_is_not_under_way_is_queued() {
        let mut order = order(&[5]);
        assert_eq!(take(&mut order, |_| true), Some((0, 0)));
        order.demand(0, 0..=1);
        order.demand(0, 1..=3);
        order.demand(0, 0..=3);
        assert_eq!(rest(&mut order), [(0, 1), (0, 2), (0, 3), (0, 4)]);
        let demanded = (0..5).map(|number| order.is_demanded(Chunk { file: 0, number }));
        assert_eq!(demanded.collect::<Vec<_>>(), [true, true, true, true, false], "that under way, too");
    }

    #[test]
    fn a_demand_that_cannot_be_begun_now_stops_no_other_file_and_keeps_its_place() {
        let mut order = order(&[2, 2, 2]);
        order.demand(0, 1..=1);
        order.demand(1, 1..=1);
        assert_eq!(take(&mut order, |file| file != 0), Some((1, 1)));
        assert_eq!(take(&mut order, |file| file == 2), Some((2, 0)));
        assert_eq!(take(&mut order, |_| false), None);
        assert_eq!(take(&mut order, |_| true), Some((0, 1)));
    }

    #[test]
    fn demands_of_a_gpu_that_is_busy_cost_the_others_nothing() {
        let chunks = 200_000;
        let mut order = order(&[chunks, chunks]);
        order.demand(0, 0..=chunks - 1);
        // What this thread has had of a CPU: others' work does not count.
        let cpu_time = || Duration::from(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap());
        let start = cpu_time();
        for number in 0..chunks {
            assert_eq!(take(&mut order, |file| file != 0), Some((1, number)));
        }
        for number in 0..chunks {
            assert_eq!(take(&mut order, |_| true), Some((0, number)));
        }
        // A look at every demand, for each chunk, would be minutes.
        let took = cpu_time() - start;
        assert!(took < Duration::from_secs(5), "{took:?}");
    }

    #[test]
    fn chunks_full_of_small_buffers_come_first_and_large_ones_as_in_the_file() {
        assert_eq!(small_first(&[0, 0, 9, 0, 700, 9, 0]), [4, 2, 5, 0, 1, 3, 6]);
        assert_eq!(small_first(&[]), [0; 0]);
    }

    #[test]
    fn what_is_put_first_comes_once_in_its_order_and_the_rest_as_before() {
        assert_eq!(put_first(&[3, 1, 3, 9, u64::MAX, 0], vec![2, 4, 0, 1, 3]), [3, 1, 0, 2, 4]);
        assert_eq!(put_first(&[], vec![1, 0]), [1, 0]);
        assert_eq!(put_first(&[0], Vec::new()), [0; 0]);
    }

    /// `SplitMix64`.
    struct Dice(u64);

    impl Dice {
        fn below(&mut self, limit: u64) -> u64 {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut mixed = self.0;
            mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            (mixed ^ (mixed >> 31)) % limit
        }
    }

    /// Plays at random: gives the number of chunks that were there.
    fn play(dice: &mut Dice) -> usize {
        let sizes: Vec<u64> = (0..=dice.below(4)).map(|_| dice.below(200)).collect();
        let small = |size: &u64, dice: &mut Dice| {
            (0..*size).map(|_| usize::try_from(dice.below(3)).unwrap()).collect::<Vec<_>>()
        };
        let sequence = |size: &u64| {
            let first: Vec<u64> = (0..dice.below(9)).map(|_| dice.below(250)).collect();
            put_first(&first, small_first(&small(size, dice)))
        };
        let sequences: Vec<_> = sizes.iter().map(sequence).collect();
        let cut = usize::try_from(dice.below(sizes.len() as u64 + 1)).unwrap();
        let groups = vec![(cut..sizes.len()).collect(), (0..cut).collect()];
        let mut order = ChunkSchedule::new(sequences.into_iter(), groups);
        let mut taken = Vec::new();
        // In the order of demands, not taken.
        let mut wanted: Vec<(usize, u64)> = Vec::new();
        while !order.all_taken() {
            let file = usize::try_from(dice.below(sizes.len() as u64)).unwrap();
            if dice.below(5) == 0 && sizes[file] > 0 {
                let first = dice.below(sizes[file]);
                let last = first + dice.below((sizes[file] - first).min(9));
                order.demand(file, first..=last);
                let new = (first..=last).map(|number| (file, number));
                let new: Vec<_> =
                    new.filter(|chunk| !taken.contains(chunk) && !wanted.contains(chunk)).collect();
                wanted.extend(new);
            }
            let busy = usize::try_from(dice.below(2 * sizes.len() as u64)).unwrap();
            let Some(chunk) = take(&mut order, |file| file != busy) else { continue };
            assert!(!taken.contains(&chunk), "{chunk:?} twice");
            assert_ne!(chunk.0, busy, "of a file of which none could be begun");
            if let Some(first) = wanted.iter().position(|wanted| wanted.0 != busy) {
                assert_eq!(chunk, wanted.remove(first), "before a demand");
            }
            taken.push(chunk);
        }
        assert_eq!(wanted, []);
        assert_eq!(order.next(|_| true), None);
        assert_eq!(taken.len() as u64, sizes.iter().sum::<u64>(), "some were never taken");
        taken.len()
    }

    #[test]
    fn every_chunk_is_taken_once_whatever_is_demanded_when() {
        let played: usize = (0..300).map(|seed| play(&mut Dice(seed))).sum();
        assert!(played > 10_000, "{played}");
    }
}
