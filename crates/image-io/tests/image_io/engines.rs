// SPDX-License-Identifier: MIT OR Apache-2.0
//! Every engine gives the same bytes and the same errors, and invents nothing.

use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::time::Duration;

use crate::common::{finish, load, make_cold, open, pages, read_once, readable};
use proptest::prelude::*;
use rewake_image_io::io_budget::{IoBudget, Lane};
use rewake_image_io::{
    BLOCK, BlockCache, BufferSlice, Class, Completion, DEMAND_BUFFERS, DEMAND_RESERVE, DEPTH, Engine,
    ImageFile, MAX_EIO_RETRIES, PAGE, ReadMode, Request, SimPlan, TransferError, read_now,
};
use rewake_process::Notifier;
use tempfile::NamedTempFile;

fn engines() -> [(&'static str, Engine<BufferSlice>); 3] {
    let plan = SimPlan { max_delay: 3, short_percent: 40, ..SimPlan::default() };
    [
        ("uring", Engine::new(None).unwrap()),
        ("threads", Engine::with_threads().unwrap()),
        ("sim", Engine::simulated(plan)),
    ]
}

/// Length of the file in these tests: not a whole number of blocks, nor of pages.
const LEN: usize = 12 * BLOCK + 5 * PAGE + 904;

/// A file whose blocks are read in one mode.
struct Case {
    temp: NamedTempFile,
    file: Arc<ImageFile>,
    bytes: Vec<u8>,
    /// Another reader, which makes reads of the disk buffered ones.
    _other: Option<Arc<ImageFile>>,
}

impl Case {
    fn new(mode: ReadMode) -> Self {
        let (temp, file, bytes) = pages(LEN);
        let _other = (mode == ReadMode::Buffered).then(|| open(temp.path()));
        if mode == ReadMode::Cached {
            std::fs::read(temp.path()).unwrap();
        } else {
            make_cold(&temp);
        }
        let found = file.mode(0, BLOCK, true);
        let evicted = mode == ReadMode::Cached && found == ReadMode::Direct;
        assert!(found == mode || evicted, "{found:?} at {}: use another file system", temp.path().display());
        Self { temp, file, bytes, _other }
    }

    fn all() -> [Self; 3] {
        [ReadMode::Direct, ReadMode::Buffered, ReadMode::Cached].map(Self::new)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_engine_gives_the_files_bytes(
        mode in prop::sample::select(vec![ReadMode::Direct, ReadMode::Buffered, ReadMode::Cached]),
        reads in prop::collection::vec((0..LEN as u64 + 9000, 0..=BLOCK, any::<bool>()), 1..6),
    ) {
        let Case { file, bytes, .. } = &Case::new(mode);
        let cache = BlockCache::new(4 * BLOCK).unwrap();
        for (name, mut engine) in engines() {
            for &(offset, len, aligned) in &reads {
                let offset = if aligned { offset / PAGE as u64 * PAGE as u64 } else { offset };
                let start = usize::try_from(offset).unwrap().min(LEN);
                let there = (LEN - start).min(len);
                match read_once(&mut engine, &cache, file, (offset, len)) {
                    Ok(got) => {
                        prop_assert_eq!(there, len, "{} gave bytes that the file does not have", name);
                        prop_assert!(got == bytes[start..start + len], "{}: wrong bytes at {}", name, offset);
                    }
                    Err(TransferError::Short { expected, got, .. }) => {
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
    let cache = BlockCache::new(4 * BLOCK).unwrap();
    for (name, mut engine) in engines().into_iter().take(2) {
        let Case { temp, file, bytes, .. } = Case::new(ReadMode::Direct);
        let got = read_once(&mut engine, &cache, &file, (0, BLOCK)).unwrap();
        assert!(got == bytes[..BLOCK], "{name}: wrong bytes");
        // The region counts as cold for this file, whatever is cached later.
        assert!(!open(temp.path()).is_cached(0, BLOCK), "{name} went through the page cache");
    }
}

#[test]
fn a_direct_read_of_an_unaligned_tail_is_right() {
    let Case { file, bytes, .. } = Case::new(ReadMode::Direct);
    let cache = BlockCache::new(4 * BLOCK).unwrap();
    for (name, mut engine) in engines() {
        let got = read_once(&mut engine, &cache, &file, (12 * BLOCK as u64, LEN - 12 * BLOCK)).unwrap();
        assert!(got == bytes[12 * BLOCK..], "{name}: wrong bytes");
    }
}

#[test]
fn a_file_truncated_after_open_is_an_error_that_names_it() {
    for Case { temp, file, .. } in Case::all() {
        let cache = BlockCache::new(4 * BLOCK).unwrap();
        temp.as_file().set_len(BLOCK as u64 + 904).unwrap();
        for (name, mut engine) in engines() {
            let error = read_once(&mut engine, &cache, &file, (BLOCK as u64, BLOCK)).unwrap_err();
            let TransferError::Short { file: named, offset, expected, got } = &error else {
                panic!("{name}: {error}")
            };
            assert_eq!((named.as_path(), *offset, *expected, *got), (temp.path(), BLOCK as u64, BLOCK, 904));
            assert!(error.to_string().contains(&*temp.path().to_string_lossy()), "{error}");
        }
        let error = read_now(&file, BLOCK as u64, &mut [0; 2 * PAGE]).unwrap_err();
        assert!(matches!(error, TransferError::Short { got: 904, .. }), "{error}");
    }
}

#[test]
fn no_engine_gives_bytes_of_a_file_that_changed_after_open() {
    use std::os::unix::fs::FileExt as _;
    for Case { temp, file, .. } in Case::all() {
        let cache = BlockCache::new(4 * BLOCK).unwrap();
        std::thread::sleep(Duration::from_millis(30));
        temp.as_file().write_all_at(&[1; BLOCK], 0).unwrap();
        for (name, mut engine) in engines() {
            let error = read_once(&mut engine, &cache, &file, (BLOCK as u64, BLOCK)).unwrap_err();
            assert!(matches!(error, TransferError::Changed { .. }), "{name}: {error}");
        }
    }
}

#[test]
fn an_offset_no_file_can_have_is_an_error() {
    for Case { file, .. } in Case::all() {
        let cache = BlockCache::new(4 * BLOCK).unwrap();
        for (name, mut engine) in engines() {
            for offset in [u64::MAX, !4095, i64::MAX as u64] {
                let result = read_once(&mut engine, &cache, &file, (offset, PAGE));
                assert!(result.is_err(), "{name} read at {offset}");
            }
        }
        assert!(read_now(&file, u64::MAX, &mut [0; PAGE]).is_err());
    }
}

/// A demand read of a page, with its number as token.
fn demand_read(cache: &Arc<BlockCache>, file: &Arc<ImageFile>, page: u64) -> Request<BufferSlice> {
    Request::fill(page, file, page * PAGE as u64, cache.demand_buffer().unwrap(), Class::Demand)
}

#[test]
fn a_passing_eio_is_retried_and_a_lasting_one_is_reported() {
    let Case { temp, file, bytes, .. } = Case::new(ReadMode::Direct);
    let cache = BlockCache::new(4 * BLOCK).unwrap();
    let broken = 5 * PAGE as u64..6 * PAGE as u64;
    let plan = SimPlan { seed: 3, eio_percent: 20, broken: Some(broken), ..SimPlan::default() };
    let mut engine = Engine::simulated(plan);
    let mut good = 0;
    for page in 0..60u64 {
        engine.submit(demand_read(&cache, &file, page)).unwrap();
        let Completion { memory, result, .. } = finish(&mut engine, 1).pop().unwrap();
        let start = usize::try_from(page).unwrap() * PAGE;
        match result {
            Ok(()) => {
                assert!(*memory == bytes[start..start + PAGE]);
                good += 1;
            }
            Err(TransferError::Io { file, tries, source, .. }) => {
                assert_eq!((file.as_path(), tries), (temp.path(), MAX_EIO_RETRIES + 1));
                assert_eq!(source.raw_os_error(), Some(libc::EIO));
            }
            Err(other) => panic!("{other}"),
        }
        assert!(page != 5 || good == 5, "page 5 is broken, those before it are not");
    }
    assert!(good >= 57, "{good} of 60: a fifth of all calls fails");
}

#[test]
fn the_same_seed_gives_the_same_order_and_another_seed_another() {
    let order = |seed| {
        let Case { file, .. } = Case::new(ReadMode::Direct);
        let cache = BlockCache::new(4 * BLOCK).unwrap();
        let mut engine = Engine::simulated(SimPlan { seed, max_delay: 9, ..SimPlan::default() });
        for page in 0..DEMAND_BUFFERS.into() {
            engine.submit(demand_read(&cache, &file, page)).unwrap();
        }
        finish(&mut engine, DEMAND_BUFFERS as usize).iter().map(|done| done.token).collect::<Vec<_>>()
    };
    assert_eq!(order(1), order(1));
    assert_ne!(order(1), order(2));
    assert_ne!(order(1), (0..DEMAND_BUFFERS.into()).collect::<Vec<_>>());
}

#[test]
fn a_full_engine_returns_background_reads_but_takes_demand_reads() {
    let Case { file, bytes, .. } = Case::new(ReadMode::Direct);
    let most = DEPTH - DEMAND_RESERVE;
    let cache = BlockCache::new((most + 3) * BLOCK).unwrap();
    let notifier = Notifier::new().unwrap();
    for (name, mut engine) in engines() {
        let mut guards = Vec::new();
        let mut background_read = |token: u64| {
            let mut guard = load(&cache, &file, (1 << 40) + token, &notifier);
            let mut memory = guard.take_slice().unwrap();
            memory.truncate(PAGE);
            guards.push(guard);
            Request::fill(1000 + token, &file, token * PAGE as u64, memory, Class::Background)
        };
        for token in 0..most as u64 {
            let request = background_read(token);
            engine.submit(request).unwrap_or_else(|_| panic!("{name} is full at {token}"));
        }
        let back = engine.submit(background_read(999)).expect_err("one read more than the depth");
        assert_eq!(back.token, 1999, "{name}");
        for page in 0..DEMAND_RESERVE as u64 {
            let read = demand_read(&cache, &file, page);
            engine.submit(read).unwrap_or_else(|_| panic!("{name} refused demand read {page}"));
        }
        assert_eq!((engine.in_flight(), engine.has_room(0)), (DEPTH, false), "{name}");
        for done in finish(&mut engine, DEPTH) {
            done.result.unwrap();
            let start = usize::try_from(done.token % 1000).unwrap() * PAGE;
            let own = *done.memory == bytes[start..start + PAGE];
            assert!(own, "{name}: token {} has bytes of another read", done.token);
        }
        assert_eq!(engine.in_flight(), 0, "{name}");
        engine.submit(back).expect("room again");
        finish(&mut engine, 1);
    }
}

#[test]
fn a_dropped_engine_returns_its_buffers_after_its_reads() {
    let Case { temp, file, .. } = Case::new(ReadMode::Direct);
    let cache = BlockCache::new(4 * BLOCK).unwrap();
    for _ in 0..20 {
        for (name, mut engine) in engines() {
            make_cold(&temp);
            for page in 0..DEMAND_BUFFERS.into() {
                let read = demand_read(&cache, &file, page);
                engine.submit(read).unwrap_or_else(|_| panic!("{name} refused {page}"));
            }
            engine.flush();
            drop(engine);
            let mut all: Vec<_> = (0..DEMAND_BUFFERS).map(|_| cache.demand_buffer().unwrap()).collect();
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
    let Case { temp, file, .. } = Case::new(ReadMode::Direct);
    let cache = BlockCache::new(4 * BLOCK).unwrap();
    for (name, mut engine) in engines().into_iter().take(2) {
        let fd = engine.event().unwrap().as_raw_fd();
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
            engine.submit(demand_read(&cache, &file, round)).unwrap();
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
fn an_idle_engine_is_not_readable() {
    for (name, engine) in engines().into_iter().take(2) {
        eprintln!("{engine:?}");
        assert!(!readable(engine.event().unwrap().as_raw_fd(), Duration::ZERO), "{name}");
    }
}

#[test]
fn the_budget_refuses_background_reads_of_the_disk_only() {
    let cache = BlockCache::new(8 * BLOCK).unwrap();
    let budget = Arc::new(IoBudget::new(vec![Notifier::new().unwrap()]).unwrap());
    let mut engine = Engine::new(Some((Arc::clone(&budget), Lane::Cpus))).unwrap();
    let (cold, warm) = (Case::new(ReadMode::Direct), Case::new(ReadMode::Cached));
    // Another reader has all of the budget.
    let mut others = Vec::new();
    others.extend(std::iter::from_fn(|| budget.background(Lane::Cpus, BLOCK)));
    assert!(!engine.allows(BLOCK));
    let page = |file, class| Request::fill(7, file, 0, cache.demand_buffer().unwrap(), class);
    assert_eq!(engine.submit(page(&cold.file, Class::Background)).unwrap_err().token, 7);
    for request in [page(&warm.file, Class::Background), page(&cold.file, Class::Demand)] {
        engine.submit(request).unwrap();
    }
    for done in finish(&mut engine, 2) {
        done.result.unwrap();
    }
    drop(others);
    assert_eq!(budget.in_flight(Lane::Cpus), 0);
    engine.submit(page(&cold.file, Class::Background)).unwrap();
    assert_eq!(budget.in_flight(Lane::Cpus), PAGE, "until the read is over");
    drop(engine);
    assert_eq!(budget.in_flight(Lane::Cpus), 0);
}
