// SPDX-License-Identifier: MIT OR Apache-2.0
//! Copies between buffer objects (BOs) of AMD GPUs and CPU memory, through a render node and without libdrm.
//!
//! * [`Staging`]: CPU memory in slots, that all GPUs of a transfer reach.
//! * [`CopyEngine`]: one GPU. It imports BOs by their dma-bufs and runs [`Transfer`]s: many in one submission, several
//!   submissions in flight on every ring.
//!
//! ```no_run
//! use rewake_sdma_copy::{CopyEngine, Place, Shape, Staging, Transfer};
//! use rewake_amdgpu_uapi::render::Render;
//! # fn load(dmabuf: std::os::fd::BorrowedFd<'_>, contents: &[u8]) -> Result<(), Box<dyn std::error::Error>> {
//! let render = Render::open(128)?;
//! let staging = Staging::new(Shape { slots: 16, ..Shape::default() }, &[&render])?;
//! let mut engine = CopyEngine::open(render, &staging)?;
//! let bo = engine.import(dmabuf, 1 << 20)?;
//! let slot = staging.slots().next().expect("sixteen of them");
//! let from = Place { slot, at: 0 };
//! staging.write(from, contents);
//! let ticket = engine.submit(&[Transfer::Load { bo, at: 0, from, bytes: contents.len() as u64 }])?;
//! engine.wait(ticket, std::time::Instant::now() + std::time::Duration::from_secs(10))?;
//! engine.release(bo)?;
//! # Ok(())
//! # }
//! ```
//!
//! # Which way bytes go
//! In this order, and [`CopyEngine::way`] says which and why:
//! 1. The GPU's copy rings, with staging in ordinary pages (memfd and udmabuf).
//! 2. The copy rings, with staging in GTT buffers, where `/dev/udmabuf` is missing or its buffers are refused. O_DIRECT and
//!    io_uring cannot reach that memory ([`Staging::memory`]).
//! 3. The CPU, in a thread, through its view of each BO (the PCI BAR), where the GPU offers no copy ring. Reading is slow there.
//!
//! Without any GPU, memory can stand in for one: [`MemoryDevice`].
//!
//! # Rules
//! * An engine belongs to one thread. Nothing blocks but [`CopyEngine::wait`].
//! * Transfers of one submission do not overlap, and a slot or a BO's range that is in flight belongs to the engine.
//!   Submissions on different rings have no order between them.
//! * BOs are kept by the application: release an imported one when its bytes are there, or the application cannot free it.
//! * Sources: `drivers/gpu/drm/amd/amdgpu` of Linux 6.12 and 7.2 (`amdgpu_cs.c`, `amdgpu_ctx.c`, `amdgpu_sync.c`).

#![forbid(unsafe_code)]

mod address;
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
pub use engine::{CopyEngine, CopyPath, Done};
pub use error::{Error, SubmitFault};
pub use flight::Ticket;
pub use rings::{COPIES, IN_FLIGHT};
pub use staging::{Memory, Place, Shape, Slot, Staging};
pub use table::Bo;
pub use transfer::Transfer;
