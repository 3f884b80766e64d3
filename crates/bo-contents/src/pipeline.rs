// SPDX-License-Identifier: MIT OR Apache-2.0
//! The chunks in flight between files and buffers: engines, staging memory, file transfers, and waits.

use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::Arc;
use std::time::Instant;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rewake_amdgpu_uapi::abi::memory::Mapping;
use rewake_criu_images::amdgpu::settings::max_buffer_size;
use rewake_image_io::io_budget::{IoBudget, Lane};
use rewake_image_io::{Completion, Engine};
use rewake_sdma_copy::{Bo, Shape, Slot, Staging, StagingMemory, Transfer};

use crate::buffer::StoredBuffer;
use crate::chunk_schedule::{Chunk, ChunkKind, ChunkSchedule};
use crate::copies::{Copies, Sink};
use crate::dedup::{assign_sources, source_of};
use crate::error::{Error, STALL_LIMIT, Stall};
use crate::io_memory::IoMemory;
use crate::layout::{FileEntry, background_schedule, buffers, file_entries, remaining, smallest_first};
use crate::pages::{CHUNK, GpuPagesFile, Piece};
use crate::process::{Name, ProcessBuffers};
use crate::report::Moved;
use crate::slot_quota::quota;

/// Slots of staging memory for each GPU, 16 MiB: enough to keep a disk and two rings busy. Creating more
/// takes longer than they save.
const SLOTS_PER_GPU: u32 = 8;
/// The most slots for all GPUs, 48 MiB: three chunks for each of eight GPUs.
const MAX_SLOTS: u32 = 24;
/// The fewest slots: one is copied while the other is read or written.
const MIN_SLOTS: u64 = 2;
/// The poll interval for engines without an event descriptor, and for a disk that others use.
const SHORT_POLL_MS: u16 = 1;
/// The poll interval for all others.
const LONG_POLL_MS: u16 = 1000;

/// What a finished chunk completes, for a process on a GPU.
pub(crate) struct ChunkCompletion {
    /// The index of the process.
    pub(crate) process: usize,
    /// The GPU's render node.
    pub(crate) minor: u32,
    /// Bytes of buffers that became resident.
    pub(crate) bytes: u64,
    /// Buffers whose last chunk it was.
    pub(crate) complete: Vec<usize>,
    /// Whether they were the last buffers of the process.
    pub(crate) all: bool,
}

/// What a caller waits for that no transfer's end shows.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Pending {
    /// The I/O budget has refused a read, or a fetcher a request.
    pub(crate) refused: bool,
    /// Bytes have not arrived from another host. The session limits the time that a fetcher needs.
    pub(crate) absent: bool,
}

/// All chunks in flight, and the means to move them.
pub(crate) struct Pipeline<'a> {
    pub(crate) staging: Staging,
    pub(crate) moved: Moved,
    pub(crate) engine: Engine<IoMemory>,
    pub(crate) copies: Copies,
    processes: &'a [ProcessBuffers<'a>],
    entries: Vec<FileEntry<'a>>,
    /// The I/O budget of background reads. None: there is no other reader.
    budget: Option<Arc<IoBudget>>,
    /// The memory of the slots, as file transfers see it.
    io_memory: IoMemory,
    /// Buffers by process and number.
    buffers: Vec<Vec<Option<StoredBuffer>>>,
    /// Incomplete buffers, by process.
    missing: Vec<usize>,
    schedule: ChunkSchedule,
    /// Whether processes follow one another, instead of all files taking turns.
    by_process: bool,
    /// Whether some buffers have the same bytes as others.
    has_duplicates: bool,
    free: Vec<Slot>,
    last: Instant,
}

impl<'a> Pipeline<'a> {
    /// Opens an engine for each GPU. The schedule is file order.
    pub(crate) fn new(
        processes: &'a [ProcessBuffers<'a>],
        sink: Sink<'_>,
        budget: Option<Arc<IoBudget>>,
    ) -> Result<Self, Error> {
        let (entries, minors) = file_entries(processes);
        let buffers = buffers(processes, &entries);
        let missing = remaining(processes, &buffers);
        let all: u64 = entries.iter().map(|entry| entry.file.chunks()).sum();
        let most = (max_buffer_size()?.unwrap_or(u64::MAX) / CHUNK).max(MIN_SLOTS);
        let slots =
            MAX_SLOTS.min(SLOTS_PER_GPU.saturating_mul(u32::try_from(minors.len()).unwrap_or(MAX_SLOTS)));
        let slots = u32::try_from(most.min(all.max(MIN_SLOTS))).unwrap_or(slots).min(slots);
        let (staging, copies) = Copies::new(sink, &minors, Shape { slots, slot_bytes: CHUNK })?;
        let io_memory = match staging.memory() {
            StagingMemory::Pages => IoMemory::Staging(staging.clone()),
            StagingMemory::Gtt => {
                let own = Mapping::anonymous(u64::from(slots) * CHUNK)?;
                own.keep_from_core_dumps()?;
                IoMemory::Own(Arc::new(own))
            }
        };
        let sequences = entries.iter().map(|entry| (0..entry.file.chunks()).collect());
        let schedule = ChunkSchedule::new(sequences, vec![(0..entries.len()).collect()]);
        Ok(Self {
            free: staging.slots().collect(),
            staging,
            moved: Moved::default(),
            processes,
            entries,
            copies,
            io_memory,
            engine: Engine::new(budget.clone().map(|budget| (budget, Lane::Gpus)))?,
            budget,
            buffers,
            missing,
            schedule,
            by_process: false,
            has_duplicates: false,
            last: Instant::now(),
        })
    }

    pub(crate) fn file(&self, chunk: Chunk) -> &'a GpuPagesFile {
        self.entries[chunk.file].file
    }

    /// Returns the processes that have no buffer to load.
    pub(crate) fn without_buffers(&self) -> impl Iterator<Item = usize> + use<> {
        let none: Vec<usize> =
            (0..self.missing.len()).filter(|process| self.missing[*process] == 0).collect();
        none.into_iter()
    }

    pub(crate) fn files(&self) -> impl Iterator<Item = &'a GpuPagesFile> {
        self.entries.iter().map(|entry| entry.file)
    }

    /// Returns lines for the log about the paths of the bytes.
    pub(crate) fn notes(&self) -> Vec<String> {
        self.copies.notes().chain(self.engine.note().map(str::to_owned)).collect()
    }

    /// Switches to the schedule of a background load, with `first` at the front of its GPUs. Of duplicates,
    /// one buffer is read.
    pub(crate) fn by_process(&mut self, first: &[Name], duplicates: &[Vec<Name>]) {
        let files = smallest_first(self.processes, &self.entries);
        for set in duplicates {
            self.has_duplicates |= assign_sources(set, &files, self.processes, &mut self.buffers);
        }
        self.schedule = background_schedule(self.processes, &self.entries, &self.buffers, files, first);
        self.by_process = true;
    }

    /// Moves a buffer before all that are not in flight and were not demanded earlier. Ignores a buffer that
    /// is not loaded.
    pub(crate) fn demand(&mut self, process: usize, buffer: usize) {
        let here = self.processes[process].dmabufs[buffer].is_some();
        if let Some(StoredBuffer { file, chunks, .. }) =
            source_of(&self.buffers, (process, buffer)).filter(|_| here)
        {
            self.schedule.demand(*file, chunks.clone());
        }
    }

    /// Returns the next chunk that `may` start, of a GPU that has room for copies and is not `skipped`. None:
    /// no chunk can start now.
    pub(crate) fn next_chunk(&self, skipped: &[usize], may: impl Fn(ChunkKind) -> bool) -> Option<Chunk> {
        let engine = |file: usize| self.entries[file].engine;
        let has_room = |file| !skipped.contains(&engine(file)) && self.copies.has_room(engine(file));
        self.schedule.next(|file, kind| has_room(file) && may(kind))
    }

    /// Takes the chunk that [`Pipeline::next_chunk`] returned.
    pub(crate) fn take_chunk(&mut self, chunk: Chunk) {
        self.schedule.take(chunk);
        self.last = Instant::now();
    }

    /// Takes the chunks that hold no bytes to read.
    pub(crate) fn take_unread(&mut self) {
        for chunk in self.chunks(|_| true) {
            if !self.file(chunk).pieces(chunk.number).any(|piece| self.is_moved(chunk, &piece)) {
                self.schedule.take(chunk);
            }
        }
    }

    /// Returns the chunks of files that another host may have.
    pub(crate) fn fetched_chunks(&self) -> Vec<Chunk> {
        self.chunks(|file| file.file.source().is_some())
    }

    /// Returns all chunks of some files.
    fn chunks(&self, of: impl Fn(&GpuPagesFile) -> bool) -> Vec<Chunk> {
        let files = self.entries.iter().enumerate().filter(|(_, entry)| of(entry.file));
        let chunks = |(file, entry): (usize, &FileEntry<'_>)| {
            (0..entry.file.chunks()).map(move |number| Chunk { file, number })
        };
        files.flat_map(chunks).collect()
    }

    /// Notes which chunks have not arrived from another host.
    pub(crate) fn note_absent(&mut self, chunks: &[Chunk]) {
        self.schedule.note_absent(chunks);
    }

    /// Returns whether chunks that were not taken need no request.
    pub(crate) fn has_present(&self) -> bool {
        self.schedule.has_present()
    }

    pub(crate) fn all_taken(&self) -> bool {
        self.schedule.all_taken()
    }

    pub(crate) fn is_demanded(&self, chunk: Chunk) -> bool {
        self.schedule.is_demanded(chunk)
    }

    pub(crate) fn free_slot(&mut self) -> Option<Slot> {
        self.free.pop()
    }

    /// Returns the most slots for a GPU. None: no limit, because files take turns or one GPU remains.
    pub(crate) fn quota(&self) -> Option<usize> {
        let left = |engine: usize| {
            let mut files = self.entries.iter().enumerate().filter(|(_, entry)| entry.engine == engine);
            files.any(|(file, _)| self.schedule.has_remaining(file))
        };
        let gpus = || (0..self.copies.count()).filter(|engine| left(*engine)).count();
        self.by_process.then(|| quota(self.staging.slots().len(), gpus())).flatten()
    }

    /// Returns the index of the GPU that a chunk belongs to.
    pub(crate) fn gpu(&self, chunk: Chunk) -> usize {
        self.entries[chunk.file].engine
    }

    pub(crate) fn give_back(&mut self, slot: Slot) {
        self.free.push(slot);
    }

    /// Returns whether every slot is free and no copy is in flight.
    pub(crate) fn is_idle(&self) -> bool {
        let slots = self.free.len() == self.staging.slots().len();
        slots && self.copies.is_idle()
    }

    /// Returns whether a piece is moved. It is not if its buffer is skipped or has another source.
    pub(crate) fn is_moved(&self, chunk: Chunk, piece: &Piece) -> bool {
        let process = self.entries[chunk.file].process;
        let buffer = || self.buffers[process][piece.buffer].as_ref();
        self.processes[process].dmabufs[piece.buffer].is_some()
            && buffer().is_some_and(|of| of.duplicates.source.is_none())
    }

    /// Returns the number of buffers that get a piece's bytes: its own and its followers.
    pub(crate) fn buffers_with(&self, chunk: Chunk, piece: &Piece) -> usize {
        let buffer = || self.buffers[self.entries[chunk.file].process][piece.buffer].as_ref();
        if self.is_moved(chunk, piece) {
            1 + buffer().map_or(0, |of| of.duplicates.followers.len())
        } else {
            0
        }
    }

    /// Returns one of these buffers. The first is the piece's own.
    pub(crate) fn buffer_with(&self, chunk: Chunk, piece: &Piece, which: usize) -> Name {
        let process = self.entries[chunk.file].process;
        let followers =
            |buffer: &StoredBuffer| which.checked_sub(1).map(|which| buffer.duplicates.followers[which]);
        self.buffers[process][piece.buffer].as_ref().and_then(followers).unwrap_or((process, piece.buffer))
    }

    /// Returns the index of each GPU that a chunk is copied to; it may repeat.
    pub(crate) fn gpus(&self, chunk: Chunk) -> impl Iterator<Item = usize> {
        let pieces = self.has_duplicates.then(|| self.file(chunk).pieces(chunk.number)).into_iter().flatten();
        let others = pieces.flat_map(move |piece| {
            (1..self.buffers_with(chunk, &piece))
                .map(move |which| self.gpu_of(self.buffer_with(chunk, &piece, which)))
        });
        std::iter::once(self.gpu(chunk)).chain(others)
    }

    fn gpu_of(&self, (process, number): Name) -> usize {
        self.buffers[process][number].as_ref().map_or(0, |buffer| self.entries[buffer.file].engine)
    }

    /// Returns the engine of a buffer, and the engine's handle of it.
    pub(crate) fn bo(&mut self, (process, number): Name) -> Result<(usize, Bo), Error> {
        let buffer = self.buffers[process][number].as_mut().expect("a buffer with a piece has bytes");
        let engine = self.entries[buffer.file].engine;
        if let Some(bo) = buffer.bo {
            return Ok((engine, bo));
        }
        let dmabuf = self.processes[process].dmabufs[number].as_ref();
        let bo = self.copies.import(engine, dmabuf.ok_or(Stall::NoBytes(number))?)?;
        buffer.bo = Some(bo);
        self.moved.buffers += 1;
        Ok((engine, bo))
    }

    /// Counts bytes of a piece for one of its buffers. Only the first buffer's bytes are read.
    pub(crate) fn count_duplicate(&mut self, which: usize, bytes: u64, zero: u64) {
        if which > 0 {
            self.moved.bytes += bytes;
            self.moved.same += bytes;
            self.moved.zero += zero;
        }
    }

    /// Adds a transfer to the next [`Pipeline::copy`].
    pub(crate) fn push(&mut self, name: Name, transfer: impl FnOnce(Bo) -> Transfer) -> Result<(), Error> {
        let (engine, bo) = self.bo(name)?;
        self.copies.push(engine, transfer(bo));
        Ok(())
    }

    /// Starts the copies of a chunk, which must have room.
    pub(crate) fn copy(&mut self, chunk: Chunk, slot: Option<Slot>) -> Result<(), Error> {
        let submissions = self.copies.submit(self.gpu(chunk), chunk, slot)?;
        self.moved.submissions += submissions as u64;
        self.last = Instant::now();
        Ok(())
    }

    /// Returns whether the copies of a slot's chunk may be submitted now.
    pub(crate) fn may_copy(&self, chunk: Chunk) -> bool {
        self.gpus(chunk).all(|gpu| self.copies.may_copy(gpu))
    }

    /// Returns whether the fills of a chunk without a slot may be submitted now.
    pub(crate) fn may_fill(&self, chunk: Chunk) -> bool {
        self.gpus(chunk).all(|gpu| self.copies.may_fill(gpu))
    }

    /// Adds the chunks whose copies have ended. Returns whether an engine may have room that it had not.
    pub(crate) fn copied(&mut self, into: &mut Vec<(Chunk, Option<Slot>)>) -> Result<bool, Error> {
        let any = self.copies.take_ended(into)?;
        if any {
            self.last = Instant::now();
        }
        Ok(any)
    }

    /// Counts a finished chunk, and releases buffers that are complete.
    pub(crate) fn chunk_done(&mut self, chunk: Chunk, into: &mut Vec<ChunkCompletion>) -> Result<(), Error> {
        let file = self.file(chunk);
        for piece in file.pieces(chunk.number) {
            for which in 0..self.buffers_with(chunk, &piece) {
                let (process, number) = self.buffer_with(chunk, &piece, which);
                let Some(buffer) = &mut self.buffers[process][number] else { continue };
                let FileEntry { file: GpuPagesFile { minor, .. }, engine, .. } = self.entries[buffer.file];
                let of_it = into.iter().position(|done| (done.process, done.minor) == (process, *minor));
                let of_it = of_it.unwrap_or_else(|| {
                    into.push(ChunkCompletion {
                        process,
                        minor: *minor,
                        bytes: 0,
                        complete: Vec::new(),
                        all: false,
                    });
                    into.len() - 1
                });
                buffer.left -= 1;
                into[of_it].bytes += piece.bytes;
                if buffer.left == 0 {
                    buffer.bo.take().map_or(Ok(()), |bo| self.copies.release(engine, bo))?;
                    into[of_it].complete.push(number);
                }
            }
        }
        for done in into {
            self.missing[done.process] -= done.complete.len();
            done.all = !done.complete.is_empty() && self.missing[done.process] == 0;
        }
        Ok(())
    }

    /// Returns the memory that files are read into and written from.
    pub(crate) fn io_memory(&self) -> IoMemory {
        self.io_memory.clone()
    }

    /// Returns the offset of a slot in that memory.
    pub(crate) fn place(slot: Slot) -> usize {
        slot.index() as usize * usize::try_from(CHUNK).unwrap_or(usize::MAX)
    }

    /// Adds the file transfers that have ended.
    pub(crate) fn transferred(&mut self, into: &mut Vec<Completion<IoMemory>>) {
        self.engine.flush();
        self.engine.reap(into);
        if !into.is_empty() {
            self.last = Instant::now();
        }
    }

    /// Copies a slot to staging memory, where files cannot be read into it.
    pub(crate) fn copy_to_staging(&self, slot: Slot, bytes: u64) {
        if let IoMemory::Own(own) = &self.io_memory {
            let mut copy = vec![0; usize::try_from(bytes).unwrap_or(0)];
            own.read(Self::place(slot) as u64, &mut copy);
            self.staging.write(rewake_sdma_copy::StagingOffset { slot, at: 0 }, &copy);
        }
    }

    /// Copies a slot from staging memory, where files cannot be written from it.
    pub(crate) fn copy_from_staging(&self, slot: Slot, bytes: u64) {
        if let IoMemory::Own(own) = &self.io_memory {
            let mut copy = vec![0; usize::try_from(bytes).unwrap_or(0)];
            self.staging.read(rewake_sdma_copy::StagingOffset { slot, at: 0 }, &mut copy);
            own.write(Self::place(slot) as u64, &copy);
        }
    }

    /// Sleeps until a transfer may have ended or one of `wake` is readable; briefly if a read was refused.
    pub(crate) fn wait(&mut self, wake: [Option<BorrowedFd<'_>>; 2], pending: Pending) -> Result<(), Error> {
        let Pending { refused, absent } = pending;
        if (refused || absent) && self.engine.in_flight() == 0 && self.copies.is_idle() {
            // Other readers have the budget, or a fetcher has the requests, and this is not a stall.
            self.last = Instant::now();
        }
        if self.last.elapsed() > STALL_LIMIT {
            return self.diagnose();
        }
        let budget = self.budget.as_ref();
        let of_budget = budget.map(|budget| budget.gpus().as_fd());
        let readable = |fd| PollFd::new(fd, PollFlags::POLLIN);
        let mut fds: Vec<PollFd<'_>> =
            [self.engine.event(), of_budget].into_iter().chain(wake).flatten().map(readable).collect();
        // The end of a transfer wakes a refused caller, except while demand reads limit the others.
        let mut must_poll =
            refused && (self.engine.in_flight() == 0 || budget.is_some_and(|budget| budget.is_busy()));
        for event in self.copies.events() {
            must_poll |= event.is_none();
            fds.extend(event.map(readable));
        }
        let look = u16::try_from(self.engine.patience().as_millis())
            .map_or(LONG_POLL_MS, |look| look.min(LONG_POLL_MS));
        match poll(&mut fds, PollTimeout::from(if must_poll { SHORT_POLL_MS } else { look })) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        // Before the next read asks the budget.
        self.budget.iter().for_each(|budget| _ = budget.gpus().drain());
        Ok(())
    }

    fn diagnose(&mut self) -> Result<(), Error> {
        self.copies.diagnose()?;
        match self.engine.in_flight() {
            0 => Err(Stall::Nothing.into()),
            count => Err(Stall::Files(count).into()),
        }
    }
}
