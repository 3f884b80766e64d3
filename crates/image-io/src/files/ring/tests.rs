// SPDX-License-Identifier: MIT OR Apache-2.0
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use super::*;
use crate::PAGE;
use crate::files::TransferFile;
use crate::files::testing::Pages;
use crate::ring::TRUST_FLAG_FOR;
use crate::ring::testing::{Flag, ends};

const BYTES: usize = 64 * PAGE;

fn pattern(bytes: usize, seed: usize) -> Vec<u8> {
    (0..bytes).map(|index| u8::try_from((index * 7 + seed) % 251).unwrap()).collect()
}

fn both(path: &Path) -> Arc<TransferFile> {
    let open = |flags| OpenOptions::new().read(true).write(true).custom_flags(flags).open(path);
    TransferFile::new(path, open(0).unwrap(), open(libc::O_DIRECT).ok())
}

/// Returns a ring with io_uring, and one without.
fn rings() -> [FileRing<Arc<Pages>>; 2] {
    let mut plain = FileRing::new(4).unwrap();
    plain.backend = Backend::Plain(io::Error::from_raw_os_error(libc::ENOSYS));
    [FileRing::new(4).unwrap(), plain]
}

fn all(ring: &mut FileRing<Arc<Pages>>) -> Vec<Finished> {
    let (mut over, wanted) = (Vec::new(), ring.in_flight() + ring.over.len());
    ring.flush();
    while over.len() < wanted {
        assert!(
            wait_readable(ring.event().as_raw_fd(), Duration::from_secs(60)),
            "{ring:?} did not wake its poller"
        );
        ring.finished(&mut over);
    }
    over
}

fn flag(ring: &FileRing<Arc<Pages>>) -> Flag {
    let Backend::Uring(uring) = &ring.backend else { panic!("no io_uring here: {:?}", ring.note()) };
    Flag::of(uring)
}

#[test]
fn a_flag_without_completion_is_checked_once() {
    ends(|| {
        let [mut ring, _] = rings();
        flag(&ring).keep_set_during(|| ring.finished(&mut Vec::new()));
        assert_eq!(ring.patience(), Duration::MAX, "nothing is in flight");
    });
}

#[test]
fn a_completed_transfer_without_the_flag_is_found() {
    let (reader, mut writer) = std::io::pipe().unwrap();
    let [mut ring, _] = rings();
    ring.submit(Request {
        file: TransferFile::new("pipe", File::from(OwnedFd::from(reader)), None),
        direction: Direction::Read,
        offset: 0,
        memory: Pages::new(BYTES),
        at: 0,
        bytes: PAGE,
        needed: PAGE,
        token: 7,
    })
    .unwrap();
    ring.flush();
    let mut over = Vec::new();
    ring.finished(&mut over);
    assert!(over.is_empty());
    writer.write_all(&[1; PAGE]).unwrap();
    assert!(wait_readable(ring.event().as_raw_fd(), Duration::from_secs(60)));
    ring.event.drain();
    flag(&ring).clear();
    let start = Instant::now();
    while over.is_empty() {
        let patience = ring.patience();
        assert!(
            patience <= TRUST_FLAG_FOR && start.elapsed() < Duration::from_secs(10),
            "the completion is not found"
        );
        wait_readable(ring.event().as_raw_fd(), patience);
        ring.finished(&mut over);
    }
    assert!(over.pop().unwrap().result.is_ok() && ring.patience() == Duration::MAX);
}

#[test]
fn bytes_are_written_and_read_at_any_alignment() {
    let temp = tempfile::NamedTempFile::new().unwrap();
    let memory = Pages::new(BYTES);
    for mut ring in rings() {
        assert_eq!(ring.note().is_some(), matches!(ring.backend, Backend::Plain(_)));
        for (token, (offset, at, bytes)) in
            [(0, 0, 2 * PAGE), (8, 3 * PAGE, 100), (PAGE as u64, 5, PAGE)].into_iter().enumerate()
        {
            let (file, token) = (both(temp.path()), token as u64);
            memory.put(at, &pattern(bytes, at));
            let request = |direction, at| Request {
                file: Arc::clone(&file),
                direction,
                offset,
                memory: Arc::clone(&memory),
                at,
                bytes,
                needed: bytes,
                token,
            };
            ring.submit(request(Direction::Write, at)).unwrap();
            all(&mut ring).pop().unwrap().result.unwrap();
            ring.submit(request(Direction::Read, 32 * PAGE)).unwrap();
            let over = all(&mut ring).pop().unwrap();
            assert!(over.result.is_ok() && over.token == token);
            assert!(memory.get(32 * PAGE, bytes) == pattern(bytes, at), "{ring:?}: {offset} {at}");
        }
    }
}

#[test]
fn a_request_may_have_the_whole_last_page_of_a_file() {
    let temp = tempfile::NamedTempFile::new().unwrap();
    temp.as_file().write_all_at(&pattern(PAGE + 10, 3), 0).unwrap();
    let memory = Pages::new(BYTES);
    for mut ring in rings() {
        let request = |needed| Request {
            file: both(temp.path()),
            direction: Direction::Read,
            offset: 0,
            memory: Arc::clone(&memory),
            at: 0,
            bytes: 2 * PAGE,
            needed,
            token: 1,
        };
        ring.submit(request(PAGE + 10)).unwrap();
        all(&mut ring).pop().unwrap().result.unwrap();
        assert!(memory.get(0, PAGE + 10) == pattern(PAGE + 10, 3));
        ring.submit(request(PAGE + 11)).unwrap();
        let error = all(&mut ring).pop().unwrap().result.unwrap_err();
        assert!(error.to_string().starts_with("read 8192 bytes at 0 of "), "{error}");
    }
}

#[test]
fn transfers_in_flight_are_bounded_and_none_is_lost() {
    let temp = tempfile::NamedTempFile::new().unwrap();
    temp.as_file().set_len(BYTES as u64).unwrap();
    let memory = Pages::new(BYTES);
    let [mut ring, _] = rings();
    let file = both(temp.path());
    let request = |token| Request {
        file: Arc::clone(&file),
        direction: Direction::Read,
        offset: 0,
        memory: Arc::clone(&memory),
        at: 0,
        bytes: PAGE,
        needed: PAGE,
        token,
    };
    for token in 0..4 {
        ring.submit(request(token)).unwrap();
    }
    assert_eq!(ring.submit(request(4)).unwrap_err().token, 4);
    let mut tokens: Vec<u64> = all(&mut ring).iter().map(|over| over.token).collect();
    tokens.sort_unstable();
    assert_eq!(tokens, [0, 1, 2, 3]);
    ring.submit(request(4)).unwrap();
    all(&mut ring).pop().unwrap().result.unwrap();
}

/// How often bytes are put into the page cache until they are found there.
const TRIES: u32 = 10;

#[test]
fn small_cached_reads_end_at_once_others_stay_out_of_the_cache() {
    let temp = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let bytes = pattern(8 * PAGE + 10, 5);
    temp.as_file().write_all_at(&bytes, 0).unwrap();
    temp.as_file().sync_all().unwrap();
    let file = both(temp.path());
    let memory = Pages::new(BYTES);
    for mut ring in rings() {
        let plain = ring.note().is_some();
        let mut read = || {
            let file = Arc::clone(&file);
            let (bytes, needed) = (9 * PAGE, 8 * PAGE + 10);
            let (direction, to) = (Direction::Read, Arc::clone(&memory));
            ring.submit(Request { file, direction, offset: 0, memory: to, at: 0, bytes, needed, token: 0 })
                .unwrap();
            let at_once = ring.in_flight() == 0 && matches!(ring.backend, Backend::Uring(_));
            all(&mut ring).pop().unwrap().result.unwrap();
            assert!(memory.get(0, needed) == pattern(needed, 5));
            memory.put(0, &[0; 9 * PAGE]);
            at_once
        };
        drop_cached(&file);
        for _ in 0..2 {
            assert!(!read());
            assert!(!file.is_cached(8 * PAGE as u64, 1), "a read past the page cache has filled it");
        }
        // The kernel may evict the pages at any time.
        let at_once = (0..TRIES).any(|_| {
            std::fs::read(temp.path()).unwrap();
            file.is_cached(0, 9 * PAGE) && (read() || plain)
        });
        assert!(at_once);
        let only_its_first_page = (0..TRIES).any(|_| {
            drop_cached(&file);
            let mut first = [0; 10];
            fadvise(&file, libc::POSIX_FADV_RANDOM);
            file.file().read_exact_at(&mut first, 0).unwrap();
            fadvise(&file, libc::POSIX_FADV_NORMAL);
            file.is_cached(0, PAGE)
        });
        assert!(only_its_first_page && !file.is_cached(0, 9 * PAGE), "only its first page");
        assert!(!read());
    }
}

#[test]
fn large_cached_reads_are_copied_by_workers() {
    let temp = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    let bytes = pattern(BYTES, 9);
    temp.as_file().write_all_at(&bytes, 0).unwrap();
    temp.as_file().sync_all().unwrap();
    let file = both(temp.path());
    for cached in [true, false] {
        let (pages, mut ring) = (Pages::new(BYTES), FileRing::new(4).unwrap());
        if !cached {
            drop_cached(&file);
        }
        let request = Request {
            file: Arc::clone(&file),
            direction: Direction::Read,
            offset: 0,
            memory: Arc::clone(&pages),
            at: 0,
            bytes: BYTES,
            needed: BYTES,
            token: 0,
        };
        ring.submit(request).unwrap();
        // The kernel may evict the pages at any time.
        let by_worker = ring.flights.iter().flatten().any(|flight| flight.by_worker);
        assert!(by_worker || !cached || !file.is_cached(0, BYTES));
        let mut over = Vec::new();
        while over.is_empty() {
            ring.flush();
            assert!(
                wait_readable(ring.event().as_raw_fd(), Duration::from_secs(60)),
                "{ring:?} did not wake its poller"
            );
            ring.finished(&mut over);
        }
        over.pop().unwrap().result.unwrap();
        assert!(pages.get(0, BYTES) == bytes);
    }
}

fn fadvise(file: &TransferFile, advice: i32) {
    // SAFETY: it takes no pointers.
    assert_eq!(unsafe { libc::posix_fadvise(file.file().as_raw_fd(), 0, 0, advice) }, 0);
}

fn drop_cached(file: &TransferFile) {
    fadvise(file, libc::POSIX_FADV_DONTNEED);
    assert!(
        !file.is_cached(0, PAGE),
        "the file system keeps all files in the page cache: this test needs another one"
    );
}

#[test]
fn an_error_names_the_act_the_place_and_the_file() {
    let memory = Pages::new(BYTES);
    for mut ring in rings() {
        let file = TransferFile::new("read-only.img", File::open("/dev/null").unwrap(), None);
        let (direction, memory) = (Direction::Write, Arc::clone(&memory));
        ring.submit(Request { file, direction, offset: 8, memory, at: 0, bytes: 9, needed: 9, token: 0 })
            .unwrap();
        let error = all(&mut ring).pop().unwrap().result.unwrap_err();
        assert_eq!(error.to_string(), "write 9 bytes at 8 of read-only.img");
    }
}
