// SPDX-License-Identifier: MIT OR Apache-2.0
//! A load from files of an image into memory that stands in for GPUs.

mod scene;
mod twins;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use rewake_bo_contents::LoadEvent;
use rewake_image_io::Notifier;
use rewake_image_io::io_budget::{IoBudget, Lane, PIECE};

use scene::{CHUNK, Scene, pattern};

#[test]
fn a_process_is_whole_when_the_last_of_its_buffers_is() {
    let sizes = [CHUNK, 4096, 65536, 5 * CHUNK, 3 * CHUNK, 2 * CHUNK];
    let told = Scene::new(&sizes).load_as_three();
    let place = |whole| told.iter().position(|told| *told == whole).unwrap();
    assert_eq!(place(LoadEvent::Process { process: 2 }), 0, "none to wait for");
    assert_eq!(told.len(), sizes.len() + 3);
    for process in [0, 1] {
        let buffers = (process..sizes.len()).step_by(2).map(|number| LoadEvent::Buffer { process, number });
        let last = buffers.map(place).max().unwrap();
        assert_eq!(place(LoadEvent::Process { process }), last + 1);
    }
}

#[test]
fn every_byte_comes_from_the_page_cache_and_from_the_disk() {
    let sizes = [4096, 5 * CHUNK, 65536, 3 * CHUNK + 4096, 4096, 12 * CHUNK, 4096];
    for cold in [false, true] {
        let scene = Scene::new(&sizes);
        for (buffer, size) in sizes.iter().enumerate() {
            scene.put(buffer, 0, &pattern(buffer, *size));
        }
        if cold {
            scene.chill();
        }
        let (report, mut whole) = scene.load(&[]);
        whole.sort_unstable();
        assert_eq!(whole, [0, 1, 2, 3, 4, 5, 6], "each is told of once");
        assert_eq!((report.moved.buffers, report.moved.zero), (7, 0));
        assert_eq!(
            report.ways,
            ["renderD127", "renderD128"]
                .map(|node| format!("{node}: copies by the CPU (memory in a GPU's place)"))
        );
        for (buffer, size) in sizes.iter().enumerate() {
            assert!(scene.memory(buffer) == pattern(buffer, *size), "buffer {buffer}, cold: {cold}");
        }
    }
}

#[test]
fn holes_of_a_file_are_zeros_whatever_was_there_before() {
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

#[test]
fn what_is_demanded_before_it_begins_is_whole_first_and_small_ones_before_large_ones() {
    // Those on GPU 7 are every other one.
    let sizes = [12 * CHUNK, 4096, 12 * CHUNK, 4096, 3 * CHUNK, 4096, 6 * CHUNK, 4096, 4096];
    let scene = Scene::new(&sizes);
    for (buffer, size) in sizes.iter().enumerate() {
        scene.put(buffer, 0, &pattern(buffer, *size));
    }
    let orders: Vec<Vec<usize>> = (0..5)
        .map(|_| scene.load(&[4, 2]).1.into_iter().filter(|buffer| buffer % 2 == 0).collect())
        .collect();
    // Chunks are begun in this order. Several are under way: one that stands still is overtaken, but not each time.
    let is_right = |order: &Vec<usize>| {
        let place = |buffer| order.iter().position(|of| *of == buffer);
        order[0] == 4 && place(2) < place(0) && place(8) < place(0) && place(0) < place(6)
    };
    assert!(orders.iter().any(is_right), "{orders:?}");
}

fn one_reactor() -> Arc<IoBudget> {
    Arc::new(IoBudget::new(vec![Notifier::new().unwrap()]).unwrap())
}

/// Bytes under way at most that nobody waits for, and turns of another, while threads wait for the disk. All of it comes.
fn beside_others() -> (usize, usize) {
    let sizes = [6 * CHUNK, 4096, 65536, 3 * CHUNK + 4096];
    let scene = Scene::new(&sizes);
    for (buffer, size) in sizes.iter().enumerate() {
        scene.put(buffer, 0, &pattern(buffer, *size));
    }
    scene.chill();
    let (pace, over) = (one_reactor(), AtomicBool::new(false));
    let (begins, begun) = channel();
    let done = std::thread::scope(|scope| {
        // Threads that wait for the disk without end, and who reads memory of CPUs.
        let others = scope.spawn(|| {
            let (mut most, mut turns) = (0, 0);
            while !over.load(Ordering::Relaxed) {
                pace.note_demand();
                let _ = begins.send(());
                most = most.max(pace.in_flight(Lane::Gpus));
                let begun = pace.allows(Lane::Cpus, PIECE).then(|| pace.begin(Lane::Cpus, PIECE));
                std::thread::sleep(Duration::from_micros(200));
                turns += usize::from(begun.is_some());
                begun.into_iter().for_each(|begun| pace.end(begun));
            }
            (most, turns)
        });
        begun.recv().unwrap();
        let ends = Sets(&over);
        scene.load_at(Some(Arc::clone(&pace)), &[], |_| ());
        drop(ends);
        others.join().unwrap()
    });
    for (buffer, size) in sizes.iter().enumerate() {
        assert!(scene.memory(buffer) == pattern(buffer, *size), "buffer {buffer}");
    }
    assert_eq!(pace.in_flight(Lane::Gpus), 0);
    done
}

/// Sets a flag when it is dropped: whoever waits for that ends when this thread panics, too.
struct Sets<'a>(&'a AtomicBool);

impl Drop for Sets<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn while_threads_wait_for_the_disk_it_comes_in_pieces_and_leaves_turns_to_others() {
    // Nobody waits any more where the thread that does stands still, but not each time.
    let seen: Vec<(usize, usize)> = (0..5).map(|_| beside_others()).collect();
    assert!(seen.iter().any(|(most, turns)| *most <= 8 * PIECE && *turns > 0), "bytes and turns: {seen:?}");
}

/// The order in which buffers become whole, of which one is demanded, while another's piece does not end before that one is whole.
fn order_beside_another(demanded: usize) -> Vec<usize> {
    let sizes = [CHUNK, 4096, 2 * CHUNK, 65536];
    let scene = Scene::new(&sizes);
    for (buffer, size) in sizes.iter().enumerate() {
        scene.put(buffer, 0, &pattern(buffer, *size));
    }
    scene.chill();
    let (pace, over) = (one_reactor(), AtomicBool::new(false));
    let mut begun = Some(pace.begin(Lane::Cpus, 8 * PIECE));
    let (begins, waits) = channel();
    let mut whole = Vec::new();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                pace.note_demand();
                let _ = begins.send(());
                std::thread::sleep(Duration::from_micros(200));
            }
        });
        waits.recv().unwrap();
        let _ends = Sets(&over);
        scene.load_at(Some(Arc::clone(&pace)), &[demanded], |buffer| {
            whole.push(buffer);
            if buffer == demanded {
                over.store(true, Ordering::Relaxed);
                begun.take().into_iter().for_each(|begun| pace.end(begun));
            }
        });
    });
    whole
}

#[test]
fn what_is_demanded_waits_for_no_turn() {
    // Nobody waits any more where the thread that does stands still, but not each time.
    let orders: Vec<Vec<usize>> = (0..5).map(|_| order_beside_another(2)).collect();
    assert!(orders.iter().any(|order| order[0] == 2), "{orders:?}");
    assert!(orders.iter().all(|order| order.len() == 4), "{orders:?}");
}

#[test]
fn what_is_read_does_not_wait_for_all_that_is_only_filled() {
    let comes_early = || {
        // All but one are holes, and that one in part: it is copied from staging memory.
        let scene = Scene::new(&[CHUNK; 160]);
        let (demanded, data) = (80, pattern(1, 4096));
        scene.put(demanded, CHUNK / 2, &data);
        scene.chill();
        let whole = scene.load(&[demanded]).1;
        assert_eq!(scene.memory(demanded)[CHUNK / 2..][..data.len()], data);
        let of_7: Vec<usize> = whole.into_iter().filter(|buffer| buffer % 2 == 0).collect();
        let place = of_7.iter().position(|buffer| *buffer == demanded).unwrap();
        eprintln!("{place} of {}", of_7.len());
        place < of_7.len() / 2
    };
    // A slow read makes it late too, but not each time.
    assert!((0..5).any(|_| comes_early()), "it waits");
}

#[test]
fn a_buffer_that_is_not_handed_over_is_left_alone() {
    let mut scene = Scene::new(&[8192, 4096, 3 * CHUNK]);
    scene.put(0, 0, &pattern(0, 8192));
    scene.put(2, 0, &pattern(2, 3 * CHUNK));
    let kept = scene.memfds[2].take();
    let (_, mut whole) = scene.load(&[2]);
    whole.sort_unstable();
    assert_eq!(whole, [0, 1]);
    scene.memfds[2] = kept;
    assert!(scene.memory(2) == vec![0xee; 3 * CHUNK]);
    assert!(scene.memory(0) == pattern(0, 8192));
}
