// SPDX-License-Identifier: MIT OR Apache-2.0
//! What is under way between files and buffers: engines, staging memory, transfers of files, and the waiting for them.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rewake_amdgpu_uapi::abi::memory::Mapping;
use rewake_amdgpu_uapi::settings::max_buffer_size;
use rewake_image_io::files::{Direction, Finished, Request};
use rewake_image_io::io_budget::IoBudget;
use rewake_sdma_copy::{Bo, Memory, Shape, Slot, Staging, Transfer};

use crate::chunk_schedule::{Chunk, ChunkSchedule};
use crate::copies::{Copies, Sink};
use crate::dedup::{assign_sources, source_of};
use crate::error::{Error, Stuck};
use crate::io_memory::IoMemory;
use crate::layout::{Buffer, ProcessLayout, background_schedule, buffers, parts, remaining, smallest_first};
use crate::pages::{CHUNK, PagesFile, Piece};
use crate::report::Moved;
use crate::slot_quota::quota;
use crate::straight::Straight;
use crate::transfers::Transfers;

/// Slots of staging memory for each GPU, 16 MiB: enough for a disk and two rings to be busy. More take longer to make than
/// they save.
const SLOTS_OF_A_GPU: u32 = 8;
/// And in all, 48 MiB: three chunks of each of eight GPUs.
const SLOTS: u32 = 24;
/// One copied, one read or written: with fewer nothing is under way beside anything.
const FEWEST_SLOTS: u64 = 2;
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

/// A buffer: its process and the image's number of it.
pub(crate) type Name = (usize, usize);

/// What was in a chunk that is done, of a process on a GPU.
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

/// All that is under way.
pub(crate) struct Pipeline<'a> {
    pub(crate) staging: Staging,
    pub(crate) moved: Moved,
    pub(crate) straight: Straight,
    pub(crate) transfers: Transfers,
    pub(crate) copies: Copies,
    processes: &'a [Process<'a>],
    parts: Vec<ProcessLayout<'a>>,
    /// The files' side of the slots.
    window: IoMemory,
    /// By process and buffer.
    buffers: Vec<Vec<Option<Buffer>>>,
    /// Buffers that are not whole, by process.
    missing: Vec<usize>,
    order: ChunkSchedule,
    /// Rather than all files in turn.
    by_process: bool,
    /// Whether some buffers have the same bytes as others.
    has_twins: bool,
    free: Vec<Slot>,
    last: Instant,
}

impl<'a> Pipeline<'a> {
    /// An engine for each GPU, and nothing under way. Chunks come as they are in the files.
    pub(crate) fn new(
        processes: &'a [Process<'a>],
        sink: Sink<'_>,
        pace: Option<Arc<IoBudget>>,
    ) -> Result<Self, Error> {
        let (parts, minors) = parts(processes);
        let buffers = buffers(processes, &parts);
        let missing = remaining(processes, &buffers);
        let all: u64 = parts.iter().map(|part| part.file.chunks()).sum();
        let most = (max_buffer_size()?.unwrap_or(u64::MAX) / CHUNK).max(FEWEST_SLOTS);
        let slots = SLOTS.min(SLOTS_OF_A_GPU.saturating_mul(u32::try_from(minors.len()).unwrap_or(SLOTS)));
        let slots = u32::try_from(most.min(all.max(FEWEST_SLOTS))).unwrap_or(slots).min(slots);
        let (staging, copies) = Copies::new(sink, &minors, Shape { slots, slot_bytes: CHUNK })?;
        let window = match staging.memory() {
            Memory::Pages => IoMemory::Staging(staging.clone()),
            Memory::Gtt => IoMemory::Own(Arc::new(Mapping::anonymous(u64::from(slots) * CHUNK)?)),
        };
        let sequences = parts.iter().map(|part| (0..part.file.chunks()).collect());
        let order = ChunkSchedule::new(sequences, vec![(0..parts.len()).collect()]);
        Ok(Self {
            free: staging.slots().collect(),
            staging,
            moved: Moved::default(),
            processes,
            parts,
            copies,
            window,
            transfers: Transfers::new(pace)?,
            buffers,
            missing,
            order,
            by_process: false,
            has_twins: false,
            straight: Straight::default(),
            last: Instant::now(),
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

    /// The files that a process's bytes were read from: others', too, where some have the same.
    pub(crate) fn read_for(&self, process: usize) -> impl Iterator<Item = &'a PagesFile> {
        let others = self.has_twins.then(|| self.files()).into_iter().flatten();
        self.processes[process].files.iter().chain(others)
    }

    /// All files.
    pub(crate) fn files(&self) -> impl Iterator<Item = &'a PagesFile> {
        self.parts.iter().map(|part| part.file)
    }

    /// For the log: the ways that bytes go.
    pub(crate) fn notes(&self) -> Vec<String> {
        self.copies.notes().chain(self.transfers.note()).collect()
    }

    /// In the order of what is loaded behind running processes, with these buffers of processes first of their GPU. Of buffers that have
    /// the same bytes one is read.
    pub(crate) fn by_process(&mut self, first: &[Name], twins: &[Vec<Name>]) {
        let files = smallest_first(self.processes, &self.parts);
        for set in twins {
            self.has_twins |= assign_sources(set, &files, self.processes, &mut self.buffers);
        }
        self.order = background_schedule(self.processes, &self.parts, &self.buffers, files, first);
        self.by_process = true;
    }

    /// Wants a buffer before all others that are not under way and that nobody demanded before. One that is not loaded is
    /// left alone.
    pub(crate) fn demand(&mut self, process: usize, buffer: usize) {
        let here = self.processes[process].dmabufs[buffer].is_some();
        if let Some(Buffer { file, chunks, .. }) =
            source_of(&self.buffers, (process, buffer)).filter(|_| here)
        {
            self.order.demand(*file, chunks.clone());
        }
    }

    /// The next chunk of a GPU that has room for copies and was not `passed`; None if there is none now.
    pub(crate) fn next_chunk(&self, passed: &[usize]) -> Option<Chunk> {
        let engine = |file: usize| self.parts[file].engine;
        self.order.next(|file| !passed.contains(&engine(file)) && self.copies.has_room(engine(file)))
    }

    /// Takes what [`Pipeline::next_chunk`] gave.
    pub(crate) fn take_chunk(&mut self, chunk: Chunk) {
        self.order.take(chunk);
        self.last = Instant::now();
    }

    /// Takes the chunks that have no bytes of what is read.
    pub(crate) fn take_unread(&mut self) {
        for file in 0..self.parts.len() {
            for number in 0..self.parts[file].file.chunks() {
                let chunk = Chunk { file, number };
                if !self.file(chunk).pieces(number).any(|piece| self.is_here(chunk, &piece)) {
                    self.order.take(chunk);
                }
            }
        }
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
    pub(crate) fn quota(&self) -> Option<usize> {
        let left = |engine: usize| {
            let mut files = self.parts.iter().enumerate().filter(|(_, part)| part.engine == engine);
            files.any(|(file, _)| self.order.has_left(file))
        };
        let gpus = || (0..self.copies.count()).filter(|engine| left(*engine)).count();
        self.by_process.then(|| quota(self.staging.slots().len(), gpus())).flatten()
    }

    /// Its place among the GPUs, of that which a chunk is copied by.
    pub(crate) fn gpu(&self, chunk: Chunk) -> usize {
        self.parts[chunk.file].engine
    }

    pub(crate) fn give_back(&mut self, slot: Slot) {
        self.free.push(slot);
    }

    /// Whether every slot is free and no engine works.
    pub(crate) fn is_idle(&self) -> bool {
        let slots = self.free.len() == self.staging.slots().len();
        slots && self.copies.is_idle() && self.straight.is_idle()
    }

    /// Whether a piece's bytes are moved, from this file or into it: not if its buffer is left alone, or follows another.
    pub(crate) fn is_here(&self, chunk: Chunk, piece: &Piece) -> bool {
        let process = self.parts[chunk.file].process;
        let buffer = || self.buffers[process][piece.buffer].as_ref();
        self.processes[process].dmabufs[piece.buffer].is_some()
            && buffer().is_some_and(|of| of.twins.follows.is_none())
    }

    /// Buffers that have a piece's bytes: its own, if it is here, and those that follow it.
    pub(crate) fn buffers_with(&self, chunk: Chunk, piece: &Piece) -> usize {
        let buffer = || self.buffers[self.parts[chunk.file].process][piece.buffer].as_ref();
        if self.is_here(chunk, piece) { 1 + buffer().map_or(0, |of| of.twins.followers.len()) } else { 0 }
    }

    /// One of them: the first is its own.
    pub(crate) fn buffer_with(&self, chunk: Chunk, piece: &Piece, which: usize) -> Name {
        let process = self.parts[chunk.file].process;
        let followers = |buffer: &Buffer| which.checked_sub(1).map(|which| buffer.twins.followers[which]);
        self.buffers[process][piece.buffer].as_ref().and_then(followers).unwrap_or((process, piece.buffer))
    }

    /// The place among the GPUs of each one that a chunk is copied to; some of them more than once.
    pub(crate) fn gpus(&self, chunk: Chunk) -> impl Iterator<Item = usize> {
        let pieces = self.has_twins.then(|| self.file(chunk).pieces(chunk.number)).into_iter().flatten();
        let others = pieces.flat_map(move |piece| {
            (1..self.buffers_with(chunk, &piece))
                .map(move |which| self.gpu_of(self.buffer_with(chunk, &piece, which)))
        });
        std::iter::once(self.gpu(chunk)).chain(others)
    }

    fn gpu_of(&self, (process, number): Name) -> usize {
        self.buffers[process][number].as_ref().map_or(0, |buffer| self.parts[buffer.file].engine)
    }

    /// Whether other buffers have the same bytes as some of a chunk's.
    pub(crate) fn is_led(&self, chunk: Chunk) -> bool {
        self.gpus(chunk).nth(1).is_some()
    }

    /// The engine of a buffer that has bytes, and its name for it.
    pub(crate) fn bo(&mut self, (process, number): Name) -> Result<(usize, Bo), Error> {
        let buffer = self.buffers[process][number].as_mut().expect("what has a piece has bytes");
        let engine = self.parts[buffer.file].engine;
        if let Some(bo) = buffer.bo {
            return Ok((engine, bo));
        }
        let dmabuf = self.processes[process].dmabufs[number].as_ref();
        let bo = self.copies.import(engine, dmabuf.ok_or(Stuck::NoBytes(number))?)?;
        buffer.bo = Some(bo);
        self.moved.buffers += 1;
        Ok((engine, bo))
    }

    /// Bytes for one of a piece's buffers, so many of them zero: for all but the first they are not read.
    pub(crate) fn count_twin(&mut self, which: usize, bytes: u64, zero: u64) {
        if which > 0 {
            self.moved.bytes += bytes;
            self.moved.same += bytes;
            self.moved.zero += zero;
        }
    }

    /// One more of what [`Pipeline::copy`] starts.
    pub(crate) fn push(&mut self, name: Name, transfer: impl FnOnce(Bo) -> Transfer) -> Result<(), Error> {
        let (engine, bo) = self.bo(name)?;
        self.copies.push(engine, transfer(bo));
        Ok(())
    }

    /// Starts the copies of a chunk, for which there is room.
    pub(crate) fn copy(&mut self, chunk: Chunk, slot: Option<Slot>) -> Result<(), Error> {
        let submissions = self.copies.submit(self.gpu(chunk), chunk, slot)?;
        self.moved.submissions += submissions as u64;
        self.last = Instant::now();
        Ok(())
    }

    /// Whether the CPU copies, and these bytes of the file are in the page cache: they can be put where they belong at once.
    pub(crate) fn may_read_straight(&self, chunk: Chunk, offset: u64, bytes: u64) -> bool {
        let ProcessLayout { file, engine, .. } = self.parts[chunk.file];
        self.copies.is_by_cpu(engine)
            && file.file.is_cached(offset, usize::try_from(bytes).unwrap_or(usize::MAX))
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
            let (engine, bo) = self.bo(self.buffer_with(chunk, piece, 0))?;
            let view = self.copies.view(engine, bo)?.ok_or(Stuck::NoBytes(piece.buffer))?;
            let &Piece { at, bytes, .. } = piece;
            if at.checked_add(bytes).is_none_or(|end| end > view.len()) {
                let (what, size, reason) = ("a BO", view.len(), "it ends before that");
                return Err(rewake_sdma_copy::Error::Range { what, at, bytes, size, reason }.into());
            }
            let size = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
            self.transfers.start(Request {
                file: Arc::clone(&file.file),
                direction: Direction::Read,
                offset: piece.offset,
                memory: IoMemory::Buffer(view),
                at: size(piece.at),
                bytes: size(piece.bytes),
                needed: size(piece.bytes),
                token,
            });
        }
        self.moved.read += pieces.iter().map(|piece| piece.bytes).sum::<u64>();
        self.straight.begins(place, chunk, pieces.len());
        Ok(())
    }

    /// Whether the copies of a chunk in a slot may be submitted now.
    pub(crate) fn may_copy(&self, chunk: Chunk) -> bool {
        self.gpus(chunk).all(|gpu| self.copies.may_copy(gpu))
    }

    /// Whether a chunk that needs no slot may be submitted now.
    pub(crate) fn may_fill(&self, chunk: Chunk) -> bool {
        self.gpus(chunk).all(|gpu| self.copies.may_fill(gpu))
    }

    /// The chunks whose copies have ended, with their slots; whether an engine has room that had none, perhaps.
    pub(crate) fn copied(&mut self, into: &mut Vec<(Chunk, Option<Slot>)>) -> Result<bool, Error> {
        into.extend(self.straight.ended().map(|chunk| (chunk, None)));
        let any = self.copies.ended(into)?;
        if any {
            self.last = Instant::now();
        }
        Ok(any)
    }

    /// A chunk is done: buffers that have no more are let go of.
    pub(crate) fn chunk_done(&mut self, chunk: Chunk, into: &mut Vec<Done>) -> Result<(), Error> {
        let file = self.file(chunk);
        for piece in file.pieces(chunk.number) {
            for which in 0..self.buffers_with(chunk, &piece) {
                let (process, number) = self.buffer_with(chunk, &piece, which);
                let Some(buffer) = &mut self.buffers[process][number] else { continue };
                let ProcessLayout { file: PagesFile { minor, .. }, engine, .. } = self.parts[buffer.file];
                let of_it = into.iter().position(|done| (done.process, done.minor) == (process, *minor));
                let of_it = of_it.unwrap_or_else(|| {
                    into.push(Done { process, minor: *minor, bytes: 0, whole: Vec::new(), all: false });
                    into.len() - 1
                });
                buffer.left -= 1;
                into[of_it].bytes += piece.bytes;
                if buffer.left == 0 {
                    buffer.bo.take().map_or(Ok(()), |bo| self.copies.release(engine, bo))?;
                    into[of_it].whole.push(number);
                }
            }
        }
        for done in into {
            self.missing[done.process] -= done.whole.len();
            done.all = !done.whole.is_empty() && self.missing[done.process] == 0;
        }
        Ok(())
    }

    /// The memory that files are read into and written from.
    pub(crate) fn window(&self) -> IoMemory {
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
        if let IoMemory::Own(own) = &self.window {
            let mut copy = vec![0; usize::try_from(bytes).unwrap_or(0)];
            own.read(Self::place(slot) as u64, &mut copy);
            self.staging.write(rewake_sdma_copy::Place { slot, at: 0 }, &copy);
        }
    }

    /// ... and back.
    pub(crate) fn bring_out(&self, slot: Slot, bytes: u64) {
        if let IoMemory::Own(own) = &self.window {
            let mut copy = vec![0; usize::try_from(bytes).unwrap_or(0)];
            self.staging.read(rewake_sdma_copy::Place { slot, at: 0 }, &mut copy);
            own.write(Self::place(slot) as u64, &copy);
        }
    }

    /// Sleeps until something may have ended, or until `wake` can be read; not for long if it was `refused` a read.
    pub(crate) fn wait(&mut self, wake: Option<BorrowedFd<'_>>, refused: bool) -> Result<(), Error> {
        if refused && self.transfers.in_flight() == 0 && self.copies.is_idle() {
            // It waits for others, as long as they need.
            self.last = Instant::now();
        }
        if self.last.elapsed() > PATIENCE {
            return self.diagnose();
        }
        let mut fds: Vec<PollFd<'_>> = self.transfers.wakers().collect();
        fds.extend(wake.map(|wake| PollFd::new(wake, PollFlags::POLLIN)));
        let soon = refused && self.transfers.is_for_others();
        let look = u16::try_from(self.transfers.patience().as_millis()).map_or(LOOK, |look| look.min(LOOK));
        let mut blind = false;
        for event in self.copies.events() {
            blind |= event.is_none();
            fds.extend(event.map(|fd| PollFd::new(fd, PollFlags::POLLIN)));
        }
        match poll(&mut fds, PollTimeout::from(if blind || soon { SOON } else { look })) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        self.transfers.awake();
        Ok(())
    }

    fn diagnose(&mut self) -> Result<(), Error> {
        self.copies.diagnose()?;
        match self.transfers.in_flight() {
            0 => Err(Stuck::Nothing.into()),
            count => Err(Stuck::Files(count).into()),
        }
    }
}
