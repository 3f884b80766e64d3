// SPDX-License-Identifier: MIT OR Apache-2.0
//! Buffers that have the same bytes.

use std::sync::atomic::{AtomicU64, Ordering};

use rewake_bo_contents::{BackgroundLoad, Candidates, LoadEvent, PagesFile, Process};

use crate::scene::{CHUNK, Scene, pattern};

/// Sets of buffers with the same bytes, by the files' place and the image's number.
fn same(files: &[Vec<PagesFile>]) -> Vec<Vec<(usize, usize)>> {
    let same = Candidates::of(files).unwrap().compare(|| true).unwrap();
    assert!(!same.cut_off);
    same.sets
}

/// Buffers 0, 3 and 5 are said to have the same bytes, and their files have others: whose bytes it is that all have shows what was read.
fn said_to_be_the_same() -> (Scene, Vec<usize>) {
    let large = 3 * CHUNK + 4096;
    let sizes = vec![large, 4096, 5 * CHUNK, large, 65536, large, 2 * CHUNK];
    let scene = Scene::new(&sizes);
    for (buffer, size) in sizes.iter().enumerate() {
        scene.put(buffer, 0, &pattern(buffer, *size));
    }
    (scene, sizes)
}

fn has(scene: &Scene, sizes: &[usize], bytes_of: &[usize]) {
    for (buffer, of) in bytes_of.iter().enumerate() {
        assert!(
            scene.memory(buffer) == pattern(*of, sizes[buffer]),
            "buffer {buffer} has others than {of}'s"
        );
    }
}

#[test]
fn the_bytes_of_one_are_read_and_copied_to_all() {
    for cold in [false, true] {
        let (scene, sizes) = said_to_be_the_same();
        if cold {
            scene.chill();
        }
        let mut whole = Vec::new();
        let report = scene.load_with(None, &[], &[&[5, 0, 3]], |buffer| whole.push(buffer));
        // That of the GPU with the fewest bytes is read: GPU 8 has 1, 3 and 5.
        has(&scene, &sizes, &[3, 1, 2, 3, 4, 3, 6]);
        whole.sort_unstable();
        assert_eq!(whole, [0, 1, 2, 3, 4, 5, 6], "each is told of once");
        assert_eq!(report.moved.same, 2 * sizes[0] as u64, "{report}");
        let bytes = sizes.iter().sum::<usize>() as u64;
        assert_eq!(report.moved.bytes, bytes, "{report}");
        // Whole pages, some at two buffers' border, others at two chunks'.
        let pages = (bytes - 2 * sizes[0] as u64)..=(bytes - 2 * sizes[0] as u64 + 16 * 4096);
        assert!(pages.contains(&report.moved.read), "{:?}", report.moved);
        assert_eq!(report.moved.zero, 0, "{report}");
    }
}

#[test]
fn one_that_is_demanded_comes_first_and_all_with_it() {
    let order = || {
        let (scene, sizes) = said_to_be_the_same();
        scene.chill();
        let mut whole = Vec::new();
        // The other one is the last of its GPU.
        scene.load_with(None, &[0], &[&[0, 5]], |buffer| whole.push(buffer));
        has(&scene, &sizes, &[5, 1, 2, 3, 4, 5, 6]);
        // Small ones are in its chunks.
        whole.into_iter().filter(|buffer| sizes[*buffer] > CHUNK).collect::<Vec<_>>()
    };
    // Several chunks are under way: one that stands still is overtaken, but not each time.
    let orders: Vec<Vec<usize>> = (0..5).map(|_| order()).collect();
    assert!(orders.iter().any(|order| order[..2] == [5, 0]), "{orders:?}");
}

#[test]
fn zeros_are_filled_into_all() {
    let (size, data) = (4 * CHUNK, pattern(9, 300_000));
    let scene = Scene::new(&[size, size, 4096]);
    for buffer in [0, 1] {
        scene.put(buffer, CHUNK + 123_456, &data);
    }
    scene.chill();
    let of_one = scene.load_with(None, &[], &[], |_| ()).moved;
    let of_both = scene.load_with(None, &[], &[&[0, 1]], |_| ()).moved;
    // As many as without sets: each buffer's, however they came to it.
    assert_eq!((of_both.bytes, of_both.zero), (of_one.bytes, of_one.zero));
    assert!(of_both.zero >= 2 * (3 * CHUNK - 4096) as u64 && of_both.read < of_one.read, "{of_both:?}");
    let mut right = vec![0; size];
    right[CHUNK + 123_456..][..data.len()].copy_from_slice(&data);
    assert!(scene.memory(0) == right && scene.memory(1) == right);
}

#[test]
fn what_is_not_loaded_here_is_not_read_for_others() {
    let (mut scene, sizes) = said_to_be_the_same();
    let kept = scene.memory(3);
    let memfd = scene.memfds[3].take();
    scene.load_with(None, &[0], &[&[3, 0, 5]], |buffer| assert_ne!(buffer, 3));
    scene.memfds[3] = memfd;
    assert!(scene.memory(3) == kept, "it is left alone");
    assert!(scene.memory(0) == pattern(5, sizes[0]) && scene.memory(5) == pattern(5, sizes[5]));
}

#[test]
fn sets_that_make_no_sense_make_no_difference() {
    let (scene, sizes) = said_to_be_the_same();
    // Of other sizes, alone, twice in one, in two, unknown.
    let sets: [&[usize]; 6] = [&[0, 2, 4], &[1], &[6, 6], &[0, 3], &[3, 5], &[5, 70]];
    let report = scene.load_with(None, &[3, 5], &sets, |_| ());
    has(&scene, &sizes, &[3, 1, 2, 3, 4, 5, 6]);
    assert_eq!(report.moved.same, sizes[0] as u64);
}

#[test]
fn those_with_the_same_bytes_are_found() {
    let sizes = [3 * CHUNK, 3 * CHUNK, 65536, 3 * CHUNK, 65536, 3 * CHUNK, 4096, 4096, 3 * CHUNK, 3 * CHUNK];
    let scene = Scene::new(&sizes);
    for buffer in [0, 3, 5] {
        scene.put(buffer, 0, &pattern(7, sizes[buffer]));
    }
    // One byte differs, where no sample is; two of 4 KiB; a hole in two.
    scene.put(5, CHUNK + 777, &[0]);
    for buffer in [2, 4, 6, 7] {
        scene.put(buffer, 0, &pattern(8, sizes[buffer]));
    }
    scene.put(1, 0, &pattern(9, sizes[1]));
    let found = || same(&[Vec::from(scene.files())]);
    assert_eq!(found(), [vec![(0, 0), (0, 3)], vec![(0, 2), (0, 4)]]);
    scene.chill();
    assert_eq!(found(), [vec![(0, 0), (0, 3)], vec![(0, 2), (0, 4)]]);
    // Two processes with one image: each buffer has its twin.
    let two = same(&[Vec::from(scene.files()), Vec::from(scene.files())]);
    assert_eq!(two.len(), 4, "{two:?}");
    assert_eq!(two[0], [(0, 0), (0, 3), (1, 0), (1, 3)]);
}

#[test]
fn what_was_found_before_the_time_was_over_is_kept() {
    // The largest are compared first, by one thread or several.
    let sizes = [6 * CHUNK, 6 * CHUNK, 2 * CHUNK, 2 * CHUNK, CHUNK, CHUNK];
    let scene = Scene::new(&sizes);
    for (buffer, size) in sizes.iter().enumerate() {
        scene.put(buffer, 0, &pattern(buffer / 2, *size));
    }
    let files = [Vec::from(scene.files())];
    let alike = || Candidates::of(&files).unwrap();
    assert_eq!(alike().bytes(), sizes.iter().sum::<usize>() as u64);
    let same_within = |steps: u64| {
        let taken = AtomicU64::new(0);
        alike().compare(|| taken.fetch_add(1, Ordering::Relaxed) < steps).unwrap()
    };
    let all = [vec![(0, 0), (0, 1)], vec![(0, 2), (0, 3)], vec![(0, 4), (0, 5)]];
    let steps = ((6 + 2 + 1) * CHUNK as u64) >> 20;
    for within in 0..steps {
        let same = same_within(within);
        assert!(same.cut_off && same.sets.len() < all.len(), "{within}: {same:?}");
        assert!(same.sets.iter().all(|set| all.contains(set)), "{within}: {same:?}");
    }
    assert!((0..steps).any(|within| !same_within(within).sets.is_empty()));
    let same = same_within(steps);
    assert_eq!((&same.sets[..], same.cut_off), (&all[..], false));
}

#[test]
fn processes_that_have_the_same_are_whole_together() {
    let sizes = [3 * CHUNK, 65536, 2 * CHUNK + 4096, 65536];
    let scene = Scene::new(&[sizes, sizes].concat());
    for (buffer, size) in sizes.iter().enumerate() {
        scene.put(buffer, 0, &pattern(buffer, *size));
        // What is not to be seen.
        scene.put(4 + buffer, 0, &pattern(9, *size));
    }
    // Two processes of one image: the first four buffers are the one's, the others the other's.
    let files = scene.files();
    let of = |process: usize| {
        let own = |number: usize| (number / 4 == process).then(|| scene.memfds[number].as_ref());
        let memfds = (0..8).map(own);
        memfds.map(|memfd| memfd??.try_clone().ok()).collect::<Vec<_>>()
    };
    let dmabufs = [of(0), of(1)];
    let processes = dmabufs.each_ref().map(|dmabufs| Process { files: &files, dmabufs });
    let mut told = Vec::new();
    let loading = BackgroundLoad::into_memory(&processes, &scene.device, None).unwrap();
    let loading = loading.twins((0..4).map(|number| vec![(0, number), (1, 4 + number)]).collect());
    let desk = loading.desk();
    loading.run(|whole| told.push(whole)).unwrap().unwrap();
    assert_eq!(told.len(), 8 + 2);
    for process in [0, 1] {
        let place = |whole| told.iter().position(|told| *told == whole).unwrap();
        let last = place(LoadEvent::Process { process });
        for (of, size) in sizes.iter().enumerate() {
            let number = 4 * process + of;
            assert!(place(LoadEvent::Buffer { process, number }) < last, "{told:?}");
            assert!(scene.memory(number) == pattern(of, *size));
        }
    }
    assert!(desk.progress().iter().all(|of| of.resident == of.all && of.all > 0), "{:?}", desk.progress());
}

#[test]
fn of_very_many_with_the_same_bytes_several_are_read() {
    let scene = Scene::new(&[65536; 100]);
    let right = pattern(1, 65536);
    (0..100).for_each(|buffer| scene.put(buffer, 0, &right));
    let all: Vec<usize> = (0..100).collect();
    let report = scene.load_with(None, &[], &[&all], |_| ());
    assert!(all.iter().all(|buffer| scene.memory(*buffer) == right));
    // 17 have one's bytes.
    assert_eq!(report.moved.same, (100 - 6) * 65536);
}

/// Numbers below a limit, from a seed.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).unwrap() % limit
    }
}

/// Buffers of few sizes and contents, some of which have holes, some of which are demanded: how many were spared.
fn play(seed: u64) -> u64 {
    let mut dice = Dice(seed);
    let kinds = [65536, CHUNK - 4096, CHUNK + 65536, 3 * CHUNK];
    let sizes: Vec<usize> = (0..2 + dice.below(14)).map(|_| kinds[dice.below(kinds.len())]).collect();
    let scene = Scene::new(&sizes);
    let mut right = Vec::new();
    for (buffer, size) in sizes.iter().enumerate() {
        let mut bytes = pattern(dice.below(3), *size);
        let hole = dice.below(3) * 65536;
        bytes[..hole.min(*size)].fill(0);
        scene.put(buffer, hole.min(*size), &bytes[hole.min(*size)..]);
        right.push(bytes);
    }
    if dice.below(2) == 0 {
        scene.chill();
    }
    let sets: Vec<Vec<usize>> = same(&[Vec::from(scene.files())])
        .into_iter()
        .map(|set| set.into_iter().map(|(_, buffer)| buffer).collect())
        .collect();
    let demanded: Vec<usize> = (0..dice.below(4)).map(|_| dice.below(sizes.len())).collect();
    let sets: Vec<&[usize]> = sets.iter().map(Vec::as_slice).collect();
    let mut whole = Vec::new();
    let report = scene.load_with(None, &demanded, &sets, |buffer| whole.push(buffer));
    for (buffer, bytes) in right.iter().enumerate() {
        assert!(scene.memory(buffer) == *bytes, "buffer {buffer} of seed {seed}");
    }
    whole.sort_unstable();
    assert_eq!(whole, (0..sizes.len()).collect::<Vec<_>>(), "seed {seed}");
    // What is all zeros is in no set; all else that has an equal one is spared but once.
    let bytes_of = |buffer: &usize| &right[*buffer];
    let zeros = |buffer: &usize| bytes_of(buffer).iter().all(|byte| *byte == 0);
    let numbers = || (0..sizes.len()).filter(|buffer| !zeros(buffer));
    let has_earlier =
        |buffer: &usize| numbers().any(|other| other < *buffer && bytes_of(&other) == bytes_of(buffer));
    let spared: usize = numbers().filter(has_earlier).map(|buffer| sizes[buffer]).sum();
    assert_eq!(report.moved.same, spared as u64, "seed {seed}: {sets:?}");
    let edges = sizes.len() * 16 * 4096;
    assert!(report.moved.read <= (sizes.iter().sum::<usize>() - spared + edges) as u64, "seed {seed}");
    report.moved.same
}

#[test]
fn every_byte_is_right_whatever_is_the_same() {
    let spared: u64 = (0..40).map(play).sum();
    assert!(spared > 40 * CHUNK as u64, "{spared}");
}
