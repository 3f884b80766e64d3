// SPDX-License-Identifier: MIT OR Apache-2.0
//! AMD's compute driver (KFD) and render nodes from Rust.
//!
//! * [`abi`]: the kernel's numbers and structs, and the only `unsafe` code.
//! * [`topology`]: the GPUs of the machine.
//! * [`Kfd`] opens `/dev/kfd`.
//! * [`criu`]: checkpoint operations, and the kernel's private data.
//! * [`smi`]: the driver's events about queues.
//! * [`render`]: submissions through a render node. [`packet`]: their encoding.
//! * [`render_state`]: what a render node keeps besides buffers and contexts.
//!
//! Sources: `include/uapi/linux/kfd_ioctl.h`, `include/uapi/drm/amdgpu_drm.h`, `drivers/gpu/drm/amd/amdkfd`
//! of Linux 7.2 and 6.12. All of it runs on both.
#![cfg_attr(not(test), deny(clippy::unwrap_used))]
#![cfg_attr(not(test), deny(unsafe_code))]

#[allow(unsafe_code, reason = "the one place for it")]
pub mod abi;
pub mod criu;
pub mod packet;
pub mod render;
pub mod render_state;
pub mod smi;
pub mod topology;

mod error;
mod kfd;

pub use error::{Error, FailedCall};
pub use kfd::Kfd;
