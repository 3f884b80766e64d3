// SPDX-License-Identifier: MIT OR Apache-2.0
//! What tests of GPUs share.
//!
//! Every test runs its body in a process of its own, [`isolated`]: a process has one compute state, and what it leaves
//! behind when it ends is a test too. After it the judge's list is empty and nothing is left alive.

pub mod app;
pub mod criu;
pub mod judge;
pub mod scene;
pub mod snapshot;
pub mod sys;

pub use judge::Judge;
pub use scene::{Peer, Scene, isolated};
