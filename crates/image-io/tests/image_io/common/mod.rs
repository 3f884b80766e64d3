// SPDX-License-Identifier: MIT OR Apache-2.0
//! A pages file with known contents, and engines driven to their end.
#![allow(dead_code, unreachable_pub)] // Each test binary uses its part.

use std::io::Write;
use std::os::fd::{AsRawFd, RawFd};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rewake_image_io::{
    Acquire, BlockCache, BlockRef, BufferSlice, Class, Completion, Engine, ImageFile, LoadGuard, Memory,
    Request, TransferError,
};
use rewake_process::Notifier;
use tempfile::NamedTempFile;

/// Bytes that differ everywhere: each 8 bytes are a hash of their own offset.
pub fn content(len: usize) -> Vec<u8> {
    let word = |i: u64| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (i << 17)).to_le_bytes();
    (0..len.div_ceil(8) as u64).flat_map(word).take(len).collect()
}

/// A file on disk with `content(len)`, written back so that it can be dropped from the page cache.
pub fn pages(len: usize) -> (NamedTempFile, Arc<ImageFile>, Vec<u8>) {
    let bytes = content(len);
    // Not in /tmp, which may be memory: that never gets cold, and is never read directly.
    let mut temp = NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    temp.write_all(&bytes).unwrap();
    temp.as_file().sync_all().unwrap();
    let file = open(temp.path());
    (temp, file, bytes)
}

/// Opens a file as a session does.
pub fn open(path: &Path) -> Arc<ImageFile> {
    let file = ImageFile::from_file(std::fs::File::open(path).unwrap(), path).unwrap();
    file.join();
    file
}

/// Has the kernel evict the file's pages.
pub fn make_cold(temp: &NamedTempFile) {
    // SAFETY: posix_fadvise takes no pointers.
    let rc = unsafe { libc::posix_fadvise(temp.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    assert_eq!(rc, 0);
}

/// Returns whether the descriptor becomes readable in time. An interruption by io_uring's own work does not
/// count.
pub fn readable(fd: RawFd, patience: Duration) -> bool {
    let give_up = Instant::now() + patience;
    loop {
        let left = give_up.saturating_duration_since(Instant::now());
        let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        // SAFETY: one pollfd that lives across the call.
        let ready = unsafe { libc::poll(&raw mut poll, 1, i32::try_from(left.as_millis()).unwrap()) };
        if ready >= 0 || std::io::Error::last_os_error().kind() != std::io::ErrorKind::Interrupted {
            return ready > 0;
        }
    }
}

/// Reaps until `count` reads are over. It waits for the engine's descriptor where it has one.
pub fn finish<M: Memory>(engine: &mut Engine<M>, count: usize) -> Vec<Completion<M>> {
    engine.flush();
    let mut done = Vec::new();
    let start = Instant::now();
    while done.len() < count {
        assert!(start.elapsed() < Duration::from_secs(60), "{} of {count} reads are over", done.len());
        if let Some(fd) = engine.event() {
            assert!(
                readable(fd.as_raw_fd(), Duration::from_secs(60)),
                "the engine's descriptor stays unreadable"
            );
        }
        engine.reap(&mut done);
    }
    done
}

pub fn load(cache: &Arc<BlockCache>, file: &Arc<ImageFile>, block: u64, notifier: &Notifier) -> LoadGuard {
    match cache.acquire(file, block, notifier) {
        Acquire::Load(guard) => guard,
        other => panic!("expected to load block {block}, got {other:?}"),
    }
}

/// Loads a block on the calling thread and publishes it.
pub fn fill(mut guard: LoadGuard, file: &ImageFile) -> BlockRef {
    let mut slice = guard.take_slice().unwrap();
    rewake_image_io::read_now(file, guard.offset(), &mut slice).unwrap();
    guard.publish(slice)
}

/// Reads `len` bytes with an engine, into a block buffer of `cache`.
pub fn read_once(
    engine: &mut Engine<BufferSlice>,
    cache: &Arc<BlockCache>,
    file: &Arc<ImageFile>,
    (offset, len): (u64, usize),
) -> Result<Vec<u8>, TransferError> {
    // A block number that no test uses, far beyond the file: its buffer is a whole block.
    let mut guard = load(cache, file, 1 << 40, &Notifier::new().unwrap());
    let mut memory = guard.take_slice().unwrap();
    memory.fill(0xEE);
    memory.truncate(len);
    engine.submit(Request::fill(1, file, offset, memory, Class::Background)).unwrap();
    let done = finish(engine, 1).pop().unwrap();
    assert_eq!((done.token, done.memory.len(), engine.in_flight()), (1, len, 0));
    done.result.map(|()| done.memory.to_vec())
}

/// Pages of this process. Clones share them.
#[derive(Debug, Clone)]
pub struct Pages(Arc<memmap2::MmapRaw>);

// SAFETY: the pages are mapped until the last clone is dropped, and never borrowed.
unsafe impl Memory for Pages {
    fn start(&self) -> NonNull<u8> {
        NonNull::new(self.0.as_mut_ptr()).unwrap()
    }

    fn bytes(&self) -> usize {
        self.0.len()
    }
}

impl Pages {
    pub fn new(bytes: usize) -> Self {
        Self(Arc::new(memmap2::MmapOptions::new().len(bytes).map_anon().unwrap().into()))
    }

    pub fn put(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.bytes());
        // SAFETY: the range lies in the mapping, and no transfer is in flight.
        unsafe { self.start().as_ptr().add(at).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }

    pub fn get(&self, at: usize, bytes: usize) -> Vec<u8> {
        assert!(at + bytes <= self.bytes());
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts(self.start().as_ptr().add(at), bytes) }.to_vec()
    }
}
