// SPDX-License-Identifier: MIT OR Apache-2.0
//! Copies between buffer objects (BOs) of AMD GPUs and CPU memory, through a render node and without libdrm.
//!
//! * [`Staging`]: CPU memory in slots that all GPUs of a transfer can access.
//! * [`CopyEngine`]: the copies of one GPU. It imports BOs by their dma-bufs and runs [`Transfer`]s. One
//!   submission holds many transfers, and every ring has several submissions in flight.
//!
//! ```no_run
//! use rewake_sdma_copy::{CopyEngine, Shape, Staging, StagingOffset, Transfer};
//! use rewake_amdgpu_uapi::render::Render;
//! # use std::{error::Error, os::fd::BorrowedFd};
//! # fn load(dmabuf: BorrowedFd<'_>, contents: &[u8]) -> Result<(), Box<dyn Error>> {
//! let render = Render::open(128)?;
//! let staging = Staging::new(Shape { slots: 16, ..Shape::default() }, &[&render])?;
//! let mut engine = CopyEngine::open(render, &staging)?;
//! let bo = engine.import(dmabuf, 1 << 20)?;
//! let slot = staging.slots().next().expect("there are sixteen");
//! let from = StagingOffset { slot, at: 0 };
//! staging.write(from, contents);
//! let ticket = engine.submit(&[Transfer::Load { bo, at: 0, from, bytes: contents.len() as u64 }])?;
//! engine.wait(ticket, std::time::Instant::now() + std::time::Duration::from_secs(10))?;
//! engine.release(bo)?;
//! # Ok(())
//! # }
//! ```
//!
//! # Copy paths
//! An engine takes the first path that works, and [`CopyEngine::path`] says which and why:
//! 1. The GPU's copy rings, with staging memory in ordinary pages (memfd and udmabuf).
//! 2. The copy rings, with staging memory in GTT buffers, if `/dev/udmabuf` is missing or its buffers are
//!    refused. O_DIRECT and io_uring cannot access that memory ([`Staging::memory`]).
//! 3. A CPU thread, through the CPU mapping of each BO (the PCI BAR), if the GPU offers no copy ring. Reads
//!    are slow there.
//!
//! [`MemoryDevice`] takes the place of a GPU on machines without one.
//!
//! # Rules
//! * An engine belongs to one thread. Only [`CopyEngine::wait`] blocks.
//! * Transfers of one submission must not overlap. A slot or BO range in flight belongs to the engine.
//!   Submissions on different rings have no order.
//! * The kernel keeps a BO while it is imported: release it after its copies, or the application cannot free
//!   it.
//! * Sources: `drivers/gpu/drm/amd/amdgpu` of Linux 6.12 and 7.2 (`amdgpu_cs.c`, `amdgpu_ctx.c`,
//!   `amdgpu_sync.c`).
#![cfg_attr(not(test), deny(clippy::unwrap_used))]
#![forbid(unsafe_code)]

mod address;
mod caps;
mod cpu;
mod device;
mod engine;
mod error;
mod flight;
mod rings;
mod staging;
mod table;
mod transfer;

pub use device::MemoryDevice;
pub use engine::{CopyCompletion, CopyEngine, CopyPath};
pub use error::{Error, SubmitFault};
pub use flight::Ticket;
pub use rings::{COPIES, IN_FLIGHT};
pub use staging::{Shape, Slot, Staging, StagingMemory, StagingOffset};
pub use table::Bo;
pub use transfer::Transfer;
