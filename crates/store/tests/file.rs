// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a pages file knows about itself.

mod common;

use common::{make_cold, pages};
use rewake_skip::skip;
use rewake_store::{BLOCK, How, PAGE, PagesFile, ReadError, StoreError, read_now};

/// How often something is put into the page cache until it is found there: the kernel may take memory for something else.
const TRIES: u32 = 10;

#[test]
fn residency_is_measured_block_by_block() {
    let (temp, file, bytes) = pages(4 * BLOCK);
    let just_written = (0..TRIES).any(|_| {
        std::os::unix::fs::FileExt::write_all_at(temp.as_file(), &bytes, 0).unwrap();
        file.is_cached(0, 4 * BLOCK)
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
    let random = PagesFile::from_file(again, temp.path()).unwrap();
    let just_read = (0..TRIES).any(|_| {
        read_now(&random, 2 * BLOCK as u64, &mut vec![0; BLOCK]).unwrap();
        file.is_cached(2 * BLOCK as u64, BLOCK)
    });
    assert!(just_read);
    assert!(!file.is_cached(BLOCK as u64, BLOCK));
    assert!(!file.is_cached(BLOCK as u64, 2 * BLOCK), "half of it is missing");
    assert_eq!(file.how(2 * BLOCK as u64, BLOCK), How::Buffered);
    assert_eq!(file.how(BLOCK as u64, BLOCK), if file.has_direct() { How::Direct } else { How::Buffered });
}

#[test]
fn a_block_with_dirty_pages_is_read_through_the_cache() {
    use std::os::unix::fs::FileExt;
    let (temp, file, _) = pages(BLOCK);
    make_cold(&temp);
    // The kernel may write it to the disk meanwhile.
    let buffered = (0..TRIES).any(|_| {
        temp.as_file().write_all_at(&[1; PAGE], 0).unwrap();
        file.how(0, BLOCK) == How::Buffered
    });
    assert!(buffered);
}

#[test]
fn the_end_of_the_file_counts_as_cached_whole_pages() {
    let (_temp, file, _) = pages(PAGE + 904);
    assert!(file.is_cached(PAGE as u64, BLOCK), "what lies beyond the end is not missing");
    assert_eq!(file.blocks(), 1);
}

#[test]
fn two_opens_of_one_file_have_one_key_until_it_changes() {
    let (temp, file, _) = pages(BLOCK);
    assert_eq!(PagesFile::open(temp.path()).unwrap().key(), file.key());
    std::thread::sleep(std::time::Duration::from_millis(20));
    std::fs::write(temp.path(), vec![9; BLOCK]).unwrap();
    assert_ne!(PagesFile::open(temp.path()).unwrap().key(), file.key());
}

#[test]
fn an_unlinked_file_is_still_read_directly() {
    let temp = tempfile::tempfile().unwrap();
    temp.set_len(BLOCK as u64).unwrap();
    let file = PagesFile::from_file(temp, "unlinked").unwrap();
    assert_eq!(file.len(), BLOCK as u64);
    read_now(&file, 0, &mut [1; PAGE]).unwrap();
}

#[test]
fn a_range_beyond_the_end_is_refused_by_name() {
    let (temp, file, _) = pages(BLOCK + 10);
    file.check_range(0, BLOCK + 10).unwrap();
    file.check_range(u64::MAX, 0).unwrap();
    let error = file.check_range(BLOCK as u64, 11).unwrap_err();
    assert!(matches!(error, ReadError::Short { expected: 11, got: 10, .. }));
    assert!(error.to_string().contains(&*temp.path().to_string_lossy()));
    file.check_range(u64::MAX, 1).unwrap_err();
}

#[test]
fn what_is_not_a_regular_file_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    assert!(matches!(PagesFile::open(dir.path()), Err(StoreError::NotRegular { .. })));
    assert!(matches!(PagesFile::open("/dev/zero"), Err(StoreError::NotRegular { .. })));
    let missing = PagesFile::open(dir.path().join("pages-1.img")).unwrap_err();
    assert!(missing.to_string().contains("pages-1.img"));
}
