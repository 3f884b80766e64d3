// SPDX-License-Identifier: MIT OR Apache-2.0
use std::io::Write as _;
use std::sync::Arc;

use super::super::ring::testing::{Flag, ends};
use super::super::ring::{CLEAR_FLAG_INTERVAL, build_as};
use super::*;
use crate::cache::BlockCache;
use crate::class::Class;
use crate::engine::Request;
use crate::file::{ImageFile, ReadMode};
use crate::units::BLOCK;
use crate::{Acquire, BufferSlice, LoadGuard};

type Ring = Uring<BufferSlice>;

/// Returns every kind of ring that older kernels allow, with its note.
fn all_kinds() -> [(Ring, Option<String>); 3] {
    [Flavour::Deferred, Flavour::Cooperative, Flavour::Plain].map(|flavour| {
        let (ring, finished) = build_as(flavour, DEPTH).expect("this kernel has every kind of ring");
        (Ring::assemble(ring, finished), note(flavour))
    })
}

fn deferred() -> Ring {
    let [(ring, _), ..] = all_kinds();
    ring
}

/// A file with these bytes, on the disk. It is not in /tmp, which may be memory.
fn file_of(bytes: &[u8]) -> (tempfile::NamedTempFile, Arc<ImageFile>) {
    let mut temp = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    temp.write_all(bytes).unwrap();
    temp.as_file().sync_all().unwrap();
    let file = ImageFile::from_file(temp.reopen().unwrap(), temp.path()).unwrap();
    (temp, file)
}

/// Starts a read of a block.
fn start(
    ring: &mut Ring,
    cache: &Arc<BlockCache>,
    file: &Arc<ImageFile>,
    block: u64,
    mode: ReadMode,
) -> LoadGuard {
    let Acquire::Load(mut guard) = cache.acquire(file, block, &Notifier::new().unwrap()) else {
        panic!("not a load")
    };
    let slice = guard.take_slice().unwrap();
    ring.start(Flight::new(Request::fill(7, file, guard.offset(), slice, Class::Demand), mode, None));
    ring.flush();
    guard
}

#[test]
fn every_kind_of_ring_reads_the_same_bytes_and_wakes_its_poller() {
    let content: Vec<u8> = (0..4 * BLOCK).map(|i| u8::try_from(i % 251).unwrap()).collect();
    let (_temp, file) = file_of(&content);
    let cache = BlockCache::new(8 * BLOCK).unwrap();
    for (mut ring, note) in all_kinds() {
        for mode in [ReadMode::Direct, ReadMode::Buffered, ReadMode::Cached] {
            let guard = start(&mut ring, &cache, &file, 2, mode);
            let mut done = Vec::new();
            while done.is_empty() {
                let readable = wait_readable(ring.finished.as_raw_fd(), Duration::from_secs(60));
                assert!(readable, "{note:?} did not become readable");
                ring.reap(&mut done);
            }
            let over = done.pop().unwrap();
            over.result.unwrap();
            let block = guard.publish(over.memory);
            assert!(*block == content[2 * BLOCK..3 * BLOCK], "{note:?} {mode:?}: wrong bytes");
            block.discard();
        }
    }
}

#[test]
fn a_flag_without_completion_is_checked_once() {
    ends(|| {
        let mut ring = deferred();
        Flag::of(&ring.ring).keep_set_during(|| ring.reap(&mut Vec::new()));
        assert_eq!(ring.patience(), Duration::MAX, "nothing is in flight");
    });
}

#[test]
fn a_completed_read_without_the_flag_is_found() {
    // Not a hole, which would be read at once.
    let ((_temp, file), cache) = (file_of(&[1; BLOCK]), BlockCache::new(8 * BLOCK).unwrap());
    let mut ring = deferred();
    let _guard = start(&mut ring, &cache, &file, 0, ReadMode::Direct);
    assert!(wait_readable(ring.finished.as_raw_fd(), Duration::from_secs(60)));
    ring.finished.drain();
    Flag::of(&ring.ring).clear();
    let (mut done, start) = (Vec::new(), Instant::now());
    while done.is_empty() {
        let patience = ring.patience();
        assert!(
            patience <= CLEAR_FLAG_INTERVAL && start.elapsed() < Duration::from_secs(10),
            "the completion is not found"
        );
        wait_readable(ring.finished.as_raw_fd(), patience);
        ring.reap(&mut done);
    }
    assert_eq!(ring.patience(), Duration::MAX);
}

#[test]
fn the_note_names_what_a_ring_lacks() {
    let lacking = Some("deferred completions are not available".to_owned());
    assert_eq!(all_kinds().map(|(_, note)| note), [None, lacking.clone(), lacking]);
}
