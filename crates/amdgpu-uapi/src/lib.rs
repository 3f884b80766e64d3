// SPDX-License-Identifier: MIT OR Apache-2.0
//! AMD's compute driver (KFD) and render nodes from Rust.
//!
//! * [`abi`]: the kernel's numbers and structs, and the only `unsafe` code.
//! * [`topology`]: what GPUs there are.
//! * [`Kfd`], [`Device`]: `/dev/kfd`, and one GPU with the process's address space on it.
//! * [`Buffer`], [`Userptr`]: memory that the GPU reaches, at the same address as the CPU.
//! * [`ComputeQueue`], [`SdmaQueue`], [`Events`]: work, and waiting for it. [`packet`]: its encoding.
//! * [`svm`]: attributes of ordinary memory.
//! * [`criu`]: checkpoint operations and the kernel's private data.
//! * [`mapping`]: which GPUs take the places of an image's. [`settings`]: what its user may switch.
//! * [`held`]: calls that wait for memory. [`smi`]: what the driver tells of queues.
//! * [`render`]: submissions through a render node.
//!
//! Sources: `include/uapi/linux/kfd_ioctl.h`, `include/uapi/drm/amdgpu_drm.h`, `drivers/gpu/drm/amd/amdkfd` of
//! Linux 7.2 and 6.12. All of it runs on both.

#![cfg_attr(not(test), deny(unsafe_code))]

#[allow(unsafe_code, reason = "the one place for it")]
pub mod abi;
pub mod criu;
pub mod held;
pub mod mapping;
pub mod packet;
pub mod render;
pub mod settings;
pub mod smi;
pub mod svm;
pub mod topology;

mod buffer;
mod device;
mod error;
mod event;
mod queue;

pub use buffer::{Buffer, Kind, Spec, Userptr};
pub use device::{Device, Kfd};
pub use error::{Error, FailedCall};
pub use event::{Event, Events, Outcome};
pub use queue::{ComputeQueue, QueueSpec, SdmaQueue, doorbells};
