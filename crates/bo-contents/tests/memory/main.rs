// SPDX-License-Identifier: MIT OR Apache-2.0
//! Loads files of an image into memory that takes the place of GPUs.

mod arriving;
mod duplicates;
mod scene;
mod sealed;

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use rewake_bo_contents::LoadEvent;
use rewake_image_io::io_budget::{IoBudget, Lane, PIECE};
use rewake_process::Notifier;

use scene::{CHUNK, Scene, pattern};

#[test]
fn a_process_is_complete_after_its_last_buffer() {
    let sizes = [CHUNK, 4096, 65536, 5 * CHUNK, 3 * CHUNK, 2 * CHUNK];
    let events = Scene::new(&sizes).load_as_three();
    let place = |complete| events.iter().position(|events| *events == complete).unwrap();
    assert_eq!(place(LoadEvent::Process { process: 2 }), 0, "it has no buffers");
    assert_eq!(events.len(), sizes.len() + 3);
    for process in [0, 1] {
        let buffers = (process..sizes.len()).step_by(2).map(|number| LoadEvent::Buffer { process, number });
        let last = buffers.map(place).max().unwrap();
        assert_eq!(place(LoadEvent::Process { process }), last + 1);
    }
}

#[test]
fn every_byte_is_loaded_from_the_page_cache_or_the_disk() {
    let sizes = [4096, 5 * CHUNK, 65536, 3 * CHUNK + 4096, 4096, 12 * CHUNK, 4096];
    for cold in [false, true] {
        let scene = Scene::new(&sizes);
        for (buffer, size) in sizes.iter().enumerate() {
            scene.put(buffer, 0, &pattern(buffer, *size));
        }
        if cold {
            scene.chill();
        }
        let (report, mut complete) = scene.load(&[]);
        complete.sort_unstable();
        assert_eq!(complete, [0, 1, 2, 3, 4, 5, 6], "each is reported once");
        assert_eq!((report.moved.buffers, report.moved.zero), (7, 0));
        assert_eq!(
            report.paths,
            ["renderD127", "renderD128"]
                .map(|node| format!("{node}: copies by the CPU (memory in a GPU's place)"))
        );
        for (buffer, size) in sizes.iter().enumerate() {
            assert!(scene.memory(buffer) == pattern(buffer, *size), "buffer {buffer}, cold: {cold}");
        }
    }
}

#[test]
fn holes_of_a_file_overwrite_memory_with_zeros() {
    let size = 4 * CHUNK;
    let scene = Scene::new(&[size, 4096]);
    let data = pattern(1, 300_000);
    scene.put(0, CHUNK + 123_456, &data);
    scene.chill();
    let (report, _) = scene.load(&[]);
    assert!(report.moved.zero > 3 * CHUNK as u64, "{report}");
    let mut right = vec![0; size];
    right[CHUNK + 123_456..][..data.len()].copy_from_slice(&data);
    assert!(scene.memory(0) == right);
    assert_eq!(scene.memory(1), [0; 4096]);
}

/// A chunk is read in 16 ranges at most, so that holes between the last ones are read, too.
#[test]
fn a_chunk_with_more_holes_than_reads_is_loaded_whole() {
    let scene = Scene::new(&[CHUNK, 4096]);
    let (data, mut right) = (pattern(0, 4096), vec![0; CHUNK]);
    for at in (0..CHUNK).step_by(CHUNK / 32) {
        scene.put(0, at, &data);
        right[at..][..data.len()].copy_from_slice(&data);
    }
    scene.load(&[]);
    assert!(scene.memory(0) == right);
}

#[test]
fn a_process_is_not_resident_from_an_image_that_was_written_meanwhile() {
    // All are read before the first is reported, in all likelihood, and no read finds the change then. The
    // new length shows even where times of files are coarse.
    let scene = Scene::new(&[4096; 8]);
    let (_, error) = scene.load_fails(|_| {
        let file = File::options().append(true).open(scene.path(7)).unwrap();
        file.set_len(file.metadata().unwrap().len() + 4096).unwrap();
    });
    assert!(error.contains("changed while it was served"), "{error}");
}

#[test]
fn demanded_buffers_are_first_then_small_ones_then_large_ones() {
    // The even buffers are on GPU 7. The demanded ones have more chunks than there are slots (16).
    let sizes = [12 * CHUNK, 4096, 20 * CHUNK, 4096, 3 * CHUNK, 4096, 6 * CHUNK, 4096, 4096];
    let scene = Scene::new(&sizes);
    for (buffer, size) in sizes.iter().enumerate() {
        scene.put(buffer, 0, &pattern(buffer, *size));
    }
    scene.sync();
    let orders: Vec<Vec<usize>> = (0..10)
        .map(|_| scene.load(&[4, 2]).1.into_iter().filter(|buffer| buffer % 2 == 0).collect())
        .collect();
    // Chunks start in this order: the unit tests of the schedule prove it. A chunk whose read is slow is
    // overtaken by any number of others, so each pair is in order in some load and not in all.
    for (sooner, later) in [(4, 2), (2, 0), (8, 0), (0, 6)] {
        let place = |order: &[usize], buffer| order.iter().position(|of| *of == buffer);
        let in_order = |order: &Vec<usize>| place(order, sooner) < place(order, later);
        assert!(orders.iter().any(in_order), "{sooner} before {later}: {orders:?}");
    }
}

fn one_reactor() -> Arc<IoBudget> {
    Arc::new(IoBudget::new(vec![Notifier::new().unwrap()]).unwrap())
}

/// Loads while threads wait for the disk. Returns the most background bytes in flight, and the turns of
/// another reader.
fn load_beside_demands() -> (usize, usize) {
    let sizes = [6 * CHUNK, 4096, 65536, 3 * CHUNK + 4096];
    let scene = Scene::new(&sizes);
    for (buffer, size) in sizes.iter().enumerate() {
        scene.put(buffer, 0, &pattern(buffer, *size));
    }
    scene.chill();
    let (budget, over) = (one_reactor(), AtomicBool::new(false));
    let (started, start) = channel();
    let done = std::thread::scope(|scope| {
        // This thread demands the disk without end, and reads CPU memory in the background.
        let others = scope.spawn(|| {
            let (mut most, mut turns) = (0, 0);
            while !over.load(Ordering::Relaxed) {
                drop(budget.demand());
                let _ = started.send(());
                most = most.max(budget.in_flight(Lane::Gpus));
                let permit = budget.background(Lane::Cpus, PIECE);
                std::thread::sleep(Duration::from_micros(200));
                turns += usize::from(permit.is_some());
            }
            (most, turns)
        });
        start.recv().unwrap();
        let ends = Sets(&over);
        scene.load_with_budget(Some(Arc::clone(&budget)), &[], |_| ());
        drop(ends);
        others.join().unwrap()
    });
    for (buffer, size) in sizes.iter().enumerate() {
        assert!(scene.memory(buffer) == pattern(buffer, *size), "buffer {buffer}");
    }
    assert_eq!(budget.in_flight(Lane::Gpus), 0);
    done
}

/// Sets a flag when it is dropped, also by a panic, so that the thread that polls it ends.
struct Sets<'a>(&'a AtomicBool);

impl Drop for Sets<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn background_loads_beside_demands_use_pieces_and_take_turns() {
    // A demanding thread that the system suspends leaves the disk idle, but not every time.
    let seen: Vec<(usize, usize)> = (0..5).map(|_| load_beside_demands()).collect();
    assert!(seen.iter().any(|(most, turns)| *most <= 8 * PIECE && *turns > 0), "bytes and turns: {seen:?}");
}

/// Returns the order in which buffers become resident. One of them is demanded, and a permit of another
/// reader is held until it is resident.
fn order_with_held_permit(demanded: usize) -> Vec<usize> {
    let sizes = [CHUNK, 4096, 2 * CHUNK, 65536];
    let scene = Scene::new(&sizes);
    for (buffer, size) in sizes.iter().enumerate() {
        scene.put(buffer, 0, &pattern(buffer, *size));
    }
    scene.chill();
    let (budget, over) = (one_reactor(), AtomicBool::new(false));
    let mut permit = budget.background(Lane::Cpus, 8 * PIECE);
    assert!(permit.is_some());
    let (started, start) = channel();
    let mut complete = Vec::new();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                drop(budget.demand());
                let _ = started.send(());
                std::thread::sleep(Duration::from_micros(200));
            }
        });
        start.recv().unwrap();
        let _ends = Sets(&over);
        scene.load_with_budget(Some(Arc::clone(&budget)), &[demanded], |buffer| {
            complete.push(buffer);
            if buffer == demanded {
                over.store(true, Ordering::Relaxed);
                drop(permit.take());
            }
        });
    });
    complete
}

#[test]
fn a_demand_waits_for_no_turn() {
    // A demanding thread that the system suspends leaves the disk idle, but not every time.
    let orders: Vec<Vec<usize>> = (0..5).map(|_| order_with_held_permit(2)).collect();
    assert!(orders.iter().any(|order| order[0] == 2), "{orders:?}");
    assert!(orders.iter().all(|order| order.len() == 4), "{orders:?}");
}

#[test]
fn a_copy_does_not_wait_for_all_fills() {
    let comes_early = || {
        // All buffers are holes, except a part of one, which is copied from staging memory.
        let scene = Scene::new(&[CHUNK; 160]);
        let (demanded, data) = (80, pattern(1, 4096));
        scene.put(demanded, CHUNK / 2, &data);
        scene.chill();
        let complete = scene.load(&[demanded]).1;
        assert_eq!(scene.memory(demanded)[CHUNK / 2..][..data.len()], data);
        let of_7: Vec<usize> = complete.into_iter().filter(|buffer| buffer % 2 == 0).collect();
        let place = of_7.iter().position(|buffer| *buffer == demanded).unwrap();
        eprintln!("{place} of {}", of_7.len());
        place < of_7.len() / 2
    };
    // A slow read also makes it late, but not every time.
    assert!((0..5).any(|_| comes_early()), "the copy was after the fills");
}

#[test]
fn a_buffer_without_a_dma_buf_is_not_loaded() {
    let mut scene = Scene::new(&[8192, 4096, 3 * CHUNK]);
    scene.put(0, 0, &pattern(0, 8192));
    scene.put(2, 0, &pattern(2, 3 * CHUNK));
    let kept = scene.memfds[2].take();
    let (_, mut complete) = scene.load(&[2]);
    complete.sort_unstable();
    assert_eq!(complete, [0, 1]);
    scene.memfds[2] = kept;
    assert!(scene.memory(2) == vec![0xee; 3 * CHUNK]);
    assert!(scene.memory(0) == pattern(0, 8192));
}
