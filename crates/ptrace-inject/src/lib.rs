// SPDX-License-Identifier: MIT OR Apache-2.0
//! Stops x86-64 processes through ptrace(2) for a short time, and changes them.
//!
//! * [`with_tracer`]: runs a closure on a thread that traces a running process.
//! * [`with_stopped`]: runs a closure while all threads are stopped, and leaves no trace.
//! * [`Stopped::syscall`]: makes the process call the kernel. No code is written to it.
//! * [`Stopped::give`], [`Stopped::close`]: gives it a descriptor, and closes one.
//! * [`with_tracee`]: as [`with_stopped`], for a process that the calling thread has already stopped, as
//!   CRIU's main thread has.
//! * [`Stopped::prepare_swaps`]: replaces placeholders by mappings of the device.
//! * [`placeholder_mappings`]: finds placeholders. [`populated_ranges`]: finds their pages that the device
//!   lacks.
//!
//! Medians on a machine with two cores and a load of ten (Linux 6.18, EPYC; `cargo test --release -p
//! rewake-ptrace-inject measure -- --ignored --nocapture`):
//! * [`with_stopped`]: 0.3 to 0.6 ms for one sleeping thread, 1.0 to 1.4 ms for 16. For 16 computing threads
//!   0.1 to 0.2 s, as each must get a CPU to reach its stop.
//! * An injected call: 37 to 60 us.
//! * A swap: 0.35 to 0.6 ms alone in a stop, 0.2 to 0.6 ms for each of many.
//! * Stop, swap, detach and wake: 0.7 to 2 ms.
//!
//! The reasons, and the kernel's part in each step: `docs/decisions/0009-tracer.md`.
#![cfg(all(target_arch = "x86_64", target_os = "linux"))]
#![cfg_attr(not(test), deny(clippy::unwrap_used))]

mod abi;
mod entry;
mod error;
mod give;
mod inject;
mod maps;
mod placeholder;
mod proc;
mod restart;
mod rseq;
mod scratch;
mod sharers;
mod stop;
mod stuck;
mod swap;
mod tracer;
mod wait;

pub use error::Error;
pub use placeholder::{PlaceholderMapping, placeholder_mappings, populated_ranges};
pub use stop::{Stopped, with_stopped, with_tracee};
pub use stuck::{Reason, StuckThread};
pub use swap::{Swap, SwapBatch};
pub use tracer::with_tracer;
