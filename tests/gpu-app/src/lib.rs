// SPDX-License-Identifier: MIT OR Apache-2.0
//! A small inference server that keeps its state on GPUs, for tests to dump and restore. Its answers depend
//! on every byte of that state, and are the same on every machine.
//!
//! * [`shape`]: how large it is and what it does besides answering. [`weights`]: its numbers, from a seed.
//! * [`kernel`]: the soft GPU's built-in kernels, and what each computes.
//! * [`model`]: the same answers without any GPU.
//! * [`kfd`]: the compute driver's memory, queues and events. [`gpu`]: one process's GPUs, with all of them.
//!   [`chain`]: dispatches that wait for each other.
//! * [`stage`]: the layers of one process. [`family`]: several processes. [`small`]: many small buffers.
//!   [`own`]: memory that no GPU can access.
//! * [`side`]: other work during answers. [`rendered`]: a process without compute.
//! * [`serve`]: the socket; [`client`]: its client.

#![deny(unsafe_code)]

pub mod chain;
pub mod client;
pub mod family;
pub mod gpu;
pub mod kernel;
pub mod kfd;
pub mod model;
pub mod own;
pub mod rendered;
pub mod serve;
pub mod shape;
pub mod side;
pub mod small;
pub mod stage;
pub mod weights;
