// SPDX-License-Identifier: MIT OR Apache-2.0
//! Every engine gives the same bytes and the same errors, and invents nothing.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{finish, load, make_cold, pages, read_once, readable};
use proptest::prelude::*;
use rewake_image_io::engine::{DEPTH_BLOCKS, DEPTH_DEMAND, MAX_EIO_RETRIES};
use rewake_image_io::{
    BLOCK, BlockCache, Done, Engine, PAGE, Psync, Read, ReadError, ReadMode, Sim, SimPlan, Uring,
    default_engine, read_now,
};
use rewake_process::Notifier;
use rewake_skip::skip;

fn engines(cache: &Arc<BlockCache>) -> Vec<(&'static str, Box<dyn Engine>)> {
    vec![
        ("uring", Box::new(Uring::new(cache).unwrap())),
        ("psync", Box::new(Psync::new(cache).unwrap())),
        ("sim", Box::new(Sim::new(cache, SimPlan { max_delay: 3, short_percent: 40, ..SimPlan::default() }))),
    ]
}

/// Length of the file in these tests: not a whole number of blocks, nor of pages.
const LEN: usize = 12 * BLOCK + 5 * PAGE + 904;

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_engine_gives_the_files_bytes(
        reads in prop::collection::vec((0..LEN as u64 + 9000, 0..=BLOCK, any::<bool>(), any::<bool>()), 1..6),
    ) {
        let (_temp, file, bytes) = pages(LEN);
        let cache = BlockCache::new(4 * BLOCK).unwrap();
        for (name, mut engine) in engines(&cache) {
            for &(offset, len, direct, aligned) in &reads {
                let offset = if aligned { offset / PAGE as u64 * PAGE as u64 } else { offset };
                let how = if direct { ReadMode::Direct } else { ReadMode::Buffered };
                let start = usize::try_from(offset).unwrap().min(LEN);
                let there = (LEN - start).min(len);
                match read_once(&mut *engine, &cache, &file, (offset, len, how)) {
                    Ok(got) => {
                        prop_assert_eq!(there, len, "{} gave bytes that the file does not have", name);
                        prop_assert!(got == bytes[start..start + len], "{}: wrong bytes at {}", name, offset);
                    }
                    Err(ReadError::Short { expected, got, .. }) => {
                        prop_assert!(there < len, "{} refuses {} bytes at {}", name, len, offset);
                        prop_assert_eq!((expected, got), (len, there), "{}", name);
                    }
                    Err(other) => prop_assert!(false, "{}: {}", name, other),
                }
            }
        }
    }
}

#[test]
fn a_cold_file_read_directly_stays_out_of_the_page_cache() {
    let (temp, file, bytes) = pages(LEN);
    let cache = BlockCache::new(4 * BLOCK).unwrap();
    for (name, mut engine) in engines(&cache).into_iter().take(2) {
        make_cold(&temp);
        if file.how(0, BLOCK) == ReadMode::Buffered {
            skip!("{} cannot be made cold (tmpfs, or a kernel before 6.5)", temp.path().display());
        }
        let before = cache.metrics().snapshot();
        let got = read_once(&mut *engine, &cache, &file, (0, BLOCK, ReadMode::Direct)).unwrap();
        assert!(got == bytes[..BLOCK], "{name}: wrong bytes");
        assert!(!file.is_cached(0, BLOCK), "{name} went through the page cache");
        let after = cache.metrics().snapshot();
        assert_eq!(after.bytes_direct - before.bytes_direct, BLOCK as u64, "{name}");
        assert_eq!(after.bytes_buffered, before.bytes_buffered, "{name}");
    }
}

#[test]
fn a_direct_read_of_an_unaligned_tail_is_right() {
    let (_temp, file, bytes) = pages(LEN);
    let cache = BlockCache::new(4 * BLOCK).unwrap();
    for (name, mut engine) in engines(&cache) {
        let tail = LEN - 12 * BLOCK;
        let got =
            read_once(&mut *engine, &cache, &file, (12 * BLOCK as u64, tail, ReadMode::Direct)).unwrap();
        assert!(got == bytes[12 * BLOCK..], "{name}: wrong bytes");
    }
}

#[test]
fn a_file_truncated_after_open_is_an_error_that_names_it() {
    for how in [ReadMode::Direct, ReadMode::Buffered] {
        let (temp, file, _) = pages(LEN);
        let cache = BlockCache::new(4 * BLOCK).unwrap();
        temp.as_file().set_len(BLOCK as u64 + 904).unwrap();
        for (name, mut engine) in engines(&cache) {
            let error = read_once(&mut *engine, &cache, &file, (BLOCK as u64, BLOCK, how)).unwrap_err();
            let ReadError::Short { file: named, offset, expected, got } = &error else {
                panic!("{name}: {error}")
            };
            assert_eq!((named.as_path(), *offset, *expected, *got), (temp.path(), BLOCK as u64, BLOCK, 904));
            assert!(error.to_string().contains(&*temp.path().to_string_lossy()), "{error}");
        }
        let error = read_now(&file, BLOCK as u64, &mut [0; 2 * PAGE]).unwrap_err();
        assert!(matches!(error, ReadError::Short { got: 904, .. }), "{error}");
    }
}

#[test]
fn no_engine_gives_bytes_of_a_file_that_changed_after_open() {
    use std::os::unix::fs::FileExt as _;
    for how in [ReadMode::Direct, ReadMode::Buffered] {
        let (temp, file, _) = pages(LEN);
        let cache = BlockCache::new(4 * BLOCK).unwrap();
        std::thread::sleep(Duration::from_millis(30));
        temp.as_file().write_all_at(&[1; BLOCK], 0).unwrap();
        for (name, mut engine) in engines(&cache) {
            let error = read_once(&mut *engine, &cache, &file, (BLOCK as u64, BLOCK, how)).unwrap_err();
            assert!(matches!(error, ReadError::Changed { .. }), "{name}: {error}");
        }
    }
}

#[test]
fn an_offset_no_file_can_have_is_an_error() {
    let (_temp, file, _) = pages(LEN);
    let cache = BlockCache::new(4 * BLOCK).unwrap();
    for (name, mut engine) in engines(&cache) {
        for offset in [u64::MAX, !4095, i64::MAX as u64] {
            for how in [ReadMode::Direct, ReadMode::Buffered] {
                let result = read_once(&mut *engine, &cache, &file, (offset, PAGE, how));
                assert!(result.is_err(), "{name} read at {offset}");
            }
        }
    }
    assert!(read_now(&file, u64::MAX, &mut [0; PAGE]).is_err());
}

fn demand_read(
    cache: &Arc<BlockCache>,
    file: &Arc<rewake_image_io::PagesFile>,
    ticket: u64,
    offset: u64,
) -> Read {
    let dst = cache.demand_buffer().unwrap();
    Read { ticket, file: Arc::clone(file), offset, dst, how: ReadMode::Direct }
}

#[test]
fn a_passing_eio_is_retried_and_a_lasting_one_is_reported() {
    let (temp, file, bytes) = pages(LEN);
    let cache = BlockCache::new(4 * BLOCK).unwrap();
    let broken = 5 * PAGE as u64..6 * PAGE as u64;
    let plan = SimPlan { seed: 3, eio_percent: 20, broken: Some(broken), ..SimPlan::default() };
    let mut engine = Sim::new(&cache, plan);
    let mut good = 0;
    for page in 0..60u64 {
        let offset = page * PAGE as u64;
        engine.submit(demand_read(&cache, &file, page, offset)).unwrap();
        let Done { dst, result, .. } = finish(&mut engine, 1).pop().unwrap();
        let start = usize::try_from(offset).unwrap();
        match result {
            Ok(()) => {
                assert!(*dst == bytes[start..start + PAGE]);
                good += 1;
            }
            Err(ReadError::Io { file, tries, source, .. }) => {
                assert_eq!((file.as_path(), tries), (temp.path(), MAX_EIO_RETRIES + 1));
                assert_eq!(source.raw_os_error(), Some(libc::EIO));
            }
            Err(other) => panic!("{other}"),
        }
        assert!(page != 5 || good == 5, "page 5 is broken, those before it are not");
    }
    assert!(good >= 57, "{good} of 60");
    assert!(cache.metrics().snapshot().retries > u64::from(MAX_EIO_RETRIES));
}

#[test]
fn the_same_seed_gives_the_same_order_and_another_seed_another() {
    let order = |seed| {
        let (_temp, file, _) = pages(LEN);
        let cache = BlockCache::new(4 * BLOCK).unwrap();
        let mut engine = Sim::new(&cache, SimPlan { seed, max_delay: 9, ..SimPlan::default() });
        for page in 0..DEPTH_DEMAND as u64 {
            engine.submit(demand_read(&cache, &file, page, page * PAGE as u64)).unwrap();
        }
        finish(&mut engine, DEPTH_DEMAND).iter().map(|done| done.ticket).collect::<Vec<_>>()
    };
    assert_eq!(order(1), order(1));
    assert_ne!(order(1), order(2));
    assert_ne!(order(1), (0..40).collect::<Vec<_>>());
}

#[test]
fn a_full_engine_returns_block_reads_but_takes_demand_reads() {
    let (_temp, file, bytes) = pages(LEN);
    let cache = BlockCache::new((DEPTH_BLOCKS + 3) * BLOCK).unwrap();
    let notifier = Notifier::new().unwrap();
    for (name, mut engine) in engines(&cache) {
        let mut guards = Vec::new();
        let mut block_read = |ticket: u64| {
            let mut guard = load(&cache, &file, (1 << 40) + ticket, &notifier);
            let mut dst = guard.take_slice().unwrap();
            dst.truncate(PAGE);
            guards.push(guard);
            Read {
                ticket,
                file: Arc::clone(&file),
                offset: ticket * PAGE as u64,
                dst,
                how: ReadMode::Buffered,
            }
        };
        for ticket in 0..DEPTH_BLOCKS as u64 {
            engine.submit(block_read(ticket)).unwrap_or_else(|_| panic!("{name} is full at {ticket}"));
        }
        let back = engine.submit(block_read(999)).expect_err("one read more than the depth");
        assert_eq!(back.ticket, 999, "{name}");
        for ticket in 0..DEPTH_DEMAND as u64 {
            let read = demand_read(&cache, &file, 1000 + ticket, ticket * PAGE as u64);
            engine.submit(read).unwrap_or_else(|_| panic!("{name} refused demand read {ticket}"));
        }
        assert!(cache.demand_buffer().is_none(), "all demand buffers are in flight");
        for done in finish(&mut *engine, DEPTH_BLOCKS + DEPTH_DEMAND) {
            done.result.unwrap();
            let start = usize::try_from(done.ticket % 1000).unwrap() * PAGE;
            assert!(
                *done.dst == bytes[start..start + PAGE],
                "{name}: ticket {} has bytes of another read",
                done.ticket
            );
        }
        assert_eq!(engine.in_flight(), 0, "{name}");
        engine.submit(back).expect("room again");
        finish(&mut *engine, 1);
    }
}

#[test]
fn a_dropped_engine_returns_its_buffers_after_its_reads() {
    let (temp, file, _) = pages(LEN);
    let cache = BlockCache::new(4 * BLOCK).unwrap();
    for _ in 0..20 {
        for (name, mut engine) in engines(&cache) {
            make_cold(&temp);
            for ticket in 0..DEPTH_DEMAND as u64 {
                let read = demand_read(&cache, &file, ticket, ticket * PAGE as u64);
                engine.submit(read).unwrap_or_else(|_| panic!("{name} refused {ticket}"));
            }
            engine.flush();
            drop(engine);
            let mut all: Vec<_> = (0..DEPTH_DEMAND).map(|_| cache.demand_buffer().unwrap()).collect();
            all.iter_mut().for_each(|buffer| buffer.fill(0xAB));
            std::thread::yield_now();
            assert!(
                all.iter().all(|buffer| buffer.iter().all(|&byte| byte == 0xAB)),
                "{name} writes after drop"
            );
        }
    }
}

#[test]
fn epoll_sleeps_on_the_engine_until_its_reads_are_over() {
    let (temp, file, _) = pages(LEN);
    let cache = BlockCache::new(4 * BLOCK).unwrap();
    for (name, mut engine) in engines(&cache).into_iter().take(2) {
        let fd = engine.poll_fd().unwrap();
        // SAFETY: epoll_create1 takes no pointers; the descriptor is closed below.
        let epoll = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 5 };
        // SAFETY: all descriptors are open; event lives across the call.
        assert_eq!(unsafe { libc::epoll_ctl(epoll, libc::EPOLL_CTL_ADD, fd, &raw mut event) }, 0);
        let mut wait = |millis| loop {
            // SAFETY: one event that lives across the call.
            let ready = unsafe { libc::epoll_wait(epoll, &raw mut event, 1, millis) };
            // A ring that was torn down earlier on this thread interrupts a later wait once.
            if ready >= 0 || std::io::Error::last_os_error().kind() != std::io::ErrorKind::Interrupted {
                break ready;
            }
        };
        assert_eq!(wait(0), 0, "{name}: readable with nothing to do");
        for round in 0..50 {
            make_cold(&temp);
            engine.submit(demand_read(&cache, &file, round, round * PAGE as u64)).unwrap();
            engine.flush();
            let mut done = Vec::new();
            while done.is_empty() {
                assert_eq!(wait(60_000), 1, "{name}: round {round}: no wake-up");
                engine.reap(&mut done);
            }
            done.pop().unwrap().result.unwrap();
            assert_eq!(wait(0), 0, "{name}: still readable after the reap");
        }
        // SAFETY: epoll is open and ours.
        unsafe { libc::close(epoll) };
    }
}

#[test]
fn the_default_engine_reads() {
    let (_temp, file, bytes) = pages(LEN);
    let cache = BlockCache::new(4 * BLOCK).unwrap();
    let mut default = default_engine(&cache).unwrap();
    eprintln!("{default:?}");
    assert!(!readable(default.engine.poll_fd().unwrap(), Duration::ZERO));
    let got = read_once(&mut *default.engine, &cache, &file, (PAGE as u64, PAGE, ReadMode::Direct)).unwrap();
    assert!(got == bytes[PAGE..2 * PAGE]);
}
