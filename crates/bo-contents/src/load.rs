// SPDX-License-Identifier: MIT OR Apache-2.0
//! Loads files into buffers. It reads the data of a chunk into its slot and copies it; the GPU fills holes,
//! which are not read. Demanded chunks get slots and copies first.

use std::sync::Arc;

use rewake_image_io::{Class, Direction, FetchReader, Request};
use rewake_sdma_copy::{Slot, StagingOffset, Transfer};

use crate::absent::AbsentSlots;
use crate::chunk_schedule::Chunk;
use crate::data_range::DataRange;
use crate::error::Error;
use crate::handle::LoadHandle;
use crate::pages::Piece;
use crate::pipeline::{ChunkCompletion, Pending, Pipeline};
use crate::report::Moved;
use crate::slot_quota::{self, Backpressure, SlotUse};

/// Bytes of a page.
const PAGE: u64 = 4096;
/// The most reads for one chunk. Further data ranges are joined with the last one, including the holes
/// between them.
const MAX_READS: usize = 16;
/// Bytes of the words that a GPU fills with.
const WORD: u64 = 4;

/// A buffer or process whose memory has become resident.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadEvent {
    /// A buffer is resident.
    Buffer {
        /// The index of the process in the load.
        process: usize,
        /// The image's number of the buffer.
        number: usize,
    },
    /// All buffers of a process are resident. This follows the events of its buffers.
    Process {
        /// The index of the process in the load.
        process: usize,
    },
}

/// A chunk that is read into a slot.
#[derive(Debug, Clone)]
struct SlotRead {
    chunk: Chunk,
    ranges: Vec<DataRange>,
    /// The number of ranges whose reads were all started. `from` is where the next range continues.
    started: usize,
    from: u64,
    /// Reads in flight.
    left: usize,
}

impl SlotRead {
    fn new(chunk: Chunk, ranges: Vec<DataRange>) -> Self {
        Self { chunk, ranges, started: 0, from: 0, left: 0 }
    }
}

/// The slots of a load.
#[derive(Debug)]
struct LoadSlots {
    reads: Vec<Option<SlotRead>>,
    /// Slots of which some reads are not started.
    unfinished: Vec<Slot>,
    /// Slots that were read and not copied.
    ready: Vec<Slot>,
    /// Slots whose chunks have not arrived.
    absent: AbsentSlots,
    /// Whether the I/O budget has refused a read, or a fetcher a request.
    refused: bool,
    /// GPUs that wait for their own copies. Chunks of other GPUs are started first.
    skipped: Vec<usize>,
}

impl LoadSlots {
    /// Returns the reason why a chunk must wait while other GPUs need slots too.
    fn backpressure(&self, pipeline: &Pipeline<'_>, chunk: Chunk) -> Option<Backpressure> {
        let quota = pipeline.quota().filter(|_| !pipeline.is_demanded(chunk))?;
        let of_it = self
            .reads
            .iter()
            .flatten()
            .filter(|slot_read| pipeline.gpu(slot_read.chunk) == pipeline.gpu(chunk));
        let was_read =
            |slot_read: &&SlotRead| slot_read.left == 0 && slot_read.started == slot_read.ranges.len();
        let (read, all) = (of_it.clone().filter(was_read).count(), of_it.count());
        slot_quota::backpressure(
            quota,
            SlotUse { reading: all - read, read, copying: pipeline.copies.slots_of(pipeline.gpu(chunk)) },
        )
    }
}

/// Loads all chunks, and reports each buffer and process as soon as it is resident.
pub(crate) fn run(
    pipeline: &mut Pipeline<'_>,
    handle: &LoadHandle,
    reader: Option<FetchReader>,
    on_event: &mut dyn FnMut(LoadEvent),
) -> Result<Moved, Error> {
    let mut slots = LoadSlots {
        reads: vec![None; pipeline.staging.slots().len()],
        unfinished: Vec::new(),
        ready: Vec::new(),
        absent: AbsentSlots::new(reader, pipeline.staging.slots().len()),
        refused: false,
        skipped: Vec::new(),
    };
    let (mut ended, mut copied, mut done) = (Vec::new(), Vec::new(), Vec::new());
    pipeline.take_unread();
    let absent = absent_chunks(pipeline)?;
    pipeline.note_absent(&absent);
    pipeline.without_buffers().for_each(|process| on_event(LoadEvent::Process { process }));
    loop {
        if handle.is_given_up() {
            return Err(Error::GivenUp);
        }
        for (process, buffer) in handle.take_requests() {
            pipeline.demand(process, buffer);
        }
        let mut idle = !start(pipeline, &mut slots)?;
        pipeline.transferred(&mut ended);
        for finished in ended.drain(..) {
            finished.result?;
            idle = false;
            let index = usize::try_from(finished.token).unwrap_or(usize::MAX);
            let Some(entry) = slots.reads.get_mut(index).and_then(Option::as_mut) else { continue };
            entry.left -= 1;
            if entry.left == 0 && entry.started == entry.ranges.len() {
                slots.ready.extend(pipeline.staging.slots().nth(index));
            }
        }
        idle &= !copy_read(pipeline, &mut slots)?;
        idle &= !pipeline.copied(&mut copied)?;
        for (chunk, slot) in copied.drain(..) {
            pipeline.chunk_done(chunk, &mut done)?;
            slot.into_iter().for_each(|slot| pipeline.give_back(slot));
            report_complete(pipeline, handle, &mut done, on_event)?;
            idle = false;
        }
        if pipeline.all_taken() && pipeline.is_idle() {
            return Ok(pipeline.moved);
        }
        if idle {
            let pending = Pending { refused: slots.refused, absent: !slots.absent.is_empty() };
            pipeline.wait([Some(handle.event()), slots.absent.event()], pending)?;
            handle.drain_wakeup();
            slots.absent.drain_wakeup();
        }
    }
}

/// Reports the memory that a finished chunk makes resident. The caller may then let programs access it.
fn report_complete(
    pipeline: &Pipeline<'_>,
    handle: &LoadHandle,
    done: &mut Vec<ChunkCompletion>,
    on_event: &mut dyn FnMut(LoadEvent),
) -> Result<(), Error> {
    for ChunkCompletion { process, minor, bytes, complete: buffers, all } in done.drain(..) {
        if all {
            // The process's queues may run now: not with memory of an image that was replaced.
            pipeline.files().try_for_each(|file| file.file.check_unchanged())?;
        }
        handle.count(process, minor, bytes);
        buffers.into_iter().for_each(|number| on_event(LoadEvent::Buffer { process, number }));
        if all {
            on_event(LoadEvent::Process { process });
        }
    }
    Ok(())
}

/// Starts copies of slots that were read, as far as engines have room. Demanded chunks are first, then the
/// order of the reads. Returns whether it started any.
fn copy_read(pipeline: &mut Pipeline<'_>, slots: &mut LoadSlots) -> Result<bool, Error> {
    let LoadSlots { reads, ready, .. } = slots;
    let count = ready.len();
    // A chunk for several GPUs is not overtaken on any of them. Otherwise it might never find room on all of
    // them at once.
    let mut closed = Vec::new();
    ready.sort_by_key(|slot| {
        let entry = reads[slot.index() as usize].as_ref();
        !entry.is_some_and(|entry| pipeline.is_demanded(entry.chunk))
    });
    for slot in std::mem::take(ready) {
        let entry = reads[slot.index() as usize].take().expect("a ready slot has a chunk");
        if pipeline.may_copy(entry.chunk) && !pipeline.gpus(entry.chunk).any(|gpu| closed.contains(&gpu)) {
            copy_in(pipeline, &entry, slot)?;
        } else {
            closed.extend(pipeline.gpus(entry.chunk));
            reads[slot.index() as usize] = Some(entry);
            ready.push(slot);
        }
    }
    Ok(ready.len() < count)
}

/// Continues chunks that were started, and starts others while slots and room last. Returns whether it
/// started a read or fill.
fn start(pipeline: &mut Pipeline<'_>, slots: &mut LoadSlots) -> Result<bool, Error> {
    let mut any = false;
    slots.refused = false;
    slots.skipped.clear();
    let arrived = slots.absent.take_arrived(pipeline)?;
    slots.refused |= slots.absent.is_refused();
    for (slot, chunk, ranges) in arrived {
        slots.reads[slot.index() as usize] = Some(SlotRead::new(chunk, ranges));
        slots.unfinished.push(slot);
    }
    for slot in std::mem::take(&mut slots.unfinished) {
        any |= read_on(pipeline, slots, slot);
    }
    while pipeline.engine.has_room(MAX_READS)
        && let Some(chunk) = pipeline.next_chunk(&slots.skipped, |kind| slots.absent.has_room(pipeline, kind))
    {
        let ranges = data_ranges(pipeline, chunk)?;
        if ranges.is_empty() {
            if !pipeline.may_fill(chunk) {
                slots.skipped.push(pipeline.gpu(chunk));
                continue;
            }
            pipeline.take_chunk(chunk);
            account(pipeline, chunk, &ranges);
            fill(pipeline, chunk)?;
            any = true;
            continue;
        }
        let is_absent = AbsentSlots::is_absent(pipeline, chunk, &ranges);
        // Background loads read one chunk after the other where the disk is shared.
        if !is_absent && !slots.unfinished.is_empty() && !pipeline.is_demanded(chunk) {
            break;
        }
        match slots.backpressure(pipeline, chunk).filter(|_| !is_absent) {
            Some(Backpressure::Copies) => {
                slots.skipped.push(pipeline.gpu(chunk));
                continue;
            }
            Some(Backpressure::Disk) => break,
            None => {}
        }
        let Some(slot) = pipeline.free_slot() else { break };
        account(pipeline, chunk, &ranges);
        pipeline.take_chunk(chunk);
        if is_absent {
            slots.absent.add(pipeline, slot, chunk, ranges)?;
            slots.refused |= slots.absent.is_refused();
            continue;
        }
        slots.reads[slot.index() as usize] = Some(SlotRead::new(chunk, ranges));
        any |= read_on(pipeline, slots, slot);
        if pipeline.engine.has_finished() {
            // The page cache had the chunk, and this thread copied it: submit it to the GPU before the
            // next one is read.
            return Ok(true);
        }
    }
    Ok(any)
}

/// Returns the chunks some of whose bytes have not arrived from another host. Bytes that the load does not
/// request do not arrive while it runs.
fn absent_chunks(pipeline: &Pipeline<'_>) -> Result<Vec<Chunk>, Error> {
    let mut absent = Vec::new();
    for chunk in pipeline.fetched_chunks() {
        if AbsentSlots::is_absent(pipeline, chunk, &data_ranges(pipeline, chunk)?) {
            absent.push(chunk);
        }
    }
    Ok(absent)
}

fn account(pipeline: &mut Pipeline<'_>, chunk: Chunk, ranges: &[DataRange]) {
    pipeline.moved.bytes += moved(pipeline, chunk).map(|moved| moved.end - moved.start).sum::<u64>();
    pipeline.moved.zero += zeros(pipeline, chunk, ranges);
}

/// Returns the moved bytes that are in no range.
fn zeros(pipeline: &Pipeline<'_>, chunk: Chunk, ranges: &[DataRange]) -> u64 {
    let pieces = pipeline.file(chunk).pieces(chunk.number).filter(|piece| pipeline.is_moved(chunk, piece));
    pieces.map(|piece| zeros_in(piece, ranges)).sum()
}

fn zeros_in(piece: Piece, ranges: &[DataRange]) -> u64 {
    parts(piece, ranges).filter(|(_, data)| !data).map(|(part, _)| part.bytes).sum()
}

/// Returns the ranges of a chunk to read: whole pages or blocks of what is moved, without holes.
fn data_ranges(pipeline: &Pipeline<'_>, chunk: Chunk) -> Result<Vec<DataRange>, Error> {
    let file = pipeline.file(chunk);
    let (first, end) = file.range(chunk.number);
    let unit = file.file.read_unit() as u64;
    let mut ranges: Vec<DataRange> = Vec::new();
    for moved in moved(pipeline, chunk) {
        let mut from = moved.start;
        while from < moved.end
            && let Some((start, stop)) = file.file.data(from, moved.end)?
        {
            let run = DataRange { start: start - start % unit, end: stop.next_multiple_of(unit) };
            match ranges.last_mut() {
                Some(last) if run.start <= last.end => last.end = run.end,
                _ => ranges.push(run),
            }
            from = stop;
        }
    }
    if ranges.len() > MAX_READS {
        let end = ranges[ranges.len() - 1].end;
        ranges.truncate(MAX_READS);
        ranges[MAX_READS - 1].end = end;
    }
    // A GPU fills whole words. Buffers of odd sizes, which drivers do not create, are read completely.
    let odd = |piece: Piece| !piece.at.is_multiple_of(WORD) || !piece.bytes.is_multiple_of(WORD);
    if file.pieces(chunk.number).any(odd) {
        ranges = vec![DataRange { start: first, end: end.next_multiple_of(unit) }];
    }
    Ok(ranges)
}

/// Returns the moved ranges of a chunk. Adjacent pieces are one range.
fn moved(pipeline: &Pipeline<'_>, chunk: Chunk) -> impl Iterator<Item = DataRange> {
    let mut pieces = pipeline
        .file(chunk)
        .pieces(chunk.number)
        .filter(move |piece| pipeline.is_moved(chunk, piece))
        .peekable();
    std::iter::from_fn(move || {
        let Piece { offset, bytes, .. } = pieces.next()?;
        let mut run = DataRange { start: offset, end: offset + bytes };
        while let Some(next) = pieces.next_if(|next| next.offset == run.end) {
            run.end += next.bytes;
        }
        Some(run)
    })
}

/// Starts the reads of a slot's chunk that the budget allows. Returns whether it started any.
fn read_on(pipeline: &mut Pipeline<'_>, slots: &mut LoadSlots, slot: Slot) -> bool {
    let size = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
    let Some(slot_read) = &mut slots.reads[slot.index() as usize] else { return false };
    let (file, demanded) = (pipeline.file(slot_read.chunk), pipeline.is_demanded(slot_read.chunk));
    let (first, _) = file.range(slot_read.chunk.number);
    let mut any = false;
    while let Some(run) = slot_read.ranges.get(slot_read.started) {
        let from = slot_read.from.max(run.start);
        let request = Request {
            token: u64::from(slot.index()),
            file: Arc::clone(&file.file),
            direction: Direction::Read,
            class: if demanded { Class::Demand } else { Class::Background },
            offset: from,
            memory: pipeline.io_memory(),
            at: Pipeline::place(slot) + size(from - first),
            bytes: size(run.end - from),
            needed: size(run.end.min(file.file.len()) - from),
        };
        let Ok(bytes) = pipeline.engine.submit(request) else {
            slots.unfinished.push(slot);
            slots.refused = true;
            break;
        };
        let end = from + bytes as u64;
        (slot_read.from, any) = (end, true);
        slot_read.started += usize::from(end == run.end);
        slot_read.left += 1;
        pipeline.moved.read += bytes as u64;
    }
    any
}

/// Starts the copies of a chunk that was read, and the fills of its holes.
fn copy_in(pipeline: &mut Pipeline<'_>, slot_read: &SlotRead, slot: Slot) -> Result<(), Error> {
    let (file, chunk) = (pipeline.file(slot_read.chunk), slot_read.chunk);
    let (first, end) = file.range(chunk.number);
    pipeline.copy_to_staging(slot, (end - first).next_multiple_of(PAGE));
    for piece in file.pieces(chunk.number) {
        let zero = zeros_in(piece, &slot_read.ranges);
        for which in 0..pipeline.buffers_with(chunk, &piece) {
            let name = pipeline.buffer_with(chunk, &piece, which);
            pipeline.count_duplicate(which, piece.bytes, zero);
            for (part, data) in parts(piece, &slot_read.ranges) {
                let from = StagingOffset { slot, at: part.offset - first };
                pipeline.push(name, |bo| match data {
                    true => Transfer::Load { bo, at: part.at, from, bytes: part.bytes },
                    false => Transfer::Fill { bo, at: part.at, bytes: part.bytes, word: 0 },
                })?;
            }
        }
    }
    pipeline.copy(chunk, Some(slot))
}

/// Fills a chunk that is one hole.
fn fill(pipeline: &mut Pipeline<'_>, chunk: Chunk) -> Result<(), Error> {
    let file = pipeline.file(chunk);
    for piece in file.pieces(chunk.number) {
        for which in 0..pipeline.buffers_with(chunk, &piece) {
            pipeline.count_duplicate(which, piece.bytes, piece.bytes);
            let fill = |bo| Transfer::Fill { bo, at: piece.at, bytes: piece.bytes, word: 0 };
            pipeline.push(pipeline.buffer_with(chunk, &piece, which), fill)?;
        }
    }
    pipeline.copy(chunk, None)
}

/// Splits a piece at the borders of ranges, and says of each part whether it is in a range.
fn parts(piece: Piece, ranges: &[DataRange]) -> impl Iterator<Item = (Piece, bool)> {
    let end = piece.offset + piece.bytes;
    let mut offset = piece.offset;
    std::iter::from_fn(move || {
        if offset >= end {
            return None;
        }
        let run = ranges.iter().find(|run| run.end > offset);
        let (stop, data) = match run {
            Some(run) if run.start <= offset => (run.end, true),
            Some(run) => (run.start, false),
            None => (end, false),
        };
        let bytes = stop.min(end) - offset;
        let part = Piece { at: piece.at + (offset - piece.offset), offset, bytes, ..piece };
        offset += bytes;
        Some((part, data))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_is_cut_where_data_begins_and_ends() {
        let ranges = [DataRange { start: 4096, end: 8192 }, DataRange { start: 12288, end: 16384 }];
        let piece = Piece { buffer: 0, at: 100, offset: 4000, bytes: 9000 };
        let cut: Vec<(u64, u64, bool)> =
            parts(piece, &ranges).map(|(part, data)| (part.at, part.bytes, data)).collect();
        assert_eq!(cut, [(100, 96, false), (196, 4096, true), (4292, 4096, false), (8388, 712, true)]);
        let cut: Vec<(u64, bool)> = parts(Piece { buffer: 0, at: 0, offset: 16384, bytes: 10 }, &ranges)
            .map(|(part, data)| (part.bytes, data))
            .collect();
        assert_eq!(cut, [(10, false)]);
        assert_eq!(parts(piece, &[]).count(), 1);
    }
}
