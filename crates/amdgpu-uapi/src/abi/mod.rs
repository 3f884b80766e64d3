// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernel's numbers and structs for `/dev/kfd` and amdgpu render nodes, and all calls that need them.
//!
//! * [`generated`]: bindgen's output from the kernel's headers; `layout` asserts sizes, offsets and numbers.
//! * [`call`], [`drm`]: one safe function for each ioctl of `/dev/kfd` and of render nodes, and [`call::raw`]
//!   for tests that misuse them.
//! * [`udmabuf`]: dma-bufs of ordinary memory.
//! * [`memory`]: mappings that others also write, with raw, checked access only.
//!
//! Nothing outside this module needs `unsafe`.

pub mod call;
pub mod drm;
#[allow(missing_docs, missing_debug_implementations, reason = "generated: the kernel's headers describe it")]
#[allow(non_camel_case_types, non_snake_case, unreachable_pub, clippy::all, reason = "generated")]
pub mod generated;
mod layout;
pub mod memory;
pub mod udmabuf;

pub use generated::*;
