// SPDX-License-Identifier: MIT OR Apache-2.0
//! Chunks that have not arrived from another host. Each has a slot, is requested from the fetcher, and is
//! read when all of it has arrived. If it is demanded before that, it is requested again as a demand. Chunks
//! that have arrived, and holes, do not wait for these.

use std::os::fd::{AsFd as _, BorrowedFd};

use rewake_image_io::{Class, FetchReader, SentRequest};
use rewake_sdma_copy::Slot;

use crate::chunk_schedule::{Chunk, ChunkKind};
use crate::data_range::DataRange;
use crate::error::Error;
use crate::pipeline::Pipeline;

/// The most chunks that are requested for the background: 8 MiB, as much as a fetcher of an image server has
/// in flight. They have half of the slots at most, so that a demanded chunk finds one.
const MAX_BACKGROUND: usize = 4;
/// Chunks that are requested at most because they were demanded: page faults on CPU memory share the link
/// with them.
const MAX_DEMANDED: usize = 2;

/// A slot whose chunk has not arrived.
#[derive(Debug)]
struct AbsentSlot {
    slot: Slot,
    chunk: Chunk,
    /// What is to be read.
    ranges: Vec<DataRange>,
    /// Whether it was demanded before it had the slot.
    demanded: bool,
    /// The class of the request.
    class: Class,
    sent: SentRequest,
}

/// The slots whose chunks have not arrived.
#[derive(Debug)]
pub(crate) struct AbsentSlots {
    reader: Option<FetchReader>,
    slots: Vec<AbsentSlot>,
    /// The number of all slots of the load.
    all: usize,
    max_background: usize,
    /// Whether the fetcher had no room for a request.
    refused: bool,
}

impl AbsentSlots {
    /// `all` is the number of all slots.
    pub(crate) fn new(reader: Option<FetchReader>, all: usize) -> Self {
        let max_background = MAX_BACKGROUND.min(all / 2).max(1);
        Self { reader, slots: Vec::new(), all, max_background, refused: false }
    }

    /// Returns whether some of these ranges have not arrived.
    pub(crate) fn is_absent(pipeline: &Pipeline<'_>, chunk: Chunk, ranges: &[DataRange]) -> bool {
        let file = &pipeline.file(chunk).file;
        ranges.iter().any(|range| !file.has(range.start, bytes(range.end - range.start)))
    }

    /// Returns whether a chunk of this kind may have a slot: chunks that are here always find one that is not
    /// taken by absent ones.
    pub(crate) fn has_room(&self, pipeline: &Pipeline<'_>, kind: ChunkKind) -> bool {
        if !kind.absent {
            return true;
        }
        let alike = self.slots.iter().filter(|slot| slot.demanded == kind.demanded).count();
        let most = if kind.demanded { MAX_DEMANDED } else { self.max_background };
        alike < most && self.slots.len() + usize::from(pipeline.has_present()) < self.all
    }

    /// Requests a chunk.
    ///
    /// # Errors
    /// No more bytes arrive.
    pub(crate) fn add(
        &mut self,
        pipeline: &Pipeline<'_>,
        slot: Slot,
        chunk: Chunk,
        ranges: Vec<DataRange>,
    ) -> Result<(), Error> {
        let (demanded, class, sent) =
            (pipeline.is_demanded(chunk), Class::Background, SentRequest::default());
        self.slots.push(AbsentSlot { slot, chunk, ranges, demanded, class, sent });
        self.request(pipeline, self.slots.len() - 1)
    }

    /// Takes the slots whose chunks have arrived, with what is to be read. The others are requested again, if
    /// another fetcher runs by now or they were demanded meanwhile.
    ///
    /// # Errors
    /// No more bytes arrive.
    pub(crate) fn take_arrived(
        &mut self,
        pipeline: &Pipeline<'_>,
    ) -> Result<Vec<(Slot, Chunk, Vec<DataRange>)>, Error> {
        self.refused = false;
        let arrived = |slot: &mut AbsentSlot| !Self::is_absent(pipeline, slot.chunk, &slot.ranges);
        let arrived: Vec<AbsentSlot> = self.slots.extract_if(.., arrived).collect();
        for at in 0..self.slots.len() {
            self.request(pipeline, at)?;
        }
        Ok(arrived.into_iter().map(|AbsentSlot { slot, chunk, ranges, .. }| (slot, chunk, ranges)).collect())
    }

    /// Requests all that the chunk of a slot lacks. What has arrived of it is not sent again.
    fn request(&mut self, pipeline: &Pipeline<'_>, at: usize) -> Result<(), Error> {
        let absent = &mut self.slots[at];
        let file = &pipeline.file(absent.chunk).file;
        let lost = || Error::Lost(file.name().to_path_buf());
        let (Some(fetched), Some(reader)) = (file.source(), &self.reader) else { return Err(lost()) };
        if fetched.source.has_ended() {
            return Err(lost());
        }
        let (Some(first), Some(last)) = (absent.ranges.first(), absent.ranges.last()) else { return Ok(()) };
        if absent.class == Class::Background && pipeline.is_demanded(absent.chunk) {
            (absent.class, absent.sent) = (Class::Demand, SentRequest::default());
        }
        let range = (first.start, bytes(last.end.min(file.len()) - first.start));
        self.refused |= !fetched.request(reader.number, absent.class, range, &mut absent.sent);
        Ok(())
    }

    /// Returns whether the fetcher had no room for a request: it is repeated.
    pub(crate) fn is_refused(&self) -> bool {
        self.refused
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Returns a descriptor that is readable when chunks may have arrived.
    pub(crate) fn event(&self) -> Option<BorrowedFd<'_>> {
        self.reader.as_ref().map(|reader| reader.waker.as_fd())
    }

    /// Resets the wakeup. The load calls it after a sleep and before [`AbsentSlots::take_arrived`].
    pub(crate) fn drain_wakeup(&self) {
        if let Some(reader) = &self.reader {
            reader.waker.drain();
        }
    }
}

fn bytes(length: u64) -> usize {
    usize::try_from(length).unwrap_or(usize::MAX)
}
