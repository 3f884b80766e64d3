// SPDX-License-Identifier: MIT OR Apache-2.0
//! `cargo xtask demo`: an inference server on a GPU is dumped in the middle of an answer, restored eagerly
//! and on demand, and finishes that answer each time. `demo --cpu`: a process without GPU, restored with a
//! background load. `demo --replicas`: three replicas from a store.
//!
//! * [`gpu`]: builds what is needed and starts the machine. [`scene`]: the steps, inside it. [`server`]: the
//!   server.
//! * [`timeline`]: times of events, from CRIU's log. [`figures`]: the table at the end, and what it must
//!   show.
//! * [`cpu`], [`actors`]: the other demo, and its processes.
//! * [`replicas`], [`metrics`]: three replicas from a store, and what their node agent reports.

mod actors;
pub(crate) mod cpu;
mod figures;
pub(crate) mod gpu;
mod metrics;
pub(crate) mod replicas;
pub(crate) mod scene;
mod server;
mod timeline;
