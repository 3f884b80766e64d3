// SPDX-License-Identifier: MIT OR Apache-2.0
//! Saves buffers to files. It copies a chunk into its slot, finds zeros, and writes everything else.

use std::sync::Arc;

use nix::unistd::ftruncate;
use rewake_image_io::{Class, Direction, Request};
use rewake_sdma_copy::{Slot, StagingOffset, Transfer};

use crate::chunk_schedule::Chunk;
use crate::error::Error;
use crate::pages::{CHUNK, HEADER};
use crate::pipeline::{Pending, Pipeline};
use crate::report::Moved;

/// Bytes that are written or skipped together. With less, disk requests get too small.
const GRANULE: u64 = 64 << 10;
/// Bytes of a page: the unit of O_DIRECT writes.
const PAGE: usize = 4096;
/// The most writes for a chunk: every other granule.
const MAX_WRITES: usize = 16;

const _: () = assert!(CHUNK / GRANULE / 2 == MAX_WRITES as u64);

pub(crate) fn run(pipeline: &mut Pipeline<'_>) -> Result<Moved, Error> {
    // Writes in flight, by slot.
    let mut writing = vec![0; pipeline.staging.slots().len()];
    let (mut ready, mut ended, mut done) = (Vec::new(), Vec::new(), Vec::new());
    let mut copied: Vec<(Chunk, Option<Slot>)> = Vec::new();
    loop {
        let mut idle = true;
        while let Some(chunk) = pipeline.next_chunk(&[], |_| true) {
            let Some(slot) = pipeline.free_slot() else { break };
            pipeline.take_chunk(chunk);
            copy_out(pipeline, chunk, slot)?;
            idle = false;
        }
        pipeline.copied(&mut copied)?;
        ready.extend(copied.drain(..).filter_map(|(chunk, slot)| slot.map(|slot| (chunk, slot))));
        while pipeline.engine.has_room(MAX_WRITES)
            && let Some((chunk, slot)) = ready.pop()
        {
            pipeline.chunk_done(chunk, &mut done)?;
            done.clear();
            let writes = write(pipeline, chunk, slot);
            writing[slot.index() as usize] = writes;
            if writes == 0 {
                pipeline.give_back(slot);
            }
            idle = false;
        }
        pipeline.transferred(&mut ended);
        for finished in ended.drain(..) {
            finished.result?;
            idle = false;
            let slot = slot_of(pipeline, finished.token);
            let left = &mut writing[slot.index() as usize];
            *left -= 1;
            if *left == 0 {
                pipeline.give_back(slot);
            }
        }
        if pipeline.all_taken() && ready.is_empty() && pipeline.is_idle() {
            break;
        }
        if idle {
            pipeline.wait([None, None], Pending::default())?;
        }
    }
    for file in pipeline.files() {
        // The last page was written whole, and is cut here.
        ftruncate(&*file.file, file.length.cast_signed())?;
    }
    Ok(pipeline.moved)
}

/// Returns the slot whose number is the token.
fn slot_of(pipeline: &Pipeline<'_>, token: u64) -> Slot {
    pipeline
        .staging
        .slots()
        .nth(usize::try_from(token).unwrap_or(usize::MAX))
        .expect("a token is a slot's number")
}

/// Starts the copies of all pieces of a chunk.
fn copy_out(pipeline: &mut Pipeline<'_>, chunk: Chunk, slot: Slot) -> Result<(), Error> {
    let file = pipeline.file(chunk);
    let (start, _) = file.range(chunk.number);
    for piece in file.pieces(chunk.number) {
        let to = StagingOffset { slot, at: piece.offset - start };
        let save = |bo| Transfer::Save { bo, at: piece.at, to, bytes: piece.bytes };
        pipeline.push(pipeline.buffer_with(chunk, &piece, 0), save)?;
    }
    pipeline.copy(chunk, Some(slot))
}

/// Starts the writes of granules that are not zero. Returns the number of writes.
fn write(pipeline: &mut Pipeline<'_>, chunk: Chunk, slot: Slot) -> usize {
    let file = pipeline.file(chunk);
    let (start, end) = file.range(chunk.number);
    let bytes = end - start;
    if chunk.number == 0 {
        pipeline.staging.write(StagingOffset { slot, at: 0 }, &(file.length - HEADER).to_le_bytes());
    }
    // The rest of the last page is written as zeros, and cut at the end of the save.
    let whole = bytes.next_multiple_of(PAGE as u64);
    let rest = usize::try_from(whole - bytes).unwrap_or(0);
    pipeline.staging.write(StagingOffset { slot, at: bytes }, &[0; PAGE][..rest]);
    pipeline.moved.bytes += bytes;
    let mut count = 0;
    let mut at = 0;
    pipeline.copy_from_staging(slot, whole);
    while at < whole {
        let run = run_of(pipeline, slot, at, whole);
        if run == 0 {
            let zero = GRANULE.min(whole - at);
            pipeline.moved.zero += zero.min(bytes.saturating_sub(at));
            at += zero;
            continue;
        }
        let bytes = usize::try_from(run).unwrap_or(usize::MAX);
        let request = Request {
            token: u64::from(slot.index()),
            file: Arc::clone(&file.file),
            direction: Direction::Write,
            class: Class::Background,
            offset: start + at,
            memory: pipeline.io_memory(),
            at: Pipeline::place(slot) + usize::try_from(at).unwrap_or(usize::MAX),
            bytes,
            needed: bytes,
        };
        assert!(pipeline.engine.submit(request).is_ok(), "the caller checked for room");
        count += 1;
        at += run;
    }
    count
}

/// Returns the bytes from `at` in adjacent granules that are not zero.
fn run_of(pipeline: &Pipeline<'_>, slot: Slot, at: u64, end: u64) -> u64 {
    let mut run = 0;
    while at + run < end {
        let granule = GRANULE.min(end - at - run);
        let from = StagingOffset { slot, at: at + run };
        if pipeline.staging.is_zero(from, usize::try_from(granule).unwrap_or(0)) {
            break;
        }
        run += granule;
    }
    run
}
