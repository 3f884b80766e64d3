// SPDX-License-Identifier: MIT OR Apache-2.0
//! A program's own use of AMD's compute driver, as ROCm's library does it: the product restores what these
//! objects are in the kernel, and makes none itself. Numbers and structs are `rewake_amdgpu_uapi::abi`'s.
//!
//! * [`Device`]: a GPU with the process's address space on it.
//! * [`Buffer`], [`Userptr`]: memory that the GPU can access, at the CPU's address. [`svm`]: attributes of
//!   ordinary memory.
//! * [`ComputeQueue`], [`SdmaQueue`], [`Events`]: work, and waits for it. [`aql`]: its encoding.

pub mod aql;
pub mod svm;

mod buffer;
mod device;
mod event;
mod queue;

pub use buffer::{Buffer, MemoryKind, Spec, Userptr};
pub use device::{Device, set_xnack, xnack};
pub use event::{Event, Events, WaitOutcome};
pub use queue::{ComputeQueue, QueueSpec, SdmaQueue, doorbells};
