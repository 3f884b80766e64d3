// SPDX-License-Identifier: MIT OR Apache-2.0
//! What tests of several packages use.
//!
//! * [`process`]: commands, waiting with a limit, what `/proc` shows, signals.
//! * [`printed`]: the commands that the README and the pages in `docs` print.
//! * [`programs`]: the programs that are built beside the tests.
//! * [`daemon`]: `rewake serve`, and the commands that use it.
//! * [`export`]: `rewake export`.
//! * [`hosts`]: two hosts on one machine.
//! * [`relay`]: a slow link to a server, which can be cut, and lies.
//! * [`authority`]: certificates for TLS.
//! * [`cgroup`]: processes that get one event together.
//! * [`confined`]: processes that confine themselves.
//! * [`seaweedfs`]: a store that answers as S3 does.
//! * [`random`]: random numbers and moments that a seed repeats.

#![deny(unsafe_code)]

pub mod authority;
pub mod cgroup;
#[allow(unsafe_code, reason = "a fork")]
pub mod confined;
pub mod daemon;
pub mod export;
pub mod hosts;
pub mod printed;
pub mod process;
pub mod programs;
pub mod random;
pub mod relay;
pub mod seaweedfs;
pub mod trace;

pub use daemon::Daemon;
pub use process::{PATIENCE, soon, until};
pub use random::Random;
