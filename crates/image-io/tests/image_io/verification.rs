// SPDX-License-Identifier: MIT OR Apache-2.0
//! Bytes of a sealed file are those that were sealed, or an error.

use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use crate::common::{make_cold, open, pages, read_once};
use rewake_image_io::{
    BLOCK, BlockCache, BlockChecksums, BufferSlice, Engine, FetchSource, FetchedFile, ImageFile, PAGE,
    PresenceMap, PresenceWriter, ReadMode, SimPlan, TransferError, block_checksum, checked_presence_file,
    checksum_of_zeros, keep_in_page_cache,
};
use tempfile::NamedTempFile;

/// Length of the file in these tests: the last block is shorter.
const LEN: usize = 3 * BLOCK + 5 * PAGE;

fn checksums(bytes: &[u8]) -> BlockChecksums {
    let table: Vec<u8> = bytes.chunks(BLOCK).flat_map(|block| block_checksum(block).to_le_bytes()).collect();
    BlockChecksums::new(Arc::new(table), 0, bytes.len() as u64).unwrap()
}

/// A sealed file, whose bytes are in the page cache or on the disk only.
fn sealed(is_cached: bool, change: impl FnOnce(&std::fs::File)) -> (NamedTempFile, Arc<ImageFile>, Vec<u8>) {
    let (temp, _, bytes) = pages(LEN);
    change(temp.as_file());
    temp.as_file().sync_all().unwrap();
    if is_cached {
        std::fs::read(temp.path()).unwrap();
    } else {
        make_cold(&temp);
    }
    let file = open(temp.path());
    file.verify_with(checksums(&bytes));
    (temp, file, bytes)
}

fn engines() -> [Engine<BufferSlice>; 3] {
    let sim = Engine::simulated(SimPlan { short_percent: 40, ..SimPlan::default() });
    [Engine::new(None).unwrap(), Engine::with_threads().unwrap(), sim]
}

#[test]
fn a_checksum_is_the_crc_that_nvme_and_s3_have() {
    assert_eq!(block_checksum(b"123456789"), 0xae8b_1486_0a79_9888);
    for length in [1, PAGE, BLOCK - 1, BLOCK] {
        assert_eq!(checksum_of_zeros(length), block_checksum(&vec![0; length]));
    }
}

#[test]
fn what_another_process_writes_is_read_through_the_page_cache() {
    let (_temp, file, _) = sealed(false, |_| {});
    file.allow_arrival();
    assert_eq!(file.mode(0, BLOCK, false), ReadMode::Exact);
    keep_in_page_cache(std::iter::once(&*file));
    assert_eq!(file.mode(0, BLOCK, true), ReadMode::Buffered);
}

#[test]
fn every_engine_finds_one_wrong_bit_on_disk_and_in_the_page_cache() {
    for is_cached in [false, true] {
        let flip = |file: &std::fs::File| {
            let mut byte = [0];
            file.read_exact_at(&mut byte, BLOCK as u64 + 77).unwrap();
            file.write_all_at(&[byte[0] ^ 4], BLOCK as u64 + 77).unwrap();
        };
        let (_temp, file, bytes) = sealed(is_cached, flip);
        let cache = BlockCache::new(4 * BLOCK).unwrap();
        for mut engine in engines() {
            for (block, right) in bytes.chunks(BLOCK).enumerate() {
                let at = (block as u64 * BLOCK as u64, right.len());
                match read_once(&mut engine, &cache, &file, at) {
                    Ok(read) => assert!(block != 1 && read == right, "block {block}"),
                    Err(TransferError::Damaged { offset, length, .. }) => {
                        assert_eq!((block, offset, length), (1, BLOCK as u64, BLOCK));
                    }
                    Err(other) => panic!("{other}"),
                }
            }
        }
    }
}

#[test]
fn a_part_of_a_block_of_a_sealed_file_is_not_given() {
    let (_temp, file, _) = sealed(true, |_| ());
    let cache = BlockCache::new(4 * BLOCK).unwrap();
    for mut engine in engines() {
        for (offset, length) in [(0, PAGE), (PAGE as u64, BLOCK), (3 * BLOCK as u64, 4 * PAGE)] {
            let error = read_once(&mut engine, &cache, &file, (offset, length)).unwrap_err();
            assert!(matches!(error, TransferError::Damaged { .. }), "{offset}, {length}: {error}");
        }
    }
}

/// What the page cache gives of a range, and its place in the buffer.
fn cached(file: &ImageFile, range: std::ops::Range<usize>) -> Vec<u8> {
    let mut buffer = vec![0xee; range.len() + 2 * BLOCK];
    let read = file.read_verified(range.start as u64..range.end as u64, &mut buffer, false).unwrap();
    buffer[read].to_vec()
}

#[test]
fn the_page_cache_gives_bytes_of_right_blocks_only() {
    let (_temp, file, bytes) = sealed(true, |file| file.write_all_at(&[0; 9], 2 * BLOCK as u64).unwrap());
    if !file.is_cached(0, LEN) {
        rewake_skip::skip!("the kernel has evicted the file");
    }
    for range in [0..PAGE, 5 * PAGE..6 * PAGE, BLOCK - PAGE..BLOCK + PAGE, 0..2 * BLOCK, 3 * BLOCK..LEN] {
        assert!(cached(&file, range.clone()) == bytes[range.clone()], "{range:?}");
    }
    assert_eq!(cached(&file, 2 * BLOCK..2 * BLOCK + PAGE), [0; 0]);
    assert_eq!(cached(&file, 3 * BLOCK - PAGE..LEN), [0; 0], "its first block is wrong");
    assert!(cached(&file, BLOCK + PAGE..3 * BLOCK) == bytes[BLOCK + PAGE..2 * BLOCK], "up to the wrong one");
}

#[test]
fn a_file_without_checksums_is_read_as_it_is() {
    let (temp, file, bytes) = pages(LEN);
    std::fs::read(temp.path()).unwrap();
    assert_eq!((file.is_sealed(), file.read_unit()), (false, PAGE));
    if !file.is_cached(0, LEN) {
        rewake_skip::skip!("the kernel has evicted the file");
    }
    assert!(cached(&file, PAGE..3 * PAGE) == bytes[PAGE..3 * PAGE]);
}

/// After a write-back error the next read finds the bytes from before. No engine gives such bytes.
#[test]
fn a_page_that_the_disk_has_lost_after_it_arrived_is_not_given() {
    let (temp, _, bytes) = pages(LEN);
    let map = checked_presence_file(2 * LEN as u64).unwrap();
    let source = Arc::new(FetchSource::new(PresenceMap::open(map.as_fd(), 2 * LEN as u64).unwrap()));
    // Another file is before it in the map.
    let first = (LEN / PAGE) as u64;
    let fetched = FetchedFile { source, first };
    let file = ImageFile::fetched(temp.reopen().unwrap(), temp.path(), fetched).unwrap();
    let arrived = PresenceWriter::open(map.as_fd(), 2 * LEN as u64).unwrap();
    arrived.arrived(first, first, &bytes);
    let cache = BlockCache::new(4 * BLOCK).unwrap();
    let read = |at: (u64, usize)| engines().map(|mut engine| read_once(&mut engine, &cache, &file, at));
    assert!(read((0, BLOCK)).into_iter().all(|read| read.unwrap() == bytes[..BLOCK]));
    temp.as_file().write_all_at(&[0; 9], 2 * PAGE as u64).unwrap();
    for read in read((0, BLOCK)) {
        match read.unwrap_err() {
            TransferError::Lost { offset, length, .. } => {
                assert_eq!((offset, length), (2 * PAGE as u64, PAGE));
            }
            other => panic!("{other}"),
        }
    }
    assert!(cached(&file, PAGE..4 * PAGE) == bytes[PAGE..2 * PAGE], "up to the wrong one");
    assert!(read((3 * PAGE as u64, PAGE)).into_iter().all(|read| read.is_ok()));
}

#[test]
fn a_hole_in_the_place_of_sealed_bytes_is_data_and_wrong() {
    let block = BLOCK as u64;
    let (temp, ..) = pages(0);
    temp.as_file().set_len(4 * block).unwrap();
    let file = open(temp.path());
    let mut bytes = vec![0; 4 * BLOCK];
    bytes[2 * BLOCK + 5] = 1;
    file.verify_with(checksums(&bytes));
    assert_eq!(file.read_unit(), BLOCK);
    assert_eq!(file.data(0, 2 * block).unwrap(), None, "zeros were sealed");
    assert_eq!(file.data(0, 4 * block).unwrap(), Some((2 * block, 3 * block)));
    assert_eq!(file.data(2 * block + 9, 2 * block + 99).unwrap(), Some((2 * block + 9, 2 * block + 99)));
    assert_eq!(file.data(3 * block, 4 * block).unwrap(), None);
    let cache = BlockCache::new(4 * BLOCK).unwrap();
    for mut engine in engines() {
        let error = read_once(&mut engine, &cache, &file, (2 * block, BLOCK)).unwrap_err();
        assert!(matches!(error, TransferError::Damaged { .. }), "{error}");
    }
}

#[test]
fn a_table_that_ends_before_the_file_is_refused() {
    let table = |bytes: usize| Arc::new(vec![0_u8; bytes]);
    let fits = |bytes, start, length| BlockChecksums::new(table(bytes), start, length).is_some();
    assert!(fits(16, 0, 2 * BLOCK as u64) && fits(24, 8, BLOCK as u64 + 1) && fits(0, 0, 0));
    assert!(!fits(15, 0, 2 * BLOCK as u64) && !fits(24, 16, BLOCK as u64 + 1));
    assert!(!fits(8, usize::MAX, 1) && !fits(8, 0, u64::MAX));
}
