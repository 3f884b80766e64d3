// SPDX-License-Identifier: MIT OR Apache-2.0
//! The working set of an image: what its program accessed first after an earlier restore, in CPU memory and
//! in buffers of GPUs. A later restore loads it before the rest.
//!
//! * [`file`]: `rewake-working-set.json` in the image directory.
//! * [`access_log`]: notes which blocks of CPU memory are accessed, without a lock.
//! * [`on_demand`]: the time at the start of a restore in which nothing is loaded that no thread waits for.
//!   Only then every access is a page fault.
//!
//! It determines an order, and no bytes: a wrong one makes a restore slower.

pub(crate) mod access_log;
pub mod file;
pub(crate) mod on_demand;

pub use on_demand::LoadingOptions;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use rewake_pager::{PAGE_SIZE, Prefetch};

/// The most runs of pages. Later ones gain little by their place.
pub const MOST_RUNS: usize = 1 << 15;
/// The most buffers of all processes together.
pub const MOST_BUFFERS: usize = 1 << 14;

/// What was accessed first, in that order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WorkingSet {
    /// CPU memory.
    pub pages: Vec<AccessedPages>,
    /// Buffers of GPUs.
    pub buffers: Vec<BufferId>,
}

/// Pages of a task that are adjacent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AccessedPages {
    /// The pid in the names of the task's images.
    pub task: u32,
    /// The address of the first page in the image.
    pub address: u64,
    /// Number of pages.
    pub pages: u64,
}

/// A buffer, by its names in the image, which are the same in each restore.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct BufferId {
    /// N of its process's `amdgpu-kfd-N.img`.
    pub kfd: u32,
    /// The buffer's number there.
    pub buffer: usize,
}

impl AccessedPages {
    /// The addresses, or `None` if they are no pages below the last address.
    fn addresses(&self) -> Option<Range<u64>> {
        let end = self.pages.checked_mul(PAGE_SIZE)?.checked_add(self.address)?;
        (self.pages > 0 && self.address.is_multiple_of(PAGE_SIZE)).then_some(self.address..end)
    }
}

impl WorkingSet {
    /// Whether nothing is in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.pages.is_empty() && self.buffers.is_empty()
    }

    /// The bytes of CPU memory.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.pages.iter().map(|run| run.pages.saturating_mul(PAGE_SIZE)).fold(0, u64::saturating_add)
    }

    /// Adds what a later restore accessed, after what is in it. Of what both have, the earlier place counts.
    #[must_use]
    pub fn merged(mut self, later: Self) -> Self {
        let mut known = AddressSets::default();
        self.pages.iter().for_each(|run| drop(known.add(*run)));
        self.pages.extend(later.pages.into_iter().flat_map(|run| known.add(run)));
        let mut seen: BTreeSet<BufferId> = self.buffers.iter().copied().collect();
        self.buffers.extend(later.buffers.into_iter().filter(|buffer| seen.insert(*buffer)));
        self
    }

    /// Leaves out what is beyond [`MOST_RUNS`] and [`MOST_BUFFERS`]. Returns that.
    pub(crate) fn split_off_excess(&mut self) -> Self {
        let pages = self.pages.split_off(self.pages.len().min(MOST_RUNS));
        let buffers = self.buffers.split_off(self.buffers.len().min(MOST_BUFFERS));
        Self { pages, buffers }
    }

    /// Returns the order of CPU memory by task. Ranks begin at `first`, and are shared by all tasks.
    pub(crate) fn by_task(&self, first: u32) -> BTreeMap<u32, Vec<Prefetch>> {
        let mut tasks: BTreeMap<u32, Vec<Prefetch>> = BTreeMap::new();
        for (run, rank) in self.pages.iter().zip(first..) {
            if let Some(addresses) = run.addresses() {
                tasks.entry(run.task).or_default().push(Prefetch { addresses, rank });
            }
        }
        tasks
    }
}

/// Addresses of tasks, as disjoint ranges by their starts.
#[derive(Debug, Default)]
struct AddressSets(BTreeMap<u32, BTreeMap<u64, u64>>);

impl AddressSets {
    /// Adds pages. Returns those that were not known.
    fn add(&mut self, run: AccessedPages) -> Vec<AccessedPages> {
        let Some(Range { start, end }) = run.addresses() else { return Vec::new() };
        let ranges = self.0.entry(run.task).or_default();
        let before = ranges.range(..=start).next_back().filter(|(_, last)| **last >= start);
        let from = before.map_or(start, |(first, _)| *first);
        // One range takes the place of all that it overlaps or continues: each is looked at once more at
        // most.
        let known: Vec<Range<u64>> = ranges.range(from..=end).map(|(first, last)| *first..*last).collect();
        let (mut at, mut new) = (start, Vec::new());
        for range in known {
            ranges.remove(&range.start);
            if at < range.start {
                new.push(at..range.start);
            }
            at = at.max(range.end);
        }
        if at < end {
            new.push(at..end);
        }
        ranges.insert(from, at.max(end));
        let to_run = |range: Range<u64>| AccessedPages {
            address: range.start,
            pages: (range.end - range.start) / PAGE_SIZE,
            ..run
        };
        new.into_iter().map(to_run).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(task: u32, page: u64, pages: u64) -> AccessedPages {
        AccessedPages { task, address: page * PAGE_SIZE, pages }
    }

    fn pages(pages: Vec<AccessedPages>) -> WorkingSet {
        WorkingSet { pages, buffers: Vec::new() }
    }

    #[test]
    fn a_later_recording_adds_what_is_new_in_its_order() {
        let first = pages(vec![run(7, 100, 16), run(8, 100, 16), run(7, 50, 4)]);
        let later = pages(vec![run(7, 90, 40), run(8, 0, 1), run(7, 52, 1), run(7, 48, 4), run(7, 125, 10)]);
        let wanted = [
            run(7, 100, 16),
            run(8, 100, 16),
            run(7, 50, 4),
            run(7, 90, 10),
            run(7, 116, 14),
            run(8, 0, 1),
            run(7, 48, 2),
            run(7, 130, 5),
        ];
        assert_eq!(first.merged(later).pages, wanted);
        let of = |buffer| BufferId { kfd: 3, buffer };
        let buffers =
            |list: &[usize]| WorkingSet { buffers: list.iter().map(|at| of(*at)).collect(), pages: vec![] };
        let merged = buffers(&[5, 1]).merged(buffers(&[2, 5, 2, 0]));
        assert_eq!(merged.buffers, [5, 1, 2, 0].map(of));
    }

    #[test]
    fn known_ranges_are_joined() {
        let mut known = AddressSets::default();
        for page in (0..1000).rev() {
            assert_eq!(known.add(run(7, 2 * page + 1, 1)), [run(7, 2 * page + 1, 1)]);
        }
        assert_eq!(known.add(run(7, 4, 3)), [run(7, 4, 1), run(7, 6, 1)]);
        assert_eq!(known.0[&7].len(), 998, "pages 3 to 7 are one range");
        assert_eq!(known.add(run(7, 0, 3000)).len(), 999);
        assert_eq!(known.0[&7], BTreeMap::from([(0, 3000 * PAGE_SIZE)]));
        assert!(known.add(run(7, 9, 2000)).is_empty());
    }

    #[test]
    fn a_merged_working_set_is_bounded() {
        let many = |from: u64| pages((from..from + MOST_RUNS as u64).map(|at| run(1, 2 * at, 1)).collect());
        let mut merged = many(0).merged(many(7));
        let excess = merged.split_off_excess();
        assert_eq!(merged, many(0));
        assert_eq!(excess, pages((0..7).map(|at| run(1, 2 * (at + MOST_RUNS as u64), 1)).collect()));
    }

    #[test]
    fn ranks_are_those_of_all_tasks_together() {
        let tasks = pages(vec![run(7, 1, 1), run(8, 5, 2), run(7, 0, 1)]).by_task(1);
        let prefetch = |page: u64, pages, rank| Prefetch {
            addresses: page * PAGE_SIZE..(page + pages) * PAGE_SIZE,
            rank,
        };
        assert_eq!(tasks[&7], [prefetch(1, 1, 1), prefetch(0, 1, 3)]);
        assert_eq!(tasks[&8], [prefetch(5, 2, 2)]);
    }
}
