// SPDX-License-Identifier: MIT OR Apache-2.0
//! What tests of GPUs share.
//!
//! Every test runs its body in a process of its own, [`isolated`]: a process has one compute state, and the
//! test checks what its end leaves. Afterwards the judge's list must be empty, and nothing may be alive.

pub mod accessor;
pub mod answers;
pub mod app;
pub mod container;
pub mod criu;
pub mod criu_leftovers;
pub mod delayed_copies;
pub mod dumped;
pub mod failing_calls;
pub mod failing_disk;
pub mod faults;
pub mod judge;
mod kept;
pub mod machine;
pub mod pair;
pub mod scene;
pub mod script;
pub mod server;
pub mod snapshot;
pub mod streamer;
pub mod sys;

/// Why a test does not run that only software GPUs support.
pub const REAL_GPUS: &str = "these GPUs are real";

pub use accessor::Accessor;
pub use container::Container;
pub use delayed_copies::DelayedCopies;
pub use failing_disk::FailingDisk;
pub use faults::Faults;
pub use judge::Judge;
pub use machine::{Machine, gpus_retry_faults};
pub use pair::Pair;
pub use rewake_testkit::{Daemon, random};
pub use scene::{Peer, Scene, isolated};
pub use server::Server;
pub use streamer::Streamer;
