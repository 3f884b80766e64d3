// SPDX-License-Identifier: MIT OR Apache-2.0
//! What is under way between files and buffers: engines, staging memory, transfers of files, and the waiting for them.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rewake_amdgpu::{Bo, CopyEngine, Memory, MemoryDevice, Shape, Slot, Staging, Ticket, Transfer, Way};
use rewake_kfd::abi::memory::Mapping;
use rewake_kfd::render::Render;
use rewake_kfd::settings::max_buffer_size;
use rewake_store::files::{Direction, Finished, Request};
use rewake_store::pace::Pace;

use crate::error::{Error, Stuck};
use crate::order::{Chunk, Order};
use crate::pages::{CHUNK, PagesFile, Piece};
use crate::parts::{Buffer, Part, behind, buffers, missing, parts};
use crate::report::Moved;
use crate::share::share;
use crate::straight::Straight;
use crate::transfers::Transfers;
use crate::window::Window;

/// Slots of staging memory for each GPU, 16 MiB: enough for a disk and two rings to be busy. More take longer to make than
/// they save.
const SLOTS_OF_A_GPU: u32 = 8;
/// And in all, 48 MiB: three chunks of each of eight GPUs.
const SLOTS: u32 = 24;
/// One copied, one read or written: with fewer nothing is under way beside anything.
const FEWEST_SLOTS: u64 = 2;
/// Copies from staging memory that are submitted ahead, for each ring: one is copied, and the next one is there when it ends.
/// More would only make demands wait.
const AHEAD: usize = 2;
/// How long nothing may happen before the restore or dump fails.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);
/// Between two looks at engines that cannot tell when something has ended, or at a disk that others use.
const SOON: u16 = 1;
/// And at those that can.
const LOOK: u16 = 1000;

/// The buffers' memory of one process, or of one render node: its files, and the buffers' dma-bufs. A buffer without one is
/// left alone by a restore.
#[derive(Debug, Clone, Copy)]
pub struct Process<'a> {
    /// Its files.
    pub files: &'a [PagesFile],
    /// By the image's number of the buffer.
    pub dmabufs: &'a [Option<OwnedFd>],
}

impl Process<'_> {
    /// Bytes in one of its files of buffers that have a dma-buf.
    pub(crate) fn bytes_in(&self, file: &PagesFile) -> u64 {
        let here = |buffer: usize| self.dmabufs.get(buffer).is_some_and(Option::is_some);
        let stretches = file.stretches().iter().filter(|stretch| here(stretch.buffer));
        stretches.map(|stretch| stretch.bytes).sum()
    }
}

/// Where buffers are.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Sink<'a> {
    /// On the GPUs that the files name.
    Gpus,
    /// In memory that stands in for them.
    Memory(&'a Arc<MemoryDevice>),
}

/// What was in a chunk that is done.
pub(crate) struct Done {
    /// Whose it was.
    pub(crate) process: usize,
    /// The GPU's render node.
    pub(crate) minor: u32,
    /// Bytes of buffers.
    pub(crate) bytes: u64,
    /// Buffers of which it was the last chunk.
    pub(crate) whole: Vec<usize>,
    /// Whether they were the last of the process.
    pub(crate) all: bool,
}

/// Copies of a chunk that an engine works on.
#[derive(Debug, Clone, Copy)]
struct Copying {
    ticket: Ticket,
    chunk: Chunk,
    /// None: nothing of it goes through staging memory.
    slot: Option<Slot>,
}

/// All that is under way.
pub(crate) struct Flow<'a> {
    pub(crate) staging: Staging,
    pub(crate) moved: Moved,
    pub(crate) straight: Straight,
    pub(crate) transfers: Transfers,
    processes: &'a [Process<'a>],
    parts: Vec<Part<'a>>,
    engines: Vec<CopyEngine>,
    /// The files' side of the slots.
    window: Window,
    /// By process and buffer.
    buffers: Vec<Vec<Option<Buffer>>>,
    /// Buffers that are not whole, by process.
    missing: Vec<usize>,
    order: Order,
    /// Rather than all files in turn.
    by_process: bool,
    free: Vec<Slot>,
    copying: Vec<Copying>,
    last: Instant,
    list: Vec<Transfer>,
}

impl<'a> Flow<'a> {
    /// An engine for each GPU, and nothing under way. Chunks come as they are in the files.
    pub(crate) fn new(
        processes: &'a [Process<'a>],
        sink: Sink<'_>,
        pace: Option<Arc<Pace>>,
    ) -> Result<Self, Error> {
        let (parts, minors) = parts(processes);
        let buffers = buffers(processes, &parts);
        let missing = missing(processes, &buffers);
        let all: u64 = parts.iter().map(|part| part.file.chunks()).sum();
        let most = (max_buffer_size()?.unwrap_or(u64::MAX) / CHUNK).max(FEWEST_SLOTS);
        let slots = SLOTS.min(SLOTS_OF_A_GPU.saturating_mul(u32::try_from(minors.len()).unwrap_or(SLOTS)));
        let slots = u32::try_from(most.min(all.max(FEWEST_SLOTS))).unwrap_or(slots).min(slots);
        let (staging, engines) = engines(sink, &minors, Shape { slots, slot_bytes: CHUNK })?;
        let window = match staging.memory() {
            Memory::Pages => Window::Staging(staging.clone()),
            Memory::Gtt => Window::Own(Arc::new(Mapping::anonymous(u64::from(slots) * CHUNK)?)),
        };
        let sequences = parts.iter().map(|part| (0..part.file.chunks()).collect());
        let order = Order::new(sequences, vec![(0..parts.len()).collect()]);
        Ok(Self {
            free: staging.slots().collect(),
            staging,
            moved: Moved::default(),
            processes,
            parts,
            engines,
            window,
            transfers: Transfers::new(pace)?,
            buffers,
            missing,
            order,
            by_process: false,
            copying: Vec::new(),
            straight: Straight::default(),
            last: Instant::now(),
            list: Vec::new(),
        })
    }

    /// The file of a chunk.
    pub(crate) fn file(&self, chunk: Chunk) -> &'a PagesFile {
        self.parts[chunk.file].file
    }

    /// Processes none of whose buffers is loaded.
    pub(crate) fn without_buffers(&self) -> impl Iterator<Item = usize> + use<> {
        let none: Vec<usize> =
            (0..self.missing.len()).filter(|process| self.missing[*process] == 0).collect();
        none.into_iter()
    }

    /// The files of a process.
    pub(crate) fn files_of(&self, process: usize) -> impl Iterator<Item = &'a PagesFile> {
        self.processes[process].files.iter()
    }

    /// All files.
    pub(crate) fn files(&self) -> impl Iterator<Item = &'a PagesFile> {
        self.parts.iter().map(|part| part.file)
    }

    /// For the log: the ways that bytes go.
    pub(crate) fn notes(&self) -> Vec<String> {
        let ways = self.engines.iter().map(|engine| format!("renderD{}: {}", engine.minor(), engine.way()));
        ways.chain(self.transfers.note()).collect()
    }

    /// In the order of what is loaded behind running processes, with these buffers of processes first of their GPU.
    pub(crate) fn by_process(&mut self, first: &[(usize, usize)]) {
        self.order = behind(self.processes, &self.parts, &self.buffers, first);
        self.by_process = true;
    }

    /// Wants a buffer before all others that are not under way and that nobody demanded before. One that is not loaded is
    /// left alone.
    pub(crate) fn demand(&mut self, process: usize, buffer: usize) {
        if self.processes[process].dmabufs[buffer].is_some()
            && let Some(Buffer { file, chunks, .. }) = &self.buffers[process][buffer]
        {
            self.order.demand(*file, chunks.clone());
        }
    }

    /// The next chunk of a GPU that has room for copies and was not `passed`; None if there is none now.
    pub(crate) fn next_chunk(&self, passed: &[usize]) -> Option<Chunk> {
        let engine = |file: usize| self.parts[file].engine;
        self.order.next(|file| !passed.contains(&engine(file)) && self.engines[engine(file)].room() > 0)
    }

    /// Takes what [`Flow::next_chunk`] gave.
    pub(crate) fn take_chunk(&mut self, chunk: Chunk) {
        self.order.take(chunk);
        self.last = Instant::now();
    }

    /// Whether all chunks have been taken.
    pub(crate) fn all_taken(&self) -> bool {
        self.order.all_taken()
    }

    /// Whether it was demanded.
    pub(crate) fn is_demanded(&self, chunk: Chunk) -> bool {
        self.order.is_demanded(chunk)
    }

    pub(crate) fn free_slot(&mut self) -> Option<Slot> {
        self.free.pop()
    }

    /// Slots that a GPU may have. None: as many as there are, for files come in turn, or nobody else needs any.
    pub(crate) fn share(&self) -> Option<usize> {
        let left = |engine: usize| {
            let mut files = self.parts.iter().enumerate().filter(|(_, part)| part.engine == engine);
            files.any(|(file, _)| self.order.has_left(file))
        };
        let gpus = || (0..self.engines.len()).filter(|engine| left(*engine)).count();
        self.by_process.then(|| share(self.staging.slots().len(), gpus())).flatten()
    }

    /// Its place among the GPUs, of that which a chunk is copied by.
    pub(crate) fn gpu(&self, chunk: Chunk) -> usize {
        self.parts[chunk.file].engine
    }

    /// Slots that are being copied by the GPU of a chunk.
    pub(crate) fn copying(&self, chunk: Chunk) -> usize {
        let of_it = |of: &&Copying| of.slot.is_some() && self.gpu(of.chunk) == self.gpu(chunk);
        self.copying.iter().filter(of_it).count()
    }

    pub(crate) fn give_back(&mut self, slot: Slot) {
        self.free.push(slot);
    }

    /// Whether every slot is free and no engine works.
    pub(crate) fn is_idle(&self) -> bool {
        let slots = self.free.len() == self.staging.slots().len();
        slots && self.copying.is_empty() && self.straight.is_idle()
    }

    /// Whether the bytes of a buffer are to be moved.
    pub(crate) fn is_here(&self, chunk: Chunk, piece: &Piece) -> bool {
        self.processes[self.parts[chunk.file].process].dmabufs[piece.buffer].is_some()
    }

    /// The engine's name for a piece's buffer.
    pub(crate) fn bo(&mut self, chunk: Chunk, piece: &Piece) -> Result<Bo, Error> {
        let Part { process, engine, .. } = self.parts[chunk.file];
        let buffer = self.buffers[process][piece.buffer].as_mut().expect("what has a piece has bytes");
        if let Some(bo) = buffer.bo {
            return Ok(bo);
        }
        let dmabuf = self.processes[process].dmabufs[piece.buffer].as_ref();
        let dmabuf = dmabuf.ok_or(Stuck::NoBytes(piece.buffer))?;
        // The kernel rounds to pages.
        let bo = self.engines[engine].import(dmabuf.as_fd(), 1)?;
        buffer.bo = Some(bo);
        self.moved.buffers += 1;
        Ok(bo)
    }

    /// An empty list for [`Flow::copy`], used again and again.
    pub(crate) fn list(&mut self) -> Vec<Transfer> {
        let mut list = std::mem::take(&mut self.list);
        list.clear();
        list
    }

    /// Starts the copies of a chunk, for which there is room.
    pub(crate) fn copy(
        &mut self,
        chunk: Chunk,
        slot: Option<Slot>,
        transfers: Vec<Transfer>,
    ) -> Result<(), Error> {
        let ticket = self.engines[self.parts[chunk.file].engine].submit(&transfers)?;
        self.moved.submissions += 1;
        self.list = transfers;
        self.copying.push(Copying { ticket, chunk, slot });
        self.last = Instant::now();
        Ok(())
    }

    /// Whether the CPU copies, and these bytes of the file are in the page cache: they can be put where they belong at once.
    pub(crate) fn may_read_straight(&self, chunk: Chunk, offset: u64, bytes: u64) -> bool {
        let Part { file, engine, .. } = self.parts[chunk.file];
        let by_cpu = matches!(self.engines[engine].way(), Way::Cpu { .. });
        by_cpu && file.file.is_cached(offset, usize::try_from(bytes).unwrap_or(usize::MAX))
    }

    /// Starts reading a chunk's pieces straight into their buffers, from a free place. Their tokens are those behind slots'.
    pub(crate) fn read_straight(
        &mut self,
        chunk: Chunk,
        place: usize,
        pieces: &[Piece],
    ) -> Result<(), Error> {
        let file = self.file(chunk);
        let token = (self.staging.slots().len() + place) as u64;
        for piece in pieces {
            let bo = self.bo(chunk, piece)?;
            let view =
                self.engines[self.parts[chunk.file].engine].view(bo)?.ok_or(Stuck::NoBytes(piece.buffer))?;
            let &Piece { at, bytes, .. } = piece;
            if at.checked_add(bytes).is_none_or(|end| end > view.len()) {
                let (what, size, reason) = ("a BO", view.len(), "it ends before that");
                return Err(rewake_amdgpu::Error::Range { what, at, bytes, size, reason }.into());
            }
            let size = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
            self.transfers.start(Request {
                file: Arc::clone(&file.file),
                direction: Direction::Read,
                offset: piece.offset,
                memory: Window::Buffer(view),
                at: size(piece.at),
                bytes: size(piece.bytes),
                needed: size(piece.bytes),
                token,
            });
        }
        self.straight.begins(place, chunk, pieces.len());
        Ok(())
    }

    /// Whether the copies of a chunk in a slot may be submitted now.
    pub(crate) fn may_copy(&self, chunk: Chunk) -> bool {
        self.copies_to_come(chunk) > 0 && self.engines[self.parts[chunk.file].engine].room() > 0
    }

    /// Whether a chunk that needs no slot may be submitted now: copies from slots find room all the same, or what was read
    /// would wait for all that is only filled.
    pub(crate) fn may_fill(&self, chunk: Chunk) -> bool {
        self.engines[self.parts[chunk.file].engine].room() > self.copies_to_come(chunk)
    }

    /// How many copies from slots may be submitted to a chunk's engine before one of them has ended.
    fn copies_to_come(&self, chunk: Chunk) -> usize {
        let rings = match self.engines[self.parts[chunk.file].engine].way() {
            Way::Rings { rings, .. } => *rings,
            Way::Cpu { .. } => 1,
        };
        (AHEAD * rings).saturating_sub(self.copying(chunk))
    }

    /// The chunks whose copies have ended, with their slots.
    pub(crate) fn copied(&mut self, into: &mut Vec<(Chunk, Option<Slot>)>) -> Result<(), Error> {
        into.extend(self.straight.ended().map(|chunk| (chunk, None)));
        for engine in &mut self.engines {
            for done in engine.finished()? {
                done.result?;
                let index = self.copying.iter().position(|copying| copying.ticket == done.ticket);
                if let Some(copying) = index.map(|index| self.copying.swap_remove(index)) {
                    into.push((copying.chunk, copying.slot));
                    self.last = Instant::now();
                }
            }
        }
        Ok(())
    }

    /// A chunk is done: buffers that have no more are let go of.
    pub(crate) fn chunk_done(&mut self, chunk: Chunk) -> Result<Done, Error> {
        let Part { file, process, engine } = self.parts[chunk.file];
        let mut done = Done { process, minor: file.minor, bytes: 0, whole: Vec::new(), all: false };
        for piece in file.pieces(chunk.number) {
            let Some(buffer) = &mut self.buffers[process][piece.buffer] else { continue };
            buffer.left -= 1;
            // Those that are left alone have none.
            let Some(bo) = buffer.bo else { continue };
            done.bytes += piece.bytes;
            if buffer.left == 0 {
                buffer.bo = None;
                self.engines[engine].release(bo)?;
                done.whole.push(piece.buffer);
            }
        }
        self.missing[process] -= done.whole.len();
        done.all = !done.whole.is_empty() && self.missing[process] == 0;
        Ok(done)
    }

    /// The memory that files are read into and written from.
    pub(crate) fn window(&self) -> Window {
        self.window.clone()
    }

    /// Where a slot is in it.
    pub(crate) fn place(slot: Slot) -> usize {
        slot.index() as usize * usize::try_from(CHUNK).unwrap_or(usize::MAX)
    }

    /// The transfers of files that have ended.
    pub(crate) fn transferred(&mut self, into: &mut Vec<Finished>) {
        self.transfers.finished(into);
        if !into.is_empty() {
            self.last = Instant::now();
        }
    }

    /// Where files cannot be read into staging memory, copies a slot there...
    pub(crate) fn bring_in(&self, slot: Slot, bytes: u64) {
        if let Window::Own(own) = &self.window {
            let mut copy = vec![0; usize::try_from(bytes).unwrap_or(0)];
            own.read(Self::place(slot) as u64, &mut copy);
            self.staging.write(rewake_amdgpu::Place { slot, at: 0 }, &copy);
        }
    }

    /// ... and back.
    pub(crate) fn bring_out(&self, slot: Slot, bytes: u64) {
        if let Window::Own(own) = &self.window {
            let mut copy = vec![0; usize::try_from(bytes).unwrap_or(0)];
            self.staging.read(rewake_amdgpu::Place { slot, at: 0 }, &mut copy);
            own.write(Self::place(slot) as u64, &copy);
        }
    }

    /// Sleeps until something may have ended, or until `wake` can be read; not for long if it was `refused` a read.
    pub(crate) fn wait(&mut self, wake: Option<BorrowedFd<'_>>, refused: bool) -> Result<(), Error> {
        if refused && self.transfers.in_flight() == 0 && self.copying.is_empty() {
            // It waits for others, as long as they need.
            self.last = Instant::now();
        }
        if self.last.elapsed() > PATIENCE {
            return self.diagnose();
        }
        let mut fds: Vec<PollFd<'_>> = self.transfers.wakers().collect();
        fds.extend(wake.map(|wake| PollFd::new(wake, PollFlags::POLLIN)));
        let busy = || self.engines.iter().filter(|engine| engine.in_flight() > 0);
        fds.extend(busy().filter_map(CopyEngine::event_fd).map(|fd| PollFd::new(fd, PollFlags::POLLIN)));
        let blind = busy().any(|engine| engine.event_fd().is_none());
        match poll(&mut fds, PollTimeout::from(if blind || refused { SOON } else { LOOK })) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        self.transfers.awake();
        Ok(())
    }

    fn diagnose(&mut self) -> Result<(), Error> {
        if let Some(copying) = self.copying.first() {
            // The engine says what it knows.
            let engine = self.parts[copying.chunk.file].engine;
            self.engines[engine].wait(copying.ticket, Instant::now())?;
        }
        match self.transfers.in_flight() {
            0 => Err(Stuck::Nothing.into()),
            count => Err(Stuck::Files(count).into()),
        }
    }
}

/// An engine for each GPU, and the staging memory of all.
fn engines(sink: Sink<'_>, minors: &[u32], shape: Shape) -> Result<(Staging, Vec<CopyEngine>), Error> {
    let Sink::Memory(memory) = sink else {
        let renders: Vec<Render> = minors.iter().copied().map(Render::open).collect::<Result<_, _>>()?;
        let staging = Staging::new(shape, &renders.iter().collect::<Vec<_>>())?;
        let engines = renders.into_iter().map(|render| CopyEngine::open(render, &staging));
        let engines = engines.collect::<Result<_, _>>()?;
        return Ok((staging, engines));
    };
    let staging = Staging::pages(shape)?;
    let engines = minors.iter().map(|minor| CopyEngine::in_memory(*minor, memory, &staging));
    let engines = engines.collect::<Result<_, _>>()?;
    Ok((staging, engines))
}
