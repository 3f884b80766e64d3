// SPDX-License-Identifier: MIT OR Apache-2.0
//! Copies between staging memory and buffers: one engine for each GPU, its copies in flight, and its room for
//! more.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use rewake_amdgpu_uapi::render::Render;
use rewake_sdma_copy::{Bo, CopyEngine, CopyPath, MemoryDevice, Shape, Slot, Staging, Ticket, Transfer};

use crate::chunk_schedule::Chunk;
use crate::error::Error;

/// Copies from staging memory in flight on each ring. One is copied, and the next is ready when it ends. More
/// would only delay demands.
const SUBMIT_AHEAD: usize = 2;

/// The place of the buffers.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Sink<'a> {
    /// On the GPUs that the files name.
    Gpus,
    /// In memory that takes the place of all GPUs.
    Memory(&'a Arc<MemoryDevice>),
}

/// Copies of a chunk on one engine.
#[derive(Debug, Clone, Copy)]
struct Copying {
    engine: usize,
    /// The engine of the GPU that the chunk belongs to.
    leader: usize,
    ticket: Ticket,
    chunk: Chunk,
    /// None: nothing of the chunk goes through staging memory.
    slot: Option<Slot>,
}

/// The engines of all GPUs.
pub(crate) struct Copies {
    engines: Vec<CopyEngine>,
    in_flight: Vec<Copying>,
    /// The transfers of the next submission, by engine. The allocations are reused.
    lists: Vec<Vec<Transfer>>,
}

impl Copies {
    /// Opens an engine for each render node, and creates the staging memory of all.
    pub(crate) fn new(sink: Sink<'_>, minors: &[u32], shape: Shape) -> Result<(Staging, Self), Error> {
        let (staging, engines): (Staging, Result<Vec<CopyEngine>, _>) = match sink {
            Sink::Gpus => {
                let renders: Vec<Render> =
                    minors.iter().copied().map(Render::open).collect::<Result<_, _>>()?;
                let staging = Staging::new(shape, &renders.iter().collect::<Vec<_>>())?;
                let engines = renders.into_iter().map(|render| CopyEngine::open(render, &staging)).collect();
                (staging, engines)
            }
            Sink::Memory(memory) => {
                let staging = Staging::pages(shape)?;
                let engine = |minor: &u32| CopyEngine::in_memory(*minor, memory, &staging);
                let engines = minors.iter().map(engine).collect();
                (staging, engines)
            }
        };
        let engines = engines?;
        let lists = engines.iter().map(|_| Vec::new()).collect();
        Ok((staging, Self { engines, in_flight: Vec::new(), lists }))
    }

    /// Returns the number of engines.
    pub(crate) fn count(&self) -> usize {
        self.engines.len()
    }

    /// Returns a line for the log about each engine's copy path.
    pub(crate) fn notes(&self) -> impl Iterator<Item = String> {
        self.engines.iter().map(|engine| format!("renderD{}: {}", engine.minor(), engine.path()))
    }

    /// Imports a buffer, and returns the engine's handle of it.
    pub(crate) fn import(&mut self, engine: usize, dmabuf: &OwnedFd) -> Result<Bo, Error> {
        // The size of 1 is enough: the kernel rounds it up to the buffer's pages.
        Ok(self.engines[engine].import(dmabuf.as_fd(), 1)?)
    }

    pub(crate) fn release(&mut self, engine: usize, bo: Bo) -> Result<(), Error> {
        Ok(self.engines[engine].release(bo)?)
    }

    /// Adds a transfer to the next [`Copies::submit`].
    pub(crate) fn push(&mut self, engine: usize, transfer: Transfer) {
        self.lists[engine].push(transfer);
    }

    /// Submits the transfers that were pushed, which belong to one chunk and must have room. Returns the
    /// number of submissions.
    pub(crate) fn submit(&mut self, leader: usize, chunk: Chunk, slot: Option<Slot>) -> Result<usize, Error> {
        let mut submissions = 0;
        for (engine, list) in self.lists.iter_mut().enumerate().filter(|(_, list)| !list.is_empty()) {
            let ticket = self.engines[engine].submit(list)?;
            list.clear();
            self.in_flight.push(Copying { engine, leader, ticket, chunk, slot });
            submissions += 1;
        }
        Ok(submissions)
    }

    /// Adds the chunks whose copies have all ended, with their slots. Returns whether any copy has ended,
    /// which leaves room on an engine.
    pub(crate) fn take_ended(&mut self, into: &mut Vec<(Chunk, Option<Slot>)>) -> Result<bool, Error> {
        let mut any = false;
        for engine in &mut self.engines {
            for done in engine.finished()? {
                done.result?;
                let index = self.in_flight.iter().position(|copying| copying.ticket == done.ticket);
                let Some(index) = index else { continue };
                any = true;
                let Copying { chunk, slot, .. } = self.in_flight.swap_remove(index);
                if self.in_flight.iter().all(|other| other.chunk != chunk) {
                    into.push((chunk, slot));
                }
            }
        }
        Ok(any)
    }

    /// Returns the number of slots whose chunks belong to a GPU and are being copied by any engine.
    pub(crate) fn slots_of(&self, leader: usize) -> usize {
        let first = |place: usize, chunk| self.in_flight[..place].iter().all(|other| other.chunk != chunk);
        let of_it =
            self.in_flight.iter().enumerate().filter(|(_, of)| of.slot.is_some() && of.leader == leader);
        of_it.filter(|(place, of)| first(*place, of.chunk)).count()
    }

    /// Returns the number of slots that an engine copies from.
    fn slots(&self, engine: usize) -> usize {
        self.in_flight.iter().filter(|of| of.slot.is_some() && of.engine == engine).count()
    }

    /// Returns whether an engine has room for a submission.
    pub(crate) fn has_room(&self, engine: usize) -> bool {
        self.engines[engine].room() > 0
    }

    /// Returns whether an engine has room for copies from a slot.
    pub(crate) fn may_copy(&self, engine: usize) -> bool {
        self.slots_free(engine) > 0 && self.has_room(engine)
    }

    /// Returns whether an engine has room for a fill, which needs no slot. Some room stays reserved for
    /// copies from slots, or a chunk that was read would wait for all fills.
    pub(crate) fn may_fill(&self, engine: usize) -> bool {
        self.engines[engine].room() > self.slots_free(engine)
    }

    /// Returns the number of copies from slots that an engine still takes.
    fn slots_free(&self, engine: usize) -> usize {
        let rings = match self.engines[engine].path() {
            CopyPath::Rings { rings, .. } => *rings,
            CopyPath::Cpu { .. } => 1,
        };
        (SUBMIT_AHEAD * rings).saturating_sub(self.slots(engine))
    }

    /// Returns whether no copy is in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// Returns a descriptor for each busy engine, readable when a copy has ended. None: the engine has no
    /// descriptor.
    pub(crate) fn events(&self) -> impl Iterator<Item = Option<BorrowedFd<'_>>> {
        self.engines.iter().filter(|engine| engine.in_flight() > 0).map(CopyEngine::event_fd)
    }

    /// Returns the error of an engine that does not answer. Does nothing if no copy is in flight.
    pub(crate) fn diagnose(&mut self) -> Result<(), Error> {
        if let Some(Copying { engine, ticket, .. }) = self.in_flight.first() {
            self.engines[*engine].wait(*ticket, Instant::now())?;
        }
        Ok(())
    }
}
