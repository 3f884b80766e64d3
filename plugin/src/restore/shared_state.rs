// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory that all restored tasks and CRIU's main process share, made before the first task is forked. A task
//! that maps another's buffer finds its new mmap offset here.

use std::io;
use std::os::fd::AsFd as _;
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::unistd::ftruncate;
use rewake_amdgpu_uapi::abi::memory::{Mapping, PAGE};
use rewake_criu_images::amdgpu::KfdImage;

/// How long a task waits for another one's GPU state. Loading the memory of the largest GPU takes less.
const STATE_LIMIT: Duration = Duration::from_secs(600);
/// Time between two checks of a state.
const POLL_INTERVAL: Duration = Duration::from_millis(1);
const WORD: u64 = 8;

/// States of a process's GPU state or of a render node; 0 is not started.
const READY: u64 = 1;
const FAILED: u64 = 2;
/// A render node that a task is making.
const CLAIMED: u64 = 3;

/// The shared memory, in words of 64 bits.
///
/// Each `amdgpu-kfd-ID.img` has a row: its state, the id of the render node of each GPU, the new offset of
/// each buffer, and its placeholders. Each open render node has a row, too. Then follow the ids of
/// `/dev/kfd`s and exported buffers, and whether a CRIU watchdog runs. All ids are from CRIU's store of
/// descriptors.
#[derive(Debug)]
pub(crate) struct SharedState {
    memory: Mapping,
    rows: Vec<Row>,
    nodes: Vec<Row>,
    files: u64,
    exports: u64,
    watchdog: u64,
}

/// The offset at which a buffer can be mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MmapOffset {
    /// The offset in its GPU's render node.
    Offset(u64),
    /// The driver cannot map it: the buffer belongs to another GPU.
    Nowhere,
}

/// Stands for [`MmapOffset::Nowhere`]. No offset has this value: an offset is a multiple of the page size.
const NOWHERE: u64 = u64::MAX;

/// Words in front of the placeholders' words: the ids of their file and their userfaultfd.
const PLACEHOLDER_WORDS: usize = 2;

#[derive(Debug, Clone, Copy)]
struct Row {
    state: u64,
    contents: u64,
    render: u64,
    buffers: u64,
    /// The ids of the placeholders' file and userfaultfd, and for each mapping its start in the file and its
    /// buffer.
    placeholders: u64,
}

/// A task's wait for another's state has failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WaitError {
    /// The process's restore failed.
    #[error(
        "the GPU state of process {0}, which this task needs, could not be restored: see that process's error"
    )]
    Failed(u32),
    /// The process's state was not made in time.
    #[error("waited {STATE_LIMIT:?} for the GPU state of process {0}, which this task needs")]
    TimedOut(u32),
    /// The restore of a render node failed.
    #[error(
        "the render node of file {0:#x}, which this task needs, could not be restored: see the earlier error"
    )]
    NodeFailed(u32),
    /// The render node was not made in time.
    #[error("waited {STATE_LIMIT:?} for the render node of file {0:#x}, which this task needs")]
    NodeTimedOut(u32),
}

impl SharedState {
    /// Makes the memory with space for the images, `files` of `/dev/kfd`, `exports`, and the given number of
    /// buffers of each render node and of placeholders of each process.
    pub(crate) fn new(
        images: &[(u32, KfdImage)],
        placeholders: impl Iterator<Item = usize>,
        files: usize,
        exports: usize,
        nodes: impl Iterator<Item = usize>,
    ) -> io::Result<Self> {
        let mut end = 0;
        let mut take = |words: usize| {
            let start = end;
            end += words as u64 * WORD;
            start
        };
        let mut row = |renders: usize, buffers: usize, placeholders: usize| Row {
            state: take(1),
            contents: take(1),
            render: take(renders),
            buffers: take(buffers),
            placeholders: take(placeholders),
        };
        let of = |((_, image), count): (&(u32, KfdImage), usize)| {
            row(image.nodes.len(), image.buffers.len(), PLACEHOLDER_WORDS + 2 * count)
        };
        let rows = images.iter().zip(placeholders).map(of).collect();
        let nodes = nodes.map(|buffers| row(1, buffers, 0)).collect();
        let (files, exports, watchdog) = (take(files), take(exports), take(1));
        let length = end.max(1).next_multiple_of(PAGE);
        let file = memfd_create(c"rewake-shared-state", MFdFlags::MFD_CLOEXEC)?;
        ftruncate(&file, i64::try_from(length).map_err(io::Error::other)?)?;
        Ok(Self { memory: Mapping::shared(file.as_fd(), 0, length)?, rows, nodes, files, exports, watchdog })
    }

    /// Ends the tasks' wait for a watchdog: one runs, or none will.
    pub(crate) fn stop_watchdog_wait(&self) {
        self.memory.store64(self.watchdog, 1);
    }

    pub(crate) fn has_watchdog(&self) -> bool {
        self.memory.load64(self.watchdog) == 1
    }

    /// Stores a buffer's mmap offset. It is read only after [`SharedState::put_ready`].
    pub(crate) fn put_buffer(&self, image: usize, buffer: usize, mmap_offset: MmapOffset) {
        self.put_mmap_offset(self.rows[image], buffer, mmap_offset);
    }

    fn put_mmap_offset(&self, row: Row, buffer: usize, mmap_offset: MmapOffset) {
        let offset = match mmap_offset {
            MmapOffset::Offset(offset) => offset,
            MmapOffset::Nowhere => NOWHERE,
        };
        self.memory.store64(row.buffers + buffer as u64 * WORD, offset);
    }

    /// Claims a render node; returns true only to the first task that calls this.
    pub(crate) fn claim_node(&self, node: usize) -> bool {
        self.memory.replace64(self.nodes[node].state, 0, CLAIMED)
    }

    /// Stores the mmap offset of a render node's buffer. It is read only after [`SharedState::put_node`].
    pub(crate) fn put_node_buffer(&self, node: usize, buffer: usize, mmap_offset: MmapOffset) {
        self.put_mmap_offset(self.nodes[node], buffer, mmap_offset);
    }

    /// Stores the socket with the dma-bufs of a render node's buffers.
    pub(crate) fn put_node_contents(&self, node: usize, stored: i32) {
        self.put_stored(self.nodes[node].contents, stored);
    }

    /// Returns the socket with the dma-bufs of a render node's buffers, or `None` if it has no own buffers.
    pub(crate) fn node_contents(&self, node: usize) -> Option<i32> {
        self.get_stored(self.nodes[node].contents)
    }

    /// Stores a render node that is complete but for its imports.
    pub(crate) fn put_node(&self, node: usize, stored: i32) {
        self.put_stored(self.nodes[node].render, stored);
        self.memory.store64(self.nodes[node].state, READY);
    }

    /// Reports that a render node could not be made.
    pub(crate) fn node_failed(&self, node: usize) {
        self.memory.store64(self.nodes[node].state, FAILED);
    }

    /// Waits for a render node that another task makes, and returns its id in CRIU's store; `file` names it
    /// in errors.
    pub(crate) fn wait_node(&self, node: usize, file: u32) -> Result<i32, WaitError> {
        let row = self.nodes[node];
        let errors = (WaitError::NodeFailed(file), WaitError::NodeTimedOut(file));
        self.wait_until(row.state, || self.get_stored(row.render).filter(|_| self.is_ready(row)), errors)
    }

    /// Returns the mmap offset of a render node's buffer.
    pub(crate) fn node_buffer(&self, node: usize, buffer: usize) -> MmapOffset {
        self.mmap_offset(self.nodes[node], buffer)
    }

    fn is_ready(&self, row: Row) -> bool {
        self.memory.load64(row.state) == READY
    }

    /// Stores the render node of the GPU that is assigned to node `node` of the image.
    pub(crate) fn put_render(&self, image: usize, node: usize, stored: i32) {
        self.memory.store64(self.rows[image].render + node as u64 * WORD, u64::from(stored.unsigned_abs()));
    }

    /// Stores the socket with the dma-bufs of a process's buffers.
    pub(crate) fn put_contents(&self, image: usize, stored: i32) {
        self.put_stored(self.rows[image].contents, stored);
    }

    /// Returns the socket with the dma-bufs of a process's buffers, or `None` if no task has made the
    /// process.
    pub(crate) fn contents(&self, image: usize) -> Option<i32> {
        self.get_stored(self.rows[image].contents)
    }

    /// Stores a process's placeholder file and the userfaultfd of its placeholders.
    pub(crate) fn put_placeholders(&self, image: usize, file: i32, uffd: i32) {
        self.put_stored(self.rows[image].placeholders, file);
        self.put_stored(self.rows[image].placeholders + WORD, uffd);
    }

    /// Returns a process's placeholder file and userfaultfd, or `None` if it has no placeholder.
    pub(crate) fn placeholders(&self, image: usize) -> Option<(i32, i32)> {
        let row = self.rows[image].placeholders;
        self.get_stored(row).zip(self.get_stored(row + WORD))
    }

    /// Stores that a mapping is a placeholder for this buffer, from this offset of the file on.
    pub(crate) fn put_placeholder(&self, image: usize, number: usize, buffer: usize, offset: u64) {
        let word = self.placeholder_word(image, number);
        self.memory.store64(word, offset);
        self.memory.store64(word + WORD, buffer as u64 + 1);
    }

    /// Returns the buffer and file offset of a mapping's placeholder, or `None` if the mapping has none.
    pub(crate) fn placeholder(&self, image: usize, number: usize) -> Option<(usize, u64)> {
        let word = self.placeholder_word(image, number);
        let buffer = usize::try_from(self.memory.load64(word + WORD).checked_sub(1)?).ok()?;
        Some((buffer, self.memory.load64(word)))
    }

    fn placeholder_word(&self, image: usize, number: usize) -> u64 {
        self.rows[image].placeholders + (PLACEHOLDER_WORDS + 2 * number) as u64 * WORD
    }

    /// Reports that the state of an image's process is complete.
    pub(crate) fn put_ready(&self, image: usize) {
        self.memory.store64(self.rows[image].state, READY);
    }

    /// Reports that the state of an image's process could not be made.
    pub(crate) fn put_failed(&self, image: usize) {
        self.memory.store64(self.rows[image].state, FAILED);
    }

    /// Returns how many processes have their GPU state.
    pub(crate) fn ready_count(&self) -> usize {
        self.rows.iter().filter(|row| self.memory.load64(row.state) == READY).count()
    }

    /// Stores a `/dev/kfd`.
    pub(crate) fn put_file(&self, file: usize, stored: i32) {
        self.put_stored(self.files + file as u64 * WORD, stored);
    }

    /// Stores the dma-buf of an exported buffer.
    pub(crate) fn put_export(&self, export: usize, stored: i32) {
        self.put_stored(self.exports + export as u64 * WORD, stored);
    }

    /// Stores an id plus one: 0 is none yet.
    fn put_stored(&self, word: u64, stored: i32) {
        self.memory.store64(word, u64::from(stored.unsigned_abs()) + 1);
    }

    fn get_stored(&self, word: u64) -> Option<i32> {
        i32::try_from(self.memory.load64(word).checked_sub(1)?).ok()
    }

    /// Waits for a `/dev/kfd` of the process of `image`; `pid` names it in errors.
    pub(crate) fn file(&self, file: usize, image: usize, pid: u32) -> Result<i32, WaitError> {
        self.stored(self.files + file as u64 * WORD, image, pid)
    }

    /// Waits for an exported buffer of the process of `image`; `pid` names it in errors.
    pub(crate) fn export(&self, export: usize, image: usize, pid: u32) -> Result<i32, WaitError> {
        self.stored(self.exports + export as u64 * WORD, image, pid)
    }

    fn stored(&self, word: u64, image: usize, pid: u32) -> Result<i32, WaitError> {
        let errors = (WaitError::Failed(pid), WaitError::TimedOut(pid));
        self.wait_until(self.rows[image].state, || self.get_stored(word), errors)
    }

    /// Waits for the state of a process; `pid` names it in errors.
    pub(crate) fn wait(&self, image: usize, pid: u32) -> Result<(), WaitError> {
        let row = self.rows[image];
        let errors = (WaitError::Failed(pid), WaitError::TimedOut(pid));
        self.wait_until(row.state, || self.is_ready(row).then_some(()), errors)
    }

    /// Waits until `ready` returns a value, `state` is [`FAILED`], or the time is over. The last argument has
    /// the errors for the latter two.
    fn wait_until<T>(
        &self,
        state: u64,
        ready: impl Fn() -> Option<T>,
        (failed, timed_out): (WaitError, WaitError),
    ) -> Result<T, WaitError> {
        let start = Instant::now();
        loop {
            if let Some(found) = ready() {
                return Ok(found);
            }
            if self.memory.load64(state) == FAILED {
                return Err(failed);
            }
            if start.elapsed() > STATE_LIMIT {
                return Err(timed_out);
            }
            sleep(POLL_INTERVAL);
        }
    }

    pub(crate) fn buffer(&self, image: usize, buffer: usize) -> MmapOffset {
        self.mmap_offset(self.rows[image], buffer)
    }

    fn mmap_offset(&self, row: Row, buffer: usize) -> MmapOffset {
        match self.memory.load64(row.buffers + buffer as u64 * WORD) {
            NOWHERE => MmapOffset::Nowhere,
            offset => MmapOffset::Offset(offset),
        }
    }

    pub(crate) fn render(&self, image: usize, node: usize) -> i32 {
        i32::try_from(self.memory.load64(self.rows[image].render + node as u64 * WORD)).unwrap_or(-1)
    }
}
