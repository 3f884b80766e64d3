// SPDX-License-Identifier: MIT OR Apache-2.0
//! Loads of buffers that have the same bytes.

use rewake_bo_contents::{BackgroundLoad, LoadEvent, ProcessBuffers, find_duplicates};
use rewake_manifest::{ImageChecksums, read_checksums};
use rewake_testkit::Random;

use crate::scene::{CHUNK, Scene, pattern};

/// Seals the image, which `processes` processes have. Returns the sets of buffers with the same bytes.
fn same(scene: &Scene, processes: usize) -> Vec<Vec<(usize, usize)>> {
    scene.seal();
    let (files, sealed) = (scene.files(), read_checksums(&scene.images()).unwrap().unwrap());
    let process = ProcessBuffers { files: &files, dmabufs: &[] };
    find_duplicates(&vec![process; processes], &sealed)
}

/// Creates a scene whose buffers 0, 3 and 5 are listed as duplicates, although their bytes differ. So the
/// bytes in memory show which buffer was read.
fn listed_as_duplicates() -> (Scene, Vec<usize>) {
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
            "buffer {buffer} does not have {of}'s bytes"
        );
    }
}

#[test]
fn the_bytes_of_one_duplicate_are_read_and_copied_to_all() {
    for cold in [false, true] {
        let (scene, sizes) = listed_as_duplicates();
        if cold {
            scene.chill();
        }
        let mut complete = Vec::new();
        let report = scene.load_with(None, &[], &[&[5, 0, 3]], |buffer| complete.push(buffer));
        // The buffer of the GPU with the fewest bytes is read: GPU 8 has 1, 3 and 5.
        has(&scene, &sizes, &[3, 1, 2, 3, 4, 3, 6]);
        complete.sort_unstable();
        assert_eq!(complete, [0, 1, 2, 3, 4, 5, 6], "each is reported once");
        assert_eq!(report.moved.same, 2 * sizes[0] as u64, "{report}");
        let bytes = sizes.iter().sum::<usize>() as u64;
        assert_eq!(report.moved.bytes, bytes, "{report}");
        // Reads are complete pages: some at the border of two buffers, others at the border of two chunks.
        let pages = (bytes - 2 * sizes[0] as u64)..=(bytes - 2 * sizes[0] as u64 + 16 * 4096);
        assert!(pages.contains(&report.moved.read), "{:?}", report.moved);
        assert_eq!(report.moved.zero, 0, "{report}");
    }
}

#[test]
fn a_demanded_duplicate_and_its_source_are_loaded_first() {
    let order = || {
        let (scene, sizes) = listed_as_duplicates();
        scene.chill();
        let mut complete = Vec::new();
        // The source is the last buffer of its GPU.
        scene.load_with(None, &[0], &[&[0, 5]], |buffer| complete.push(buffer));
        has(&scene, &sizes, &[5, 1, 2, 3, 4, 5, 6]);
        // Its chunks hold small buffers too.
        complete.into_iter().filter(|buffer| sizes[*buffer] > CHUNK).collect::<Vec<_>>()
    };
    // Several chunks are in flight. One whose read is slow is overtaken, but not every time.
    let orders: Vec<Vec<usize>> = (0..5).map(|_| order()).collect();
    assert!(orders.iter().any(|order| order[..2] == [5, 0]), "{orders:?}");
}

#[test]
fn holes_are_filled_in_all_duplicates() {
    let (size, data) = (4 * CHUNK, pattern(9, 300_000));
    let scene = Scene::new(&[size, size, 4096]);
    for buffer in [0, 1] {
        scene.put(buffer, CHUNK + 123_456, &data);
    }
    scene.chill();
    let of_one = scene.load_with(None, &[], &[], |_| ()).moved;
    let of_both = scene.load_with(None, &[], &[&[0, 1]], |_| ()).moved;
    // The counts equal those without sets: they count each buffer.
    assert_eq!((of_both.bytes, of_both.zero), (of_one.bytes, of_one.zero));
    assert!(of_both.zero >= 2 * (3 * CHUNK - 4096) as u64 && of_both.read < of_one.read, "{of_both:?}");
    let mut right = vec![0; size];
    right[CHUNK + 123_456..][..data.len()].copy_from_slice(&data);
    assert!(scene.memory(0) == right && scene.memory(1) == right);
}

#[test]
fn a_buffer_that_is_not_loaded_is_no_source() {
    let (mut scene, sizes) = listed_as_duplicates();
    let kept = scene.memory(3);
    let memfd = scene.memfds[3].take();
    scene.load_with(None, &[0], &[&[3, 0, 5]], |buffer| assert_ne!(buffer, 3));
    scene.memfds[3] = memfd;
    assert!(scene.memory(3) == kept, "it was not loaded");
    assert!(scene.memory(0) == pattern(5, sizes[0]) && scene.memory(5) == pattern(5, sizes[5]));
}

#[test]
fn invalid_sets_are_ignored() {
    let (scene, sizes) = listed_as_duplicates();
    // Other sizes, a single buffer, a buffer twice in one set, a buffer in two sets, an unknown buffer.
    let sets: [&[usize]; 6] = [&[0, 2, 4], &[1], &[6, 6], &[0, 3], &[3, 5], &[5, 70]];
    let report = scene.load_with(None, &[3, 5], &sets, |_| ());
    has(&scene, &sizes, &[3, 1, 2, 3, 4, 5, 6]);
    assert_eq!(report.moved.same, sizes[0] as u64);
}

#[test]
fn duplicates_are_found() {
    let sizes = [3 * CHUNK, 3 * CHUNK, 65536, 3 * CHUNK, 65536, 3 * CHUNK, 4096, 4096, 3 * CHUNK, 3 * CHUNK];
    let scene = Scene::new(&sizes);
    for buffer in [0, 3, 5] {
        scene.put(buffer, 0, &pattern(7, sizes[buffer]));
    }
    // One byte differs; two buffers have 4 KiB; two have a hole.
    scene.put(5, CHUNK + 777, &[0]);
    for buffer in [2, 4, 6, 7] {
        scene.put(buffer, 0, &pattern(8, sizes[buffer]));
    }
    scene.put(1, 0, &pattern(9, sizes[1]));
    // Two processes with one image: each buffer has a duplicate.
    let two = same(&scene, 2);
    let both = |buffers: &[usize]| -> Vec<(usize, usize)> {
        [0, 1].iter().flat_map(|process| buffers.iter().map(|buffer| (*process, *buffer))).collect()
    };
    assert_eq!(two, [both(&[0, 3]), both(&[1]), both(&[2, 4]), both(&[5])]);
    let sealed = read_checksums(&scene.images()).unwrap().unwrap();
    let files = scene.files();
    let process = ProcessBuffers { files: &files, dmabufs: &[] };
    assert_eq!(find_duplicates(&[process], &sealed), [[(0, 0), (0, 3)], [(0, 2), (0, 4)]]);
    assert_eq!(find_duplicates(&[process], &ImageChecksums::default()), [[(0, 0); 0]; 0], "not sealed");
}

#[test]
fn processes_with_duplicates_are_complete_together() {
    let sizes = [3 * CHUNK, 65536, 2 * CHUNK + 4096, 65536];
    let scene = Scene::new(&[sizes, sizes].concat());
    for (buffer, size) in sizes.iter().enumerate() {
        scene.put(buffer, 0, &pattern(buffer, *size));
        // These bytes must not appear in memory.
        scene.put(4 + buffer, 0, &pattern(9, *size));
    }
    // Two processes of one image: the first has buffers 0 to 3, the second the others.
    let files = scene.files();
    let of = |process: usize| {
        let own = |number: usize| (number / 4 == process).then(|| scene.memfds[number].as_ref());
        let memfds = (0..8).map(own);
        memfds.map(|memfd| memfd??.try_clone().ok()).collect::<Vec<_>>()
    };
    let dmabufs = [of(0), of(1)];
    let processes = dmabufs.each_ref().map(|dmabufs| ProcessBuffers { files: &files, dmabufs });
    let mut events = Vec::new();
    let loading = BackgroundLoad::into_memory(&processes, &scene.device, None).unwrap();
    let loading = loading.duplicates((0..4).map(|number| vec![(0, number), (1, 4 + number)]).collect());
    let handle = loading.handle();
    loading.run(|complete| events.push(complete)).unwrap().unwrap();
    assert_eq!(events.len(), 8 + 2);
    for process in [0, 1] {
        let place = |complete| events.iter().position(|events| *events == complete).unwrap();
        let last = place(LoadEvent::Process { process });
        for (of, size) in sizes.iter().enumerate() {
            let number = 4 * process + of;
            assert!(place(LoadEvent::Buffer { process, number }) < last, "{events:?}");
            assert!(scene.memory(number) == pattern(of, *size));
        }
    }
    assert!(
        handle.progress().iter().all(|of| of.resident == of.all && of.all > 0),
        "{:?}",
        handle.progress()
    );
}

#[test]
fn a_large_set_of_duplicates_has_several_sources() {
    let scene = Scene::new(&[65536; 100]);
    let right = pattern(1, 65536);
    (0..100).for_each(|buffer| scene.put(buffer, 0, &right));
    let all: Vec<usize> = (0..100).collect();
    let report = scene.load_with(None, &[], &[&all], |_| ());
    assert!(all.iter().all(|buffer| scene.memory(*buffer) == right));
    // Each source serves 17 buffers, itself included.
    assert_eq!(report.moved.same, (100 - 6) * 65536);
}

/// Loads buffers of few sizes and contents with random holes and demands. Returns the bytes that were not
/// read.
fn play(seed: u64) -> u64 {
    let mut random = Random::new(seed);
    let kinds = [65536, CHUNK - 4096, CHUNK + 65536, 3 * CHUNK];
    let sizes: Vec<usize> = (0..2 + random.below(14)).map(|_| kinds[random.below(kinds.len())]).collect();
    let scene = Scene::new(&sizes);
    let mut right = Vec::new();
    for (buffer, size) in sizes.iter().enumerate() {
        let mut bytes = pattern(random.below(3), *size);
        let hole = random.below(3) * 65536;
        bytes[..hole.min(*size)].fill(0);
        scene.put(buffer, hole.min(*size), &bytes[hole.min(*size)..]);
        right.push(bytes);
    }
    if random.below(2) == 0 {
        scene.chill();
    }
    let sets: Vec<Vec<usize>> =
        same(&scene, 1).into_iter().map(|set| set.into_iter().map(|(_, buffer)| buffer).collect()).collect();
    let demanded: Vec<usize> = (0..random.below(4)).map(|_| random.below(sizes.len())).collect();
    let sets: Vec<&[usize]> = sets.iter().map(Vec::as_slice).collect();
    let mut complete = Vec::new();
    let report = scene.load_with(None, &demanded, &sets, |buffer| complete.push(buffer));
    for (buffer, bytes) in right.iter().enumerate() {
        assert!(scene.memory(buffer) == *bytes, "buffer {buffer} of seed {seed}");
    }
    complete.sort_unstable();
    assert_eq!(complete, (0..sizes.len()).collect::<Vec<_>>(), "seed {seed}");
    // Buffers of zeros are in no set. Of all other equal buffers, one is read.
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
fn every_byte_is_right_with_random_duplicates() {
    let spared: u64 = (0..40).map(play).sum();
    assert!(spared > 40 * CHUNK as u64, "{spared}");
}
