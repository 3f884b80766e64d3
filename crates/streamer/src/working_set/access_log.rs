// SPDX-License-Identifier: MIT OR Apache-2.0
//! Notes which blocks of CPU memory programs access first. The threads that serve page faults add to it
//! without a lock, and take no memory.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use rewake_pager::{PAGE_SIZE, PageIx, Plan};

use super::{AccessedPages, WorkingSet};

/// The most blocks that are noted: 8 GiB of memory. Scattered blocks are a run each: of them the file has
/// fewer.
pub(crate) const MOST_BLOCKS: usize = 1 << 17;
/// Blocks whose order does not matter to a program, because they are read in a few tens of milliseconds: 4
/// MiB. They are sorted by address, so that they are read in long pieces.
const GROUP: usize = 64;
/// Bits of a page's number; a pid takes those above (`PID_MAX_LIMIT` is 2^22).
const PAGE_BITS: u32 = 40;

/// The blocks of all address spaces, in the order of their first page faults.
#[derive(Debug)]
pub(crate) struct AccessLog {
    /// The pid in the image and the page, plus one; zero is an empty place.
    places: Box<[AtomicU64]>,
    next: AtomicUsize,
}

/// Which blocks of one address space are noted.
#[derive(Debug)]
pub(crate) struct NotedBlocks(Box<[AtomicU64]>);

impl NotedBlocks {
    pub(crate) fn of(blocks: usize) -> Self {
        Self((0..blocks.div_ceil(64)).map(|_| AtomicU64::new(0)).collect())
    }

    /// Notes a block. Returns whether it is the first time.
    fn note(&self, block: usize) -> bool {
        let bit = 1 << (block % 64);
        let word = self.0.get(block / 64);
        word.is_some_and(|word| word.fetch_or(bit, Ordering::Relaxed) & bit == 0)
    }
}

impl AccessLog {
    pub(crate) fn new() -> Self {
        Self { places: (0..MOST_BLOCKS).map(|_| AtomicU64::new(0)).collect(), next: AtomicUsize::new(0) }
    }

    /// Notes a page fault on a page of a task, by its pid in the image, and in a block.
    pub(crate) fn note(&self, noted: &NotedBlocks, block: usize, task: u32, page: PageIx) {
        if !noted.note(block) {
            return;
        }
        let at = self.next.fetch_add(1, Ordering::Relaxed);
        if let Some(place) = self.places.get(at) {
            place.store((u64::from(task) << PAGE_BITS | page.0) + 1, Ordering::Release);
        }
    }

    /// Returns the number of blocks so far, those beyond [`MOST_BLOCKS`] included.
    pub(crate) fn blocks(&self) -> usize {
        self.next.load(Ordering::Relaxed)
    }

    /// Returns what was accessed; `plan` gives the plan of a task. Forked children have their parent's pid.
    pub(crate) fn working_set<'a>(&self, plan: impl Fn(u32) -> Option<&'a Arc<Plan>>) -> WorkingSet {
        let places = self.places.iter().map(|place| place.load(Ordering::Acquire));
        let entries = places.take(self.blocks()).filter_map(|place| place.checked_sub(1));
        let runs: Vec<AccessedPages> = entries
            .filter_map(|entry| {
                let task = u32::try_from(entry >> PAGE_BITS).ok()?;
                let (address, pages) = plan(task)?.in_block(PageIx(entry & ((1 << PAGE_BITS) - 1)));
                Some(AccessedPages { task, address, pages })
            })
            .collect();
        let pages = runs.chunks(GROUP).flat_map(joined).collect();
        // It joins what two address spaces of one task accessed.
        WorkingSet::default().merged(WorkingSet { pages, buffers: Vec::new() })
    }
}

/// Returns runs by task and address, adjacent ones as one.
fn joined(runs: &[AccessedPages]) -> Vec<AccessedPages> {
    let by_address: BTreeMap<(u32, u64), u64> =
        runs.iter().map(|run| ((run.task, run.address), run.pages)).collect();
    let mut joined: Vec<AccessedPages> = Vec::new();
    for ((task, address), pages) in by_address {
        match joined.last_mut() {
            Some(last) if last.task == task && last.address + last.pages * PAGE_SIZE == address => {
                last.pages += pages;
            }
            _ => joined.push(AccessedPages { task, address, pages }),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use rewake_pager::{BLOCK_PAGES, Extent};

    use super::*;

    const BASE: u64 = 0x7000_0000_0000;

    fn plan(blocks: u64) -> Arc<Plan> {
        let extent = Extent { target: BASE, file: 0, file_offset: 0, pages: blocks * BLOCK_PAGES };
        Arc::new(Plan::new(vec![extent]).unwrap())
    }

    fn run(task: u32, block: u64, blocks: u64) -> AccessedPages {
        AccessedPages { task, address: BASE + block * BLOCK_PAGES * PAGE_SIZE, pages: blocks * BLOCK_PAGES }
    }

    /// Notes page faults in these blocks of a task.
    fn fault(log: &AccessLog, noted: &NotedBlocks, task: u32, blocks: impl IntoIterator<Item = usize>) {
        for block in blocks {
            log.note(noted, block, task, PageIx(block as u64 * BLOCK_PAGES + 5));
        }
    }

    #[test]
    fn blocks_are_recorded_once_in_the_order_of_their_groups() {
        let (log, plan) = (AccessLog::new(), plan(1000));
        let (first, second) = (NotedBlocks::of(1000), NotedBlocks::of(1000));
        fault(&log, &first, 7, [500, 3, 500, 2, 3]);
        fault(&log, &second, 8, [2]);
        fault(&log, &first, 7, 600..600 + GROUP);
        assert_eq!(log.blocks(), 4 + GROUP);
        let group = GROUP as u64;
        let wanted =
            [run(7, 2, 2), run(7, 500, 1), run(7, 600, group - 4), run(8, 2, 1), run(7, 596 + group, 4)];
        assert_eq!(log.working_set(|_| Some(&plan)).pages, wanted);
        assert_eq!(log.working_set(|pid| (pid == 8).then_some(&plan)).pages, [run(8, 2, 1)]);
    }

    #[test]
    fn a_forked_child_s_accesses_count_once() {
        let (log, plan) = (AccessLog::new(), plan(10));
        fault(&log, &NotedBlocks::of(10), 7, [4]);
        fault(&log, &NotedBlocks::of(10), 7, [4, 5]);
        assert_eq!(log.working_set(|_| Some(&plan)).pages, [run(7, 4, 2)]);
    }

    #[test]
    fn blocks_beyond_the_limit_are_left_out() {
        let (log, plan) = (AccessLog::new(), plan(MOST_BLOCKS as u64 + 10));
        fault(&log, &NotedBlocks::of(MOST_BLOCKS + 10), 1, 0..MOST_BLOCKS + 10);
        let bytes = log.working_set(|_| Some(&plan)).bytes();
        assert_eq!(bytes, MOST_BLOCKS as u64 * BLOCK_PAGES * PAGE_SIZE);
    }
}
