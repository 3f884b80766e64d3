// SPDX-License-Identifier: MIT OR Apache-2.0
//! The suite's tests: one build makes their programs, jobs run in lanes, and a record says what ran.
//! `commands/test.rs` runs the jobs of this machine, and `vm/suite.rs` the jobs of virtual machines.

pub(crate) mod budget;
pub(crate) mod expected;
pub(crate) mod jobs;
mod list;
pub(crate) mod programs;
pub(crate) mod record;
pub(crate) mod selection;
pub(crate) mod versions;
