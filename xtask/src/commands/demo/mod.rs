// SPDX-License-Identifier: MIT OR Apache-2.0
//! `cargo xtask demo`: an inference server on a GPU is dumped and restored, and goes on with the answer that it was in the
//! middle of. `demo --cpu`: a process without GPU, restored with its memory still on the way.
//!
//! * [`gpu`]: builds what is needed and starts the machine. [`scene`]: the play itself, inside it.
//! * [`timeline`]: what CRIU's log says happened when.
//! * [`cpu`], [`actors`], [`drawing`]: the other demo, its processes, and the drawing that it leaves.

mod actors;
pub(crate) mod cpu;
mod drawing;
pub(crate) mod gpu;
pub(crate) mod scene;
mod timeline;
