// SPDX-License-Identifier: MIT OR Apache-2.0
//! AMD's compute driver (KFD) and render nodes from Rust.
//!
//! * [`abi`]: the kernel's numbers and structs, and the only `unsafe` code.
//! * [`topology`]: the GPUs of the machine.
//! * [`Kfd`], [`Device`]: `/dev/kfd`, and a GPU with the process's address space on it.
//! * [`Buffer`], [`Userptr`]: memory that the GPU can access, at the CPU's address.
//! * [`ComputeQueue`], [`SdmaQueue`], [`Events`]: work, and waits for it. [`packet`]: its encoding.
//! * [`svm`]: attributes of ordinary memory.
//! * [`criu`]: checkpoint operations, and the kernel's private data.
//! * [`smi`]: the driver's events about queues.
//! * [`render`]: submissions through a render node. [`render_state`]: what it keeps besides buffers and contexts.
//!
//! Sources: `include/uapi/linux/kfd_ioctl.h`, `include/uapi/drm/amdgpu_drm.h`, `drivers/gpu/drm/amd/amdkfd`
//! of
//! Linux 7.2 and 6.12. All of it runs on both.
#![cfg_attr(not(test), deny(clippy::unwrap_used))]
#![cfg_attr(not(test), deny(unsafe_code))]

#[allow(unsafe_code, reason = "the one place for it")]
pub mod abi;
pub mod criu;
pub mod packet;
pub mod render;
pub mod render_state;
pub mod smi;
pub mod svm;
pub mod topology;

mod buffer;
mod device;
mod error;
mod event;
mod queue;

pub use buffer::{Buffer, MemoryKind, Spec, Userptr};
pub use device::{Device, Kfd};
pub use error::{Error, FailedCall};
pub use event::{Event, Events, WaitOutcome};
pub use queue::{ComputeQueue, QueueSpec, SdmaQueue, doorbells};
