// SPDX-License-Identifier: MIT OR Apache-2.0
//! A load behind processes that run already.

use std::sync::Arc;

use rewake_image_io::io_budget::IoBudget;
use rewake_sdma_copy::MemoryDevice;

use crate::copies::Sink;
use crate::error::Error;
use crate::handle::LoadHandle;
use crate::load::{self, LoadEvent};
use crate::pipeline::{Name, Process};
use crate::report::Report;

/// A load that has not begun.
///
/// Processes come one after the other, the one with the fewest bytes first: it can go on when it has all of them. Of each, those come first
/// that [`BackgroundLoad::first`] names; then small buffers, for there are hundreds in a chunk; then the large ones, in the order of the files. What is
/// demanded at the [`LoadHandle`] goes before all that is not under way. Under way are, and a demand may have to wait for, at most:
/// * as many chunks of 2 MiB as staging memory has slots, 8 for each GPU and at most 24, being read or in their slots. The first of them
///   that ends makes room for what was demanded. With a [`IoBudget`] those that are being read are two at least, and no more than 4 ms of the
///   disk's time; a piece of one of them, as long as anybody waits for the disk.
/// * Of them, on the GPU's copy rings, 2 for each ring; the others are overtaken. A ring is busy with less only if it is
///   faster than this thread wakes. Where buffers have the same bytes, each is up to 17 copies.
/// * 8 fills for each ring: nothing is read for them, and GPUs fill as fast as their memory is.
#[derive(Debug)]
pub struct BackgroundLoad<'a> {
    processes: &'a [Process<'a>],
    sink: Sink<'a>,
    desk: LoadHandle,
    pace: Option<Arc<IoBudget>>,
    first: Vec<Name>,
    twins: Vec<Vec<Name>>,
}

impl<'a> BackgroundLoad<'a> {
    /// Of all these processes' buffers that have a dma-buf, at the pace of all that read from the same disk, if others do. Nothing is
    /// read yet, and no GPU opened.
    ///
    /// # Errors
    /// There is no descriptor left.
    pub fn new(processes: &'a [Process<'a>], pace: Option<Arc<IoBudget>>) -> Result<Self, Error> {
        Ok(Self {
            processes,
            sink: Sink::Gpus,
            desk: LoadHandle::new(processes)?,
            pace,
            first: Vec::new(),
            twins: Vec::new(),
        })
    }

    /// As [`BackgroundLoad::new`], where the buffers are memfds of `memory`, which stands in for all GPUs: none is opened.
    ///
    /// # Errors
    /// There is no descriptor left.
    pub fn into_memory(
        processes: &'a [Process<'a>],
        memory: &'a Arc<MemoryDevice>,
        pace: Option<Arc<IoBudget>>,
    ) -> Result<Self, Error> {
        Ok(Self { sink: Sink::Memory(memory), ..Self::new(processes, pace)? })
    }

    /// Buffers that somebody is likely to demand: a process's place and the image's number of each. They come in this order before the others of
    /// their process and GPU, which come as they do otherwise. What is unknown or not loaded makes no difference.
    #[must_use]
    pub fn first(self, first: Vec<(usize, usize)>) -> Self {
        Self { first, ..self }
    }

    /// Sets of buffers that have the same bytes, as [`Candidates`](crate::Alike) finds them: a process's place and the image's number of each. Of a set those
    /// of one are read, and copied to all that are loaded. What is unknown makes no difference.
    #[must_use]
    pub fn twins(self, twins: Vec<Vec<(usize, usize)>>) -> Self {
        Self { twins, ..self }
    }

    /// Where others ask for buffers, now or while it runs.
    #[must_use]
    pub fn desk(&self) -> LoadHandle {
        self.desk.clone()
    }

    /// Loads; ends when all is there. `whole` hears once of every buffer of some bytes, and of every process: at once, and in the
    /// thread that loads, which does nothing else meanwhile. None, and it hears nothing, where there is nothing to read.
    ///
    /// # Errors
    /// As [`load`](crate::load()).
    pub fn run(self, mut whole: impl FnMut(LoadEvent) + Send) -> Result<Option<Report>, Error> {
        let Self { processes, sink, desk, pace, first, twins } = self;
        crate::run("loaded", processes, sink, pace, |flow| {
            flow.by_process(&first, &twins);
            load::run(flow, &desk, &mut whole)
        })
    }
}
