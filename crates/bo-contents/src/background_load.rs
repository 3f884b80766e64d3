// SPDX-License-Identifier: MIT OR Apache-2.0
//! Loads buffers in the background while their processes run.

use std::sync::Arc;

use rewake_image_io::FetchReader;
use rewake_image_io::io_budget::IoBudget;
use rewake_sdma_copy::MemoryDevice;

use crate::copies::Sink;
use crate::error::Error;
use crate::handle::LoadHandle;
use crate::load::{self, LoadEvent};
use crate::process::{Name, ProcessBuffers};
use crate::report::Report;
use crate::run::run;

/// A load that has not started.
///
/// It loads one process after the other. The process with the fewest bytes is first, because its queues can
/// resume once all of its buffers are resident. Within a process, buffers given to
/// [`BackgroundLoad::prioritize`] are first. Then follow small buffers, of which a chunk holds hundreds, then
/// large ones in file order.
///
/// A demand at the [`LoadHandle`] precedes everything that is not in flight. A demand may have to wait for at
/// most:
/// * As many chunks of 2 MiB as staging memory has slots: 8 for each GPU, 24 at most. They are being read or
///   are in their slots, and the first that ends makes room for the demand. With an [`IoBudget`], at least
///   two are being read, and at most 4 ms of the disk's time. While a demand load waits for the disk, only a
///   piece of one chunk is read.
/// * Of these chunks, 2 for each copy ring of the GPU; a demand overtakes the others. A ring has fewer only
///   if it is faster than this thread wakes. With duplicates, each chunk is up to 17 copies.
/// * Of chunks that have not arrived from another host, two that were demanded are requested at once, and the
///   next when one of them is here. No other chunk waits for these: see `absent`.
/// * 8 fills for each ring: a fill reads nothing, and GPUs fill at the speed of their memory.
#[derive(Debug)]
pub struct BackgroundLoad<'a> {
    processes: &'a [ProcessBuffers<'a>],
    sink: Sink<'a>,
    handle: LoadHandle,
    budget: Option<Arc<IoBudget>>,
    first: Vec<Name>,
    duplicates: Vec<Vec<Name>>,
    reader: Option<FetchReader>,
}

impl<'a> BackgroundLoad<'a> {
    /// Prepares a load of all buffers that have a dma-buf. `budget` is shared by all readers of the disk, if
    /// there are others. Nothing is read and no GPU is opened yet.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn new(processes: &'a [ProcessBuffers<'a>], budget: Option<Arc<IoBudget>>) -> Result<Self, Error> {
        Ok(Self {
            processes,
            sink: Sink::Gpus,
            handle: LoadHandle::new(processes)?,
            budget,
            first: Vec::new(),
            duplicates: Vec::new(),
            reader: None,
        })
    }

    /// As [`BackgroundLoad::new`], but the buffers are memfds of `memory`, which takes the place of all GPUs.
    /// No GPU is opened.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn into_memory(
        processes: &'a [ProcessBuffers<'a>],
        memory: &'a Arc<MemoryDevice>,
        budget: Option<Arc<IoBudget>>,
    ) -> Result<Self, Error> {
        Ok(Self { sink: Sink::Memory(memory), ..Self::new(processes, budget)? })
    }

    /// Names buffers that are likely to be demanded: the process's index and the image's number of each. They
    /// precede the other buffers of their process and GPU, in this order. Entries that are unknown or not
    /// loaded are ignored.
    #[must_use]
    pub fn prioritize(self, first: Vec<(usize, usize)>) -> Self {
        Self { first, ..self }
    }

    /// Names sets of buffers that have the same bytes, as [`Candidates`](crate::Candidates) finds them: the
    /// process's index and the image's number of each. Of each set, one buffer is read and copied to all
    /// buffers that are loaded. Unknown entries are ignored.
    #[must_use]
    pub fn duplicates(self, duplicates: Vec<Vec<(usize, usize)>>) -> Self {
        Self { duplicates, ..self }
    }

    /// Says by which reader chunks are requested that have not arrived from another host. The load waits for
    /// them.
    #[must_use]
    pub fn fetched_by(self, reader: Option<FetchReader>) -> Self {
        Self { reader, ..self }
    }

    /// Returns the handle where other threads demand buffers, before or during the load.
    #[must_use]
    pub fn handle(&self) -> LoadHandle {
        self.handle.clone()
    }

    /// Loads all buffers, and returns when all are resident. `on_event` is called once for each buffer that
    /// has bytes, and once for each process, as soon as it is resident. The loading thread makes the calls
    /// and waits for them. Returns None, without a call, if there is nothing to read.
    ///
    /// # Errors
    /// As [`load`](crate::load()).
    pub fn run(self, mut on_event: impl FnMut(LoadEvent) + Send) -> Result<Option<Report>, Error> {
        let Self { processes, sink, handle, budget, first, duplicates, reader } = self;
        run("loaded", processes, sink, budget, |pipeline| {
            pipeline.by_process(&first, &duplicates);
            load::run(pipeline, &handle, reader, &mut on_event)
        })
    }
}
