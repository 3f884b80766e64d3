// SPDX-License-Identifier: MIT OR Apache-2.0
//! Copies between staging memory and buffers: an engine for each GPU, what each works on, and how much more it may be given.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use rewake_amdgpu_uapi::abi::memory::Mapping;
use rewake_amdgpu_uapi::render::Render;
use rewake_sdma_copy::{Bo, CopyEngine, CopyPath, MemoryDevice, Shape, Slot, Staging, Ticket, Transfer};

use crate::chunk_schedule::Chunk;
use crate::error::Error;

/// Copies from staging memory that are submitted ahead, for each ring: one is copied, and the next one is there when it ends.
/// More would only make demands wait.
const AHEAD: usize = 2;

/// Where buffers are.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Sink<'a> {
    /// On the GPUs that the files name.
    Gpus,
    /// In memory that stands in for them.
    Memory(&'a Arc<MemoryDevice>),
}

/// Copies of a chunk that an engine works on.
#[derive(Debug, Clone, Copy)]
struct Copying {
    engine: usize,
    /// That of the GPU whose chunk it is.
    leader: usize,
    ticket: Ticket,
    chunk: Chunk,
    /// None: nothing of it goes through staging memory.
    slot: Option<Slot>,
}

/// All engines.
pub(crate) struct Copies {
    engines: Vec<CopyEngine>,
    under_way: Vec<Copying>,
    /// What is submitted next, by engine: used again and again.
    lists: Vec<Vec<Transfer>>,
}

impl Copies {
    /// An engine for each of the GPUs' render nodes, and the staging memory of all.
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
        Ok((staging, Self { engines, under_way: Vec::new(), lists }))
    }

    /// How many engines there are.
    pub(crate) fn count(&self) -> usize {
        self.engines.len()
    }

    /// For the log: the way that each one's bytes go.
    pub(crate) fn notes(&self) -> impl Iterator<Item = String> {
        self.engines.iter().map(|engine| format!("renderD{}: {}", engine.minor(), engine.way()))
    }

    /// Whether the CPU copies for it.
    pub(crate) fn is_by_cpu(&self, engine: usize) -> bool {
        matches!(self.engines[engine].way(), CopyPath::Cpu { .. })
    }

    /// Its name for a buffer.
    pub(crate) fn import(&mut self, engine: usize, dmabuf: &OwnedFd) -> Result<Bo, Error> {
        // The kernel rounds to pages.
        Ok(self.engines[engine].import(dmabuf.as_fd(), 1)?)
    }

    pub(crate) fn release(&mut self, engine: usize, bo: Bo) -> Result<(), Error> {
        Ok(self.engines[engine].release(bo)?)
    }

    /// Where the CPU sees a buffer, if it does.
    pub(crate) fn view(&mut self, engine: usize, bo: Bo) -> Result<Option<Arc<Mapping>>, Error> {
        Ok(self.engines[engine].view(bo)?)
    }

    /// One more of what [`Copies::submit`] starts.
    pub(crate) fn push(&mut self, engine: usize, transfer: Transfer) {
        self.lists[engine].push(transfer);
    }

    /// Starts what was pushed, all of it of one chunk of a GPU's, for which there is room; how many submissions that are.
    pub(crate) fn submit(&mut self, leader: usize, chunk: Chunk, slot: Option<Slot>) -> Result<usize, Error> {
        let mut submissions = 0;
        for (engine, list) in self.lists.iter_mut().enumerate().filter(|(_, list)| !list.is_empty()) {
            let ticket = self.engines[engine].submit(list)?;
            list.clear();
            self.under_way.push(Copying { engine, leader, ticket, chunk, slot });
            submissions += 1;
        }
        Ok(submissions)
    }

    /// Chunks of which all copies have ended, with their slots; whether any copy has, so that an engine has room.
    pub(crate) fn ended(&mut self, into: &mut Vec<(Chunk, Option<Slot>)>) -> Result<bool, Error> {
        let mut any = false;
        for engine in &mut self.engines {
            for done in engine.finished()? {
                done.result?;
                let index = self.under_way.iter().position(|copying| copying.ticket == done.ticket);
                let Some(index) = index else { continue };
                any = true;
                let Copying { chunk, slot, .. } = self.under_way.swap_remove(index);
                if self.under_way.iter().all(|other| other.chunk != chunk) {
                    into.push((chunk, slot));
                }
            }
        }
        Ok(any)
    }

    /// Slots with chunks of a GPU's that are being copied, by whatever engine.
    pub(crate) fn slots_of(&self, leader: usize) -> usize {
        let first = |place: usize, chunk| self.under_way[..place].iter().all(|other| other.chunk != chunk);
        let of_it =
            self.under_way.iter().enumerate().filter(|(_, of)| of.slot.is_some() && of.leader == leader);
        of_it.filter(|(place, of)| first(*place, of.chunk)).count()
    }

    /// Slots that an engine copies from.
    fn slots(&self, engine: usize) -> usize {
        self.under_way.iter().filter(|of| of.slot.is_some() && of.engine == engine).count()
    }

    /// Whether it may be given anything.
    pub(crate) fn has_room(&self, engine: usize) -> bool {
        self.engines[engine].room() > 0
    }

    /// Whether it may be given copies from a slot now.
    pub(crate) fn may_copy(&self, engine: usize) -> bool {
        self.to_come(engine) > 0 && self.has_room(engine)
    }

    /// Whether it may be given what needs no slot: copies from slots find room all the same, or what was read would wait for all
    /// that is only filled.
    pub(crate) fn may_fill(&self, engine: usize) -> bool {
        self.engines[engine].room() > self.to_come(engine)
    }

    /// How many copies from slots it may be given before one of them has ended.
    fn to_come(&self, engine: usize) -> usize {
        let rings = match self.engines[engine].way() {
            CopyPath::Rings { rings, .. } => *rings,
            CopyPath::Cpu { .. } => 1,
        };
        (AHEAD * rings).saturating_sub(self.slots(engine))
    }

    /// Whether no engine works.
    pub(crate) fn is_idle(&self) -> bool {
        self.under_way.is_empty()
    }

    /// Engines that work: readable when something has ended. None: one that cannot tell.
    pub(crate) fn events(&self) -> impl Iterator<Item = Option<BorrowedFd<'_>>> {
        self.engines.iter().filter(|engine| engine.in_flight() > 0).map(CopyEngine::event_fd)
    }

    /// What an engine that does not answer knows of it; nothing where none works.
    pub(crate) fn diagnose(&mut self) -> Result<(), Error> {
        if let Some(Copying { engine, ticket, .. }) = self.under_way.first() {
            self.engines[*engine].wait(*ticket, Instant::now())?;
        }
        Ok(())
    }
}
