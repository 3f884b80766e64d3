// SPDX-License-Identifier: MIT OR Apache-2.0
//! Saves and loads the memory of buffer objects. The files are `amdgpu-pages-ID-GPU.img` and
//! `amdgpu-drm-pages-ID-MINOR-BUFFER.img`.
//!
//! The unit is a chunk of the *file*: 2 MiB at a multiple of 2 MiB. A slot of staging memory holds one chunk,
//! and disks read and write it with O_DIRECT. One submission copies all buffers that have bytes in a chunk,
//! so hundreds of small buffers cost as much as a large one. Chunks of all GPUs are in flight at once: one is
//! copied while another is read or written. One thread drives all of it, and its memory is limited to the
//! staging memory.
//!
//! * [`PagesFile`]: the layout of a file. `pipeline`: the chunks in flight; `copies`: the copies in flight.
//!   [`save`] and [`load`]: the two directions.
//! * [`Candidates`]: finds buffers that have the same bytes. `dedup`: reads such bytes once.
//! * [`BackgroundLoad`]: a load that takes demands and reports progress at its [`LoadHandle`].
//!   `chunk_schedule`: chooses the next chunk.
//! * [`folder`]: opens files of an image directory.
//!
//! Cached bytes are read from the page cache, and the rest with O_DIRECT. Where a GPU has no SDMA rings, a
//! thread copies between staging memory and the CPU's mapping of a buffer.
//! [`BackgroundLoad::into_memory`] needs no GPU: tests and `cargo xtask bench engine` load into memory.

mod background_load;
mod chunk_schedule;
mod copies;
mod dedup;
mod duplicate_finder;
mod error;
pub mod folder;
mod handle;
mod io_memory;
mod layout;
mod load;
mod pages;
mod pipeline;
mod report;
mod save;
mod slot_quota;
mod transfers;

use std::sync::Arc;
use std::time::Instant;

use nix::sys::signal::{SigSet, SigmaskHow};

pub use background_load::BackgroundLoad;
pub use duplicate_finder::{Candidates, DUPLICATES_FILE, DuplicateSets, EARLIER_DUPLICATES_FILE};
pub use error::{Error, Stuck};
pub use handle::{LoadHandle, Progress};
pub use load::LoadEvent;
pub use pages::PagesFile;
pub use pipeline::Process;
pub use report::{Moved, Report};
use rewake_image_io::io_budget::IoBudget;
pub use rewake_sdma_copy::MemoryDevice;

use copies::Sink;
use pipeline::Pipeline;

/// Writes the memory of buffers to files. Every buffer that has bytes must have a dma-buf.
///
/// # Errors
/// A GPU or a file failed or does not answer.
pub fn save(processes: &[Process<'_>]) -> Result<Option<Report>, Error> {
    run("saved", processes, Sink::Gpus, None, save::run)
}

/// Reads the memory of all processes' buffers, in file order. It skips buffers without a dma-buf. Returns
/// None if there is nothing to read.
///
/// # Errors
/// A GPU or a file failed or does not answer.
pub fn load(processes: &[Process<'_>]) -> Result<Option<Report>, Error> {
    let any = |process: &&Process<'_>| process.dmabufs.iter().any(Option::is_some);
    let here: Vec<Process<'_>> = processes.iter().filter(any).copied().collect();
    let handle = LoadHandle::new(&here)?;
    run("loaded", &here, Sink::Gpus, None, |pipeline| load::run(pipeline, &handle, &mut |_| ()))
}

/// Runs a save or a load on its own thread.
fn run(
    done: &'static str,
    processes: &[Process<'_>],
    sink: Sink<'_>,
    budget: Option<Arc<IoBudget>>,
    work: impl FnOnce(&mut Pipeline<'_>) -> Result<Moved, Error> + Send,
) -> Result<Option<Report>, Error> {
    if processes.iter().flat_map(|process| process.files).all(|file| file.chunks() == 0) {
        return Ok(None);
    }
    // Files are joined now and not when they are opened: plugin and streamer have them open at the same time.
    processes.iter().flat_map(|process| process.files).for_each(|file| file.file.join());
    let remote = processes.iter().flat_map(|process| process.files).any(|file| file.file.is_remote());
    budget.iter().filter(|_| remote).for_each(|budget| budget.set_remote_fs());
    let start = Instant::now();
    let (paths, moved) = on_quiet_thread(|| {
        let mut pipeline = Pipeline::new(processes, sink, budget)?;
        let paths = pipeline.notes();
        Ok((paths, work(&mut pipeline)?))
    })?;
    Ok(Some(Report { done, paths, moved, time: start.elapsed() }))
}

/// Runs `work` on a thread that blocks all signals, and joins the thread.
///
/// The kernel tears an io_uring down after its close, and then interrupts the thread that had it
/// (`io_ring_exit_work`). A driver call that this thread makes meanwhile fails with EINTR. RESUME fails so
/// while it registers notifiers (`mm_take_all_locks`), and must not be repeated.
fn on_quiet_thread<T: Send>(work: impl FnOnce() -> Result<T, Error> + Send) -> Result<T, Error> {
    let before = SigSet::all().thread_swap_mask(SigmaskHow::SIG_SETMASK)?;
    let done = std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("contents".to_owned());
        Ok(thread.spawn_scoped(scope, work)?.join())
    });
    before.thread_set_mask()?;
    match done {
        Ok(Ok(answer)) => answer,
        Ok(Err(_)) => Err(Error::Panicked),
        Err(error) => Err(error),
    }
}
