// SPDX-License-Identifier: MIT OR Apache-2.0
//! From files to buffers: what is no hole of a chunk is read into its slot and copied; holes are filled by the GPU, and
//! nothing is read for them. What is demanded meanwhile comes first, into slots and out of them.

use std::sync::Arc;

use rewake_image_io::files::{Direction, Request};
use rewake_sdma_copy::{Place, Slot, Transfer};

use crate::chunk_schedule::Chunk;
use crate::error::Error;
use crate::folder::FileError;
use crate::handle::LoadHandle;
use crate::pages::{PagesFile, Piece};
use crate::pipeline::{Done, Pipeline};
use crate::report::Moved;
use crate::slot_quota::{self, Backpressure, SlotUse};

/// Bytes of a page: what direct reads are multiples of.
const PAGE: u64 = 4096;
/// Pieces that a chunk is read in. With more of them everything between the last ones is read, too.
const MOST: usize = 16;
/// Words that the GPU fills with.
const WORD: u64 = 4;

/// Bytes of a file that are not a hole, whole pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct DataRange {
    start: u64,
    end: u64,
}

/// What has all its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadEvent {
    /// A buffer.
    Buffer {
        /// The process's place among the load's.
        process: usize,
        /// The image's number of it.
        number: usize,
    },
    /// All buffers of a process: after each of them was told.
    Process {
        /// Its place.
        process: usize,
    },
}

/// A chunk in a slot.
#[derive(Debug, Clone)]
struct SlotRead {
    chunk: Chunk,
    runs: Vec<DataRange>,
    /// Runs of which all reads were begun, and where those of the next one go on.
    begun: usize,
    from: u64,
    /// Reads that have not ended.
    left: usize,
}

/// What a load has under way in slots.
#[derive(Debug)]
struct Slots {
    held: Vec<Option<SlotRead>>,
    /// Those of which not all reads could be begun.
    partly: Vec<Slot>,
    /// Those that were read.
    read: Vec<Slot>,
    /// Whether a read was refused for now.
    refused: bool,
    /// GPUs that wait for their own copies: others' chunks are begun before.
    passed: Vec<usize>,
}

impl Slots {
    /// What a chunk has to wait for, if others need slots, too.
    fn backpressure(&self, flow: &Pipeline<'_>, chunk: Chunk) -> Option<Backpressure> {
        let share = flow.quota().filter(|_| !flow.is_demanded(chunk))?;
        let of_it = self.held.iter().flatten().filter(|held| flow.gpu(held.chunk) == flow.gpu(chunk));
        let was_read = |held: &&SlotRead| held.left == 0 && held.begun == held.runs.len();
        let (read, all) = (of_it.clone().filter(was_read).count(), of_it.count());
        slot_quota::backpressure(
            share,
            SlotUse { reading: all - read, read, copying: flow.copies.slots_of(flow.gpu(chunk)) },
        )
    }
}

/// Loads all, and tells of each buffer and process as soon as it is whole.
pub(crate) fn run(
    flow: &mut Pipeline<'_>,
    desk: &LoadHandle,
    whole: &mut dyn FnMut(LoadEvent),
) -> Result<Moved, Error> {
    let count = flow.staging.slots().len();
    let mut slots = Slots {
        held: vec![None; count],
        partly: Vec::new(),
        read: Vec::new(),
        refused: false,
        passed: Vec::new(),
    };
    let (mut over, mut copied, mut done) = (Vec::new(), Vec::new(), Vec::new());
    flow.take_unread();
    flow.without_buffers().for_each(|process| whole(LoadEvent::Process { process }));
    loop {
        if desk.is_given_up() {
            return Err(Error::GivenUp);
        }
        for (process, buffer) in desk.take_requests() {
            flow.demand(process, buffer);
        }
        let mut idle = !start(flow, &mut slots)?;
        flow.transferred(&mut over);
        for finished in over.drain(..) {
            finished.result?;
            idle = false;
            let index = usize::try_from(finished.token).unwrap_or(usize::MAX);
            let Some(entry) = slots.held.get_mut(index) else {
                flow.straight.was_read(index - count);
                continue;
            };
            let Some(entry) = entry else { continue };
            entry.left -= 1;
            if entry.left == 0 && entry.begun == entry.runs.len() {
                slots.read.extend(flow.staging.slots().nth(index));
            }
        }
        idle &= !copy_read(flow, &mut slots)?;
        idle &= !flow.copied(&mut copied)?;
        for (chunk, slot) in copied.drain(..) {
            flow.chunk_done(chunk, &mut done)?;
            slot.into_iter().for_each(|slot| flow.give_back(slot));
            tell(flow, desk, chunk, &mut done, whole)?;
            idle = false;
        }
        if flow.all_taken() && flow.is_idle() {
            return Ok(flow.moved);
        }
        if idle {
            flow.wait(Some(desk.event()), slots.refused)?;
            desk.drain_wakeup();
        }
    }
}

/// Tells what is there now that a chunk is done. Who hears of it lets others see it.
fn tell(
    flow: &Pipeline<'_>,
    desk: &LoadHandle,
    chunk: Chunk,
    done: &mut Vec<Done>,
    whole: &mut dyn FnMut(LoadEvent),
) -> Result<(), Error> {
    if done.iter().any(|done| !done.whole.is_empty()) {
        unchanged(flow.file(chunk))?;
    }
    for Done { process, minor, bytes, whole: buffers, all } in done.drain(..) {
        if all {
            flow.read_for(process).try_for_each(unchanged)?;
        }
        desk.count(process, minor, bytes);
        buffers.into_iter().for_each(|number| whole(LoadEvent::Buffer { process, number }));
        if all {
            whole(LoadEvent::Process { process });
        }
    }
    Ok(())
}

fn unchanged(file: &PagesFile) -> Result<(), Error> {
    Ok(file.check_unchanged().map_err(FileError::of("read", &file.name))?)
}

/// Starts the copies of slots that were read, as far as they may be: what was demanded first, then in the order in which they
/// were read; whether any was.
fn copy_read(flow: &mut Pipeline<'_>, slots: &mut Slots) -> Result<bool, Error> {
    let Slots { held, read, .. } = slots;
    let count = read.len();
    // What waits for several GPUs is not overtaken on any of them, or it might never find room on all at once.
    let mut closed = Vec::new();
    read.sort_by_key(|slot| {
        let entry = held[slot.index() as usize].as_ref();
        !entry.is_some_and(|entry| flow.is_demanded(entry.chunk))
    });
    for slot in std::mem::take(read) {
        let entry = held[slot.index() as usize].take().expect("a slot that was read holds a chunk");
        if flow.may_copy(entry.chunk) && !flow.gpus(entry.chunk).any(|gpu| closed.contains(&gpu)) {
            copy_in(flow, &entry, slot)?;
        } else {
            closed.extend(flow.gpus(entry.chunk));
            held[slot.index() as usize] = Some(entry);
            read.push(slot);
        }
    }
    Ok(read.len() < count)
}

/// Goes on with chunks that were begun, and starts others as long as there are slots and room; whether any was.
fn start(flow: &mut Pipeline<'_>, slots: &mut Slots) -> Result<bool, Error> {
    let mut any = false;
    slots.refused = false;
    slots.passed.clear();
    for slot in std::mem::take(&mut slots.partly) {
        any |= read_on(flow, slots, slot);
    }
    while flow.transfers.has_room(MOST)
        && let Some(chunk) = flow.next_chunk(&slots.passed)
    {
        let runs = runs(flow, chunk)?;
        if runs.is_empty() {
            if !flow.may_fill(chunk) {
                slots.passed.push(flow.gpu(chunk));
                continue;
            }
            flow.take_chunk(chunk);
            account(flow, chunk, &runs);
            fill(flow, chunk)?;
        } else if let Some(pieces) = straight(flow, chunk, &runs) {
            let Some(place) = flow.straight.place() else { break };
            flow.take_chunk(chunk);
            account(flow, chunk, &runs);
            flow.read_straight(chunk, place, &pieces)?;
        } else {
            // What nobody waits for comes one after the other where the disk is shared.
            if !slots.partly.is_empty() && !flow.is_demanded(chunk) {
                break;
            }
            match slots.backpressure(flow, chunk) {
                Some(Backpressure::ForCopies) => {
                    slots.passed.push(flow.gpu(chunk));
                    continue;
                }
                Some(Backpressure::ForTheDisk) => break,
                None => {}
            }
            let Some(slot) = flow.free_slot() else { break };
            account(flow, chunk, &runs);
            let held = SlotRead { chunk, runs, begun: 0, from: 0, left: 0 };
            slots.held[slot.index() as usize] = Some(held);
            flow.take_chunk(chunk);
            any |= read_on(flow, slots, slot);
            if flow.transfers.has_finished() {
                // The page cache had it, and getting it took this thread's time: the GPU gets it before the next one.
                return Ok(true);
            }
            continue;
        }
        any = true;
    }
    Ok(any)
}

fn account(flow: &mut Pipeline<'_>, chunk: Chunk, runs: &[DataRange]) {
    flow.moved.bytes += moved(flow, chunk).map(|moved| moved.end - moved.start).sum::<u64>();
    flow.moved.zero += zeros(flow, chunk, runs);
}

/// Bytes of what is moved that are in no run.
fn zeros(flow: &Pipeline<'_>, chunk: Chunk, runs: &[DataRange]) -> u64 {
    let pieces = flow.file(chunk).pieces(chunk.number).filter(|piece| flow.is_here(chunk, piece));
    pieces.map(|piece| zeros_in(piece, runs)).sum()
}

fn zeros_in(piece: Piece, runs: &[DataRange]) -> u64 {
    parts(piece, runs).filter(|(_, data)| !data).map(|(part, _)| part.bytes).sum()
}

/// What of a chunk is to be read: whole pages of what is moved, but for holes.
fn runs(flow: &Pipeline<'_>, chunk: Chunk) -> Result<Vec<DataRange>, Error> {
    let file = flow.file(chunk);
    let (first, end) = file.range(chunk.number);
    let mut runs: Vec<DataRange> = Vec::new();
    for moved in moved(flow, chunk) {
        let mut from = moved.start;
        while from < moved.end
            && let Some((start, stop)) =
                file.data(from, moved.end).map_err(FileError::of("search", &file.name))?
        {
            let run = DataRange { start: start - start % PAGE, end: stop.next_multiple_of(PAGE) };
            match runs.last_mut() {
                Some(last) if run.start <= last.end => last.end = run.end,
                _ => runs.push(run),
            }
            from = stop;
        }
    }
    if runs.len() > MOST {
        let end = runs[runs.len() - 1].end;
        runs.truncate(MOST);
        runs[MOST - 1].end = end;
    }
    // The GPU fills whole words: buffers of odd sizes, which drivers do not have, are read.
    let odd = |piece: Piece| !piece.at.is_multiple_of(WORD) || !piece.bytes.is_multiple_of(WORD);
    if file.pieces(chunk.number).any(odd) {
        runs = vec![DataRange { start: first, end: end.next_multiple_of(PAGE) }];
    }
    Ok(runs)
}

/// Bytes of a chunk that are moved: pieces that follow one another are one.
fn moved(flow: &Pipeline<'_>, chunk: Chunk) -> impl Iterator<Item = DataRange> {
    let mut pieces =
        flow.file(chunk).pieces(chunk.number).filter(move |piece| flow.is_here(chunk, piece)).peekable();
    std::iter::from_fn(move || {
        let Piece { offset, bytes, .. } = pieces.next()?;
        let mut run = DataRange { start: offset, end: offset + bytes };
        while let Some(next) = pieces.next_if(|next| next.offset == run.end) {
            run.end += next.bytes;
        }
        Some(run)
    })
}

/// Starts reads of a chunk, all if they are allowed; whether any was.
fn read_on(flow: &mut Pipeline<'_>, slots: &mut Slots, slot: Slot) -> bool {
    let size = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
    let Some(held) = &mut slots.held[slot.index() as usize] else { return false };
    let (file, waited) = (flow.file(held.chunk), flow.is_demanded(held.chunk));
    let (first, _) = file.range(held.chunk.number);
    let mut any = false;
    while let Some(run) = held.runs.get(held.begun) {
        let from = held.from.max(run.start);
        let request = Request {
            file: Arc::clone(&file.file),
            direction: Direction::Read,
            offset: from,
            memory: flow.window(),
            at: Pipeline::place(slot) + size(from - first),
            bytes: size(run.end - from),
            needed: size(run.end.min(file.length) - from),
            token: u64::from(slot.index()),
        };
        let room = flow.transfers.has_room(1);
        let Some(bytes) = room.then(|| flow.transfers.read(request, waited)).flatten() else {
            slots.partly.push(slot);
            slots.refused = true;
            break;
        };
        let end = from + bytes as u64;
        (held.from, any) = (end, true);
        held.begun += usize::from(end == run.end);
        held.left += 1;
        flow.moved.read += bytes as u64;
    }
    any
}

/// What of a chunk is read straight into its buffers, without staging memory between: all, where the CPU copies, if it has few
/// pieces, no holes, and is in the page cache. None: all of it goes the other way.
fn straight(flow: &Pipeline<'_>, chunk: Chunk, runs: &[DataRange]) -> Option<Vec<Piece>> {
    let file = flow.file(chunk);
    let (first, end) = file.range(chunk.number);
    let alone = zeros(flow, chunk, runs) == 0 && !flow.is_led(chunk);
    let whole = alone && flow.may_read_straight(chunk, first, end - first);
    let pieces: Vec<Piece> = file
        .pieces(chunk.number)
        .filter(|piece| whole && flow.is_here(chunk, piece))
        .take(MOST + 1)
        .collect();
    (1..=MOST).contains(&pieces.len()).then_some(pieces)
}

/// Starts the copies of a chunk that was read, and fills what was not.
fn copy_in(flow: &mut Pipeline<'_>, held: &SlotRead, slot: Slot) -> Result<(), Error> {
    let (file, chunk) = (flow.file(held.chunk), held.chunk);
    let (first, end) = file.range(chunk.number);
    flow.bring_in(slot, (end - first).next_multiple_of(PAGE));
    for piece in file.pieces(chunk.number) {
        let zero = zeros_in(piece, &held.runs);
        for which in 0..flow.buffers_with(chunk, &piece) {
            let name = flow.buffer_with(chunk, &piece, which);
            flow.count_twin(which, piece.bytes, zero);
            for (part, data) in parts(piece, &held.runs) {
                let from = Place { slot, at: part.offset - first };
                flow.push(name, |bo| match data {
                    true => Transfer::Load { bo, at: part.at, from, bytes: part.bytes },
                    false => Transfer::Fill { bo, at: part.at, bytes: part.bytes, word: 0 },
                })?;
            }
        }
    }
    flow.copy(chunk, Some(slot))
}

/// Fills a chunk that is one hole.
fn fill(flow: &mut Pipeline<'_>, chunk: Chunk) -> Result<(), Error> {
    let file = flow.file(chunk);
    for piece in file.pieces(chunk.number) {
        for which in 0..flow.buffers_with(chunk, &piece) {
            flow.count_twin(which, piece.bytes, piece.bytes);
            let fill = |bo| Transfer::Fill { bo, at: piece.at, bytes: piece.bytes, word: 0 };
            flow.push(flow.buffer_with(chunk, &piece, which), fill)?;
        }
    }
    flow.copy(chunk, None)
}

/// A piece cut at the borders of runs; whether each part is in one.
fn parts(piece: Piece, runs: &[DataRange]) -> impl Iterator<Item = (Piece, bool)> {
    let end = piece.offset + piece.bytes;
    let mut offset = piece.offset;
    std::iter::from_fn(move || {
        if offset >= end {
            return None;
        }
        let run = runs.iter().find(|run| run.end > offset);
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
        let runs = [DataRange { start: 4096, end: 8192 }, DataRange { start: 12288, end: 16384 }];
        let piece = Piece { buffer: 0, at: 100, offset: 4000, bytes: 9000 };
        let cut: Vec<(u64, u64, bool)> =
            parts(piece, &runs).map(|(part, data)| (part.at, part.bytes, data)).collect();
        assert_eq!(cut, [(100, 96, false), (196, 4096, true), (4292, 4096, false), (8388, 712, true)]);
        let cut: Vec<(u64, bool)> = parts(Piece { buffer: 0, at: 0, offset: 16384, bytes: 10 }, &runs)
            .map(|(part, data)| (part.bytes, data))
            .collect();
        assert_eq!(cut, [(10, false)]);
        assert_eq!(parts(piece, &[]).count(), 1);
    }
}
