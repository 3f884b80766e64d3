// SPDX-License-Identifier: MIT OR Apache-2.0
//! What single operations must do, and what must be refused.

use std::sync::Arc;
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};
use rewake_pager::{
    BLOCK_PAGES, BlockIx, Change, ChangeError, Extent, Finish, Locate, PAGE_SIZE, PageIx, Plan, PlanError,
    Prefetch, ResidencyMap, RestoreError, Run, Segment,
};

const GIB: u64 = 1 << 30;

fn extent(target: u64, file_offset: u64, pages: u64) -> Extent {
    Extent { target: target * PAGE_SIZE, file: 0, file_offset: file_offset * PAGE_SIZE, pages }
}

fn map(extents: &[Extent]) -> ResidencyMap {
    ResidencyMap::new(Arc::new(Plan::new(extents.to_vec()).unwrap()))
}

fn remap(from: u64, to: u64, pages: u64) -> Change {
    Change::Remap { from: from * PAGE_SIZE, to: to * PAGE_SIZE, len: pages * PAGE_SIZE }
}

fn all_runs(map: &ResidencyMap, block: usize) -> Vec<Run> {
    let mut runs = Vec::new();
    assert_eq!(map.runs(BlockIx(block), PageIx(0), u64::MAX, &mut runs), None);
    runs
}

#[test]
fn whole_ranges_have_every_page_where_the_image_has_it() {
    let whole = |map: &ResidencyMap| -> Vec<(u64, u64)> {
        let pages = |range: std::ops::Range<u64>| (range.start / PAGE_SIZE, range.end / PAGE_SIZE);
        map.whole_ranges(512 * PAGE_SIZE).into_iter().map(pages).collect()
    };
    // The first two are adjacent, in another order in the file.
    let mut map = map(&[extent(1000, 5000, 1000), extent(500, 0, 500), extent(4096, 9000, 511)]);
    assert_eq!(whole(&map), [(512, 1536)]);
    map.apply(&remap(1100, 100_000, 1)).unwrap();
    assert_eq!(whole(&map), [(512, 1024)]);
    map.apply(&remap(100_000, 1100, 1)).unwrap();
    assert_eq!(whole(&map), [(512, 1536)], "it has moved back");
    let last = Change::Remove { start: 1023 * PAGE_SIZE, end: 1024 * PAGE_SIZE };
    map.apply(&last).unwrap();
    assert_eq!(whole(&map), [(1024, 1536)]);
}

#[test]
fn a_block_has_the_pages_of_one_extent_around_a_page() {
    // The second extent begins in the middle of the first block of the file.
    let plan = Plan::new(vec![extent(1000, 0, 3), extent(5000, 3, 40)]).unwrap();
    let around = |page| {
        let (address, pages) = plan.in_block(PageIx(page));
        (address / PAGE_SIZE, pages)
    };
    assert_eq!([0, 2, 3, 15].map(around), [(1000, 3), (1000, 3), (5000, 13), (5000, 13)]);
    assert_eq!([16, 31, 42].map(around), [(5013, 16), (5013, 16), (5029, 11)]);
}

#[test]
fn prefetched_addresses_are_claimed_first_and_known_to_be_resident() {
    let mut map = map(&[extent(1000, 0, 64), extent(5000, 64, 64)]);
    let prefetch =
        |start: u64, end: u64, rank| Prefetch { addresses: start * PAGE_SIZE..end * PAGE_SIZE, rank };
    assert!(map.is_priority_resident());
    // The last has no page of the image.
    map.set_priority(&[prefetch(5040, 5041, 2), prefetch(1000, 1017, 5), prefetch(9000, 9001, 6)]);
    assert_eq!(map.next_rank(), Some(2));
    let blocks: Vec<_> = std::iter::from_fn(|| map.claim_first(u32::MAX)).map(|block| block.0).collect();
    assert_eq!(blocks, [6, 0, 1]);
    assert_eq!((map.next_rank(), map.is_priority_resident()), (None, false));
    map.set_resident(PageIx(0), 32);
    assert!(!map.is_priority_resident());
    map.set_resident(PageIx(96), 16);
    assert!(map.is_priority_resident());
    blocks.into_iter().for_each(|block| map.release(BlockIx(block), Finish::Done));
    assert_eq!(map.claim(), Some(BlockIx(2)));
    map.check().unwrap();
}

#[test]
fn a_plan_of_nothing_is_complete() {
    let map = map(&[]);
    assert_eq!(map.locate(0x1000), Locate::Unbacked);
    assert_eq!(map.claim(), None);
    assert!(map.background_done());
    map.check().unwrap();
}

#[test]
fn damaged_plans_are_refused() {
    let refused = |extents: &[Extent]| Plan::new(extents.to_vec()).unwrap_err();
    let odd = Extent { target: 1, ..extent(0, 0, 1) };
    assert_eq!(refused(&[odd]), PlanError::Unaligned(odd));
    let odd = Extent { file_offset: 512, ..extent(0, 0, 1) };
    assert_eq!(refused(&[odd]), PlanError::Unaligned(odd));
    assert_eq!(refused(&[extent(0, 0, 0)]), PlanError::Empty(extent(0, 0, 0)));
    assert_eq!(refused(&[extent(0, 0, u64::MAX)]), PlanError::TooLarge);
    let last = Extent { target: u64::MAX - 4095, ..extent(0, 0, 1) };
    assert_eq!(refused(&[last]), PlanError::Overflow(last));
    let (a, b) = (extent(10, 0, 5), extent(14, 5, 1));
    assert_eq!(refused(&[b, a]), PlanError::TargetOverlap(a, b));
    let (a, b) = (extent(10, 0, 5), extent(20, 4, 1));
    assert_eq!(refused(&[b, a]), PlanError::FileOverlap(a, b));
    let elsewhere = Extent { file: 1, ..b };
    assert_eq!(Plan::new(vec![a, elsewhere]).unwrap().pages(), 6);
}

#[test]
fn blocks_are_aligned_in_the_file_and_name_only_lazy_pages() {
    let plan = Plan::new(vec![extent(1000, 12, 10), extent(500, 50, 1), extent(0, 34, 2)]).unwrap();
    let blocks = (0..plan.blocks()).map(|number| plan.block(BlockIx(number)));
    let blocks: Vec<_> = blocks.map(|block| (block.index, block.first.0, block.pages)).collect();
    assert_eq!(blocks, [(0, 0, 4), (1, 4, 6), (2, 10, 2), (3, 12, 1)]);
}

#[test]
fn the_place_of_a_dumped_page_reaches_to_the_end_of_its_extent() {
    let plan = Plan::new(vec![extent(1000, 12, 10), extent(1010, 50, 1)]).unwrap();
    let place =
        |page: u64| plan.file_run(page * PAGE_SIZE).map(|run| (run.file_offset / PAGE_SIZE, run.pages));
    assert_eq!([place(999), place(1000), place(1009)], [None, Some((12, 10)), Some((21, 1))]);
    assert_eq!([place(1010), place(1011)], [Some((50, 1)), None]);
    let run = plan.file_run(1003 * PAGE_SIZE + 7).unwrap();
    assert_eq!((run.target, run.file, run.file_offset), (1003 * PAGE_SIZE, 0, 15 * PAGE_SIZE));
}

#[test]
fn small_extents_share_a_block_and_a_long_one_has_many() {
    // In blocks of the file: one page; two pages; the rest and two more blocks, whose tail has a fourth
    // extent's page.
    let plan = [extent(9000, 0, 1), extent(100, 1, 2), extent(2000, 8, 30), extent(50, 47, 1)];
    let plan = Plan::new(plan.to_vec()).unwrap();
    let blocks = (0..plan.blocks()).map(|number| plan.block(BlockIx(number)));
    let blocks: Vec<_> = blocks.map(|block| (block.index, block.first.0, block.pages)).collect();
    assert_eq!(blocks, [(0, 0, 11), (1, 11, 16), (2, 27, 7)]);
}

#[test]
fn a_record_that_claims_16_tib_costs_no_more_than_one_of_a_page() {
    let whole = Plan::new(vec![extent(0, 0, 1 << 32)]).unwrap();
    assert_eq!((whole.pages(), whole.blocks()), (1 << 32, 1 << 28));
    let last = whole.block(BlockIx(whole.blocks() - 1));
    assert_eq!((last.index, last.first.0, last.pages), ((1 << 28) - 1, (1 << 32) - BLOCK_PAGES, BLOCK_PAGES));
    assert_eq!(whole.extents().len(), 1, "the plan keeps one extent");
    assert_eq!(
        Plan::new(vec![extent(0, 0, 1 << 32), extent(1 << 33, 1 << 32, 1)]).unwrap_err(),
        PlanError::TooLarge
    );
}

#[test]
fn a_block_is_found_by_file_and_offset() {
    let second = Extent { file: 1, ..extent(3000, 32, 16) };
    let plan = Plan::new(vec![extent(1000, 12, 10), extent(500, 50, 1), second]).unwrap();
    let found = |file, index| plan.block_from(file, index).map(|block| block.0);
    assert_eq!([found(0, 0), found(0, 2), found(0, 3)], [Some(0), Some(2), Some(2)]);
    assert_eq!([found(0, 4), found(1, 0), found(1, 3), found(2, 0)], [None, Some(3), None, None]);
}

#[test]
fn a_run_ends_where_an_extent_ends() {
    // Contiguous in memory and in the file, but in two mappings: one fill may not cross them.
    let map = map(&[extent(100, 0, 3), extent(103, 3, 2)]);
    let found: Vec<_> =
        all_runs(&map, 0).iter().map(|run| (run.target / PAGE_SIZE, run.page.0, run.pages)).collect();
    assert_eq!(found, [(100, 0, 3), (103, 3, 2)]);
}

#[test]
fn contiguous_missing_pages_are_one_run() {
    let map = map(&[extent(100, 0, 14)]);
    map.set_resident(PageIx(3), 5);
    let found: Vec<_> = all_runs(&map, 0).iter().map(|run| (run.page.0, run.pages)).collect();
    assert_eq!(found, [(0, 3), (8, 6)]);
}

#[test]
fn dropped_pages_are_never_filled_again() {
    let mut map = map(&[extent(100, 0, 10)]);
    map.apply(&Change::Remove { start: 102 * PAGE_SIZE, end: 104 * PAGE_SIZE }).unwrap();
    assert_eq!(map.locate(102 * PAGE_SIZE), Locate::Unbacked);
    assert_eq!((map.missing(), map.total()), (8, 8));
    assert_eq!(all_runs(&map, 0).iter().map(|run| run.pages).sum::<u64>(), 8);
    // A late set_resident of a page that was filled just before it was dropped changes nothing.
    assert_eq!(map.set_resident(PageIx(2), 1), 0);
    map.check().unwrap();
}

#[test]
fn a_moved_page_keeps_its_bytes_and_its_residency() {
    let mut map = map(&[extent(100, 0, 4)]);
    map.set_resident(PageIx(1), 1);
    map.apply(&remap(100, 9000, 4)).unwrap();
    let at = |page: u64| map.locate(page * PAGE_SIZE);
    assert!(matches!(at(9001), Locate::Resident(place) if place.page == PageIx(1)));
    assert!(matches!(at(9002), Locate::Missing(place) if place.file_offset == 2 * PAGE_SIZE));
    assert_eq!(at(101), Locate::Unbacked);
    assert_eq!(map.missing(), 3);
}

#[test]
fn a_move_drops_the_memory_at_its_target() {
    let mut map = map(&[extent(100, 0, 4), extent(200, 4, 4)]);
    map.apply(&remap(100, 202, 4)).unwrap();
    assert_eq!((map.total(), map.missing()), (6, 6));
    assert!(matches!(map.locate(202 * PAGE_SIZE), Locate::Missing(place) if place.page == PageIx(0)));
    map.check().unwrap();
}

#[test]
fn a_page_moved_back_leaves_an_empty_snapshot() {
    let mut map = map(&[extent(100, 0, 4)]);
    map.apply(&remap(100, 900, 4)).unwrap();
    assert_eq!(map.snapshot(), [Segment { target: 900 * PAGE_SIZE, page: PageIx(0), pages: 4 }]);
    map.apply(&remap(900, 100, 4)).unwrap();
    assert_eq!(map.snapshot(), []);
}

#[test]
fn changes_that_no_kernel_reports_are_refused_and_do_nothing() {
    let mut map = map(&[extent(100, 0, 4)]);
    for bad in [
        Change::Remove { start: 100 * PAGE_SIZE, end: 101 * PAGE_SIZE + 1 },
        Change::Remap { from: 0, to: PAGE_SIZE, len: 100 },
    ] {
        assert_eq!(map.apply(&bad), Err(ChangeError::Unaligned(bad)));
    }
    let beyond = Change::Remap { from: 0, to: u64::MAX - 4095, len: PAGE_SIZE };
    for bad in [Change::Unmap { start: 2 * PAGE_SIZE, end: PAGE_SIZE }, beyond] {
        assert_eq!(map.apply(&bad), Err(ChangeError::BadRange(bad)));
    }
    let bad = remap(100, 102, 4);
    assert_eq!(map.apply(&bad), Err(ChangeError::Overlap(bad)));
    assert_eq!((map.total(), map.snapshot()), (4, vec![]));
}

#[test]
fn ranges_beyond_four_gib_are_dropped_whole() {
    let at = |gib: u64| gib * GIB / PAGE_SIZE;
    let mut map = map(&[extent(100, 0, 4), extent(at(5), 4, 4), extent(at(7), 8, 4)]);
    map.apply(&Change::Unmap { start: 0, end: 6 * GIB }).unwrap();
    assert_eq!(map.total(), 4);
    map.apply(&Change::Remove { start: 0, end: u64::MAX - 4095 }).unwrap();
    assert_eq!((map.total(), map.missing()), (0, 0));
    assert_eq!(map.claim(), None);
}

#[test]
fn a_child_s_map_is_independent() {
    let mut parent = map(&[extent(100, 0, 4)]);
    parent.set_resident(PageIx(0), 1);
    let child = parent.fork();
    parent.apply(&Change::Unmap { start: 0, end: 102 * PAGE_SIZE }).unwrap();
    child.set_resident(PageIx(1), 1);
    assert_eq!((parent.missing(), child.missing(), child.total()), (2, 2, 4));
    assert!(child.claim().is_some());
}

#[test]
fn promoted_blocks_are_claimed_first_and_resident_ones_never() {
    let map = map(&[extent(100, 0, 10 * BLOCK_PAGES)]);
    let faulted = match map.locate((100 + 6 * BLOCK_PAGES + 3) * PAGE_SIZE) {
        Locate::Missing(place) => place.block,
        other => panic!("{other:?}"),
    };
    map.promote(faulted);
    map.set_resident(PageIx(0), 2 * BLOCK_PAGES);
    let order: Vec<_> = std::iter::from_fn(|| map.claim()).map(|block| block.0).collect();
    assert_eq!(order, [6, 7, 2, 3, 4, 5, 8, 9]);
    assert_eq!(map.promotions_lost(), 0);
}

#[test]
fn a_block_released_too_early_is_claimed_again() {
    let map = map(&[extent(100, 0, 4)]);
    let block = map.claim().unwrap();
    assert_eq!(map.claim(), None);
    map.release(block, Finish::Done);
    assert_eq!(map.claim(), Some(block));
    map.set_resident(PageIx(0), 4);
    map.release(block, Finish::Done);
    assert_eq!(map.claim(), None);
    map.check().unwrap();
}

#[test]
fn threads_that_share_a_map_fill_every_page_once() {
    let map = map(&[extent(100, 0, 5000), extent(9000, 7000, 3000)]);
    let filled: u64 = std::thread::scope(|scope| {
        let worker = || {
            let mut filled = 0;
            while let Some(block) = map.claim() {
                map.promote(BlockIx(block.0 * 7 % map.plan().blocks()));
                for run in all_runs(&map, block.0) {
                    filled += map.set_resident(run.page, run.pages);
                    filled += map.set_resident(run.page, run.pages);
                }
                map.release(block, Finish::Done);
            }
            filled
        };
        let workers: Vec<_> = (0..4).map(|_| scope.spawn(worker)).collect();
        workers.into_iter().map(|worker| worker.join().unwrap()).sum()
    });
    assert_eq!((filled, map.missing()), (8000, 0));
    map.check().unwrap();
}

#[test]
fn a_record_of_another_image_is_refused() {
    let plan = Arc::new(Plan::new(vec![extent(100, 0, 4), extent(200, 4, 4)]).unwrap());
    let restore = |segments: &[Segment]| ResidencyMap::restore(Arc::clone(&plan), segments).map(drop);
    let segment =
        |target: u64, page, pages| Segment { target: target * PAGE_SIZE, page: PageIx(page), pages };
    let beyond = segment(900, 6, 3);
    assert_eq!(restore(&[beyond]), Err(RestoreError::BadPages(beyond)));
    let again = segment(900, 1, 1);
    assert_eq!(restore(&[segment(800, 0, 2), again]), Err(RestoreError::BadPages(again)));
    let occupied = segment(201, 0, 2);
    assert_eq!(restore(&[occupied]), Err(RestoreError::BadTarget(occupied)));
    let twice = segment(801, 2, 2);
    assert_eq!(restore(&[segment(800, 0, 2), twice]), Err(RestoreError::BadTarget(twice)));
    assert_eq!(restore(&[segment(900, 2, 4)]), Ok(()));
}

/// A million extents of one page; their order in memory is the reverse of the file's.
fn million() -> Vec<Extent> {
    const COUNT: u64 = 1_000_000;
    (0..COUNT).map(|number| extent(2 * (COUNT - number), number, 1)).collect()
}

/// Far more than one pass over all of them takes, also on a slow machine.
const A_MINUTE: Duration = Duration::from_secs(60);

/// CPU time of this thread: other threads' work does not count.
fn cpu_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap().into()
}

#[test]
fn a_million_extents_are_planned_and_walked_in_seconds() {
    // The bounds are wide for a loaded machine; anything quadratic would take hours.
    let extents = million();
    let begin = cpu_time();
    let map = ResidencyMap::new(Arc::new(Plan::new(extents).unwrap()));
    let planned = cpu_time() - begin;
    let mut runs = Vec::new();
    let mut blocks = 0;
    while let Some(block) = map.claim() {
        runs.clear();
        assert_eq!(map.runs(block, PageIx(0), BLOCK_PAGES, &mut runs), None);
        for run in &runs {
            map.set_resident(run.page, run.pages);
        }
        map.release(block, Finish::Done);
        blocks += 1;
    }
    let walked = cpu_time() - begin - planned;
    assert_eq!((blocks, map.missing()), (1_000_000_u64.div_ceil(BLOCK_PAGES), 0));
    println!("a million extents: planned in {planned:?}, walked in {walked:?}");
    assert!(planned < A_MINUTE && walked < A_MINUTE, "{planned:?} {walked:?}");
}

#[test]
fn one_huge_extent_is_dropped_and_moved_in_milliseconds() {
    let pages = 64 * GIB / PAGE_SIZE;
    let mut map = map(&[extent(1 << 20, 0, pages)]);
    let start = PAGE_SIZE << 20;
    let begin = cpu_time();
    map.apply(&Change::Remap { from: start, to: start + 100 * GIB, len: 3 * GIB }).unwrap();
    map.apply(&Change::Remove { start: start + 100 * GIB, end: start + 102 * GIB }).unwrap();
    map.apply(&Change::Unmap { start: start + 3 * GIB, end: start + 63 * GIB }).unwrap();
    let took = cpu_time() - begin;
    assert_eq!(map.total(), 2 * GIB / PAGE_SIZE);
    println!("65 GiB changed in {took:?}");
    assert!(took < Duration::from_secs(1), "{took:?}");
}

#[test]
fn the_missing_run_around_a_page_ends_where_a_page_is_not_missing_or_of_another_extent() {
    let mut map = map(&[extent(100, 10, 40), extent(140, 80, 10)]);
    // Page numbers of the window, then of the run found: its first page, its length, its page in the file.
    let run = |map: &ResidencyMap, page: u64, window: std::ops::Range<u64>| {
        let run = map.missing_run(page * PAGE_SIZE, &(window.start * PAGE_SIZE..window.end * PAGE_SIZE));
        run.map(|run| (run.target / PAGE_SIZE, run.pages, run.file_offset / PAGE_SIZE))
    };
    assert_eq!(run(&map, 120, 120..130), Some((120, 10, 30)));
    assert_eq!(run(&map, 120, 110..121), Some((110, 11, 20)));
    assert_eq!(run(&map, 138, 138..150), Some((138, 2, 48)), "the next extent is elsewhere in the file");
    assert_eq!(run(&map, 141, 100..142), Some((140, 2, 80)));
    assert_eq!(run(&map, 99, 90..110), None, "no page of the image");
    map.set_resident(map_page(&map, 115), 2);
    assert_eq!(run(&map, 120, 100..125), Some((117, 8, 27)));
    assert_eq!(run(&map, 112, 112..120), Some((112, 3, 22)));
    assert_eq!(run(&map, 115, 110..120), None, "it is resident");
    map.apply(&remap(122, 500, 1)).unwrap();
    assert_eq!(run(&map, 120, 100..130), Some((117, 5, 27)), "the next page is moved");
    assert_eq!(run(&map, 130, 110..135), Some((123, 12, 33)), "a page before it is moved");
    assert_eq!(run(&map, 500, 500..501), None, "it is moved");
    assert_eq!(run(&map, 122, 110..130), None, "its page has moved away");
}

fn map_page(map: &ResidencyMap, page: u64) -> PageIx {
    match map.locate(page * PAGE_SIZE) {
        Locate::Missing(place) => place.page,
        other => panic!("{other:?}"),
    }
}

#[test]
fn claims_follow_a_sweep_unless_they_are_shortly_ahead_of_it() {
    let map = map(&[extent(0, 0, 4096 * BLOCK_PAGES)]);
    let claim = || map.claim().unwrap().0;
    assert_eq!([claim(), claim()], [0, 1]);
    map.follow(PageIx(1000 * BLOCK_PAGES + 3), false);
    assert_eq!([claim(), claim(), claim()], [1000, 1001, 1002]);
    map.follow(PageIx(900 * BLOCK_PAGES), false);
    assert_eq!(claim(), 1003, "they are ahead already");
    map.follow(PageIx(700 * BLOCK_PAGES), false);
    assert_eq!(claim(), 700);
    map.follow(PageIx(4095 * BLOCK_PAGES), false);
    assert_eq!([claim(), claim(), claim()], [4095, 2, 3], "the blocks before it follow");
    map.check().unwrap();
}

#[test]
fn claims_are_ahead_of_a_sweep_that_fills_windows() {
    let map = map(&[extent(0, 0, 4096 * BLOCK_PAGES)]);
    let claim = || map.claim().unwrap().0;
    map.follow(PageIx(0), true);
    assert_eq!([claim(), claim()], [32, 33], "2 MiB");
    map.follow(PageIx(2 * BLOCK_PAGES), true);
    assert_eq!(claim(), 34, "they are ahead already");
    map.follow(PageIx(4 * BLOCK_PAGES), true);
    assert_eq!(claim(), 36);
    map.follow(PageIx(4080 * BLOCK_PAGES), true);
    assert_eq!(claim(), 37, "the plan ends before that");
    map.check().unwrap();
}
