// SPDX-License-Identifier: MIT OR Apache-2.0
//! What restored tasks tell each other, and CRIU's main process: memory that all of them share, made before the first
//! one is forked. A task that maps another's buffer needs to know where it is now.

use std::io;
use std::os::fd::AsFd as _;
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::unistd::ftruncate;
use rewake_amdgpu_uapi::abi::memory::{Mapping, PAGE};
use rewake_criu_images::amdgpu::KfdImage;

/// How long a task waits for another one's GPU state. Loading the largest GPU's memory takes less.
const PATIENCE: Duration = Duration::from_secs(600);
/// Between two looks.
const LOOK: Duration = Duration::from_millis(1);
const WORD: u64 = 8;

/// What became of a process's GPU state; 0 is nothing yet.
const MADE: u64 = 1;
const FAILED: u64 = 2;
/// Of a render node: some task makes it.
const TAKEN: u64 = 3;

/// One row of words for each `amdgpu-kfd-ID.img`: its state, a render node's id in CRIU's store for each of its GPUs,
/// the new offset of each buffer, and its placeholders. One for each render node, too. Behind them, ids of what tasks have for each other: `/dev/kfd`s, exported
/// buffers; and whether a guard looks after the tasks.
#[derive(Debug)]
pub(crate) struct SharedState {
    memory: Mapping,
    rows: Vec<Row>,
    nodes: Vec<Row>,
    files: u64,
    exports: u64,
    guarded: u64,
}

/// Where a buffer is mapped from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MmapOffset {
    /// The offset in its GPU's render node.
    Offset(u64),
    /// The driver cannot map it: it is another GPU's.
    Nowhere,
}

/// No offset: they are page numbers of files.
const NOWHERE: u64 = u64::MAX;

/// Words before those of each placeholder.
const PLACEHOLDERS: usize = 2;

#[derive(Debug, Clone, Copy)]
struct Row {
    state: u64,
    contents: u64,
    render: u64,
    buffers: u64,
    /// Their file and their userfaultfd, and for each mapping where in the file it begins and its buffer.
    placeholders: u64,
}

/// The other process's GPU state did not come.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Waited {
    /// Its restore failed.
    #[error("the GPU state of process {0}, which is needed here, could not be restored: see above")]
    Failed(u32),
    /// Nothing happened.
    #[error("waited {PATIENCE:?} for the GPU state of process {0}, which is needed here")]
    Late(u32),
    /// The restore of a render node failed.
    #[error("the render node of file {0:#x}, which is needed here, could not be restored: see above")]
    NodeFailed(u32),
    /// Nobody makes it.
    #[error("waited {PATIENCE:?} for the render node of file {0:#x}, which is needed here")]
    NodeLate(u32),
}

impl SharedState {
    /// With room for so many `/dev/kfd`s and exported buffers, for render nodes with so many buffers, and for so many
    /// placeholders of each process.
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
            row(image.nodes.len(), image.buffers.len(), PLACEHOLDERS + 2 * count)
        };
        let rows = images.iter().zip(placeholders).map(of).collect();
        let nodes = nodes.map(|buffers| row(1, buffers, 0)).collect();
        let (files, exports, guarded) = (take(files), take(exports), take(1));
        let length = end.max(1).next_multiple_of(PAGE);
        let file = memfd_create(c"rewake-board", MFdFlags::MFD_CLOEXEC)?;
        ftruncate(&file, i64::try_from(length).map_err(io::Error::other)?)?;
        Ok(Self { memory: Mapping::shared(file.as_fd(), 0, length)?, rows, nodes, files, exports, guarded })
    }

    /// A guard looks after the tasks, or none will: they do not wait for it any more.
    pub(crate) fn put_guarded(&self) {
        self.memory.store64(self.guarded, 1);
    }

    pub(crate) fn is_guarded(&self) -> bool {
        self.memory.load64(self.guarded) == 1
    }

    /// Where a buffer is mapped from now; not seen before [`SharedState::made`].
    pub(crate) fn put_buffer(&self, image: usize, buffer: usize, place: MmapOffset) {
        self.put_place(self.rows[image], buffer, place);
    }

    fn put_place(&self, row: Row, buffer: usize, place: MmapOffset) {
        let offset = match place {
            MmapOffset::Offset(offset) => offset,
            MmapOffset::Nowhere => NOWHERE,
        };
        self.memory.store64(row.buffers + buffer as u64 * WORD, offset);
    }

    /// Whether a render node is this task's to make: it is the first one's that asks.
    pub(crate) fn take_node(&self, node: usize) -> bool {
        self.memory.replace64(self.nodes[node].state, 0, TAKEN)
    }

    /// Where a buffer of a render node is mapped from now; not seen before [`SharedState::put_node`].
    pub(crate) fn put_node_buffer(&self, node: usize, buffer: usize, place: MmapOffset) {
        self.put_place(self.nodes[node], buffer, place);
    }

    /// The socket with the dma-bufs of a render node's buffers, by its id in CRIU's store.
    pub(crate) fn put_node_contents(&self, node: usize, stored: i32) {
        self.put_stored(self.nodes[node].contents, stored);
    }

    /// The same; none if there are none.
    pub(crate) fn node_contents(&self, node: usize) -> Option<i32> {
        self.get_stored(self.nodes[node].contents)
    }

    /// A render node is made, with what is its own: by its id in CRIU's store.
    pub(crate) fn put_node(&self, node: usize, stored: i32) {
        self.put_stored(self.nodes[node].render, stored);
        self.memory.store64(self.nodes[node].state, MADE);
    }

    /// It will not come.
    pub(crate) fn node_failed(&self, node: usize) {
        self.memory.store64(self.nodes[node].state, FAILED);
    }

    /// Waits for a render node that some task makes, by its id in CRIU's store; `file` names it in errors.
    pub(crate) fn wait_node(&self, node: usize, file: u32) -> Result<i32, Waited> {
        let row = self.nodes[node];
        let late = (Waited::NodeFailed(file), Waited::NodeLate(file));
        self.wait_until(row.state, || self.get_stored(row.render).filter(|_| self.is_made(row)), late)
    }

    /// Where a buffer of a render node is mapped from now.
    pub(crate) fn node_buffer(&self, node: usize, buffer: usize) -> MmapOffset {
        self.place(self.nodes[node], buffer)
    }

    fn is_made(&self, row: Row) -> bool {
        self.memory.load64(row.state) == MADE
    }

    /// The render node of the GPU in the place of node `node` of the image.
    pub(crate) fn put_render(&self, image: usize, node: usize, stored: i32) {
        self.memory.store64(self.rows[image].render + node as u64 * WORD, u64::from(stored.unsigned_abs()));
    }

    /// The socket with the dma-bufs of a process's buffers, by its id in CRIU's store.
    pub(crate) fn put_contents(&self, image: usize, stored: i32) {
        self.put_stored(self.rows[image].contents, stored);
    }

    /// The same; none if no task has made the process.
    pub(crate) fn contents(&self, image: usize) -> Option<i32> {
        self.get_stored(self.rows[image].contents)
    }

    /// A process's file of placeholders and their userfaultfd, by their ids in CRIU's store.
    pub(crate) fn put_placeholders(&self, image: usize, file: i32, uffd: i32) {
        self.put_stored(self.rows[image].placeholders, file);
        self.put_stored(self.rows[image].placeholders + WORD, uffd);
    }

    /// The same; none if it has no placeholder.
    pub(crate) fn placeholders(&self, image: usize) -> Option<(i32, i32)> {
        let row = self.rows[image].placeholders;
        self.get_stored(row).zip(self.get_stored(row + WORD))
    }

    /// A mapping is a placeholder, from this offset of the file on, for this buffer.
    pub(crate) fn put_placeholder(&self, image: usize, number: usize, buffer: usize, offset: u64) {
        let word = self.placeholder_word(image, number);
        self.memory.store64(word, offset);
        self.memory.store64(word + WORD, buffer as u64 + 1);
    }

    /// The same: buffer and offset; none if it is not.
    pub(crate) fn placeholder(&self, image: usize, number: usize) -> Option<(usize, u64)> {
        let word = self.placeholder_word(image, number);
        let buffer = usize::try_from(self.memory.load64(word + WORD).checked_sub(1)?).ok()?;
        Some((buffer, self.memory.load64(word)))
    }

    fn placeholder_word(&self, image: usize, number: usize) -> u64 {
        self.rows[image].placeholders + (PLACEHOLDERS + 2 * number) as u64 * WORD
    }

    /// All of an image's process is there.
    pub(crate) fn made(&self, image: usize) {
        self.memory.store64(self.rows[image].state, MADE);
    }

    /// It will not come.
    pub(crate) fn failed(&self, image: usize) {
        self.memory.store64(self.rows[image].state, FAILED);
    }

    /// How many processes have their GPU state.
    pub(crate) fn count(&self) -> usize {
        self.rows.iter().filter(|row| self.memory.load64(row.state) == MADE).count()
    }

    /// A `/dev/kfd`'s id in CRIU's store.
    pub(crate) fn put_file(&self, file: usize, stored: i32) {
        self.put_stored(self.files + file as u64 * WORD, stored);
    }

    /// An exported buffer's.
    pub(crate) fn put_export(&self, export: usize, stored: i32) {
        self.put_stored(self.exports + export as u64 * WORD, stored);
    }

    /// One more than the id: 0 is none yet.
    fn put_stored(&self, word: u64, stored: i32) {
        self.memory.store64(word, u64::from(stored.unsigned_abs()) + 1);
    }

    fn get_stored(&self, word: u64) -> Option<i32> {
        i32::try_from(self.memory.load64(word).checked_sub(1)?).ok()
    }

    /// Waits for a `/dev/kfd` of the process of `image`; `pid` names it in errors.
    pub(crate) fn file(&self, file: usize, image: usize, pid: u32) -> Result<i32, Waited> {
        self.stored(self.files + file as u64 * WORD, image, pid)
    }

    /// Waits for an exported buffer of the process of `image`; `pid` names it in errors.
    pub(crate) fn export(&self, export: usize, image: usize, pid: u32) -> Result<i32, Waited> {
        self.stored(self.exports + export as u64 * WORD, image, pid)
    }

    fn stored(&self, word: u64, image: usize, pid: u32) -> Result<i32, Waited> {
        let late = (Waited::Failed(pid), Waited::Late(pid));
        self.wait_until(self.rows[image].state, || self.get_stored(word), late)
    }

    /// Waits for a process's state; `pid` names it in errors.
    pub(crate) fn wait(&self, image: usize, pid: u32) -> Result<(), Waited> {
        let row = self.rows[image];
        let late = (Waited::Failed(pid), Waited::Late(pid));
        self.wait_until(row.state, || self.is_made(row).then_some(()), late)
    }

    /// Until something is there, `state` says that it failed, or it is late; gives the error for either.
    fn wait_until<T>(
        &self,
        state: u64,
        there: impl Fn() -> Option<T>,
        (failed, late): (Waited, Waited),
    ) -> Result<T, Waited> {
        let start = Instant::now();
        loop {
            if let Some(found) = there() {
                return Ok(found);
            }
            if self.memory.load64(state) == FAILED {
                return Err(failed);
            }
            if start.elapsed() > PATIENCE {
                return Err(late);
            }
            sleep(LOOK);
        }
    }

    pub(crate) fn buffer(&self, image: usize, buffer: usize) -> MmapOffset {
        self.place(self.rows[image], buffer)
    }

    fn place(&self, row: Row, buffer: usize) -> MmapOffset {
        match self.memory.load64(row.buffers + buffer as u64 * WORD) {
            NOWHERE => MmapOffset::Nowhere,
            offset => MmapOffset::Offset(offset),
        }
    }

    pub(crate) fn render(&self, image: usize, node: usize) -> i32 {
        i32::try_from(self.memory.load64(self.rows[image].render + node as u64 * WORD)).unwrap_or(-1)
    }
}
