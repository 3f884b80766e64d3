// SPDX-License-Identifier: MIT OR Apache-2.0
//! Short looks into a running process through ptrace(2), of x86-64 programs on x86-64.
//!
//! * [`with_tracer`]: something done while a thread of ours is the tracer, the process running on.
//! * [`with_stopped`]: something done while all its threads stand still, without a trace afterwards.
//! * [`Stopped::syscall`]: a system call that the process makes for us. No code is written to it.
//! * [`Stopped::ioctl`]: one of those with an argument in memory, on a file that we have, too.
//! * [`Stopped::give`], [`Stopped::close`]: a descriptor of ours becomes one of the process's, and is closed there.
//! * [`with_tracee`]: the same for a process that the calling thread has stopped already, as CRIU's main thread has.
//! * [`Stopped::swapping`]: the device's mapping takes the place of placeholders, wherever they are.
//! * [`shown`]: where placeholders are. [`present`]: what one holds that the device has not.
//!
//! Medians on a machine with two cores and five times as much to run (Linux 6.18, EPYC; `cargo test --release -p
//! rewake-ptrace-inject --test measure -- --ignored --nocapture`): all of [`with_stopped`] 0.3 to 0.6 ms for one thread that
//! sleeps, 1.0 to 1.4 ms for 16; for 16 that compute 0.1 to 0.2 s, as each has to get a CPU to come to its stop. One
//! injected call 37 to 60 us; one swap alone in a stop 0.35 to 0.6 ms, each of many 0.2 to 0.6 ms; stop, swap, let go
//! and wake 0.7 to 2 ms.
//!
//! Why it is done so, and what the kernel does at each step: `docs/decisions/0009-tracer.md`.
#![cfg(all(target_arch = "x86_64", target_os = "linux"))]

mod abi;
mod ask;
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
pub use placeholder::{Shown, present, shown};
pub use stop::{Stopped, with_stopped, with_tracee};
pub use stuck::{Reason, Stuck};
pub use swap::{Swap, Swapping};
pub use tracer::with_tracer;
