// SPDX-License-Identifier: MIT OR Apache-2.0
//! A small inference server that lives on GPUs, for tests to dump and restore: its answers depend on every byte that
//! it keeps there, and are the same wherever and whenever they are computed.
//!
//! * [`shape`]: how large it is and what it does besides answering. [`weights`]: its numbers, from a seed.
//! * [`kernel`]: the soft GPU's built-in kernels, and what each computes.
//! * [`model`]: the same answers without any GPU.
//! * [`gpu`]: one process's GPUs: memory, queues, events. [`chain`]: dispatches that wait for each other.
//! * [`stage`]: the layers of one process. [`family`]: several processes. [`small`]: many small buffers.
//!   [`own`]: memory that no GPU reaches.
//! * [`side`]: what goes on beside. [`rendered`]: a process without compute.
//! * [`serve`]: the socket; [`client`]: the other end of it.

#![deny(unsafe_code)]

pub mod chain;
pub mod client;
pub mod family;
pub mod gpu;
pub mod kernel;
pub mod model;
pub mod own;
pub mod rendered;
pub mod serve;
pub mod shape;
pub mod side;
pub mod small;
pub mod stage;
pub mod weights;
