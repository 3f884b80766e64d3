// SPDX-License-Identifier: MIT OR Apache-2.0
//! From buffers to files: a chunk is copied into its slot, searched for zeros, and what is not zero is written.

use std::sync::Arc;

use rewake_image_io::files::{Direction, Request};
use rewake_sdma_copy::{Place, Slot, Transfer};

use crate::chunk_schedule::Chunk;
use crate::error::Error;
use crate::pages::{CHUNK, HEADER};
use crate::pipeline::Pipeline;
use crate::report::Moved;

/// Bytes that are written or left out together: below it, requests of the disk get too small.
const GRANULE: u64 = 64 << 10;
/// Bytes of a page: what direct writes are multiples of.
const PAGE: usize = 4096;
/// Requests that a chunk can need: every other granule.
const MOST: usize = 16;

const _: () = assert!(CHUNK / GRANULE / 2 == MOST as u64);

pub(crate) fn run(flow: &mut Pipeline<'_>) -> Result<Moved, Error> {
    // By slot: writes that have not ended.
    let mut writing = vec![0; flow.staging.slots().len()];
    let (mut ready, mut over, mut done) = (Vec::new(), Vec::new(), Vec::new());
    let mut copied: Vec<(Chunk, Option<Slot>)> = Vec::new();
    loop {
        let mut idle = true;
        while let Some(chunk) = flow.next_chunk(&[]) {
            let Some(slot) = flow.free_slot() else { break };
            flow.take_chunk(chunk);
            copy_out(flow, chunk, slot)?;
            idle = false;
        }
        flow.copied(&mut copied)?;
        ready.extend(copied.drain(..).filter_map(|(chunk, slot)| slot.map(|slot| (chunk, slot))));
        while flow.transfers.has_room(MOST)
            && let Some((chunk, slot)) = ready.pop()
        {
            flow.chunk_done(chunk, &mut done)?;
            done.clear();
            let writes = write(flow, chunk, slot);
            writing[slot.index() as usize] = writes;
            if writes == 0 {
                flow.give_back(slot);
            }
            idle = false;
        }
        flow.transferred(&mut over);
        for finished in over.drain(..) {
            finished.result?;
            idle = false;
            let slot = slot_of(flow, finished.token);
            let left = &mut writing[slot.index() as usize];
            *left -= 1;
            if *left == 0 {
                flow.give_back(slot);
            }
        }
        if flow.all_taken() && ready.is_empty() && flow.is_idle() {
            break;
        }
        if idle {
            flow.wait(None, false)?;
        }
    }
    for file in flow.files() {
        // The last page was written whole.
        file.file.file().set_len(file.length)?;
    }
    Ok(flow.moved)
}

fn slot_of(flow: &Pipeline<'_>, token: u64) -> Slot {
    flow.staging
        .slots()
        .nth(usize::try_from(token).unwrap_or(usize::MAX))
        .expect("a token is a slot's number")
}

/// Starts the copies of all buffers' bytes in the chunk.
fn copy_out(flow: &mut Pipeline<'_>, chunk: Chunk, slot: Slot) -> Result<(), Error> {
    let file = flow.file(chunk);
    let (start, _) = file.range(chunk.number);
    for piece in file.pieces(chunk.number) {
        let to = Place { slot, at: piece.offset - start };
        let save = |bo| Transfer::Save { bo, at: piece.at, to, bytes: piece.bytes };
        flow.push(flow.buffer_with(chunk, &piece, 0), save)?;
    }
    flow.copy(chunk, Some(slot))
}

/// Starts the writes of what is not zero; gives their number.
fn write(flow: &mut Pipeline<'_>, chunk: Chunk, slot: Slot) -> usize {
    let file = flow.file(chunk);
    let (start, end) = file.range(chunk.number);
    let bytes = end - start;
    if chunk.number == 0 {
        flow.staging.write(Place { slot, at: 0 }, &(file.length - HEADER).to_le_bytes());
    }
    // What is left of the last page is written, too, and cut off at the end.
    let whole = bytes.next_multiple_of(PAGE as u64);
    let rest = usize::try_from(whole - bytes).unwrap_or(0);
    flow.staging.write(Place { slot, at: bytes }, &[0; PAGE][..rest]);
    flow.moved.bytes += bytes;
    let mut count = 0;
    let mut at = 0;
    flow.bring_out(slot, whole);
    while at < whole {
        let run = run_of(flow, slot, at, whole);
        if run == 0 {
            let zero = GRANULE.min(whole - at);
            flow.moved.zero += zero.min(bytes.saturating_sub(at));
            at += zero;
            continue;
        }
        let bytes = usize::try_from(run).unwrap_or(usize::MAX);
        flow.transfers.start(Request {
            file: Arc::clone(&file.file),
            direction: Direction::Write,
            offset: start + at,
            memory: flow.window(),
            at: Pipeline::place(slot) + usize::try_from(at).unwrap_or(usize::MAX),
            bytes,
            needed: bytes,
            token: u64::from(slot.index()),
        });
        count += 1;
        at += run;
    }
    count
}

/// Bytes from `at` on in granules that are not zero.
fn run_of(flow: &Pipeline<'_>, slot: Slot, at: u64, end: u64) -> u64 {
    let mut run = 0;
    while at + run < end {
        let granule = GRANULE.min(end - at - run);
        let from = Place { slot, at: at + run };
        if flow.staging.is_zero(from, usize::try_from(granule).unwrap_or(0)) {
            break;
        }
        run += granule;
    }
    run
}
