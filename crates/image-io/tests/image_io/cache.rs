// SPDX-License-Identifier: MIT OR Apache-2.0
//! The block cache reads each block once, bounds its memory, forgets no waiter and serves no stale bytes.

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use crate::common::{fill, finish, load, make_cold, open, pages, readable};
use rewake_image_io::{
    Acquire, BLOCK, BlockCache, Class, DEMAND_BUFFERS, Engine, ImageFile, PAGE, Request, SimPlan, StoreError,
    TransferError, read_now,
};
use rewake_process::Notifier;

fn cache_of(blocks: usize) -> Arc<BlockCache> {
    let cache = BlockCache::new((blocks + 1) * BLOCK).unwrap();
    assert_eq!(cache.capacity(), blocks);
    cache
}

fn woken(notifier: &Notifier) -> bool {
    let yes = readable(notifier.as_raw_fd(), Duration::ZERO);
    notifier.drain();
    yes
}

fn is_hit(cache: &Arc<BlockCache>, file: &Arc<ImageFile>, block: u64) -> bool {
    match cache.acquire(file, block, &Notifier::new().unwrap()) {
        Acquire::Hit(_) => true,
        Acquire::Load(_) => false,
        other => panic!("{other:?}"),
    }
}

#[test]
fn one_caller_loads_and_a_publish_wakes_the_others() {
    let (_temp, file, bytes) = pages(2 * BLOCK);
    let cache = cache_of(2);
    let (loader, waiter) = (Notifier::new().unwrap(), Notifier::new().unwrap());
    let guard = load(&cache, &file, 1, &loader);
    assert!(matches!(cache.acquire(&file, 1, &waiter), Acquire::Pending));
    assert!(!woken(&waiter));
    let block = fill(guard, &file);
    assert!(woken(&waiter) && !woken(&loader));
    let Acquire::Hit(same) = cache.acquire(&file, 1, &waiter) else { panic!("not a hit") };
    assert!(*same == bytes[BLOCK..] && *block == *same);
    assert_eq!(same.as_ptr(), block.as_ptr(), "the bytes exist once");
}

#[test]
fn a_second_open_hits_and_changed_contents_miss() {
    let (temp, file, _) = pages(BLOCK);
    let cache = cache_of(2);
    drop(fill(load(&cache, &file, 0, &Notifier::new().unwrap()), &file));
    assert!(is_hit(&cache, &open(temp.path()), 0));
    std::thread::sleep(Duration::from_millis(20));
    std::fs::write(temp.path(), vec![9; BLOCK]).unwrap();
    assert!(!is_hit(&cache, &open(temp.path()), 0), "stale bytes");
}

#[test]
fn a_failed_load_wakes_the_waiters_and_the_next_caller_loads() {
    let (_temp, file, _) = pages(BLOCK);
    let cache = cache_of(1);
    let waiter = Notifier::new().unwrap();
    for drop_instead in [false, true] {
        let guard = load(&cache, &file, 0, &Notifier::new().unwrap());
        assert!(matches!(cache.acquire(&file, 0, &waiter), Acquire::Pending));
        if drop_instead {
            drop(guard);
        } else {
            guard.fail();
        }
        assert!(woken(&waiter));
    }
    let block = fill(load(&cache, &file, 0, &waiter), &file);
    assert_eq!(block.len(), BLOCK);
}

#[test]
fn a_buffer_is_not_reused_while_a_read_may_write_to_it() {
    let (_temp, file, _) = pages(2 * BLOCK);
    let cache = cache_of(1);
    let notifier = Notifier::new().unwrap();
    let mut guard = load(&cache, &file, 0, &notifier);
    let slice = guard.take_slice().unwrap();
    assert!(guard.take_slice().is_none());
    drop(guard);
    assert!(matches!(cache.acquire(&file, 1, &notifier), Acquire::Full), "its buffer is still out");
    assert!(!woken(&notifier));
    drop(slice);
    assert!(woken(&notifier));
    drop(load(&cache, &file, 1, &notifier));
}

#[test]
fn a_buffer_returned_before_its_guard_is_freed_with_the_guard() {
    let (_temp, file, _) = pages(2 * BLOCK);
    let cache = cache_of(1);
    let notifier = Notifier::new().unwrap();
    let mut guard = load(&cache, &file, 0, &notifier);
    drop(guard.take_slice());
    assert!(matches!(cache.acquire(&file, 0, &notifier), Acquire::Pending));
    assert!(matches!(cache.acquire(&file, 1, &notifier), Acquire::Full));
    drop(guard);
    assert!(woken(&notifier));
    drop(load(&cache, &file, 1, &notifier));
}

#[test]
#[should_panic(expected = "published")]
fn a_block_cannot_be_published_with_another_blocks_buffer() {
    let (_temp, file, _) = pages(2 * BLOCK);
    let cache = cache_of(2);
    let notifier = Notifier::new().unwrap();
    let (mut one, two) = (load(&cache, &file, 0, &notifier), load(&cache, &file, 1, &notifier));
    let _ = two.publish(one.take_slice().unwrap());
}

#[test]
fn referenced_blocks_stay_idle_ones_are_evicted_in_lru_order() {
    let (_temp, file, bytes) = pages(6 * BLOCK);
    let cache = cache_of(3);
    let notifier = Notifier::new().unwrap();
    let held = fill(load(&cache, &file, 0, &notifier), &file);
    drop(fill(load(&cache, &file, 1, &notifier), &file));
    drop(fill(load(&cache, &file, 2, &notifier), &file));
    assert!(is_hit(&cache, &file, 1), "used again: now 2 is the oldest");
    drop(fill(load(&cache, &file, 3, &notifier), &file));
    assert!(is_hit(&cache, &file, 1) && is_hit(&cache, &file, 3) && !is_hit(&cache, &file, 2));
    assert!(*held == bytes[..BLOCK], "a held block was overwritten");
}

#[test]
fn memory_is_bounded_and_a_freed_buffer_wakes_waiters() {
    let (_temp, file, _) = pages(4 * BLOCK);
    let cache = cache_of(2);
    let (notifier, other) = (Notifier::new().unwrap(), Notifier::new().unwrap());
    let first = fill(load(&cache, &file, 0, &notifier), &file);
    let second = fill(load(&cache, &file, 1, &notifier), &file);
    let third = second.clone();
    for waiter in [&notifier, &other] {
        assert!(matches!(cache.acquire(&file, 2, waiter), Acquire::Full));
    }
    drop(second);
    assert!(!woken(&notifier), "a clone still holds it");
    drop(third);
    assert!(woken(&notifier) && woken(&other));
    drop(load(&cache, &file, 2, &notifier));
    assert!(!is_hit(&cache, &file, 1));
    assert!(is_hit(&cache, &file, 0));
    drop(first);
}

#[test]
fn a_discarded_block_s_buffer_is_free_at_once_and_used_next() {
    let (_temp, file, _) = pages(8 * BLOCK);
    let cache = cache_of(4);
    let notifier = Notifier::new().unwrap();
    let kept = fill(load(&cache, &file, 0, &notifier), &file);
    drop(kept);
    let mut hot = None;
    for block in 1..8 {
        let loaded = fill(load(&cache, &file, block, &notifier), &file);
        let at = loaded.as_ptr();
        assert_eq!(*hot.get_or_insert(at), at, "block {block} went to a cold buffer");
        loaded.discard();
        assert!(!is_hit(&cache, &file, block));
    }
    assert!(is_hit(&cache, &file, 0), "discarding evicted another block");
}

#[test]
fn a_discarded_block_that_another_waited_for_stays() {
    let (_temp, file, _) = pages(BLOCK);
    let cache = cache_of(2);
    let notifier = Notifier::new().unwrap();
    let guard = load(&cache, &file, 0, &notifier);
    assert!(matches!(cache.acquire(&file, 0, &notifier), Acquire::Pending));
    fill(guard, &file).discard();
    assert!(is_hit(&cache, &file, 0));
}

#[test]
fn the_last_block_ends_with_the_file_and_the_next_is_an_error() {
    let (temp, file, bytes) = pages(BLOCK + 3 * PAGE);
    let cache = cache_of(2);
    let notifier = Notifier::new().unwrap();
    let mut engine = Engine::new(None).unwrap();
    for block in [1, 2] {
        let mut guard = load(&cache, &file, block, &notifier);
        let (offset, buffer) = (guard.offset(), guard.take_slice().unwrap());
        engine.submit(Request::fill(block, &file, offset, buffer, Class::Background)).unwrap();
        let done = finish(&mut engine, 1).pop().unwrap();
        match done.result {
            Ok(()) => assert!(block == 1 && *guard.publish(done.memory) == bytes[BLOCK..]),
            Err(TransferError::Short { file, got: 0, .. }) => assert!(block == 2 && file == temp.path()),
            Err(other) => panic!("{other}"),
        }
    }
}

#[test]
fn demand_buffers_are_pages_bounded_and_returned() {
    let cache = cache_of(1);
    let all: Vec<_> = (0..DEMAND_BUFFERS).map(|_| cache.demand_buffer().unwrap()).collect();
    assert!(cache.demand_buffer().is_none());
    let mut starts: Vec<_> = all.iter().map(|buffer| buffer.as_ptr().addr()).collect();
    starts.sort_unstable();
    starts.dedup();
    assert_eq!(starts.len(), all.len(), "two buffers share memory");
    assert!(all.iter().all(|b| b.len() == PAGE && b.as_ptr().addr().is_multiple_of(PAGE)));
    drop(all);
    assert!(cache.demand_buffer().is_some());
}

#[test]
fn a_budget_without_room_for_a_block_is_refused() {
    assert!(matches!(BlockCache::new(2 * BLOCK - 1), Err(StoreError::Budget { .. })));
    assert_eq!(BlockCache::new(2 * BLOCK).unwrap().capacity(), 1);
}

/// Acquires until there is a hit or a load, sleeping on the notifier in between.
fn acquire_waiting(
    cache: &Arc<BlockCache>,
    file: &Arc<ImageFile>,
    block: u64,
    notifier: &Notifier,
) -> Acquire {
    loop {
        match cache.acquire(file, block, notifier) {
            Acquire::Pending | Acquire::Full => {
                assert!(
                    readable(notifier.as_raw_fd(), Duration::from_secs(60)),
                    "lost wake-up for block {block}"
                );
                notifier.drain();
            }
            found => return found,
        }
    }
}

#[test]
fn threads_that_want_the_same_blocks_read_each_once() {
    const BLOCKS: u64 = 24;
    let (_temp, file, bytes) = pages(24 * BLOCK);
    let cache = cache_of(24);
    let loads = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let notifier = Notifier::new().unwrap();
                for block in 0..BLOCKS {
                    let got = match acquire_waiting(&cache, &file, block, &notifier) {
                        Acquire::Load(guard) => {
                            loads.fetch_add(1, Ordering::Relaxed);
                            std::thread::yield_now();
                            fill(guard, &file)
                        }
                        Acquire::Hit(got) => got,
                        other => panic!("{other:?}"),
                    };
                    let start = usize::try_from(block).unwrap() * BLOCK;
                    assert!(*got == bytes[start..start + BLOCK]);
                }
            });
        }
    });
    assert_eq!(loads.into_inner(), BLOCKS);
}

#[test]
fn every_waiter_is_woken_with_few_buffers_and_failing_loads() {
    let (_temp, file, bytes) = pages(9 * BLOCK);
    let cache = cache_of(2);
    let dice = AtomicU32::new(0);
    std::thread::scope(|scope| {
        for thread in 0..6u64 {
            let (cache, file, bytes, dice) = (&cache, &file, &bytes, &dice);
            scope.spawn(move || {
                let notifier = Notifier::new().unwrap();
                for round in 0..150u64 {
                    let block = (round * 5 + thread) % 9;
                    let roll = dice.fetch_add(1, Ordering::Relaxed);
                    let got = match acquire_waiting(cache, file, block, &notifier) {
                        Acquire::Load(mut guard) => {
                            if roll % 5 == 0 {
                                let late = guard.take_slice();
                                guard.fail();
                                drop(late);
                                continue;
                            }
                            fill(guard, file)
                        }
                        Acquire::Hit(got) => got,
                        other => panic!("{other:?}"),
                    };
                    let at = usize::try_from(block).unwrap() * BLOCK;
                    assert!(*got == bytes[at..at + BLOCK], "block {block} has bytes of another block");
                    if roll % 3 == 0 {
                        got.discard();
                    }
                }
            });
        }
    });
}

#[test]
fn a_whole_file_streams_through_few_buffers_on_a_faulty_disk() {
    const BLOCKS: u64 = 41;
    let (temp, file, bytes) = pages(40 * BLOCK + 2 * PAGE);
    make_cold(&temp);
    let cache = cache_of(5);
    let plan = SimPlan { seed: 11, max_delay: 6, short_percent: 30, eio_percent: 10, ..SimPlan::default() };
    let mut engine = Engine::simulated(plan);
    let notifier = Notifier::new().unwrap();
    let mut guards = std::collections::HashMap::new();
    let mut todo: Vec<u64> = (0..BLOCKS).rev().collect();
    let (mut served, mut done) = (0, Vec::new());
    while served < BLOCKS {
        while let Some(block) = todo.pop() {
            let Acquire::Load(mut guard) = cache.acquire(&file, block, &notifier) else {
                todo.push(block);
                break;
            };
            let (offset, buffer) = (guard.offset(), guard.take_slice().unwrap());
            engine.submit(Request::fill(block, &file, offset, buffer, Class::Background)).unwrap();
            guards.insert(block, guard);
        }
        engine.reap(&mut done);
        for over in done.drain(..) {
            let guard = guards.remove(&over.token).unwrap();
            if over.result.is_err() {
                todo.push(over.token);
                continue;
            }
            let block = guard.publish(over.memory);
            let start = usize::try_from(over.token).unwrap() * BLOCK;
            assert!(*block == bytes[start..start + block.len()], "block {}", over.token);
            block.discard();
            served += 1;
        }
    }
    assert!(read_now(&file, 0, &mut [0; PAGE]).is_ok());
}
