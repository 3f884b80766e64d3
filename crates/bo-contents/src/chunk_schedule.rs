// SPDX-License-Identifier: MIT OR Apache-2.0
//! Chooses the next chunk. Demanded chunks are first, in the order of demands. Then the groups follow in
//! order, and the files of one group take turns. Each chunk is taken once. Chunks that have not arrived from
//! another host have an order of their own: no other chunk waits for them.

use std::collections::VecDeque;
use std::ops::RangeInclusive;

/// A chunk of one of the files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Chunk {
    /// The index of the file among all processes' files.
    pub(crate) file: usize,
    /// The number of the chunk in the file.
    pub(crate) number: u64,
}

/// What a chunk may have to wait for, in addition to its turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ChunkKind {
    /// Some of its bytes had not arrived when the load began.
    pub(crate) absent: bool,
    pub(crate) demanded: bool,
}

/// The order of all chunks of all files.
#[derive(Debug)]
pub(crate) struct ChunkSchedule {
    files: Vec<File>,
    /// Each file is in one group. Files of the first group precede files of the second.
    groups: Vec<Group>,
    /// The number of demands so far.
    demands: u64,
    /// The number of chunks that were not taken.
    left: u64,
}

/// Files that take turns.
#[derive(Debug)]
struct Group {
    files: Vec<usize>,
    /// The index in `files` of the file that is next.
    turn: usize,
}

#[derive(Debug)]
struct File {
    present: ChunkOrder,
    absent: ChunkOrder,
    is_absent: ChunkBitmap,
    taken: ChunkBitmap,
    demanded: ChunkBitmap,
}

/// Chunks of a file in their order.
#[derive(Debug, Default)]
struct ChunkOrder {
    /// Every chunk once.
    sequence: Vec<u64>,
    /// All chunks before this index were taken.
    at: usize,
    /// Demanded chunks that were not taken: the serial number of each demand among all files, and the chunk.
    queue: VecDeque<(u64, u64)>,
}

impl ChunkOrder {
    fn of(sequence: Vec<u64>, taken: &ChunkBitmap) -> Self {
        let mut order = Self { sequence, ..Self::default() };
        order.pass(taken);
        order
    }

    /// Returns the first chunk that was not taken, without regard to demands.
    fn first(&self) -> Option<u64> {
        self.sequence.get(self.at).copied()
    }

    /// Passes the chunks that were taken.
    fn pass(&mut self, taken: &ChunkBitmap) {
        while self.first().is_some_and(|number| taken.has(number)) {
            self.at += 1;
        }
    }
}

impl ChunkSchedule {
    /// Creates a schedule from each file's chunks, in their order without demands, and from the groups of
    /// files. Each file is in one group.
    pub(crate) fn new(sequences: impl Iterator<Item = Vec<u64>>, groups: Vec<Vec<usize>>) -> Self {
        let file = |sequence: Vec<u64>| {
            let [is_absent, taken, demanded] = [(); 3].map(|()| ChunkBitmap::new(sequence.len()));
            let (present, absent) = (ChunkOrder::of(sequence, &taken), ChunkOrder::default());
            File { present, absent, is_absent, taken, demanded }
        };
        let files: Vec<File> = sequences.map(file).collect();
        let left = files.iter().map(|file| file.present.sequence.len() as u64).sum();
        let groups = groups.into_iter().map(|files| Group { files, turn: 0 }).collect();
        Self { files, groups, demands: 0, left }
    }

    /// Notes which chunks have not arrived. No chunk is demanded yet.
    pub(crate) fn note_absent(&mut self, chunks: &[Chunk]) {
        for chunk in chunks {
            self.files[chunk.file].is_absent.set(chunk.number);
        }
        for File { present, absent, is_absent, taken, .. } in &mut self.files {
            let all = std::mem::take(&mut present.sequence);
            let (here, others) = all.into_iter().partition(|number| !is_absent.has(*number));
            (*present, *absent) = (ChunkOrder::of(here, taken), ChunkOrder::of(others, taken));
        }
    }

    /// Returns the next chunk that is `ready` by its file and kind, or None. An absent chunk precedes others
    /// that were not demanded: it is only requested. The cost grows with the number of files, not with the
    /// number of demands.
    pub(crate) fn next(&self, ready: impl Fn(usize, ChunkKind) -> bool) -> Option<Chunk> {
        let is_ready = |chunk: Chunk| {
            let of = &self.files[chunk.file];
            let kind =
                ChunkKind { absent: of.is_absent.has(chunk.number), demanded: of.demanded.has(chunk.number) };
            ready(chunk.file, kind)
        };
        let fronts = self.files.iter().enumerate().flat_map(|(file, of)| {
            let fronts = [&of.present, &of.absent].into_iter().filter_map(|order| order.queue.front());
            fronts.map(move |(demand, number)| (*demand, Chunk { file, number: *number }))
        });
        let first = fronts.filter(|(_, chunk)| is_ready(*chunk)).min_by_key(|(demand, _)| *demand);
        let background = |order: fn(&File) -> &ChunkOrder| {
            let mut files = self.groups.iter().flat_map(Group::in_turn);
            files.find_map(|file| {
                let chunk = Chunk { file, number: order(&self.files[file]).first()? };
                is_ready(chunk).then_some(chunk)
            })
        };
        first
            .map(|(_, chunk)| chunk)
            .or_else(|| background(|file| &file.absent))
            .or_else(|| background(|file| &file.present))
    }

    /// Takes the chunk that [`ChunkSchedule::next`] returned.
    pub(crate) fn take(&mut self, chunk: Chunk) {
        let File { present, absent, is_absent, taken, .. } = &mut self.files[chunk.file];
        let order = if is_absent.has(chunk.number) { absent } else { present };
        taken.set(chunk.number);
        order.pass(taken);
        let was_demanded = order.queue.pop_front_if(|(_, number)| *number == chunk.number).is_some();
        self.left -= 1;
        if !was_demanded {
            self.groups.iter_mut().for_each(|group| group.rotate_past(chunk.file));
        }
    }

    /// Moves these chunks of a file before all chunks that were not demanded, and after earlier demands.
    pub(crate) fn demand(&mut self, file: usize, numbers: RangeInclusive<u64>) {
        for number in numbers {
            let File { present, absent, is_absent, taken, demanded } = &mut self.files[file];
            if !demanded.set(number) && !taken.has(number) {
                let order = if is_absent.has(number) { absent } else { present };
                order.queue.push_back((self.demands, number));
                self.demands += 1;
            }
        }
    }

    /// Returns whether a file has chunks that were not taken.
    pub(crate) fn has_remaining(&self, file: usize) -> bool {
        let File { present, absent, .. } = &self.files[file];
        present.first().or_else(|| absent.first()).is_some()
    }

    /// Returns whether chunks that were not taken need no request.
    pub(crate) fn has_present(&self) -> bool {
        self.files.iter().any(|file| file.present.first().is_some())
    }

    /// Returns whether a chunk was ever demanded.
    pub(crate) fn is_demanded(&self, chunk: Chunk) -> bool {
        self.files[chunk.file].demanded.has(chunk.number)
    }

    /// Returns whether all chunks were taken.
    pub(crate) fn all_taken(&self) -> bool {
        self.left == 0
    }
}

impl Group {
    fn in_turn(&self) -> impl Iterator<Item = usize> {
        let (before, next) = self.files.split_at(self.turn);
        next.iter().chain(before).copied()
    }

    fn rotate_past(&mut self, file: usize) {
        if let Some(place) = self.files.iter().position(|of| *of == file) {
            self.turn = (place + 1) % self.files.len();
        }
    }
}

/// Orders the chunks of a file by their number of small buffers, given in `small`: most first, else in file
/// order.
pub(crate) fn small_first(small: &[usize]) -> Vec<u64> {
    let mut sequence: Vec<u64> = (0..small.len() as u64).collect();
    sequence.sort_by_key(|number| {
        let small = usize::try_from(*number).ok().and_then(|number| small.get(number));
        std::cmp::Reverse(small.copied())
    });
    sequence
}

/// Moves these chunks of a file before the others, each once. Numbers beyond the file are ignored.
pub(crate) fn prioritize(first: &[u64], sequence: Vec<u64>) -> Vec<u64> {
    let mut is_first = ChunkBitmap::new(sequence.len());
    let there = |number: &&u64| **number < sequence.len() as u64;
    let mut all: Vec<u64> =
        first.iter().filter(there).copied().filter(|number| !is_first.set(*number)).collect();
    all.extend(sequence.into_iter().filter(|number| !is_first.has(*number)));
    all
}

/// A bit for each chunk.
#[derive(Debug, Clone)]
struct ChunkBitmap(Vec<u64>);

impl ChunkBitmap {
    fn new(count: usize) -> Self {
        Self(vec![0; count.div_ceil(64)])
    }

    fn has(&self, number: u64) -> bool {
        self.0[word(number)] & mask(number) != 0
    }

    /// Sets a bit, and returns whether it was set before.
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

    /// Creates a schedule of files, in file order. `chunks` has the number of chunks of each file.
    fn schedule(chunks: &[u64]) -> ChunkSchedule {
        in_groups(chunks, vec![(0..chunks.len()).collect()])
    }

    fn in_groups(chunks: &[u64], groups: Vec<Vec<usize>>) -> ChunkSchedule {
        ChunkSchedule::new(chunks.iter().map(|chunks| (0..*chunks).collect()), groups)
    }

    fn take(schedule: &mut ChunkSchedule, ready: impl Fn(usize) -> bool) -> Option<(usize, u64)> {
        let chunk = schedule.next(|file, _| ready(file))?;
        schedule.take(chunk);
        Some((chunk.file, chunk.number))
    }

    fn rest(schedule: &mut ChunkSchedule) -> Vec<(usize, u64)> {
        std::iter::from_fn(|| take(schedule, |_| true)).collect()
    }

    #[test]
    fn without_demands_files_take_turns() {
        let mut schedule =
            ChunkSchedule::new([vec![2, 0, 1], vec![], vec![0]].into_iter(), vec![vec![0, 1, 2]]);
        assert!(!schedule.all_taken());
        assert_eq!(rest(&mut schedule), [(0, 2), (2, 0), (0, 0), (0, 1)]);
        assert!(schedule.all_taken());
    }

    #[test]
    fn a_later_group_is_chosen_when_earlier_ones_are_not_ready() {
        let mut schedule = in_groups(&[2, 1, 2], vec![vec![2], vec![0, 1]]);
        assert_eq!(take(&mut schedule, |file| file != 2), Some((0, 0)));
        assert_eq!(take(&mut schedule, |_| true), Some((2, 0)));
        assert_eq!(rest(&mut schedule), [(2, 1), (1, 0), (0, 1)]);
    }

    #[test]
    fn a_chunk_that_is_not_taken_stays_next() {
        let schedule = schedule(&[2]);
        assert_eq!(schedule.next(|_, _| true), Some(Chunk { file: 0, number: 0 }));
        assert_eq!(schedule.next(|_, _| true), Some(Chunk { file: 0, number: 0 }));
    }

    #[test]
    fn demand_loads_are_first_and_in_their_order() {
        let mut schedule = schedule(&[100, 3]);
        assert_eq!(take(&mut schedule, |_| true), Some((0, 0)));
        schedule.demand(0, 98..=99);
        schedule.demand(1, 2..=2);
        assert_eq!(take(&mut schedule, |_| true), Some((0, 98)));
        schedule.demand(0, 7..=7);
        let next: Vec<_> = (0..5).filter_map(|_| take(&mut schedule, |_| true)).collect();
        assert_eq!(next, [(0, 99), (1, 2), (0, 7), (1, 0), (0, 1)], "then in sequence");
    }

    #[test]
    fn a_demand_queues_only_chunks_that_were_not_taken() {
        let mut schedule = schedule(&[5]);
        assert_eq!(take(&mut schedule, |_| true), Some((0, 0)));
        schedule.demand(0, 0..=1);
        schedule.demand(0, 1..=3);
        schedule.demand(0, 0..=3);
        assert_eq!(rest(&mut schedule), [(0, 1), (0, 2), (0, 3), (0, 4)]);
        let demanded = (0..5).map(|number| schedule.is_demanded(Chunk { file: 0, number }));
        assert_eq!(
            demanded.collect::<Vec<_>>(),
            [true, true, true, true, false],
            "the taken chunk also counts"
        );
    }

    #[test]
    fn a_demand_that_is_not_ready_keeps_its_place_and_blocks_no_file() {
        let mut schedule = schedule(&[2, 2, 2]);
        schedule.demand(0, 1..=1);
        schedule.demand(1, 1..=1);
        assert_eq!(take(&mut schedule, |file| file != 0), Some((1, 1)));
        assert_eq!(take(&mut schedule, |file| file == 2), Some((2, 0)));
        assert_eq!(take(&mut schedule, |_| false), None);
        assert_eq!(take(&mut schedule, |_| true), Some((0, 1)));
    }

    #[test]
    fn no_chunk_waits_for_an_absent_one() {
        let mut schedule = in_groups(&[5, 2], vec![vec![0], vec![1]]);
        assert_eq!(take(&mut schedule, |_| true), Some((0, 0)));
        schedule.note_absent(&[1, 2, 4].map(|number| Chunk { file: 0, number }));
        schedule.demand(0, 1..=3);
        let no_room = |_, kind: ChunkKind| !kind.absent;
        let mut next = |ready: fn(usize, ChunkKind) -> bool| {
            let chunk = schedule.next(ready)?;
            schedule.take(chunk);
            Some((chunk.file, chunk.number))
        };
        assert_eq!(next(no_room), Some((0, 3)), "it is demanded, and here");
        assert_eq!(next(no_room), Some((1, 0)));
        assert_eq!(next(|_, kind| !kind.demanded), Some((1, 1)), "the first absent one is demanded, too");
        assert_eq!([next(no_room), next(no_room)], [None, None]);
        let all: Vec<_> = std::iter::from_fn(|| next(|_, _| true)).collect();
        assert_eq!(all, [(0, 1), (0, 2), (0, 4)]);
        assert!(schedule.all_taken() && !schedule.has_remaining(0));
    }

    #[test]
    fn absent_chunks_are_requested_before_others_are_read() {
        let mut schedule = in_groups(&[2, 3], vec![vec![0], vec![1]]);
        schedule.note_absent(&[Chunk { file: 1, number: 1 }]);
        assert_eq!(rest(&mut schedule), [(1, 1), (0, 0), (0, 1), (1, 0), (1, 2)]);
    }

    #[test]
    fn demands_of_a_busy_gpu_do_not_slow_the_others() {
        let chunks = 200_000;
        let mut schedule = schedule(&[chunks, chunks]);
        schedule.demand(0, 0..=chunks - 1);
        // Counts the CPU time of this thread only.
        let cpu_time = || Duration::from(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap());
        let start = cpu_time();
        for number in 0..chunks {
            assert_eq!(take(&mut schedule, |file| file != 0), Some((1, number)));
        }
        for number in 0..chunks {
            assert_eq!(take(&mut schedule, |_| true), Some((0, number)));
        }
        // A scan of every demand for each chunk would take minutes.
        let took = cpu_time() - start;
        assert!(took < Duration::from_secs(5), "{took:?}");
    }

    #[test]
    fn chunks_with_most_small_buffers_are_first() {
        assert_eq!(small_first(&[0, 0, 9, 0, 700, 9, 0]), [4, 2, 5, 0, 1, 3, 6]);
        assert_eq!(small_first(&[]), [0; 0]);
    }

    #[test]
    fn prioritized_chunks_are_loaded_once_and_before_the_rest() {
        assert_eq!(prioritize(&[3, 1, 3, 9, u64::MAX, 0], vec![2, 4, 0, 1, 3]), [3, 1, 0, 2, 4]);
        assert_eq!(prioritize(&[], vec![1, 0]), [1, 0]);
        assert_eq!(prioritize(&[0], Vec::new()), [0; 0]);
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

    /// Takes all chunks with random demands. Returns the number of chunks.
    fn play(dice: &mut Dice) -> usize {
        let sizes: Vec<u64> = (0..=dice.below(4)).map(|_| dice.below(200)).collect();
        let small = |size: &u64, dice: &mut Dice| {
            (0..*size).map(|_| usize::try_from(dice.below(3)).unwrap()).collect::<Vec<_>>()
        };
        let sequence = |size: &u64| {
            let first: Vec<u64> = (0..dice.below(9)).map(|_| dice.below(250)).collect();
            prioritize(&first, small_first(&small(size, dice)))
        };
        let sequences: Vec<_> = sizes.iter().map(sequence).collect();
        let cut = usize::try_from(dice.below(sizes.len() as u64 + 1)).unwrap();
        let groups = vec![(cut..sizes.len()).collect(), (0..cut).collect()];
        let mut schedule = ChunkSchedule::new(sequences.into_iter(), groups);
        let mut taken = Vec::new();
        // Demanded chunks that were not taken, in the order of demands.
        let mut wanted: Vec<(usize, u64)> = Vec::new();
        while !schedule.all_taken() {
            let file = usize::try_from(dice.below(sizes.len() as u64)).unwrap();
            if dice.below(5) == 0 && sizes[file] > 0 {
                let first = dice.below(sizes[file]);
                let last = first + dice.below((sizes[file] - first).min(9));
                schedule.demand(file, first..=last);
                let new = (first..=last).map(|number| (file, number));
                let new: Vec<_> =
                    new.filter(|chunk| !taken.contains(chunk) && !wanted.contains(chunk)).collect();
                wanted.extend(new);
            }
            let busy = usize::try_from(dice.below(2 * sizes.len() as u64)).unwrap();
            let Some(chunk) = take(&mut schedule, |file| file != busy) else { continue };
            assert!(!taken.contains(&chunk), "{chunk:?} was taken twice");
            assert_ne!(chunk.0, busy, "the file was not ready");
            if let Some(first) = wanted.iter().position(|wanted| wanted.0 != busy) {
                assert_eq!(chunk, wanted.remove(first), "a demand was overtaken");
            }
            taken.push(chunk);
        }
        assert_eq!(wanted, []);
        assert_eq!(schedule.next(|_, _| true), None);
        assert_eq!(taken.len() as u64, sizes.iter().sum::<u64>(), "some were never taken");
        taken.len()
    }

    #[test]
    fn every_chunk_is_taken_once_with_random_demands() {
        let played: usize = (0..300).map(|seed| play(&mut Dice(seed))).sum();
        assert!(played > 10_000, "{played}");
    }
}
