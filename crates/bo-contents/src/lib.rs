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
//! * [`GpuPagesFile`]: the layout of a file. `pipeline`: the chunks in flight; `copies`: the copies in
//!   flight. [`save`] and [`load`]: the two directions.
//! * [`Candidates`]: finds buffers that have the same bytes. `dedup`: reads such bytes once.
//! * [`BackgroundLoad`]: a load that takes demands and reports progress at its [`LoadHandle`].
//!   `chunk_schedule`: chooses the next chunk. `absent`: chunks that have not arrived from another host.
//! * [`folder`]: opens files of an image directory.
//!
//! Cached bytes are read from the page cache, and the rest with O_DIRECT. Where a GPU has no SDMA rings, a
//! thread copies between staging memory and the CPU's mapping of a buffer.
//! [`BackgroundLoad::into_memory`] needs no GPU: tests and `cargo xtask bench engine` load into memory.
#![cfg_attr(not(test), deny(clippy::unwrap_used))]

mod absent;
mod background_load;
mod buffer;
mod chunk_schedule;
mod copies;
mod data_range;
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
mod process;
mod report;
mod run;
mod save;
mod slot_quota;

pub use background_load::BackgroundLoad;
pub use duplicate_finder::find_duplicates;
pub use error::{Error, Stall};
pub use handle::{LoadHandle, Progress};
pub use load::LoadEvent;
pub use pages::GpuPagesFile;
pub use process::ProcessBuffers;
pub use report::{Moved, Report};
pub use rewake_sdma_copy::MemoryDevice;

use copies::Sink;
use run::run;

/// Writes the memory of buffers to files. Every buffer that has bytes must have a dma-buf.
///
/// # Errors
/// A GPU or a file failed or does not answer.
pub fn save(processes: &[ProcessBuffers<'_>]) -> Result<Option<Report>, Error> {
    run("saved", processes, Sink::Gpus, None, save::run)
}

/// Reads the memory of all processes' buffers, in file order. It skips buffers without a dma-buf. Returns
/// `None` if there is nothing to read.
///
/// # Errors
/// A GPU or a file failed or does not answer.
pub fn load(processes: &[ProcessBuffers<'_>]) -> Result<Option<Report>, Error> {
    let any = |process: &&ProcessBuffers<'_>| process.dmabufs.iter().any(Option::is_some);
    let here: Vec<ProcessBuffers<'_>> = processes.iter().filter(any).copied().collect();
    let handle = LoadHandle::new(&here)?;
    run("loaded", &here, Sink::Gpus, None, |pipeline| load::run(pipeline, &handle, None, &mut |_| ()))
}
