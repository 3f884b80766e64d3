// SPDX-License-Identifier: MIT OR Apache-2.0
//! The memory of GPUs' buffers, to and from `amdgpu-pages-ID-GPU.img` and `amdgpu-drm-pages-ID-MINOR-BUFFER.img`.
//!
//! The unit is a chunk of the *file*, 2 MiB at a multiple of 2 MiB: a slot of staging memory holds one, disks read and
//! write it past the page cache, and all buffers that have bytes in it are copied by one submission, so that small ones
//! come by the hundred. Chunks of all GPUs are under way at once: one is copied while another is read or written. One thread
//! looks after all of it, and no process has more memory for it than the staging memory.
//!
//! * [`PagesFile`]: what is where in a file. `flow`: what is under way, `copies` what engines work on. [`save`], [`load`]: the two directions.
//! * [`Candidates`]: which buffers have the same bytes. `twins`: they are read once.
//! * [`BackgroundLoad`]: a load that other threads can ask for a buffer first, and how far it is, at its [`LoadHandle`]. `order`: which
//!   chunk comes next.
//! * [`folder`]: files of an image directory.
//!
//! What the page cache has is read from it, by threads of the kernel's, and by one copy where the CPU copies anyway (`straight`);
//! the rest past it, by io_uring. [`BackgroundLoad::into_memory`] needs no GPU: tests, and `cargo xtask bench engine`, load into memory.

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
mod straight;
mod transfers;

use std::sync::Arc;
use std::time::Instant;

use nix::sys::signal::{SigSet, SigmaskHow};

pub use background_load::BackgroundLoad;
pub use duplicate_finder::{Candidates, DuplicateSets, TWINS};
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

/// Writes the memory of buffers. Those that have bytes must all have a dma-buf.
///
/// # Errors
/// A GPU or a file failed, or one of them does not answer.
pub fn save(processes: &[Process<'_>]) -> Result<Option<Report>, Error> {
    run("saved", processes, Sink::Gpus, None, save::run)
}

/// Reads the memory of all processes' buffers, in the order of the files. A buffer without a dma-buf is left alone. None where
/// there is nothing to read.
///
/// # Errors
/// A GPU or a file failed, or one of them does not answer.
pub fn load(processes: &[Process<'_>]) -> Result<Option<Report>, Error> {
    let any = |process: &&Process<'_>| process.dmabufs.iter().any(Option::is_some);
    let here: Vec<Process<'_>> = processes.iter().filter(any).copied().collect();
    let desk = LoadHandle::new(&here)?;
    run("loaded", &here, Sink::Gpus, None, |flow| load::run(flow, &desk, &mut |_| ()))
}

/// One of the two directions.
fn run(
    done: &'static str,
    processes: &[Process<'_>],
    sink: Sink<'_>,
    pace: Option<Arc<IoBudget>>,
    act: impl FnOnce(&mut Pipeline<'_>) -> Result<Moved, Error> + Send,
) -> Result<Option<Report>, Error> {
    if processes.iter().flat_map(|process| process.files).all(|file| file.chunks() == 0) {
        return Ok(None);
    }
    // Not when they are opened: the plugin and the streamer of one restore have them open at the same time.
    processes.iter().flat_map(|process| process.files).for_each(|file| file.file.join());
    let from_afar = processes.iter().flat_map(|process| process.files).any(|file| file.file.is_remote());
    pace.iter().filter(|_| from_afar).for_each(|pace| pace.set_remote_fs());
    let start = Instant::now();
    let (ways, moved) = on_quiet_thread(|| {
        let mut flow = Pipeline::new(processes, sink, pace)?;
        let ways = flow.notes();
        Ok((ways, act(&mut flow)?))
    })?;
    Ok(Some(Report { done, ways, moved, time: start.elapsed() }))
}

/// Does it in a thread that has ended when this returns, and that signals do not reach.
///
/// An io_uring goes on in the kernel after it was closed, and interrupts the thread that had it (`io_ring_exit_work`).
/// A driver's call that is made meanwhile gets EINTR: RESUME does, where it registers notifiers (`mm_take_all_locks`), and
/// must not be made again.
fn on_quiet_thread<T: Send>(act: impl FnOnce() -> Result<T, Error> + Send) -> Result<T, Error> {
    let before = SigSet::all().thread_swap_mask(SigmaskHow::SIG_SETMASK)?;
    let done = std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("contents".to_owned());
        Ok(thread.spawn_scoped(scope, act)?.join())
    });
    before.thread_set_mask()?;
    match done {
        Ok(Ok(answer)) => answer,
        Ok(Err(_)) => Err(Error::Panicked),
        Err(error) => Err(error),
    }
}
