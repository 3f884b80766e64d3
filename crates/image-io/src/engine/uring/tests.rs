// SPDX-License-Identifier: MIT OR Apache-2.0
use std::io::Write as _;
use std::sync::Arc;

use super::super::ring::testing::{Flag, ends};
use super::super::ring::{TRUST_FLAG_FOR, build_as};
use super::*;
use crate::class::Class;
use crate::engine::Request;
use crate::file::{ImageFile, ReadMode};
use crate::{Acquire, BufferSlice, LoadGuard};

type Ring = Uring<BufferSlice>;

/// Returns every kind of ring that older or stricter kernels allow, with its note.
fn all_kinds(cache: &Arc<BlockCache>) -> Vec<(Ring, Option<String>)> {
    let mut kinds = Vec::new();
    for flavour in [Flavour::Deferred, Flavour::Cooperative, Flavour::Plain] {
        for registered in [true, false] {
            let (ring, finished) = build_as(flavour, DEPTH).expect("this kernel has every kind of ring");
            let refusal = || Err(io::Error::from_raw_os_error(libc::ENOMEM));
            let registration = if registered { register(&ring, cache) } else { refusal() };
            let note = note(flavour, registration.as_ref().err());
            kinds.push((Ring::assemble(ring, finished, registered.then(|| Arc::clone(cache))), note));
        }
    }
    kinds
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
    for (mut ring, note) in all_kinds(&cache) {
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
        let cache = BlockCache::new(8 * BLOCK).unwrap();
        let (mut ring, note) = all_kinds(&cache).swap_remove(0);
        assert_eq!(note, None, "its completions are deferred");
        Flag::of(&ring.ring).keep_set_during(|| ring.reap(&mut Vec::new()));
        assert_eq!(ring.patience(), Duration::MAX, "nothing is in flight");
    });
}

#[test]
fn a_completed_read_without_the_flag_is_found() {
    // Not a hole, which would be read at once.
    let ((_temp, file), cache) = (file_of(&[1; BLOCK]), BlockCache::new(8 * BLOCK).unwrap());
    let (mut ring, _) = all_kinds(&cache).swap_remove(0);
    let _guard = start(&mut ring, &cache, &file, 0, ReadMode::Direct);
    assert!(wait_readable(ring.finished.as_raw_fd(), Duration::from_secs(60)));
    ring.finished.drain();
    Flag::of(&ring.ring).clear();
    let (mut done, start) = (Vec::new(), Instant::now());
    while done.is_empty() {
        let patience = ring.patience();
        assert!(
            patience <= TRUST_FLAG_FOR && start.elapsed() < Duration::from_secs(10),
            "the completion is not found"
        );
        wait_readable(ring.finished.as_raw_fd(), patience);
        ring.reap(&mut done);
    }
    assert_eq!(ring.patience(), Duration::MAX);
}

#[test]
fn the_note_names_what_a_ring_lacks_and_the_remedy() {
    let cache = BlockCache::new(8 * BLOCK).unwrap();
    let notes: Vec<Option<String>> = all_kinds(&cache).into_iter().map(|(_, note)| note).collect();
    assert_eq!(notes[0], None);
    assert!(notes[1].as_ref().unwrap().contains("RLIMIT_MEMLOCK"));
    assert!(notes[2].as_ref().unwrap().contains("deferred"));
}
