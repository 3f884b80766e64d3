// SPDX-License-Identifier: MIT OR Apache-2.0
//! Transfers in both directions, of memory that the caller divides, as for buffers of GPUs.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use crate::common::{Pages, content, finish, make_cold, open, pages};
use rewake_image_io::{
    BLOCK, Class, Direction, Engine, ImageFile, PAGE, ReadMode, Request, keep_in_page_cache,
};
use tempfile::NamedTempFile;

const BYTES: usize = 64 * PAGE;

fn engines() -> [(&'static str, Engine<Pages>); 2] {
    [("uring", Engine::new(None).unwrap()), ("threads", Engine::with_threads().unwrap())]
}

/// A read into the start of the memory.
fn read(file: &Arc<ImageFile>, memory: &Pages, offset: u64, bytes: usize, needed: usize) -> Request<Pages> {
    let (direction, class, memory) = (Direction::Read, Class::Background, memory.clone());
    Request { token: 7, file: Arc::clone(file), direction, class, offset, memory, at: 0, bytes, needed }
}

fn transfer(engine: &mut Engine<Pages>, request: Request<Pages>) -> Result<(), String> {
    engine.submit(request).unwrap();
    finish(engine, 1).pop().unwrap().result.map_err(|error| error.to_string())
}

#[test]
fn bytes_are_written_and_read_at_any_alignment() {
    let temp = NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let memory = Pages::new(BYTES);
    for (name, mut engine) in engines() {
        for (offset, at, bytes) in [(0, 0, 2 * PAGE), (8, 3 * PAGE, 100), (PAGE as u64, 5, PAGE)] {
            let both = File::options().read(true).write(true).open(temp.path()).unwrap();
            let file = ImageFile::from_file(both, temp.path()).unwrap();
            let right = content(at + bytes).split_off(at);
            memory.put(at, &right);
            let write =
                Request { direction: Direction::Write, at, ..read(&file, &memory, offset, bytes, bytes) };
            transfer(&mut engine, write).unwrap();
            let mut back = vec![0; bytes];
            file_of(&temp).read_exact_at(&mut back, offset).unwrap();
            assert!(back == right, "{name}: {offset} {at}");
            let from = Request { at: 32 * PAGE, ..read(&open(temp.path()), &memory, offset, bytes, bytes) };
            transfer(&mut engine, from).unwrap();
            assert!(memory.get(32 * PAGE, bytes) == right, "{name}: {offset} {at}");
        }
    }
}

fn file_of(temp: &NamedTempFile) -> File {
    File::open(temp.path()).unwrap()
}

#[test]
fn a_request_may_have_the_whole_last_page_of_a_file() {
    let (_temp, file, bytes) = pages(PAGE + 10);
    let memory = Pages::new(BYTES);
    for (_, mut engine) in engines() {
        transfer(&mut engine, read(&file, &memory, 0, 2 * PAGE, PAGE + 10)).unwrap();
        assert!(memory.get(0, PAGE + 10) == bytes);
        let error = transfer(&mut engine, read(&file, &memory, 0, 2 * PAGE, PAGE + 11)).unwrap_err();
        assert!(error.starts_with("reading 4107 bytes at offset 0 of "), "{error}");
    }
}

/// How often bytes are put into the page cache until they are found there: the kernel may evict them.
const TRIES: u32 = 10;

#[test]
fn small_cached_reads_end_at_once_others_stay_out_of_the_cache() {
    // More than a block: the region around it does not count.
    const LEN: usize = BLOCK + 9 * PAGE;
    let (temp, file, bytes) = pages(BYTES);
    let memory = Pages::new(BYTES);
    for (name, mut engine) in engines() {
        let mut at_once = || {
            engine.submit(read(&file, &memory, 0, LEN, LEN)).unwrap();
            let at_once = engine.has_finished();
            finish(&mut engine, 1).pop().unwrap().result.unwrap();
            assert!(memory.get(0, LEN) == bytes[..LEN], "{name}");
            memory.put(0, &[0; LEN]);
            at_once
        };
        // The kernel may evict the pages at any time.
        assert!((0..TRIES).any(|_| std::fs::read(temp.path()).is_ok() && at_once()), "{name}");
        make_cold(&temp);
        for _ in 0..2 {
            assert!(!at_once(), "{name}");
            assert!(!file.is_cached(0, BLOCK + 1), "{name}: a direct read has filled the cache");
        }
        let only_its_first_page = (0..TRIES).any(|_| {
            make_cold(&temp);
            let random = file_of(&temp);
            // SAFETY: it takes no pointers.
            assert_eq!(unsafe { libc::posix_fadvise(random.as_raw_fd(), 0, 0, libc::POSIX_FADV_RANDOM) }, 0);
            random.read_exact_at(&mut [0; 10], 0).unwrap();
            !file.is_cached(0, LEN)
        });
        assert!(only_its_first_page && !at_once(), "{name}: only its first page");
    }
}

#[test]
fn bytes_of_a_kept_file_stay_and_demand_reads_add_no_others() {
    let block = |number: usize| (number * BLOCK) as u64;
    let memory = Pages::new(BYTES);
    for (name, mut engine) in engines() {
        let (temp, file, bytes) = pages(64 * BLOCK);
        keep_in_page_cache(std::iter::once(&*file));
        let mut stays_alone = || {
            make_cold(&temp);
            // In order, so that the kernel would read ahead.
            for number in [18, 19, 20] {
                let request = read(&file, &memory, block(number), BLOCK, BLOCK);
                transfer(&mut engine, Request { class: Class::Demand, ..request }).unwrap();
            }
            assert!(memory.get(0, BLOCK) == bytes[20 * BLOCK..21 * BLOCK], "{name}");
            file.is_cached(block(20), BLOCK) && !file.is_cached(block(21), BLOCK)
        };
        // The kernel may evict pages at any time.
        assert!((0..TRIES).any(|_| stays_alone()), "{name}");
        let mut stays = || {
            make_cold(&temp);
            transfer(&mut engine, read(&file, &memory, 0, BLOCK, BLOCK)).unwrap();
            file.is_cached(0, BLOCK)
        };
        assert!((0..TRIES).any(|_| stays()), "{name}");
    }
}

#[test]
fn large_cached_reads_are_copied_by_other_threads() {
    let memory = Pages::new(BYTES);
    for (name, mut engine) in engines() {
        let (temp, file, bytes) = pages(BYTES);
        let cached = (0..TRIES).any(|_| {
            std::fs::read(temp.path()).unwrap();
            file.mode(0, BYTES, true) == ReadMode::Cached
        });
        assert!(cached);
        engine.submit(read(&file, &memory, 0, BYTES, BYTES)).unwrap();
        assert!(!engine.has_finished(), "{name}");
        finish(&mut engine, 1).pop().unwrap().result.unwrap();
        assert!(memory.get(0, BYTES) == bytes, "{name}");
    }
}

#[test]
fn an_error_names_the_act_the_place_and_the_file() {
    let memory = Pages::new(BYTES);
    let (temp, ..) = pages(PAGE);
    for (_, mut engine) in engines() {
        let file = ImageFile::from_file(file_of(&temp), "read-only.img").unwrap();
        let write = Request { direction: Direction::Write, ..read(&file, &memory, 8, 9, 9) };
        let error = transfer(&mut engine, write).unwrap_err();
        let cause = io::Error::from_raw_os_error(libc::EBADF).to_string();
        let start = "writing 9 bytes at offset 8 of read-only.img: failed after 1 tries";
        assert!(error.starts_with(start) && error.contains(&cause), "{error}");
    }
}

#[test]
fn what_two_read_at_once_is_read_from_the_disk_once() {
    const PIECE: usize = 1 << 20;
    const PIECES: usize = 16;
    let (temp, one, bytes) = pages(PIECES * PIECE);
    make_cold(&temp);
    let (memory, mut engine) = (Pages::new(PIECE), Engine::new(None).unwrap());
    let mut get = |file: &Arc<ImageFile>, piece: usize| {
        transfer(&mut engine, read(file, &memory, (piece * PIECE) as u64, PIECE, PIECE)).unwrap();
        assert!(memory.get(0, PIECE) == bytes[piece * PIECE..][..PIECE]);
    };
    let cached = |file: &ImageFile, piece: usize| file.is_cached((piece * PIECE) as u64, PIECE);
    get(&one, 0);
    assert!(!cached(&one, 0), "alone it reads past the page cache");
    let two = open(temp.path());
    assert_eq!([&one, &two].map(|file| file.mode(0, PIECE, true)), [ReadMode::Buffered; 2]);
    // The kernel may evict pages at any time: most of them suffice.
    let shared = (1..PIECES).filter(|piece| {
        get(&one, *piece);
        let was_cached = cached(&two, *piece);
        get(&two, *piece);
        was_cached
    });
    assert!(shared.count() > 10);
    drop(two);
    let again = |piece: &usize| {
        make_cold(&temp);
        get(&one, *piece);
        !cached(&one, *piece)
    };
    assert!((1..PIECES).filter(again).count() > 10, "alone again");
}
