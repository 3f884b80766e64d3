// SPDX-License-Identifier: MIT OR Apache-2.0
//! What an engine accepts, releases and refuses.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::os::fd::AsFd as _;

use gpu_app::gpu::Gpus;
use rewake_sdma_copy::{Error, Transfer};
use softgpu_tests::isolated;

use crate::copy_engine::{ALL, MIB, SMALL, Through, engine, import, place, run, soon};

/// Counts what a thread allocates.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: the system's allocator does all of it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise, and `alloc` gave it.
        unsafe { System.dealloc(memory, layout) };
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

#[test]
fn a_bo_imported_twice_is_released_after_both_and_its_copies() {
    isolated(1, |_| {
        let gpus = Gpus::open(1).unwrap();
        for through in [Through::Pages, Through::Cpu] {
            let (staging, mut engine) = engine(&gpus, through, SMALL);
            let buffer = gpus.host(256 << 10).unwrap();
            let (bo, again) = (import(&mut engine, &buffer), import(&mut engine, &buffer));
            assert_eq!(bo, again);
            let load = [Transfer::Load { bo, at: 0, from: place(&staging, 0, 0), bytes: 256 << 10 }];
            engine.release(bo).unwrap();
            let ticket = engine.submit(&load).unwrap();
            engine.release(again).unwrap();
            assert!(matches!(engine.submit(&load), Err(Error::Bo { .. })), "released");
            assert!(matches!(engine.release(bo), Err(Error::Bo { .. })), "released");
            engine.wait(ticket, soon()).unwrap();
            let new = import(&mut engine, &buffer);
            assert_ne!(new, bo);
            run(&mut engine, &[Transfer::Fill { bo: new, at: 0, bytes: 4, word: 1 }]);
        }
    });
}

#[test]
fn memory_that_was_released_can_be_freed() {
    isolated(1, |_| {
        let gpus = Gpus::open(1).unwrap();
        let device = gpus.device(0);
        let (_staging, mut engine) = engine(&gpus, Through::Pages, SMALL);
        let before = device.available().unwrap();
        for in_flight in [false, true] {
            let buffer = gpus.local(0, 64 * MIB).unwrap();
            let bo = import(&mut engine, &buffer);
            let ticket = engine.submit(&[Transfer::Fill { bo, at: 0, bytes: 64 * MIB, word: 7 }]).unwrap();
            if in_flight {
                engine.release(bo).unwrap();
                engine.wait(ticket, soon()).unwrap();
            } else {
                engine.wait(ticket, soon()).unwrap();
                engine.release(bo).unwrap();
            }
            drop(buffer);
            // The driver releases a submission's buffers in the background, long after its fence was
            // signalled.
            let released = rewake_testkit::soon(|| device.available().unwrap() == before);
            assert!(released, "in flight: {in_flight}");
        }
    });
}

#[test]
fn invalid_transfers_are_refused_before_any_copy() {
    isolated(1, |_| {
        let gpus = Gpus::open(1).unwrap();
        for through in ALL {
            let (staging, mut engine) = engine(&gpus, through, SMALL);
            let buffer = gpus.host(8192).unwrap();
            let dmabuf = buffer.export().unwrap();
            let error = engine.import(dmabuf.as_fd(), 8193).unwrap_err();
            assert!(matches!(error, Error::Size { size: 8192, wanted: 8193, .. }), "{error}");
            let file = std::fs::File::open("/proc/self/exe").unwrap();
            assert!(engine.import(file.as_fd(), 1).is_err());
            let bo = engine.import(dmabuf.as_fd(), 8192).unwrap();
            let from = place(&staging, 1, 0);
            let good = Transfer::Load { bo, at: 0, from, bytes: 8192 };
            staging.write(from, &[0xaa; 8192]);
            for bad in [
                Transfer::Load { bo, at: 1, from, bytes: 8192 },
                Transfer::Save { bo, at: u64::MAX, to: from, bytes: 8192 },
                Transfer::Load { bo, at: 0, from: place(&staging, 0, (256 << 10) - 1), bytes: 2 },
                Transfer::Load { bo, at: 0, from, bytes: 0 },
                Transfer::Fill { bo, at: 2, bytes: 4, word: 0 },
                Transfer::Fill { bo, at: 0, bytes: 6, word: 0 },
                Transfer::Fill { bo, at: 8192, bytes: 4, word: 0 },
            ] {
                let error = engine.submit(&[good, bad]).unwrap_err();
                assert!(matches!(error, Error::Range { .. }), "{through:?}, {bad:?}: {error}");
            }
            assert_eq!((engine.in_flight(), engine.finished().unwrap().count()), (0, 0));
            assert_eq!(buffer.cpu().load64(0), 0, "{through:?}");
            run(&mut engine, &[good]);
            assert_eq!(buffer.cpu().load64(8184), 0xaaaa_aaaa_aaaa_aaaa);
        }
    });
}

#[test]
fn an_engine_closes_what_it_opens() {
    isolated(1, |_| {
        let gpus = Gpus::open(1).unwrap();
        let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let mappings = || {
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            maps.lines().filter(|line| line.contains("rewake staging") || line.contains("/dev/dri")).count()
        };
        let before = (descriptors(), mappings());
        for through in ALL {
            let (staging, mut engine) = engine(&gpus, through, SMALL);
            let buffer = gpus.host(8192).unwrap();
            let bo = import(&mut engine, &buffer);
            let from = place(&staging, 0, 0);
            engine.submit(&[Transfer::Load { bo, at: 0, from, bytes: 8192 }]).unwrap();
            drop((engine, staging, buffer));
            assert_eq!((descriptors(), mappings()), before, "{through:?}, with a submission in flight");
        }
    });
}

#[test]
fn a_warm_engine_allocates_nothing() {
    isolated(1, |_| {
        let gpus = Gpus::open(1).unwrap();
        let (staging, mut engine) = engine(&gpus, Through::Pages, SMALL);
        let buffer = gpus.host(256 << 10).unwrap();
        let bo = import(&mut engine, &buffer);
        let transfers = [4096, 8192, 100].map(|bytes| Transfer::Load {
            bo,
            at: bytes,
            from: place(&staging, 0, 0),
            bytes,
        });
        let mut round = || {
            for _ in 0..engine.room().min(8) {
                engine.submit(&transfers).unwrap();
            }
            while engine.in_flight() > 0 {
                engine.finished().unwrap().for_each(|done| done.result.unwrap());
            }
        };
        (0..4).for_each(|_| round());
        let before = ALLOCATIONS.get();
        (0..20).for_each(|_| round());
        assert_eq!(ALLOCATIONS.get() - before, 0);
    });
}
