// SPDX-License-Identifier: MIT OR Apache-2.0
//! A pages file knows its identity, its changes and what of it is in the page cache.

use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::Path;
use std::time::{Duration, Instant};

use crate::common::{make_cold, open, pages};
use nix::fcntl::{FallocateFlags, fallocate};
use rewake_image_io::{BLOCK, FileState, ImageFile, PAGE, ReadMode, StoreError, TransferError, read_now};
use rewake_skip::skip;

const MIB: u64 = 1 << 20;

/// How often bytes are put into the page cache until they are found there: the kernel may evict them.
const TRIES: u32 = 10;

#[test]
fn residency_is_measured_block_by_block() {
    let (temp, file, bytes) = pages(4 * BLOCK);
    let just_written = (0..TRIES).any(|_| {
        std::os::unix::fs::FileExt::write_all_at(temp.as_file(), &bytes, 0).unwrap();
        file.is_cached(0, BLOCK) && file.is_cached(0, 4 * BLOCK)
    });
    assert!(just_written);
    temp.as_file().sync_all().unwrap();
    make_cold(&temp);
    if file.is_cached(0, BLOCK) {
        skip!("{} cannot be made cold (tmpfs, or a kernel before 6.5)", temp.path().display());
    }
    let fadv_random = libc::POSIX_FADV_RANDOM;
    // Without readahead the kernel caches exactly what is read (the advice is per open file).
    let again = std::fs::File::open(temp.path()).unwrap();
    // SAFETY: posix_fadvise takes no pointers.
    unsafe { libc::posix_fadvise(std::os::fd::AsRawFd::as_raw_fd(&again), 0, 0, fadv_random) };
    let random = ImageFile::from_file(again, temp.path()).unwrap();
    let just_read = (0..TRIES).any(|_| {
        read_now(&random, 2 * BLOCK as u64, &mut vec![0; BLOCK]).unwrap();
        file.is_cached(2 * BLOCK as u64, BLOCK)
    });
    assert!(just_read);
    // While two read the file, it is read through the page cache.
    drop(random);
    assert!(!file.is_cached(BLOCK as u64, BLOCK));
    assert!(!file.is_cached(BLOCK as u64, 2 * BLOCK), "half of it is missing");
    assert_eq!(file.mode(2 * BLOCK as u64, BLOCK, true), ReadMode::Cached);
    assert_eq!(file.mode(BLOCK as u64, BLOCK, true), ReadMode::Direct);
}

#[test]
fn a_block_with_dirty_pages_is_read_through_the_cache() {
    use std::os::unix::fs::FileExt;
    let (temp, file, _) = pages(BLOCK);
    make_cold(&temp);
    // The kernel may write it to the disk meanwhile.
    let buffered = (0..TRIES).any(|_| {
        temp.as_file().write_all_at(&[1; PAGE], 0).unwrap();
        file.mode(0, BLOCK, true) == ReadMode::Buffered
    });
    assert!(buffered);
}

#[test]
fn the_end_of_the_file_counts_as_cached_whole_pages() {
    let (_temp, file, _) = pages(PAGE + 904);
    assert!(file.is_cached(PAGE as u64, BLOCK), "what lies beyond the end is not missing");
}

#[test]
fn two_opens_of_one_file_have_one_key_until_it_changes() {
    let (temp, file, _) = pages(BLOCK);
    assert_eq!(open(temp.path()).key(), file.key());
    std::thread::sleep(std::time::Duration::from_millis(20));
    std::fs::write(temp.path(), vec![9; BLOCK]).unwrap();
    assert_ne!(open(temp.path()).key(), file.key());
}

#[test]
fn an_unlinked_file_is_still_read_directly() {
    let temp = tempfile::tempfile().unwrap();
    temp.set_len(BLOCK as u64).unwrap();
    let file = ImageFile::from_file(temp, "unlinked").unwrap();
    assert_eq!(file.len(), BLOCK as u64);
    read_now(&file, 0, &mut [1; PAGE]).unwrap();
}

#[test]
fn only_regular_files_are_opened() {
    let dir = tempfile::tempdir().unwrap();
    for path in [dir.path(), Path::new("/dev/zero")] {
        let error = ImageFile::from_file(std::fs::File::open(path).unwrap(), path).unwrap_err();
        assert!(matches!(error, StoreError::NotRegular { .. }));
        assert!(error.to_string().contains(&*path.to_string_lossy()), "{error}");
    }
}

/// Changes a file until its change time differs: the kernel's clock for it advances in ticks.
fn until_change_time_differs(file: &std::fs::File, mut act: impl FnMut()) {
    let before = FileState::of(file).unwrap().key.ctime;
    let deadline = Instant::now() + Duration::from_secs(10);
    while FileState::of(file).unwrap().key.ctime == before {
        assert!(Instant::now() < deadline, "the change time stays as it is");
        std::thread::sleep(Duration::from_millis(1));
        act();
    }
}

fn set_back(file: &std::fs::File, modified: std::time::SystemTime) {
    file.set_times(std::fs::FileTimes::new().set_modified(modified)).unwrap();
}

fn read_one(file: &ImageFile) -> Result<(), TransferError> {
    read_now(file, 0, &mut [0; PAGE])
}

#[test]
fn a_rewrite_that_restores_the_modification_time_is_noticed() {
    let (temp, file, bytes) = pages(BLOCK);
    let modified = temp.as_file().metadata().unwrap().modified().unwrap();
    read_one(&file).unwrap();
    until_change_time_differs(temp.as_file(), || {
        temp.as_file().write_all_at(&vec![9; bytes.len()], 0).unwrap();
        set_back(temp.as_file(), modified);
    });
    let error = read_one(&file).unwrap_err();
    assert!(matches!(error, TransferError::Changed { .. }), "{error}");
    assert!(error.to_string().contains(&*temp.path().to_string_lossy()), "{error}");
    assert!(error.to_string().contains("change time is another"), "{error}");
    assert_ne!(open(temp.path()).key(), file.key(), "a cache must not take it for the old one");
}

/// A part of the error, and what is done to the file.
type Change<'a> = (&'a str, &'a dyn Fn(&std::fs::File));

#[test]
fn a_write_another_length_and_a_hole_are_each_named() {
    let hole = |file: &std::fs::File| {
        let mode = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        fallocate(file, mode, 0, PAGE as i64).unwrap();
    };
    let cases: [Change<'_>; 3] = [
        ("modification time", &|file| file.write_all_at(&[1], 100).unwrap()),
        ("it had 65536 bytes and has 131072", &|file| file.set_len(2 * BLOCK as u64).unwrap()),
        ("modification time", &hole),
    ];
    for (what, change) in cases {
        let (temp, file, _) = pages(BLOCK);
        until_change_time_differs(temp.as_file(), || change(temp.as_file()));
        let error = read_one(&file).unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
        assert!(read_one(&file).is_err(), "the change must stay an error");
    }
}

#[test]
fn new_links_names_modes_and_removal_are_not_changes() {
    let (temp, file, bytes) = pages(BLOCK);
    let path = temp.path().to_owned();
    let [link, renamed] = ["link", "renamed"].map(|name| path.with_extension(name));
    let steps: [&dyn Fn(); 4] = [
        &|| std::fs::hard_link(&path, &link).unwrap(),
        &|| std::fs::rename(&path, &renamed).unwrap(),
        &|| std::fs::set_permissions(&renamed, std::fs::Permissions::from_mode(0o640)).unwrap(),
        &|| [&link, &renamed].iter().for_each(|name| std::fs::remove_file(name).unwrap()),
    ];
    let key = file.key();
    for step in steps {
        std::thread::sleep(Duration::from_millis(20));
        step();
        let mut page = [0; PAGE];
        read_now(&file, 0, &mut page).unwrap();
        assert!(page == bytes[..PAGE]);
    }
    assert_eq!(file.key(), key, "blocks that are cached stay so");
}

#[test]
fn only_the_unchanged_file_can_be_inherited() {
    let (temp, file, _) = pages(BLOCK);
    let (other, ..) = pages(BLOCK);
    let inherit = |from: &std::fs::File| {
        ImageFile::inherit(from.try_clone().unwrap(), temp.path(), file.state().clone())
    };
    let refused = inherit(other.as_file()).unwrap_err().to_string();
    assert!(refused.contains("it is another file"), "{refused}");
    std::thread::sleep(Duration::from_millis(20));
    let path = temp.path().to_owned();
    std::fs::remove_file(&path).unwrap();
    let inherited = inherit(temp.as_file()).unwrap();
    assert_eq!(inherited.key(), file.key());
    read_one(&inherited).unwrap();
    make_cold(&temp);
    assert_eq!(file.mode(0, BLOCK, true), ReadMode::Buffered, "the successor counts as a reader");
    until_change_time_differs(temp.as_file(), || temp.as_file().write_all_at(&[1], 0).unwrap());
    let refused = inherit(temp.as_file()).unwrap_err().to_string();
    assert!(refused.contains("modification time") && refused.contains("restore again"), "{refused}");
}

#[test]
fn data_finds_the_bytes_between_holes_of_an_unchanged_file() {
    let (temp, ..) = pages(0);
    let [start, end] = [MIB, 2 * MIB];
    temp.as_file().set_len(3 * MIB).unwrap();
    assert_eq!(open(temp.path()).data(start, end).unwrap(), None);
    temp.as_file().write_all_at(&[1; PAGE], start + 65536).unwrap();
    let file = open(temp.path());
    let (from, to) = file.data(start, end).unwrap().unwrap();
    assert!(from <= start + 65536 && to >= start + 65536 + PAGE as u64, "{from}..{to}");
    assert_eq!(file.data(to.max(start + MIB / 2), end).unwrap(), None);
    let again = |offset, end| file.data(offset, end).unwrap();
    assert_eq!(again(from + 5, end), Some((from + 5, to)), "from the range that is known");
    assert_eq!(again(from, from + 9), Some((from, from + 9)));
    assert_eq!(again(start, end), Some((from, to)), "from before the range that is known");
    until_change_time_differs(temp.as_file(), || temp.as_file().set_len(MIB).unwrap());
    let error = file.data(start, end).unwrap_err();
    assert!(matches!(error, TransferError::Changed { .. }), "a shortened file looks like a hole: {error}");
}
