// SPDX-License-Identifier: MIT OR Apache-2.0
//! A `ResidencyMap` must agree with a table that has an entry for every page.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use proptest::prelude::*;
use rewake_pager::{
    BLOCK_PAGES, BlockIx, Change, Extent, Finish, Locate, PAGE_SIZE, PageIx, Plan, ResidencyMap, Run, Segment,
};

/// Addresses in use, in pages.
const ADDRESSES: u64 = 800;

/// The simple table.
struct Table {
    /// Target page number to page of the image.
    mapping: BTreeMap<u64, u64>,
    resident: HashSet<u64>,
    /// (file, page number in the file, extent) of every page of the image; the index is the page.
    origin: Vec<(u32, u64, usize)>,
}

impl Table {
    fn new(extents: &[Extent]) -> Self {
        let mut pages: Vec<(u32, u64, u64, usize)> = Vec::new();
        for (number, extent) in extents.iter().enumerate() {
            for page in 0..extent.pages {
                let (offset, target) =
                    (extent.file_offset / PAGE_SIZE + page, extent.target / PAGE_SIZE + page);
                pages.push((extent.file, offset, target, number));
            }
        }
        pages.sort_unstable();
        Self {
            mapping: pages.iter().zip(0..).map(|((_, _, target, _), page)| (*target, page)).collect(),
            resident: HashSet::new(),
            origin: pages.iter().map(|(file, offset, _, number)| (*file, *offset, *number)).collect(),
        }
    }

    fn origin(&self, page: u64) -> (u32, u64, usize) {
        self.origin[usize::try_from(page).unwrap()]
    }

    fn apply(&mut self, change: &Change) {
        match *change {
            Change::Remove { start, end } | Change::Unmap { start, end } => {
                self.mapping.retain(|target, _| !(start / PAGE_SIZE..end / PAGE_SIZE).contains(target));
            }
            Change::Remap { from, to, len } => {
                let (from, to, len) = (from / PAGE_SIZE, to / PAGE_SIZE, len / PAGE_SIZE);
                self.mapping.retain(|target, _| !(to..to + len).contains(target));
                let moved = |at: u64| if (from..from + len).contains(&at) { at - from + to } else { at };
                self.mapping = self.mapping.iter().map(|(target, page)| (moved(*target), *page)).collect();
            }
        }
    }

    /// (page, target) of pages that are mapped and not resident, by page.
    fn missing(&self) -> Vec<(u64, u64)> {
        let missing = self.mapping.iter().filter(|(_, page)| !self.resident.contains(page));
        let mut pages: Vec<_> = missing.map(|(target, page)| (*page, *target)).collect();
        pages.sort_unstable();
        pages
    }
}

#[derive(Debug, Clone)]
enum Op {
    Remove(u64, u64),
    Unmap(u64, u64),
    Remap(u64, u64, u64),
    Resident(u64, u64),
    /// Continues with the child.
    Fork,
    /// Continues with a successor's map: no page is resident.
    Successor,
    /// Claims a block and fills this many pages of it.
    Work(u64),
    Promote(usize),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let at = 0..ADDRESSES;
    let len = prop_oneof![3 => 1..12_u64, 1 => 1..200_u64];
    let op = prop_oneof![
        2 => (at.clone(), len.clone()).prop_map(|(at, len)| Op::Remove(at, len)),
        1 => (at.clone(), len.clone()).prop_map(|(at, len)| Op::Unmap(at, len)),
        4 => (at.clone(), at.clone(), len.clone()).prop_map(|(from, to, len)| Op::Remap(from, to, len)),
        3 => (at, len).prop_map(|(page, pages)| Op::Resident(page, pages)),
        1 => Just(Op::Fork),
        1 => Just(Op::Successor),
        3 => (0..70_u64).prop_map(Op::Work),
        1 => (0..16_usize).prop_map(Op::Promote),
    ];
    prop::collection::vec(op, 1..40)
}

/// Extents whose order in the files is unrelated to their order in memory.
fn extents() -> impl Strategy<Value = Vec<Extent>> {
    let one = (0..12_u64, 1..40_u64, 0..2_u32, 0..30_u64, any::<u8>());
    prop::collection::vec(one, 1..12).prop_map(|list| {
        let mut offsets = [0, 0];
        let mut placed = Vec::new();
        for (gap, pages, file, file_gap, order) in list {
            let next = &mut offsets[file as usize];
            let file_offset = (*next + file_gap) * PAGE_SIZE;
            *next += file_gap + pages;
            placed.push((order, gap, Extent { target: 0, file, file_offset, pages }));
        }
        placed.sort_by_key(|(order, ..)| *order);
        let mut target = 0;
        let mut place = |(_, gap, extent): (u8, u64, Extent)| {
            target += gap + extent.pages;
            Extent { target: (target - extent.pages) * PAGE_SIZE, ..extent }
        };
        placed.into_iter().map(&mut place).collect()
    })
}

fn run(map: &mut ResidencyMap, table: &mut Table, op: &Op) {
    let bytes = |pages: u64| pages * PAGE_SIZE;
    let change = match *op {
        Op::Remove(at, len) => Change::Remove { start: bytes(at), end: bytes(at + len) },
        Op::Unmap(at, len) => Change::Unmap { start: bytes(at), end: bytes(at + len) },
        Op::Remap(from, to, len) => {
            Change::Remap { from: bytes(from), to: bytes(to), len: bytes(len.min(from.abs_diff(to))) }
        }
        Op::Resident(page, pages) => return set_resident(map, table, page..page + pages),
        Op::Fork => return *map = map.fork(),
        Op::Successor => {
            *map = ResidencyMap::restore(Arc::clone(map.plan()), &map.snapshot()).unwrap();
            return table.resident.clear();
        }
        Op::Work(pages) => return work(map, table, pages),
        Op::Promote(block) => return map.promote(BlockIx(block % map.plan().blocks())),
    };
    map.apply(&change).unwrap();
    table.apply(&change);
}

fn set_resident(map: &ResidencyMap, table: &mut Table, pages: Range<u64>) {
    let mapped: HashSet<u64> = table.mapping.values().copied().collect();
    let new = pages.clone().filter(|page| mapped.contains(page) && table.resident.insert(*page)).count();
    assert_eq!(map.set_resident(PageIx(pages.start), pages.end - pages.start), new as u64);
}

fn work(map: &ResidencyMap, table: &mut Table, pages: u64) {
    let Some(block) = map.claim() else {
        assert_eq!(table.missing(), [], "no block can be claimed, but pages are missing");
        return;
    };
    let mut runs = Vec::new();
    let next = map.runs(block, PageIx(0), pages, &mut runs);
    for run in runs {
        set_resident(map, table, run.page.0..run.page.0 + run.pages);
    }
    map.release(block, if next.is_some() { Finish::Retry } else { Finish::Done });
}

fn compare(map: &ResidencyMap, table: &Table) {
    map.check().unwrap();
    let missing = table.missing();
    assert_eq!(map.missing(), missing.len() as u64);
    assert_eq!(map.total(), table.mapping.len() as u64);
    assert_eq!(map.resident(), (table.mapping.len() - missing.len()) as u64);
    assert_eq!(map.background_done(), missing.is_empty());
    for address in 0..ADDRESSES + 200 {
        compare_place(map, table, address);
    }
    for step in [1, 7, u64::MAX] {
        assert_eq!(runs_of_all_blocks(map, table, step), missing, "in steps of {step}");
    }
}

fn compare_place(map: &ResidencyMap, table: &Table, address: u64) {
    let located = map.locate(address * PAGE_SIZE + address % PAGE_SIZE);
    let Some(page) = table.mapping.get(&address) else {
        return assert_eq!(located, Locate::Unbacked, "at page {address}");
    };
    let place = match located {
        Locate::Missing(place) if !table.resident.contains(page) => place,
        Locate::Resident(place) if table.resident.contains(page) => place,
        other => panic!("{other:?} at page {address}, which has image page {page}"),
    };
    let (file, offset, _) = table.origin(*page);
    assert_eq!((place.page, place.file, place.file_offset), (PageIx(*page), file, offset * PAGE_SIZE));
    let block = map.plan().block(place.block);
    assert_eq!((block.file, block.index), (file, offset / BLOCK_PAGES));
}

/// (page, target) of every page that `runs` returns.
fn runs_of_all_blocks(map: &ResidencyMap, table: &Table, step: u64) -> Vec<(u64, u64)> {
    let mut pages = Vec::new();
    for number in 0..map.plan().blocks() {
        let block = map.plan().block(BlockIx(number));
        let mut from = Some(PageIx(0));
        while let Some(page) = from {
            let mut runs: Vec<Run> = Vec::new();
            from = map.runs(BlockIx(number), page, step, &mut runs);
            assert!(runs.iter().map(|run| run.pages).sum::<u64>() <= step);
            for run in &runs {
                pages.extend((0..run.pages).map(|page| (run.page.0 + page, run.target / PAGE_SIZE + page)));
                let (file, offset, extent) = table.origin(run.page.0);
                assert_eq!((file, offset / BLOCK_PAGES), (block.file, block.index));
                assert_eq!(run.block_offset as u64, offset % BLOCK_PAGES * PAGE_SIZE);
                assert_eq!(extent, table.origin(run.page.0 + run.pages - 1).2, "a run crosses an extent");
            }
        }
    }
    pages
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_map_always_agrees_with_the_table(extents in extents(), ops in ops()) {
        let mut table = Table::new(&extents);
        let mut map = ResidencyMap::new(Arc::new(Plan::new(extents).unwrap()));
        compare(&map, &table);
        for op in &ops {
            run(&mut map, &mut table, op);
            compare(&map, &table);
        }
    }

    #[test]
    fn restoring_from_any_record_is_refused_or_consistent(
        extents in extents(),
        record in prop::collection::vec((0..900_u64, 0..300_u64, 0..60_u64, any::<bool>()), 0..6),
    ) {
        let segment = |(target, page, pages, dropped): &(u64, u64, u64, bool)| {
            let target = if *dropped { Segment::DROPPED } else { target * PAGE_SIZE };
            Segment { target, page: PageIx(*page), pages: *pages }
        };
        let mut segments: Vec<Segment> = record.iter().map(segment).collect();
        segments.sort_by_key(|segment| segment.page);
        if let Ok(map) = ResidencyMap::restore(Arc::new(Plan::new(extents).unwrap()), &segments) {
            map.check().unwrap();
        }
    }
}
